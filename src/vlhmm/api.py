"""Train a model on texts, or load one from its run folder."""

from __future__ import annotations

import shutil
import sys
import tempfile
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from vlhmm.config import override
from vlhmm.data.checked import kind_of_run
from vlhmm.data.corpora import Corpus, check_words_are_kept, load_texts
from vlhmm.data.manifest import check_manifest
from vlhmm.data.text import encode, learn
from vlhmm.distributions import HMMDistributions
from vlhmm.errors import CheckpointError, ConfigError, DataError
from vlhmm.evaluation.mixture import KIND as MIXTURE
from vlhmm.evaluation.mixture import read_mixture
from vlhmm.language_model import DEFAULT_MEMORY, HMMLanguageModel
from vlhmm.mixture import MixtureLanguageModel
from vlhmm.training.defaults import configure_for, stored_settings
from vlhmm.training.presets import preset as preset_named
from vlhmm.training.run_folder import RunFolder

if TYPE_CHECKING:
    from vlhmm.evaluation.protocol import LanguageModel
    from vlhmm.training.status import Status

Setting = str | int | float | bool | None
Texts = str | Path | Iterable[str | Sequence[str]]  # a file, or its sentences
HELD_OUT = 20  # without a validation text, every 20th sentence is one


def load(
    run: str | Path, memory: int | None = None, dtype: torch.dtype = torch.float32, device: str = "cpu"
) -> HMMLanguageModel:
    """Load the HMM of a run folder.

    Args:
        run: A folder made by `vlhmm train`, `vlhmm.train` or `HMMLanguageModel.save`.
        memory: Bytes of transition tiles that may be kept while scoring.
        dtype: Type of the tables. float64 takes twice the memory of float32.
        device: "cpu" or "cuda".

    Returns:
        The model with the best validation perplexity of the run.

    Raises:
        CheckpointError: The folder does not exist, is damaged, or holds no HMM (see `load_any`).

    Example:
        >>> vlhmm.load(run).score("the dog runs .") == model.score("the dog runs .")
        True
    """
    model = load_any(run, memory, dtype, device)
    if not isinstance(model, HMMLanguageModel):
        raise CheckpointError(f"{run} holds a {type(model).__name__}, not an HMM; load it with vlhmm.load_any")
    return model


def load_any(
    run: str | Path, memory: int | None = None, dtype: torch.dtype = torch.float32, device: str = "cpu"
) -> LanguageModel:
    """Load a model of any kind: an HMM, a mixture, a baseline, or an n-gram model in ARPA format.

    Args:
        run: A run folder, or a file named .arpa or .arpa.gz, written by any program.
        memory: Bytes of transition tiles that an HMM may keep while scoring.
        dtype: Type of an HMM's tables.
        device: "cpu" or "cuda".

    Returns:
        An `HMMLanguageModel`, a `MixtureLanguageModel` or a baseline. All of them score and predict the next word.

    Raises:
        CheckpointError: The folder does not exist or is damaged.

    Example:
        >>> type(vlhmm.load_any(run)).__name__
        'HMMLanguageModel'
    """
    path = Path(run)
    if not path.exists():
        raise CheckpointError(f"{path} does not exist; expected the folder of a run, made by vlhmm train --out {path}")
    if not path.is_dir():
        from vlhmm.baselines.kneser_ney import KneserNey

        if not path.name.endswith((".arpa", ".arpa.gz")):
            raise CheckpointError(
                f"{path} is a file, expected the folder of a run, or an n-gram model named .arpa or .arpa.gz"
            )
        return KneserNey.read_arpa(path)
    kind = kind_of_run(path)
    if kind == MIXTURE:
        check_manifest(path)
        stored = read_mixture(path)
        components = [load_any(part.folder, memory, dtype, device) for part in stored.components]
        hmm_folders = [part.folder for part in stored.components if kind_of_run(part.folder) is None]
        return MixtureLanguageModel(components, [p.weight for p in stored.components], stored.rule, hmm_folders)
    if kind is not None:
        from vlhmm.baselines import load_baseline

        return load_baseline(path)
    hmm, vocabulary, blocks, config = RunFolder(path).load()
    with torch.no_grad():
        distributions = HMMDistributions(hmm.to(device, dtype).potentials(), blocks)
        if not distributions.is_finite():
            raise CheckpointError(
                f"{path / 'model.safetensors'} is damaged: its numbers are so large that probabilities overflow; "
                "restore it or train again"
            )
    model = HMMLanguageModel(vocabulary, distributions, config.training.evaluation_context, memory or DEFAULT_MEMORY)
    model.folder = path
    return model


