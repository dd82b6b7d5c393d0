"""`vlhmm baseline`: estimate or train one of the paper's baselines, and evaluate it like every other model."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from vlhmm.cli.common import (
    DATA_DIR,
    TRAIN,
    add_format,
    add_set,
    add_vocabulary_limits,
    interruptible,
    load_training_corpus,
    print_settings,
    terminal_bar,
    token_progress,
)
from vlhmm.cli.numbers import count, duration, seed, tokens
from vlhmm.config import to_json
from vlhmm.errors import ConfigError
from vlhmm.limits import MAX_THREADS

if TYPE_CHECKING:
    from vlhmm.baselines.kneser_ney import KneserNey
    from vlhmm.data.corpora import Corpus
    from vlhmm.evaluation.perplexity import Report
    from vlhmm.evaluation.protocol import LanguageModel

DESCRIPTION = "Estimate or train a baseline, and measure its perplexity."
EPILOG = """\
TRAIN is a text file with one sentence per line and words separated by blanks (UTF-8, also .gz), or a corpus name:
sotu, ptb or wikitext-2. A corpus has its own valid and test splits.

examples:
  vlhmm baseline kn ptb                                       a Kneser-Ney 5-gram model, in seconds
  vlhmm baseline kn train.txt --valid valid.txt --arpa model.arpa.gz    for KenLM, SRILM and the like
  vlhmm score model.arpa.gz text.txt                          ARPA files are read by evaluate, score, next and sample
  vlhmm baseline lstm ptb --out runs/lstm --time-limit 90m    the same command resumes it
  vlhmm baseline lstm ptb --out runs/lstm --samples teacher.txt.gz --sample-tokens 8M    text for vlhmm train --extra
  vlhmm baseline ff ptb --format json --quiet | jq .results.test.carry.perplexity

Perplexity is reported under both context rules. reset: every line is scored by itself. carry: the state is carried
over line ends, in 16 streams. ff and lstm are trained under one of the rules (--context); quote that one. A Kneser-Ney
model starts from an empty context at every line under either rule. If a text is too small or too regular to estimate
the discounts of an order, kn uses 0.5, 1 and 1.5, and prints a message.
"""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of this verb."""
    add = parser.add_argument
    add("kind", choices=("kn", "ff", "lstm"), help="Kneser-Ney n-gram, feed-forward n-gram or LSTM")
    add("train", metavar="TRAIN", nargs="?", help=TRAIN)
    add("--valid", metavar="FILE", help="validation text; a corpus has its own")
    add("--test", metavar="FILE", help="test text")
    add("--out", metavar="RUN", help="run folder; without it, the model is not saved")
    add("--order", type=count(1, 1000), metavar="N", help="kn and ff: length of the n-grams (default: 5)")
    add("--arpa", metavar="FILE", help="kn: also write the model in ARPA format (compressed if FILE ends in .gz)")
    add("--epochs", type=count(1, 1_000_000), metavar="N", help="ff and lstm: passes over TRAIN (default: 100 and 50)")
    add_set(parser, "ff and lstm: ")
    add("--samples", metavar="FILE", help="ff and lstm: write samples of the trained model to FILE (also .gz)")
    add("--sample-tokens", type=tokens, metavar="N", help="tokens of --samples: 500k, 8M (default: 1M)")
    add("--context", choices=("reset", "carry"), help="ff and lstm: context rule of training (default: carry)")
    add("--time-limit", type=duration, metavar="T", help="ff and lstm: stop with a checkpoint after this time: 90s, 15m, 1.5h")
    add_vocabulary_limits(parser)
    add("--data-dir", metavar="DIR", help=DATA_DIR)
    add_format(parser)
    add("--seed", type=seed, default=0, metavar="N", help="seed of every random draw (default: 0)")
    add("--threads", type=count(1, MAX_THREADS), metavar="N", help="CPU threads (default: all cores)")
    add("--quiet", action="store_true", help="no progress and no messages")


