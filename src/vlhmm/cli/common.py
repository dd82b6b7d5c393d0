"""What the verbs share: common options, corpora by name, progress bars, interrupts."""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from vlhmm.cli.numbers import byte_size, count, seed
from vlhmm.config import unknown
from vlhmm.errors import ConfigError
from vlhmm.limits import MAX_THREADS

if TYPE_CHECKING:
    from vlhmm.data import Corpus


MEMORY = (
    "limit for large tables, e.g. 4G (default: none in training, 6G for the transition tiles of a loaded model, 4G for a "
    "query's messages); a query that needs more is split or refused"
)
DATA_DIR = "folder of ptb and wikitext-2 (default: $VLHMM_DATA)"
TRAIN = "a text file, - for standard input, or a corpus name"


def add_machine_options(parser: argparse.ArgumentParser) -> None:
    """Add --seed, --device, --threads, --memory and --quiet."""
    group = parser.add_argument_group("machine")
    group.add_argument("--seed", type=seed, default=0, metavar="N", help="seed of every random draw (default: 0)")
    group.add_argument(
        "--device", choices=("auto", "cpu", "cuda"), default="auto", help="where to compute (default: a GPU if there is one)"
    )
    group.add_argument("--threads", type=count(1, MAX_THREADS), metavar="N", help="CPU threads (default: all cores)")
    group.add_argument("--memory", type=byte_size, metavar="SIZE", help=MEMORY)
    group.add_argument("--quiet", action="store_true", help="no progress and no messages")


def add_format(parser: argparse.ArgumentParser, *kinds: str) -> None:
    """Add --format."""
    parser.add_argument("--format", choices=kinds or ("text", "json"), default="text", help="output format (default: text)")


def add_vocabulary_limits(parser: argparse.ArgumentParser) -> None:
    """Add --max-vocab and --min-count."""
    parser.add_argument(
        "--max-vocab", type=count(2), metavar="N", help="keep the N most frequent words; the others become <unk>"
    )
    parser.add_argument(
        "--min-count", type=count(1), default=1, metavar="N", help="keep words that occur at least N times (default: 1)"
    )


def add_set(parser: argparse.ArgumentParser, what: str = "") -> None:
    """Add --set and --list-settings."""
    parser.add_argument(
        "--set", metavar="NAME=VALUE", action="append", default=[], help=f"{what}change one setting; repeatable"
    )
    parser.add_argument("--list-settings", action="store_true", help="list the settings that --set takes, and exit")


def setup(args: argparse.Namespace) -> str:
    """Apply the machine options and return the name of the device."""
    import torch

    from vlhmm.products import use_fast_products

    # Before torch starts its threads, which inherit it: products with numbers below 1e-38 are very slow, and
    # probabilities that small are zero to float32 anyway.
    torch.set_flush_denormal(True)
    use_fast_products()
    if args.threads is None and "LOCAL_WORLD_SIZE" in os.environ:  # torchrun's processes share the cores
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // int(os.environ["LOCAL_WORLD_SIZE"])))
    if args.threads is not None:
        torch.set_num_threads(args.threads)
    if args.device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("--device cuda: this machine has no CUDA device that torch can use; take --device cpu")
    if args.device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    return args.device


def clock(seconds: float) -> str:
    """Format a duration as h:mm:ss, or m:ss."""
    whole = int(seconds)
    hours, minutes, rest = whole // 3600, whole // 60 % 60, whole % 60
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def log_to(quiet: bool) -> Callable[[str], None]:
    """Return a function that prints a line on standard error, unless quiet."""
    return (lambda line: None) if quiet else (lambda line: print(line, file=sys.stderr, flush=True))


def is_corpus(name: str) -> bool:
    """Return whether a name is that of a corpus, and of no file."""
    from vlhmm.data import CORPORA

    return name in CORPORA and not os.path.exists(name)


def check_no_vocabulary_limits(args: argparse.Namespace) -> None:
    """Refuse --max-vocab and --min-count for a corpus."""
    if args.max_vocab is not None or args.min_count != 1:
        raise ConfigError(f"{args.train} has a fixed vocabulary; drop --max-vocab and --min-count, or give TRAIN as a file")


