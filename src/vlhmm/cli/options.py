"""What the query verbs share: the run, texts, the log base, constraints, and the output formats."""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import reduce
from operator import and_
from typing import TYPE_CHECKING, Any

from vlhmm.cli.common import add_format, add_machine_options, setup
from vlhmm.config import to_json
from vlhmm.errors import ConfigError, DataError, VlhmmError
from vlhmm.limits import word_range

if TYPE_CHECKING:
    from vlhmm.queries.prefix import Prefix

LOG_BASES = {"e": 1.0, "2": math.log(2), "10": math.log(10)}


def add_query_options(parser: argparse.ArgumentParser, *formats: str) -> None:
    """Add RUN, --format and the machine options."""
    parser.add_argument("run_folder", metavar="RUN", help="run folder of a trained model")
    add_format(parser, *(formats or ("text", "json", "jsonl")))
    add_machine_options(parser)


def add_log_base(parser: argparse.ArgumentParser) -> None:
    """Add --log-base."""
    parser.add_argument(
        "--log-base",
        choices=tuple(LOG_BASES),
        default="e",
        help="base of the log-probabilities printed (default: e)",
    )


def add_constraint_options(parser: argparse.ArgumentParser) -> None:
    """Add --must-contain, --in-order, --must-not, --length, --regex and --scope."""
    group = parser.add_argument_group("constraints (all of them hold; words must be in the vocabulary)")
    group.add_argument(
        "--must-contain", "--must-include", action="append", default=[], metavar="PHRASE", help="word or phrase that the text contains; repeatable"
    )
    group.add_argument("--in-order", action="store_true", help="the --must-contain phrases occur in the order given")
    group.add_argument(
        "--must-not", action="append", default=[], metavar="PHRASE", help="word or phrase that it does not contain; repeatable"
    )
    group.add_argument("--length", "--words", metavar="A-B", help="A to B words; A- for at least A, A for exactly A")
    group.add_argument(
        "--regex", action="append", default=[], metavar="PATTERN", help="pattern over words that the whole text matches, e.g. 'the .* [a b] c?'"
    )
    group.add_argument(
        "--scope",
        choices=("text", "gaps"),
        default="text",
        help="apply them to the whole text (default), or only to the words filled in",
    )


def constraint_of(args: argparse.Namespace) -> Any:
    """Return the constraint that the options describe, or None."""
    from vlhmm.constraints.constraint import length, must_contain, must_not, regex

    parts = []
    if args.must_contain:
        parts.append(must_contain(*args.must_contain, in_order=args.in_order))
    elif args.in_order:
        raise ConfigError("--in-order needs --must-contain phrases; give some")
    if args.must_not:
        parts.append(must_not(*args.must_not))
    if args.length is not None:
        parts.append(length(*word_range(args.length, "--length")))
    parts += [regex(pattern) for pattern in args.regex]
    return reduce(and_, parts) if parts else None


def load_model(args: argparse.Namespace, run_folder: str | None = None, any_kind: bool = False) -> Any:
    """Load the HMM of a run, or with `any_kind` any model that predicts the next word."""
    device = setup(args)
    import vlhmm

    folder = run_folder or args.run_folder
    model = vlhmm.load_any(folder, memory=args.memory, device=device)
    if not any_kind and not hasattr(model, "distributions"):
        from vlhmm.queries.left_to_right import without_states

        raise ConfigError(without_states(model, folder, args.verb))
    return model


def memory_of(args: argparse.Namespace) -> float:
    """Return the most bytes that the messages of a query may take."""
    from vlhmm.data.user_text import DEFAULT_MEMORY

    return args.memory or DEFAULT_MEMORY


def texts_of(argument: str | None, split: Callable[[str], list[str]] = str.split) -> Iterator[tuple[int, list[str]]]:
    """Yield (line number, words): of the argument, or of the lines of standard input for "-"."""
    if argument != "-":
        yield 1, split(argument or "")
        return
    for number, raw in enumerate(sys.stdin.buffer, start=1):
        try:
            yield number, split(raw.decode("utf-8-sig" if number == 1 else "utf-8").rstrip("\r\n"))
        except UnicodeDecodeError:
            raise DataError(f"standard input, line {number}: not UTF-8; convert the text to UTF-8") from None


def lines_of(model: Any, file: str) -> Iterator[tuple[int, list[str], Prefix | None]]:
    """Yield (line number, words, the prefix before the line) of a file; under the rule "reset" there is no prefix."""
    from vlhmm.data.text import read_lines
    from vlhmm.queries.prefix import begin

    before = begin(model) if model.rule == "carry" else None
    for number, words in enumerate(read_lines(file, model.vocabulary.split), start=1):
        yield number, words, before
        if before is not None:
            before = before.read_line(words)


@contextmanager
def on_line(number: int, several: bool = True) -> Iterator[None]:
    """Put the line number in front of an error, where there are several lines."""
    try:
        yield
    except VlhmmError as error:
        if not several:
            raise
        raise type(error)(f"line {number}: {error}") from None


def log_oov(log: Callable[[str], None], vocabulary: Any, words: Sequence[str]) -> None:
    """Print which words are not in the vocabulary."""
    unknown = [word for word in words if word not in vocabulary]
    if unknown:
        shown = ", ".join([*(repr(word) for word in unknown[:5]), *(["..."] if len(unknown) > 5 else [])])
        what = "1 word not in the vocabulary is" if len(unknown) == 1 else f"{len(unknown)} words not in the vocabulary are"
        log(f"{what} read as <unk>: {shown}")


class LogBase:
    """Converts log-probabilities from nats to the base of --log-base."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.name = args.log_base
        self.divisor = LOG_BASES[args.log_base]

    def __call__(self, nats: float) -> float:
        return nats / self.divisor

    def number(self, nats: float) -> float | str:
        """Return the value for JSON, which has no infinity: '-inf' is a string."""
        return self(nats) if math.isfinite(nats) else "-inf"

    def shown(self, nats: float) -> str:
        return f"{self(nats):.4f}"


def probability_text(log_prob: float, digits: int) -> str:
    """Format exp(log_prob) with that many digits, also where it is below the smallest float."""
    if log_prob > -700 or math.isinf(log_prob):
        return f"{math.exp(log_prob):.{digits}g}"
    exponent = math.floor(log_prob / math.log(10))
    mantissa = f"{10 ** (log_prob / math.log(10) - exponent):.{digits - 1}f}"
    return f"1e{exponent + 1}" if mantissa.startswith("10") else f"{mantissa}e{exponent}"


class ResultWriter:
    """Prints answers one by one: as lines of text, JSON lines, or one JSON array."""

    def __init__(self, kind: str, single: bool = False) -> None:
        self.kind, self.single, self.count = kind, single, 0

    def __enter__(self) -> ResultWriter:
        return self

    def __call__(self, record: dict[str, Any], text: str | Iterable[str]) -> None:
        """Print one answer: `record` as JSON, or `text`."""
        if self.kind == "text":
            for line in [text] if isinstance(text, str) else text:
                print(line)
            sys.stdout.flush()
        elif self.kind == "jsonl":
            print(to_json(record), flush=True)
        elif self.single:
            print(to_json(record))
        else:
            print(("[" if self.count == 0 else ",") + to_json(record))
        self.count += 1

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        if self.kind == "json" and not self.single and error is None:
            print("[]" if self.count == 0 else "]")