def run(args: argparse.Namespace) -> int:
    """Train and evaluate the baseline; return 0."""
    from vlhmm.baselines.training import BaselineConfig

    if args.list_settings:
        print_settings(BaselineConfig)
        return 0
    if args.train is None:
        raise ConfigError("TRAIN is missing: a text file, - for standard input, or sotu, ptb, wikitext-2")
    _check_options(args)
    import torch

    if args.threads is not None:
        torch.set_num_threads(args.threads)
    corpus = load_training_corpus(args)
    began = time.monotonic()
    model, about = _kneser_ney(args, corpus) if args.kind == "kn" else _neural(args, corpus)
    if args.samples is not None:
        _draw(model, args)
    about = {"kind": args.kind, **about, "seconds": round(time.monotonic() - began, 2), "out": args.out}
    results = _measure(model, corpus)
    if args.format == "json":
        measured = {split: {r: report.to_dict() for r, report in rules.items()} for split, rules in results.items()}
        print(to_json({**about, "corpus": corpus.name, "results": measured}))
    else:
        sys.stdout.writelines(f"{line}\n" for line in _table(about, results))
    return 0


def _check_options(args: argparse.Namespace) -> None:
    """Refuse options that this kind of baseline would ignore, and names that cannot be written to."""
    foreign = {
        "kn": ("epochs", "context", "time_limit", "samples", "sample_tokens", "set"),
        "ff": ("arpa",),
        "lstm": ("arpa", "order"),
    }[args.kind]
    for name in foreign:
        if getattr(args, name) not in (None, []):
            raise ConfigError(f"--{name.replace('_', '-')} does not apply to baseline {args.kind}; leave it out")
    for name, is_wrong, expected in (("out", os.path.isfile, "a folder"), ("arpa", os.path.isdir, "a file")):
        if getattr(args, name) is not None and is_wrong(getattr(args, name)):
            raise ConfigError(f"--{name} {getattr(args, name)}: expected the name of {expected}; choose another one")
    if args.sample_tokens is not None and args.samples is None:
        raise ConfigError("--sample-tokens needs --samples FILE; add it, or leave --sample-tokens out")


def _kneser_ney(args: argparse.Namespace, corpus: Corpus) -> tuple[LanguageModel, dict[str, Any]]:
    from vlhmm.baselines.kneser_ney import estimate, save

    model = estimate(corpus.train, corpus.vocabulary, 5 if args.order is None else args.order)
    if args.out is not None:
        save(model, args.out)
    if args.arpa is not None:
        model.write_arpa(args.arpa)
    note_fallback(model, args.quiet)
    about = {
        "settings": {"order": model.order, "discounts": model.discounts, "fallback_orders": model.fallback_orders},
        "ngrams": model.num_ngrams,
        "parameters": model.num_parameters,
        "finished": True,
    }
    return model, about


def note_fallback(model: KneserNey, quiet: bool) -> None:
    """Print the orders for which the text is too small or too regular to estimate discounts."""
    if model.fallback_orders and not quiet:
        some = model.fallback_orders
        orders = ", ".join(map(str, some)) if len(some) < 10 else f"{some[0]} to {some[-1]}"
        _say(
            f"Kneser-Ney order {orders}: the counts of counts allow no discounts (a small or very regular text); using "
            "0.5, 1 and 1.5, as lmplz --discount_fallback does"
        )


def _neural(args: argparse.Namespace, corpus: Corpus) -> tuple[LanguageModel, dict[str, Any]]:
    from dataclasses import asdict, replace

    from vlhmm.baselines.training import default_config, train_baseline
    from vlhmm.config import override

    given = {name: getattr(args, name) for name in ("order", "epochs", "context", "seed")}
    config = replace(default_config(args.kind), **{k: v for k, v in given.items() if v is not None})
    config = override(config, args.set)
    with interruptible() as stop_asked, _progress(args.quiet, config.epochs) as progress:
        result = train_baseline(args.kind, corpus, args.out, config, args.time_limit, progress, stop_asked)
    if not result.finished and not args.quiet:
        again = "; run the same command again to resume" if args.out else ""
        _say(f"stopped by the time limit after {result.epochs:.2f} of {config.epochs} epochs{again}")
    about = {
        "settings": asdict(config),
        "parameters": result.model.num_parameters,
        "epochs": result.epochs,
        "steps": result.steps,
        "training_seconds": round(result.seconds, 1),
        "finished": result.finished,
    }
    return result.model, about