def load_run_texts(model: Any, names: list[str], data_dir: str | None) -> Iterator[tuple[str, Any]]:
    """Yield (name, Text) for files, '-' and corpora; a corpus name means its valid and test splits."""
    from vlhmm.data import CORPORA, load_corpus
    from vlhmm.data.corpora import read_text

    for name in names:
        corpus_name, _, split = name.partition(":")
        if corpus_name in CORPORA and not os.path.exists(name):
            corpus = load_corpus(corpus_name, data_dir)
            if corpus.vocabulary.words != model.vocabulary.words:
                raise ConfigError(
                    f"the model's vocabulary is not that of {corpus_name} ({len(model.vocabulary):,} and "
                    f"{len(corpus.vocabulary):,} words); give the text as a file to have it encoded with the model's own"
                )
            for part in [split] if split else ["valid", "test"]:
                if part not in ("train", "valid", "test"):
                    raise ConfigError(f"{name}: a corpus has the splits train, valid and test")
                yield f"{corpus_name}:{part}", getattr(corpus, part)
        else:
            yield name, read_text(name, model.vocabulary)


@contextmanager
def terminal_bar(*columns: str, width: int = 40) -> Iterator[Any]:
    """Draw a progress bar on standard error: a description, the bar, and `columns`, classes of rich.progress."""
    from rich import progress
    from rich.console import Console

    shown = (progress.TextColumn("{task.description}"), progress.BarColumn(width))
    others = (getattr(progress, name)() for name in columns)
    with progress.Progress(*shown, *others, console=Console(stderr=True), transient=True) as bar:
        yield bar


@contextmanager
def token_progress(quiet: bool, title: str) -> Iterator[Callable[[int, int], None] | None]:
    """Show a progress bar over tokens on a terminal, nothing elsewhere."""
    if quiet or not sys.stderr.isatty():
        yield None
        return
    with terminal_bar("TaskProgressColumn", "TimeRemainingColumn") as bar:
        task = bar.add_task(title)
        yield lambda done, total: bar.update(task, completed=done, total=total)


@contextmanager
def interruptible(check: Callable[[], None] = lambda: None, quiet: bool = False) -> Iterator[Callable[[], bool]]:
    """Stop after the current step, with a checkpoint, at the first Ctrl-C; stop at once at the second.

    `check` is called first, and may raise: torchrun sends the same signal when one of its processes has died.
    """
    asked: list[bool] = []

    def ask(*_: Any) -> None:
        check()
        if asked:
            raise KeyboardInterrupt
        asked.append(True)
        if not quiet:
            print("\nstopping after this step, with a checkpoint (press Ctrl-C again to stop at once)", file=sys.stderr)

    before = {number: signal.signal(number, ask) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield lambda: bool(asked)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def print_settings(kind: type) -> None:
    """Print every setting that --set takes, in groups: name, default, choices and meaning."""
    from vlhmm.config import by_group, settings_of

    for number, (group, settings) in enumerate(by_group(settings_of(kind)).items()):
        print(("\n" if number else "") + f"{group}:")
        for each in settings:
            print(f"  {each.name:<28} {each.default:<16} {each.choices}\n      {each.meaning}")


def load_training_corpus(args: argparse.Namespace, vocabulary: Any = None) -> Corpus:
    """Load the corpus that TRAIN, --valid, --test and the vocabulary options name."""
    from vlhmm.data import CORPORA, load_corpus, load_texts

    if is_corpus(args.train):
        if args.valid or getattr(args, "test", None):
            raise ConfigError(f"{args.train} has its own texts; drop --valid and --test, or give TRAIN as a file")
        if vocabulary is not None:
            raise ConfigError(f"{args.train} has a fixed vocabulary; drop --vocab, or give TRAIN as a file")
        check_no_vocabulary_limits(args)
        return load_corpus(args.train, args.data_dir)
    if args.train != "-" and not os.path.exists(args.train):
        raise unknown("file or corpus", args.train, list(CORPORA))
    if not args.valid:
        raise ConfigError(
            f"--valid is missing: {args.train} is a file, and the best model is chosen on a text it was not trained on"
        )
    return load_texts(args.train, args.valid, getattr(args, "test", None), vocabulary, args.max_vocab, args.min_count)
