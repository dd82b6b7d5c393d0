"""`vlhmm sample`: texts drawn from the model, exactly."""

from __future__ import annotations

import argparse
import math
from typing import Any

from vlhmm.cli.numbers import count, real
from vlhmm.cli.options import (
    LogBase,
    ResultWriter,
    add_constraint_options,
    add_log_base,
    constraint_of,
    load_model,
    log_oov,
    log_to,
    memory_of,
    query_parser,
)

EPILOG = """\
Every text is drawn from the model's own distribution, to its <eos> or to --max-tokens words. --temperature,
--top-k and --top-p change that distribution; the answers are then marked as not exact. Constraints keep it:
texts are drawn from the model given the constraint (and an end within --max-tokens words), and the
constraint's own probability is told. A constrained text's score is conditioned on the same:
log p(text | prompt, constraint, an end within --max-tokens words), so that the scores of all texts that
satisfy the constraint sum to probability one. vlhmm score gives p(text) without the conditions.

examples:
  vlhmm sample runs/mine -n 5 --seed 1
  vlhmm sample runs/mine --prompt "the people of" -n 3 --scores
  vlhmm sample runs/mine -n 3 --max-tokens 12 --must-contain peace --must-contain "our country" --must-not war
  vlhmm sample runs/mine --prompt "we" --temperature 0.7 --top-k 40       sharper, no longer exact
"""


def add_parser(subparsers: Any) -> argparse.ArgumentParser:
    """The parser of this verb, added to `subparsers`."""
    parser = query_parser(
        subparsers, "sample", "exact samples, with or without a prompt", "Texts drawn from the model.", EPILOG
    )
    parser.add_argument("--prompt", default="", metavar="WORDS", help="how every text begins")
    parser.add_argument("-n", type=count(1), default=1, metavar="N", help="how many texts (default: 1)")
    parser.add_argument(
        "--max-tokens",
        type=count(1),
        metavar="N",
        help="words after the prompt, at most (default: 100; constrained: 30)",
    )
    parser.add_argument(
        "--temperature", type=real(1e-6, 1e6), default=1.0, help="of each next word (default: 1, the model itself)"
    )
    parser.add_argument("--top-k", type=count(1), metavar="K", help="only the K most probable next words")
    parser.add_argument("--top-p", type=real(0, 1), metavar="P", help="only the most probable next words that make up P")
    parser.add_argument("--scores", action="store_true", help="each text's log-probability given the prompt, and given the constraint if there is one")
    add_constraint_options(parser)
    add_log_base(parser)
    parser.set_defaults(run=run)
    return parser


def run(args: argparse.Namespace) -> int:
    """0 when the texts are drawn."""
    from vlhmm.errors import ConfigError
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
        log(f"p(constraint | prompt, an end in time) = {math.exp(ready.log_constraint):.3g}")
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