def _draw(model: Any, args: argparse.Namespace) -> None:
    """Write text drawn from the model to --samples, one sentence per line."""
    import torch

    from vlhmm.data.text import write_text

    num_tokens = args.sample_tokens or 1_000_000
    if not args.quiet:
        _say(f"drawing {num_tokens:,} tokens, a minute or two per million")
    with token_progress(args.quiet, "drawing") as progress:
        text = model.sample(num_tokens, torch.Generator().manual_seed(args.seed), progress=progress)
    write_text(args.samples, text, model.vocabulary)
    if not args.quiet:
        _say(f"{args.samples}: {text.num_tokens:,} tokens in {text.num_sentences:,} lines, drawn from the model")


def _measure(model: LanguageModel, corpus: Corpus) -> dict[str, dict[str, Report]]:
    from vlhmm.evaluation.perplexity import evaluate

    texts = {"valid": corpus.valid} | ({} if corpus.test is None else {"test": corpus.test})
    return {
        split: {rule: evaluate(model, text, rule=rule) for rule in ("reset", "carry")} for split, text in texts.items()
    }


def _table(about: dict[str, Any], results: dict[str, dict[str, Report]]) -> Iterator[str]:
    """Yield one line per perplexity, with the counts behind it."""
    size = next(iter(results["valid"].values())).vocabulary_size
    ngrams = f"  {about['ngrams']:,} n-grams" if "ngrams" in about else ""
    yield f"{about['kind']}{ngrams}  {about['parameters']:,} parameters  vocabulary {size:,}"
    yield (
        "split  context  perplexity  without OOV  bits/token  bits/byte  "
        "sentences      words     tokens      OOV    <unk>"
    )
    for split, rules in results.items():
        for rule, r in rules.items():
            yield (
                f"{split:<5}  {rule:<7}  {r.perplexity:>10.2f}  {r.perplexity_without_oov:>11.2f}  "
                f"{r.bits_per_token:>10.4f}  {r.bits_per_byte:>9.4f}  {r.sentences:>9,}  {r.words:>9,}  "
                f"{r.tokens:>9,}  {r.oov:>7,}  {r.literal_unk:>7,}"
            )


@contextmanager
def _progress(quiet: bool, epochs: int) -> Iterator[Callable[[dict[str, Any]], None] | None]:
    """Return a callback that prints every validation, and draws a bar on a terminal."""
    if quiet:
        yield None
        return
    if not sys.stderr.isatty():
        yield lambda event: _say(_check_line(event, epochs)) if event["event"] == "check" else None
        return
    with terminal_bar("TimeRemainingColumn") as bar:
        task = bar.add_task("training", total=epochs)

        def draw(event: dict[str, Any]) -> None:
            if event["event"] == "check":
                bar.console.print(_check_line(event, epochs), highlight=False, markup=False)
            elif event["event"] == "step":
                speed = f"{event['tokens_per_second']:,} tok/s" if event["tokens_per_second"] else ""
                bar.update(task, completed=event["epoch"], description=f"step {event['step']}  {speed}")

        yield draw


def _check_line(event: dict[str, Any], epochs: int) -> str:
    star = "*" if event["is_best"] else ""
    return (
        f"epoch {event['epoch']:.2f}/{epochs}  step {event['step']}  "
        f"train {event['train_perplexity']:.1f} (dropout)  valid {event['valid_perplexity']:.1f}{star}  "
        f"rate {event['rate']:g}  {event['tokens_per_second']:,} tok/s"
    )


def _say(line: str) -> None:
    print(line, file=sys.stderr)
