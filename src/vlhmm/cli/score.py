"""`vlhmm score`: log-probability per sentence or per token, line by line."""

from __future__ import annotations

import argparse
from typing import Any

from vlhmm.cli.common import log_to
from vlhmm.cli.options import LogBase, ResultWriter, add_log_base, add_query_options, load_model
from vlhmm.limits import counted

DESCRIPTION = "Compute the log-probability of every sentence or token of a text."
EPILOG = """\
FILE is a text file with one sentence per line (also .gz); by default, standard input. Lines are answered one by one,
and memory use does not grow with the text. A line's score includes the <eos> after it. Under the context rule reset,
every line is scored by itself; under carry, it continues from the line before (one stream).

examples:
  echo "we the people" | vlhmm score runs/mine
  vlhmm score runs/mine test.txt --per token --log-base 10        word=id log-probability, like KenLM's query
  vlhmm score runs/mine test.txt --format jsonl | head -3
  vlhmm score kenlm.arpa.gz test.txt                              an n-gram model in ARPA format
  sort -u candidates.txt | vlhmm score runs/mine --format jsonl   rerank candidates, one object per line
"""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of this verb."""
    add_query_options(parser)
    parser.add_argument("file", metavar="FILE", nargs="?", default="-", help="text file (default: standard input)")
    parser.add_argument("--per", choices=("sentence", "token"), default="sentence", help="unit of the output (default: sentence)")
    add_log_base(parser)


def run(args: argparse.Namespace) -> int:
    """Score every line; return 0."""
    from vlhmm.data.text import read_lines
    from vlhmm.queries.left_to_right import score_lines

    model = load_model(args, any_kind=True)
    logs = LogBase(args)
    sentences = tokens = oov = 0
    total = 0.0
    with ResultWriter(args.format) as answer:
        for number, scored in enumerate(score_lines(model, read_lines(args.file, model.vocabulary.split)), start=1):
            record: dict[str, Any] = {
                "line": number,
                "log_prob": logs.number(scored.log_prob),
                "log_base": logs.name,
                "tokens": scored.num_tokens,
                "oov": scored.num_oov,
                "literal_unk": scored.num_unk,
            }
            text = f"Total: {logs.shown(scored.log_prob)} (log base {logs.name}) OOV: {scored.num_oov}"
            if args.per == "token":
                record["words"] = [
                    {"word": t.word, "id": t.id, "log_prob": logs.number(t.log_prob), "oov": t.oov}
                    for t in scored.tokens
                ]
                text = "\t".join([*(f"{t.word}={t.id} {logs.shown(t.log_prob)}" for t in scored.tokens), text])
            answer(record, text)
            sentences, tokens, oov = sentences + 1, tokens + scored.num_tokens, oov + scored.num_oov
            total += scored.log_prob
    log_to(args.quiet)(
        f"{counted(sentences, 'sentence')}, {counted(tokens, 'token')} with <eos>, {oov:,} OOV, log-probability "
        f"{logs(total):.2f} (log base {logs.name}), context {model.rule}"
    )
    return 0
