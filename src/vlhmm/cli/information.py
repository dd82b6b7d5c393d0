"""`vlhmm information`: entropy rate, probability of phrases, divergence of two models."""

from __future__ import annotations

import argparse
from typing import Any

from vlhmm.cli.common import log_to, token_progress
from vlhmm.cli.numbers import count
from vlhmm.cli.options import LogBase, ResultWriter, add_log_base, add_query_options, load_model, log_oov, memory_of
from vlhmm.errors import ConfigError

DESCRIPTION = "Compute the entropy rate of a model, the probability of a phrase, or the divergence of two models."
EPILOG = """\
  entropy          entropy rate of the model's own text, per token: an estimate from sampled streams, with its
                   standard error (no closed form is known)
  phrase "W ..."   exact probability that the phrase occurs within the next n tokens, for n = 1 .. --max-tokens
  kl OTHER FILE    exact KL divergence of the next-word distributions of RUN and OTHER after every prefix of
                   a text, averaged over its tokens; both runs must have the same vocabulary

examples:
  vlhmm information runs/mine entropy --streams 64 --tokens 256 --log-base 2
  vlhmm information runs/mine phrase "the united states" --max-tokens 20
  vlhmm information runs/mine kl runs/other test.txt --format json
"""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of this verb."""
    add_query_options(parser)
    parser.add_argument("what", choices=("entropy", "phrase", "kl"), metavar="WHAT", help="entropy, phrase or kl")
    parser.add_argument("operands", metavar="...", nargs="*", help="phrase: the words; kl: OTHER [FILE]")
    parser.add_argument("--streams", type=count(2), default=64, metavar="N", help="entropy: number of sampled streams (default: 64)")
    parser.add_argument("--tokens", type=count(1), default=256, metavar="N", help="entropy: tokens per stream (default: 256)")
    parser.add_argument("--max-tokens", type=count(1), default=10, metavar="N", help="phrase: largest number of tokens (default: 10)")
    parser.add_argument("--prompt", default="", metavar="WORDS", help="phrase: words before it")
    parser.add_argument("--one-sentence", action="store_true", help="phrase: it must occur before the next <eos>")
    add_log_base(parser)


def run(args: argparse.Namespace) -> int:
    """Compute the quantity and print it; return 0."""
    counts = {"entropy": (0, 0), "phrase": (1, None), "kl": (1, 2)}
    low, high = counts[args.what]
    if len(args.operands) < low or (high is not None and len(args.operands) > high):
        wanted = {
            "entropy": "nothing more",
            "phrase": "the words of a phrase",
            "kl": "another RUN, and a FILE or standard input",
        }
        raise ConfigError(f"{args.what} takes {wanted[args.what]}, got {' '.join(args.operands) or 'nothing'}")
    model = load_model(args)
    with ResultWriter(args.format, single=True) as answer:
        {"entropy": _entropy, "phrase": _phrase, "kl": _kl}[args.what](args, model, LogBase(args), answer)
    return 0


def _entropy(args: argparse.Namespace, model: Any, logs: LogBase, answer: ResultWriter) -> None:
    from vlhmm.queries.information import entropy_rate

    found = entropy_rate(model, args.streams, args.tokens, args.seed)
    record = {
        "entropy_rate": logs(found.value),
        "standard_error": logs(found.standard_error),
        "log_base": logs.name,
        "estimate": True,
        "streams": found.num_streams,
        "tokens_per_stream": found.num_tokens,
        "rule": model.rule,
        "seed": args.seed,
    }
    answer(
        record,
        f"entropy rate {logs(found.value):.4f} ± {logs(found.standard_error):.4f} per token (log base "
        f"{logs.name}): estimate and standard error from {found.num_streams} streams of {found.num_tokens} "
        "tokens",
    )


def _phrase(args: argparse.Namespace, model: Any, logs: LogBase, answer: ResultWriter) -> None:
    from vlhmm.queries.information import phrase_probability

    phrase = " ".join(args.operands)
    log_oov(log_to(args.quiet), model.vocabulary, model.vocabulary.split(args.prompt))
    with token_progress(args.quiet, "phrase") as progress:
        found = phrase_probability(
            model, phrase, args.max_tokens, args.prompt, not args.one_sentence, memory_of(args), progress
        )
    record = {
        "phrase": phrase,
        "context": args.prompt,
        "probabilities": found,
        "exact": True,
        "rule": model.rule,
    }
    lines = [f"{n}\t{probability:.8g}" for n, probability in enumerate(found, start=1)]
    answer(record, [f"# tokens\texact p({phrase!r} occurs in them)", *lines])


def _kl(args: argparse.Namespace, model: Any, logs: LogBase, answer: ResultWriter) -> None:
    from vlhmm.data.text import read_lines
    from vlhmm.queries.information import kl_on_text

    other = load_model(args, args.operands[0])
    total = ratio = 0.0
    tokens = 0
    for words in read_lines(args.operands[1] if len(args.operands) > 1 else "-", model.vocabulary.split):
        found = kl_on_text(model, other, words)
        total += found.kl * found.num_tokens
        ratio += found.log_ratio * found.num_tokens
        tokens += found.num_tokens
    record = {
        "kl": logs(total / tokens),
        "log_ratio": logs(ratio / tokens),
        "log_base": logs.name,
        "tokens": tokens,
        "exact": True,
    }
    answer(
        record,
        f"KL {logs(total / tokens):.6f} per token, log-ratio of the text {logs(ratio / tokens):.6f} per token "
        f"(log base {logs.name}), {tokens:,} tokens, each sentence by itself; exact for these contexts",
    )
