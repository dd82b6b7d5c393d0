"""`vlhmm infill`: fill gaps given both sides, exactly."""

from __future__ import annotations

import argparse
import math
from typing import Any

from vlhmm.cli.common import log_to
from vlhmm.cli.numbers import count
from vlhmm.cli.options import (
    LogBase,
    ResultWriter,
    add_constraint_options,
    add_log_base,
    add_query_options,
    constraint_of,
    load_model,
    log_oov,
    memory_of,
    on_line,
    probability_text,
    texts_of,
)

DESCRIPTION = "Fill the gaps of a text, given all words left and right of them."
EPILOG = """\
TEXT has any number of gaps: [MASK] is one word, [MASK:n] n words, [MASK:a-b] a to b words. - reads texts from standard
input, one per line. Every probability is conditioned on all given words, left and right, on the lengths of the gaps being
in range, on the constraint, and on the sentence ending after the text (unless --open). A gap holds no <eos> unless
--allow-eos is given, so <eos> is not among the alternatives of a word.

  --mode sample      draw fills from p(fill | text, constraint); each is printed with that probability
  --mode best        for one gap of one word, the most probable word; otherwise the fill on the most probable path of
                     words and states ("joint path", the state of the final <eos> included), which need not be the
                     most probable fill. The probability printed is that of the fill, over all paths; path_log_prob in
                     JSON is that of the path, under the same conditions
  --mode marginals   the distribution of each gap's length, and of each of its words given the length

examples:
  vlhmm infill runs/mine "the [MASK] of the united states"
  vlhmm infill runs/mine "he [MASK] to the [MASK:1-4] ." -n 5 --seed 1
  vlhmm infill runs/mine "our [MASK:2-6] ." -n 3 --must-contain trade --must-not war
  vlhmm infill runs/mine "the [MASK] of the [MASK]" --mode marginals --top-k 5 --format json
"""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of this verb."""
    add_query_options(parser)
    parser.add_argument("text", metavar="TEXT", help="text with [MASK] or [MASK:a-b], or - for standard input")
    parser.add_argument("--mode", choices=("sample", "best", "marginals"), default="sample", help="kind of answer (default: sample)")
    parser.add_argument("-n", type=count(1), default=1, metavar="N", help="number of samples (default: 1)")
    parser.add_argument("--top-k", type=count(), default=10, metavar="K", help="words to print per position (default: 10)")
    parser.add_argument("--open", action="store_true", help="the sentence may continue after the text")
    parser.add_argument("--allow-eos", action="store_true", help="gaps may hold <eos>")
    add_constraint_options(parser)
    add_log_base(parser)


def run(args: argparse.Namespace) -> int:
    """Fill every text; return 0."""
    from vlhmm.lattice.template import MASK
    from vlhmm.queries.infill import prepare

    constraint = constraint_of(args)
    model = load_model(args)
    logs, log = LogBase(args), log_to(args.quiet)
    several = args.text == "-"
    single = not several and args.mode != "sample"
    with ResultWriter(args.format, single) as answer:
        for number, words in texts_of(args.text, lambda text: model.vocabulary.split_around(text, MASK)):
            with on_line(number, several):
                ready = prepare(model, words, constraint, args.scope, not args.open, args.allow_eos, memory_of(args))
                log_oov(log, model.vocabulary, [word for word in words if not word.startswith("[MASK")])
                about = {"rule": model.rule, "log_base": logs.name, "evidence": logs(ready.log_evidence)}
                if ready.log_constraint is not None:
                    about["constraint_log_prob"] = logs.number(ready.log_constraint)
                    log(f"p(constraint | text) = {probability_text(ready.log_constraint, 3)}")
                _ANSWERS[args.mode](args, ready, logs, about, answer)
    return 0


def _sample(args: argparse.Namespace, ready: Any, logs: LogBase, about: dict, answer: ResultWriter) -> None:
    for fill in ready.sample(args.n, args.seed):
        _fill(ready, fill, "sample", {"seed": args.seed}, logs, about, answer)


def _best(args: argparse.Namespace, ready: Any, logs: LogBase, about: dict, answer: ResultWriter) -> None:
    best = ready.best()
    more = {} if best.path_log_prob is None else {"path_log_prob": logs(best.path_log_prob)}
    _fill(ready, best.fill, best.criterion, more, logs, about, answer)


def _fill(ready: Any, fill: Any, exact: str, more: dict, logs: LogBase, about: dict, answer: ResultWriter) -> None:
    record = {
        "text": fill.text,
        "gaps": [ready.model.vocabulary.join(words) for words in fill.gaps],
        "exact": exact,
        "log_prob": logs(fill.log_prob),
        "probability": math.exp(fill.log_prob),
        **more,
        **about,
    }
    how = "" if exact == "sample" else f"\t(exact: {exact})"
    answer(record, f"{probability_text(fill.log_prob, 4)}\t{fill.text}{how}")


def _marginals(args: argparse.Namespace, ready: Any, logs: LogBase, about: dict, answer: ResultWriter) -> None:
    gaps, lines = [], []
    for number, gap in enumerate(ready.marginals(), start=1):
        lengths = []
        for length, probability in gap.lengths.items():
            if probability == 0:
                continue
            places = [
                [{"word": w.word, "probability": w.probability} for w in place.top(args.top_k or None)]
                for place in gap.words.get(length, [])
            ]
            lengths.append({"length": length, "probability": probability, "places": places})
            if len(gap.lengths) > 1:
                lines.append(f"# gap {number}: {length} words with probability {probability:.6f}")
            for place, words in enumerate(places, start=1):
                lines.append(f"# gap {number}, word {place} of {length}")
                lines += [f"{w['probability']:.6f}\t{w['word']}" for w in words]
        gaps.append({"lengths": lengths})
    answer({"gaps": gaps, "exact": "marginals", **about}, lines)


_ANSWERS = {"sample": _sample, "best": _best, "marginals": _marginals}
