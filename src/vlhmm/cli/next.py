"""`vlhmm next`: the exact distribution of the next word."""

from __future__ import annotations

import argparse

from vlhmm.cli.common import log_to
from vlhmm.cli.numbers import count
from vlhmm.cli.options import (
    LogBase,
    ResultWriter,
    add_log_base,
    add_query_options,
    load_model,
    log_oov,
    on_line,
    texts_of,
)

DESCRIPTION = "Compute the exact distribution of the word after a context."
EPILOG = """\
CONTEXT holds the words since the start of the sentence (default: none). - reads contexts from standard input, one per
line. The distribution covers the whole vocabulary and <eos>, and sums to one; --top-k only limits what is printed.

examples:
  vlhmm next runs/mine "the president of the"
  vlhmm next runs/mine "" --top-k 20                        how sentences begin
  vlhmm next runs/mine "we the" --top-k 0 --format json     every word of the vocabulary
"""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of this verb."""
    add_query_options(parser)
    parser.add_argument("context", metavar="CONTEXT", nargs="?", default="", help="words, or - for standard input")
    parser.add_argument("--top-k", type=count(), default=10, metavar="K", help="words to print, 0 for all (default: 10)")
    add_log_base(parser)


def run(args: argparse.Namespace) -> int:
    """Print the next words of every context; return 0."""
    from vlhmm.queries.left_to_right import next_distribution

    model = load_model(args, any_kind=True)
    logs, log = LogBase(args), log_to(args.quiet)
    several = args.context == "-"
    with ResultWriter(args.format, single=not several) as answer:
        for number, words in texts_of(args.context, model.vocabulary.split):
            log_oov(log, model.vocabulary, words)
            with on_line(number, several):
                found = next_distribution(model, words)
                best = found.top(args.top_k or None)
            record = {
                "context": model.vocabulary.join(words),
                "rule": model.rule,
                "log_base": logs.name,
                "entropy": logs(found.entropy),
                "sum": float(found.probabilities.sum()),
                "words": [
                    {"word": w.word, "probability": w.probability, "log_prob": logs.number(w.log_prob)} for w in best
                ],
            }
            lines = [f"{w.probability:.6f}\t{logs.shown(w.log_prob)}\t{w.word}" for w in best]
            answer(record, [f"# probability\tlog base {logs.name}\tword after: {model.vocabulary.join(words)}", *lines])
    return 0
