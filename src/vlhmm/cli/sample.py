"""`vlhmm sample`: draw texts from the model, exactly."""

from __future__ import annotations

import argparse
from typing import Any

from vlhmm.cli.common import log_to
from vlhmm.cli.numbers import count, real
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
    probability_text,
)
from vlhmm.errors import ConfigError

DESCRIPTION = "Draw texts from the model."
EPILOG = """\
Every text is drawn from the model's distribution, up to its <eos> or to --max-tokens words. --temperature, --top-k and
--top-p change that distribution; the samples are then marked as not exact. Samples under constraints are exact: they
are drawn from p(text | prompt, constraint, end within --max-tokens words), and the probability of the constraint is
printed. --scores gives the log-probability under the same conditions, so that the probabilities of all texts that
satisfy the constraint sum to one. vlhmm score gives the unconditional p(text).

examples:
  vlhmm sample runs/mine -n 5 --seed 1
  vlhmm sample runs/mine --prompt "the people of" -n 3 --scores
  vlhmm sample runs/mine -n 3 --max-tokens 12 --must-contain peace --must-contain "our country" --must-not war
  vlhmm sample runs/mine --prompt "we" --temperature 0.7 --top-k 40       sharper, not exact
"""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of this verb."""
    add_query_options(parser)
    parser.add_argument("--prompt", default="", metavar="WORDS", help="words that every text begins with")
    parser.add_argument("-n", type=count(1), default=1, metavar="N", help="number of texts (default: 1)")
    parser.add_argument(
        "--max-tokens",
        type=count(1),
        metavar="N",
        help="largest number of words after the prompt (default: 100; with constraints: 30)",
    )
    parser.add_argument(
        "--temperature", type=real(1e-6, 1e6), default=1.0, metavar="T", help="exponent 1/T on each next-word distribution (default: 1, exact)"
    )
    parser.add_argument("--top-k", type=count(1), metavar="K", help="draw from the K most probable next words only")
    parser.add_argument("--top-p", type=real(0, 1), metavar="P", help="draw from the most probable next words with total probability P only")
    parser.add_argument("--scores", action="store_true", help="print each text's log-probability given the prompt and the constraint")
    add_constraint_options(parser)
    add_log_base(parser)


def run(args: argparse.Namespace) -> int:
    """Draw the texts; return 0."""
    from vlhmm.queries.left_to_right import has_hidden_states, sample, without_states
    from vlhmm.queries.sample import constrained

    constraint = constraint_of(args)
    if constraint is not None and (args.temperature != 1.0 or args.top_k is not None or args.top_p is not None):
        raise ConfigError("a constraint is kept exactly and takes no --temperature, --top-k or --top-p; drop one")
    model = load_model(args, any_kind=True)
    if constraint is not None and not has_hidden_states(model):
        raise ConfigError(without_states(model, args.run_folder, "a constrained sample"))
    logs, log = LogBase(args), log_to(args.quiet)
    log_oov(log, model.vocabulary, model.vocabulary.split(args.prompt))
    about: dict[str, Any] = {}
    if constraint is not None:
        longest = 30 if args.max_tokens is None else args.max_tokens
        ready = constrained(model, args.prompt, constraint, longest, args.scope, memory_of(args))
        about = {"constraint_log_prob": logs.number(ready.log_constraint)}
        log(f"p(constraint | prompt, an end in time) = {probability_text(ready.log_constraint, 3)}")
        drawn = ready.draw(args.n, args.seed)
    else:
        drawn = sample(
            model,
            args.n,
            args.prompt,
            100 if args.max_tokens is None else args.max_tokens,
            args.temperature,
            args.top_k,
            args.top_p,
            scores=args.scores,
            seed=args.seed,
        )
    if not drawn[0].exact:
        log("temperature, top-k or top-p: these are not exact samples of the model")
    with ResultWriter(args.format) as answer:
        for text in drawn:
            record: dict[str, Any] = {
                "text": text.text,
                "ended": text.ended,
                "exact": text.exact,
                "rule": model.rule,
                "seed": args.seed,
                **about,
            }
            line = text.text
            if text.log_prob is not None:
                given = "prompt" if constraint is None else "prompt, constraint and an end within max-tokens"
                record |= {"log_prob": logs.number(text.log_prob), "log_base": logs.name, "log_prob_given": given}
                if args.scores:
                    line = f"{logs.shown(text.log_prob)} (log base {logs.name})\t{line}"
            answer(record, line)
    return 0
