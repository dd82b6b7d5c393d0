"""Claim a folder for a run: create it, or check that the run in it is the one that is asked for."""

from collections.abc import Callable
from typing import Any

import numpy as np

from vlhmm.clustering.blocks import Blocks
from vlhmm.config import flattened, to_dict
from vlhmm.data.corpora import Corpus, digest
from vlhmm.errors import CheckpointError, ConfigError
from vlhmm.training.config import RunConfig
from vlhmm.training.hooks import TrainingHook
from vlhmm.training.make_blocks import make_blocks
from vlhmm.training.run_folder import RunFolder
from vlhmm.training.unknown_words import UnknownWords


def open_run(
    folder: RunFolder,
    corpus: Corpus,
    config: RunConfig,
    blocks: Blocks | None,
    described: dict[str, Any],
    log: Callable[[str], None],
    hook: TrainingHook | None = None,
) -> Blocks:
    """Create the folder of a run, or check that it holds the same run. Returns its blocks, made or read back."""
    if folder.exists():
        check_same_run(folder, corpus, config, hook)
    elif folder.model_path.exists() or folder.checkpoint_path.exists():  # config.json is written before them
        raise CheckpointError(
            f"{folder.path} holds a model and no config.json; restore that file, or choose another --out: the model would be lost"
        )
    elif any(path != folder.samples_path for path in folder.path.iterdir()) and not folder.blocks_path.exists():
        raise CheckpointError(f"{folder.path} is not empty and holds no run; choose another --out")
    if folder.exists() and folder.blocks_path.exists():
        stored_blocks = folder.blocks(corpus.vocabulary)
        if blocks is not None and not blocks.equals(stored_blocks):
            raise ConfigError(f"{folder.path} was started with other blocks; choose another --out")
        return stored_blocks
    if blocks is None:
        tokens = UnknownWords(corpus.train, corpus.vocabulary, config.training).for_clustering()
        blocks = make_blocks(config.model, tokens, corpus.vocabulary, config.training.seed, log)
    counts = corpus.train.word_counts(len(corpus.vocabulary))
    blocks.write(folder.blocks_path, corpus.vocabulary.words, counts)
    folder.create(
        config,
        corpus.vocabulary,
        {
            "name": corpus.name,
            "train_tokens": corpus.train.num_tokens,
            "digest": digest(corpus),
            **about_extra(corpus),
            **({} if hook is None else hook.describe(corpus)),
            **described,
        },
    )
    return blocks


def check_same_run(folder: RunFolder, corpus: Corpus, config: RunConfig, hook: TrainingHook | None) -> None:
    """Raise ConfigError if the folder holds another run: other settings, texts, or another hook."""
    folder.check_to_continue()
    stored, about = folder.config()
    if removed := about.get("removed_settings"):
        name, value = next(iter(removed.items()))
        raise ConfigError(
            f"{folder.path} was started with {name}={value}, a setting that no longer exists: the model can be used, "
            "training cannot be resumed; choose another --out"
        )
    check_same_settings(folder, stored, config)
    if folder.vocabulary(about).words != corpus.vocabulary.words:
        raise ConfigError(f"{folder.path} was started with another vocabulary; choose another --out")
    if about.get("digest") not in (None, digest(corpus)):  # older runs have none
        raise ConfigError(f"{folder.path} was started with another training or validation text; choose another --out")
    if {name: value for name, value in about.items() if name.startswith("extra_")} != about_extra(corpus):
        raise ConfigError(f"{folder.path} was started with another extra text; choose another --out")
    if hook is not None:
        hook.check_resumed(folder, about, corpus)


def check_same_settings(folder: RunFolder, stored: RunConfig, config: RunConfig) -> None:
    """Raise ConfigError naming the first setting that differs from the run in the folder."""
    theirs = dict(flattened(to_dict(stored)))
    for name, value in flattened(to_dict(config)):
        if theirs[name] != value and name not in ("training.checkpoint_seconds", "training.calibrate"):
            raise ConfigError(
                f"{folder.path} holds a run with {name}={theirs[name]}, asked for {value}; choose another --out, "
                "or remove that folder"
            )


def about_extra(corpus: Corpus) -> dict[str, Any]:
    """Return what the run folder stores about an extra text, to recognize it."""
    if corpus.extra is None:
        return {}
    total = sum(int(tokens.sum(dtype=np.int64)) for tokens in corpus.extra.token_arrays())
    return {"extra_tokens": corpus.extra.num_tokens, "extra_sum": total}