def train(
    texts: Texts,
    *,
    valid: Texts | None = None,
    states: int | None = None,
    blocks: int | None = None,
    epochs: float | None = None,
    out: str | Path | None = None,
    preset: str = "default",
    settings: Mapping[str, Setting] | None = None,
    max_vocab: int | None = None,
    min_count: int = 1,
    seed: int = 0,
    time_limit: float | None = None,
    memory: int | None = None,
    device: str = "cpu",
    progress: bool = True,
) -> HMMLanguageModel:
    """Train a model on sentences or on a file with one sentence per line.

    Args:
        texts: Sentences (strings split at blanks, or sequences of words), or the path of a file.
        valid: A validation text in the same form, used to choose the best iteration. Without one, every 20th sentence
            is held out.
        states: Number of hidden states, a multiple of `blocks`; by default chosen by the size of the text.
        blocks: Number of word blocks; by default chosen by the number of states and words.
        epochs: Passes over the text; by default chosen by its size.
        out: The run folder. The same call resumes from its last checkpoint. Without a folder the run is temporary: keep
            the model with `HMMLanguageModel.save`.
        preset: A complete configuration, see `vlhmm train --help`; "default" chooses by the size of the text.
        settings: Single settings by dotted name, e.g. `{"training.state_dropout": 0.3}`, see docs/settings.md.
        max_vocab: Keep this many of the most frequent words; the others become `<unk>`.
        min_count: Keep words that occur at least this often.
        seed: Seed of every random draw.
        time_limit: Seconds after which training stops with a checkpoint.
        memory: The most bytes that training may take for its tables.
        device: "cpu" or "cuda".
        progress: Show a progress bar on standard error.

    Returns:
        The model with the best validation perplexity.

    Raises:
        ConfigError: A setting is unknown or out of range.
        DataError: A file is missing or empty, or there is too little text to hold any of it out.

    Example:
        >>> sentences = ["the dog runs .", "a cat sleeps ."] * 60
        >>> model = vlhmm.train(sentences, states=8, blocks=4, epochs=2, preset="tiny", progress=False)
        >>> model.distributions.num_states
        8
    """
    from vlhmm.training import trainer

    changes: dict[str, Setting] = {"training.seed": seed}
    named = {"model.num_states": states, "model.num_blocks": blocks, "training.epochs": epochs}
    changes |= {name: value for name, value in named.items() if value is not None}
    changes |= {"max_vocab": max_vocab, "min_count": min_count} | dict(settings or {})
    named_settings = [f"{name}={value}" for name, value in changes.items()]
    config = override(preset_named(preset), named_settings) if preset != "default" else None
    corpus = corpus_of(texts, valid, max_vocab, min_count)
    if config is None:
        config = stored_settings(out, named_settings)
    if config is None:
        config = configure_for(named_settings, corpus).config
    folder = Path(tempfile.mkdtemp(prefix="vlhmm-")) if out is None else Path(out)
    try:
        with training_bar(progress) as shown:
            trainer.train(corpus, config, folder, time_limit=time_limit, memory=memory, device=device, progress=shown)
        model = load(folder, device=device)
    except BaseException:
        if out is None:
            shutil.rmtree(folder, ignore_errors=True)
        raise
    if out is None:  # the folder is removed with the model
        weakref.finalize(model, shutil.rmtree, folder, ignore_errors=True)
    return model


def corpus_of(texts: Texts, valid: Texts | None, max_vocab: int | None, min_count: int) -> Corpus:
    """Encode the texts with the vocabulary of the training text; hold out every 20th sentence if `valid` is None."""
    if isinstance(texts, str | Path) and isinstance(valid, str | Path):
        return load_texts(texts, valid, None, None, max_vocab, min_count)
    lines = list(lines_of(texts))
    if valid is None:
        held_out = list(islice(lines, HELD_OUT - 1, None, HELD_OUT))
        lines = [line for number, line in enumerate(lines, 1) if number % HELD_OUT]
        if not held_out:
            raise DataError(f"{len(lines)} sentences are too few to hold every {HELD_OUT}th out; give a valid text")
    else:
        held_out = list(lines_of(valid))
    if not lines or not held_out:
        raise DataError("there is no sentence to train on or to validate with; expected at least one of each")
    vocabulary, train_text = learn(lines, max_vocab, min_count)
    check_words_are_kept(train_text, vocabulary, "the training text")
    return Corpus("texts", vocabulary, train_text, encode(held_out, vocabulary), None)


def lines_of(texts: Texts) -> Iterator[list[str]]:
    """Yield the words of each sentence."""
    if isinstance(texts, str | Path):
        from vlhmm.data.text import read_lines

        yield from read_lines(texts)
        return
    for number, line in enumerate(texts, 1):
        if not isinstance(line, str | Sequence) or not all(isinstance(word, str) for word in line):
            raise ConfigError(f"sentence {number} is a {type(line).__name__}, expected a string or a sequence of words")
        yield line.split() if isinstance(line, str) else list(line)


@contextmanager
def training_bar(shown: bool) -> Iterator[Callable[[Status], None] | None]:
    """Show a progress bar on standard error, in a terminal or a notebook only."""
    if not (shown and (sys.stderr.isatty() or "ipykernel" in sys.modules)):
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task("training")

        def show(status: Status) -> None:
            valid = f", valid {status.valid:.1f}" if status.valid is not None else ""
            description = f"epoch {status.epoch:.0f}/{status.epochs:g}{valid}"
            bar.update(task, description=description, completed=status.step, total=status.total_steps)

        yield show
