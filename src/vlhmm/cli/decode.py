"""`vlhmm decode`: decode the hidden states of a text."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

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

if TYPE_CHECKING:
    from vlhmm.queries.decode import Decoding
    from vlhmm.queries.prefix import Prefix

Top = list[list[tuple[int, float]]]  # for each word, its most probable states and their probabilities

DESCRIPTION = "Decode the hidden states of every word of a text."
EPILOG = """\
FILE is a text file with one sentence per line; by default, standard input. Text output has CoNLL columns, with a blank
line after every sentence: word, state, block, p(state | sentence); with --top-k, K more columns of state:probability.

  --method viterbi     the most probable path (default); -k lists the K best paths
  --method posterior   each word's most probable state given the whole sentence; this need not be a possible path
  --method filtered    each word's most probable state given the words up to it
A filtered posterior does not know the later words and the <eos>; p(state | sentence) knows both.

Every sentence ends with an <eos>. The best path has a state for it, as for any word; JSON output has it as eos_state.
With --eos-state sum, paths cover the words only, and the score is p(words, <eos>, states of the words). vlhmm infill
--mode best maximizes over the state of <eos> too.

Under the context rule reset, the chain restarts at every line. Under carry, it continues from the lines before, as in
vlhmm score: paths and posteriors are conditioned on those lines, and the states of those lines are summed over.

examples:
  echo "we the people" | vlhmm decode runs/mine
  vlhmm decode runs/mine text.txt --method posterior --top-k 3
  vlhmm decode runs/mine text.txt -k 5 --format jsonl
"""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of this verb."""
    add_query_options(parser)
    parser.add_argument("file", metavar="FILE", nargs="?", default="-", help="text file (default: standard input)")
    parser.add_argument(
        "--method", choices=("viterbi", "posterior", "filtered"), default="viterbi", help="how to choose states (default: viterbi)"
    )
    parser.add_argument("-k", type=count(1), default=1, metavar="K", help="viterbi: number of best paths (default: 1)")
    parser.add_argument(
        "--eos-state",
        choices=("max", "sum"),
        default="max",
        help="viterbi: the state of the final <eos> is part of the path (max, default) or summed over (sum)",
    )
    parser.add_argument("--top-k", type=count(), default=0, metavar="K", help="also print the K most probable states of each word")
    add_log_base(parser)


def run(args: argparse.Namespace) -> int:
    """Decode every sentence; return 0."""
    if args.k > 1 and args.method != "viterbi":
        raise ConfigError(f"-k {args.k} lists best paths; --method {args.method} has only one")
    if args.eos_state == "sum" and args.method != "viterbi":
        raise ConfigError(f"--eos-state sum applies to paths; --method {args.method} sums over all other states anyway")
    model = load_model(args)
    logs = LogBase(args)
    with ResultWriter(args.format) as answer:
        for number, words, before in lines_of(model, args.file):
            if not words:
                continue
            with on_line(number):
                found, top = _sentence(model, words, args, before)
            for rank, decoding in enumerate(found, start=1):
                answer(_record(number, rank, decoding, top, logs, args), _columns(decoding, top))
    return 0


def _sentence(
    model: Any, words: list[str], args: argparse.Namespace, before: Prefix | None
) -> tuple[list[Decoding], Top | None]:
    """Return the decodings of one sentence, best first; with --top-k also the most probable states of each word."""
    from vlhmm.queries.decode import Decoding, decode, posteriors

    memory, top = memory_of(args), None
    if args.method == "filtered" or args.top_k:
        known = posteriors(model, words, memory=memory, before=before)
        table = known.filtered if args.method == "filtered" else known.smoothed
        if args.top_k:
            top = [
                [(int(states[slot]), float(row[slot])) for slot in row.argsort(descending=True)[: args.top_k].tolist()]
                for states, row in zip(known.states, table, strict=True)
            ]
    if args.method == "filtered":
        best = table.argmax(1, keepdim=True)
        blocks = [model.distributions.block(word) for word in model.vocabulary.encode(words).tolist()]
        states, chosen = (values.gather(1, best)[:, 0].tolist() for values in (known.states, table))
        return [Decoding(words, states, blocks, None, chosen)], top
    return decode(model, words, args.method, args.k, memory=memory, eos_state=args.eos_state, before=before), top


def _record(
    number: int, rank: int, decoding: Decoding, top: Top | None, logs: LogBase, args: argparse.Namespace
) -> dict[str, Any]:
    record = {
        "line": number,
        "rank": rank,
        "method": args.method,
        "words": decoding.words,
        "states": decoding.states,
        "blocks": decoding.blocks,
        "probabilities": decoding.posteriors,
    }
    if decoding.log_prob is not None:
        record |= {"log_prob": logs.number(decoding.log_prob), "log_base": logs.name}
    if decoding.eos_state is not None:
        record["eos_state"] = decoding.eos_state
    if top is not None:
        record["top"] = [[{"state": s, "probability": p} for s, p in places] for places in top]
    return record


def _columns(decoding: Decoding, top: Top | None) -> list[str]:
    lines = []
    for t, (word, state, block, probability) in enumerate(
        zip(decoding.words, decoding.states, decoding.blocks, decoding.posteriors, strict=True)
    ):
        others = [] if top is None else [f"{each}:{share:.4f}" for each, share in top[t]]
        lines.append("\t".join([word, str(state), str(block), f"{probability:.4f}", *others]))
    return [*lines, ""]
