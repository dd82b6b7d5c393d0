"""`vlhmm surprisal`: list the words of a text that the model expects least, given both sides."""

from __future__ import annotations

import argparse
import heapq
from typing import Any

from vlhmm.cli.numbers import count
from vlhmm.cli.options import (
    LogBase,
    ResultWriter,
    add_log_base,
    add_query_options,
    lines_of,
    load_model,
    memory_of,
    on_line,
)
from vlhmm.errors import ConfigError

DESCRIPTION = "List the words of a text that the model expects least, given all other words of the sentence."
EPILOG = """\
FILE is a text file with one sentence per line; by default, standard input. For every word, p(word | all other words of
its sentence, its end) is computed exactly. <eos> is not among the alternatives, so the probabilities of all other words
sum to one. The least expected words come first, each with the words that the model expects in its place. Under the context rule carry, the lines before are given too, as in vlhmm score; the lines after are not.
Positions are printed as LINE:POSITION; both count from 1, also in JSON.

examples:
  echo "the president off the united states" | vlhmm surprisal runs/mine
  vlhmm surprisal runs/mine essay.txt --worst 50
  vlhmm surprisal runs/mine essay.txt --each 1 --format jsonl      the least expected word of every sentence
"""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of this verb."""
    add_query_options(parser)
    parser.add_argument("file", metavar="FILE", nargs="?", default="-", help="text file (default: standard input)")
    parser.add_argument(
        "--worst", type=count(), default=20, metavar="N", help="list N words of the whole text (default: 20)"
    )
    parser.add_argument("--each", type=count(), metavar="N", help="list N words of every sentence instead")
    parser.add_argument("--top-k", type=count(), default=5, metavar="K", help="expected words to print (default: 5)")
    add_log_base(parser)


def run(args: argparse.Namespace) -> int:
    """List the words; return 0."""
    from vlhmm.queries.word_posterior import surprisal

    for name, value in (("--worst", args.worst), ("--each", args.each), ("--top-k", args.top_k)):
        if value is not None and value < 1:
            raise ConfigError(f"{name} {value}: expected at least 1")
    model = load_model(args)
    logs = LogBase(args)
    worst: list[tuple[float, int, int, Any]] = []  # a heap whose top is the most expected of those kept
    with ResultWriter(args.format) as answer:
        for number, words, before in lines_of(model, args.file):
            with on_line(number):
                found = surprisal(model, words, args.top_k, memory=memory_of(args), before=before) if words else []
            if args.each is not None:
                for surprise in found[: args.each]:
                    _print(number, surprise, logs, answer)
                continue
            for surprise in found[: args.worst]:
                heapq.heappush(worst, (-surprise.log_prob, -number, -surprise.position, surprise))
                if len(worst) > args.worst:
                    heapq.heappop(worst)
        for _, number, _, surprise in sorted(worst, reverse=True, key=lambda entry: entry[:3]):
            _print(-number, surprise, logs, answer)
    return 0


def _print(number: int, surprise: Any, logs: LogBase, answer: ResultWriter) -> None:
    record = {
        "line": number,
        "position": surprise.position + 1,  # as in the text output; in Python positions are indices, from 0
        "word": surprise.word,
        "log_prob": logs.number(surprise.log_prob),
        "log_base": logs.name,
        "rank": surprise.rank,
        "oov": surprise.oov,
        "expected": [{"word": w.word, "probability": w.probability} for w in surprise.expected],
    }
    expected = ", ".join(f"{w.word} {w.probability:.3f}" for w in surprise.expected)
    answer(
        record,
        f"{number}:{surprise.position + 1}\t{surprise.word}\t{logs.shown(surprise.log_prob)} "
        f"(log base {logs.name})\trank {surprise.rank:,}\texpected: {expected}",
    )
