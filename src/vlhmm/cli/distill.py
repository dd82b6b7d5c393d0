"""`vlhmm distill`: train an HMM on samples of a language model."""

from __future__ import annotations

import argparse
import json
from typing import Any

from vlhmm.cli.common import add_format, add_machine_options, clock, interruptible, log_to, setup, token_progress
from vlhmm.cli.numbers import count, duration, real, tokens
from vlhmm.errors import ConfigError
from vlhmm.limits import MAX_NEW_TOKENS

DESCRIPTION = "Distill a language model into an HMM over its tokens."
EPILOG = """\
LLM is a folder made by save_pretrained, a .gguf file, or a name on the Hugging Face hub. pip install 'vlhmm[llm]'

examples:
  vlhmm distill SmolLM2.gguf --prompts prompts.txt --tokens 1M --out runs/smol      draw a million tokens, then train
  vlhmm distill --samples drawn.jsonl --tokenizer tokenizer.json --out runs/smol    samples made elsewhere: JSON lines of
                                                                                    texts or ids, {"ids": [...], "finished": true}
  vlhmm distill SmolLM2.gguf --samples drawn.jsonl --temperature 0.8 --out runs/smol
                                                                                    also report the LLM's own perplexity
  vlhmm distill SmolLM2.gguf --prompts prompts.txt --tokens 1M --evidence 1 --out runs/smol
                                                                                    the model's hidden vectors guide the states
  vlhmm distill SmolLM2.gguf --prompts prompts.txt --tokens 1M --states 32768 --iterations 200 --out runs/large

Samples are saved in RUN/samples, shard by shard, and the same command resumes an interrupted run. One line in 40 is
held out to choose the best model, and another one for the report, which is also saved in RUN/distillation.json.
"""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of this verb."""
    parser.add_argument("llm", metavar="LLM", nargs="?", help="language model; not needed with --samples")
    parser.add_argument("--out", metavar="RUN", required=True, help="run folder")
    drawing = parser.add_argument_group("samples")
    drawing.add_argument("--prompts", metavar="FILE", help="prompts for the model, one per line")
    drawing.add_argument("--tokens", type=tokens, default=1_000_000, metavar="N", help="number of tokens to draw (default: 1M)")
    drawing.add_argument("--temperature", type=real(1e-6, 1e6), default=1.0, metavar="T", help="sampling temperature (default: 1)")
    drawing.add_argument(
        "--max-new-tokens", type=count(1, MAX_NEW_TOKENS), default=40, metavar="N", help="largest number of tokens per sample (default: 40)"
    )
    drawing.add_argument("--batch", type=count(1, 100_000), default=256, metavar="N", help="samples drawn in parallel (default: 256)")
    drawing.add_argument(
        "--template", metavar="TEXT", help="prompt template with {prompt} (default: the model's chat template, or the prompt alone)"
    )
    drawing.add_argument(
        "--precision", choices=("auto", "float32", "bfloat16"), default="auto", help="number format of the language model"
    )
    drawing.add_argument(
        "--samples", metavar="FILE", nargs="+", help="use these samples: JSON lines, text files, or folders of shards"
    )
    drawing.add_argument("--tokenizer", metavar="PATH", help="tokenizer.json of the samples, if no LLM is given")
    training = parser.add_argument_group("training")
    training.add_argument("--preset", metavar="NAME", default="distill", help="complete configuration (default: distill); tiny takes seconds")
    training.add_argument("--states", metavar="N", help="hidden states, e.g. 2^14: short for --set model.num_states=N")
    training.add_argument("--blocks", metavar="M", help="token blocks: short for --set model.num_blocks=M")
    training.add_argument(
        "--evidence", type=real(0, 1e6), default=0.0, metavar="W",
        help="weight of evidence about the states from the model's hidden vectors, e.g. 1; it reads all samples again (default: 0, none)",
    )  # fmt: skip
    training.add_argument("--iterations", type=count(1), metavar="N", help="number of E-steps, each over a share of the samples")
    training.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", help="change one setting; repeatable (see vlhmm train --list-settings)")
    training.add_argument("--time-limit", type=duration, metavar="T", help="stop training with a checkpoint after this time: 90s, 15m, 1.5h")
    add_format(parser)
    add_machine_options(parser)


def run(args: argparse.Namespace) -> int:
    """Draw samples, train and report; return 0, or 130 after an interrupt."""
    from vlhmm.training.presets import preset

    check(args)
    preset(args.preset)  # refused before anything is drawn
    device = setup(args)
    from vlhmm.cli.train import shown_progress
    from vlhmm.data.corpora import Corpus
    from vlhmm.data.tokenizer import TokenVocabulary
    from vlhmm.steering import distill
    from vlhmm.steering.llm import open_llm
    from vlhmm.training.run_folder import RunFolder
    from vlhmm.training.trainer import train

    log = log_to(args.quiet)
    llm: Any = None
    if args.llm:
        log(f"loading {args.llm}")
        llm = open_llm(args.llm, args.precision)
        vocabulary = llm.vocabulary
    else:
        vocabulary = TokenVocabulary.read(args.tokenizer)
    with interruptible() as stop_asked:
        sources = args.samples
        if not sources:
            folder = RunFolder(args.out).samples_path
            settings = distill.DrawSettings(
                temperature=args.temperature, max_new_tokens=args.max_new_tokens, template=args.template,
                batch=args.batch, seed=args.seed,
            )  # fmt: skip
            prompts = distill.read_prompts(args.prompts)
            log(f"drawing {args.tokens:,} tokens after {len(prompts):,} prompts, kept in {folder}")
            with progress_of(args.quiet, "drawing", "tokens") as progress:
                drawn = distill.draw_samples(llm, prompts, folder, args.tokens, settings, progress, stop_asked)
            if drawn < args.tokens:
                log(f"stopped at {drawn:,} tokens; the same command resumes")
                return 130
            sources = [folder]
        samples = distill.read_samples(sources, vocabulary)
        log(
            f"{samples.num_tokens:,} tokens of samples: {samples.train.num_tokens:,} to train on, "
            f"{samples.valid.num_tokens:,} for validation, {samples.test.num_tokens:,} for the report"
        )
        llm_nats = None
        if llm is not None and all(line.prompt is not None for line in samples.test_lines):
            with progress_of(args.quiet, "the LLM reads held-out samples", "samples") as progress:
                found = distill.llm_log_probs(llm, samples.test_lines, args.temperature, args.template, progress=progress)
            llm_nats = -float(found.mean())
        elif llm is not None:
            log("some samples do not say which prompt they answer; the LLM itself is left out of the report")
        config, teacher = configured(args, samples.train.num_tokens), None
        if args.evidence:
            from vlhmm.steering.hidden_vectors import read_hidden_vectors

            folder = RunFolder(args.out).samples_path
            with progress_of(args.quiet, "the LLM reads the samples", "samples") as progress:
                teacher = read_hidden_vectors(llm, samples.train_lines, folder, args.template, progress, stop_asked)
            if teacher is None:
                log("stopped; the same command resumes")
                return 130
        llm = None  # its memory
        with shown_progress(args.quiet, config, args.time_limit) as shown:
            corpus = Corpus("samples", vocabulary, samples.train, samples.valid, None)
            described = {"llm": args.llm, "samples": " ".join(map(str, sources))}
            result = train(
                corpus, config, args.out, time_limit=args.time_limit, device=device, memory=args.memory, progress=shown,
                should_stop=stop_asked, log=log, described=described, teacher=teacher,
            )  # fmt: skip
    if result.stopped_by == "interrupt":
        log(f"stopped at step {result.step} of {result.total_steps}; the same command resumes")
        return 130
    if result.best_valid == float("inf"):
        raise ConfigError("the time limit came before the first validation; the same command resumes")
    with token_progress(args.quiet, "comparing") as comparing:
        temperature = args.temperature if llm_nats is not None or not args.samples else None
        report = distill.report_on(args.out, samples, result, llm_nats, temperature, args.memory, comparing)
    from dataclasses import asdict

    record = {"run": args.out, **asdict(report)}
    print(json.dumps(record) if args.format == "json" else "\n".join(report_text(record)))
    return 0


def check(args: argparse.Namespace) -> None:
    """Refuse what does not go together, before anything is loaded."""
    if args.samples:
        if args.prompts:
            raise ConfigError("--samples are used instead of drawing: drop --prompts")
        if not args.llm and not args.tokenizer:
            raise ConfigError("--samples need the tokenizer of their ids: add --tokenizer tokenizer.json, or name the LLM")
    elif not args.llm:
        raise ConfigError("LLM is missing: a folder, a .gguf file or a hub name; or give --samples")
    elif not args.prompts:
        raise ConfigError("--prompts is missing: a file of what the model is asked, one prompt per line")
    if args.evidence and not args.llm:
        raise ConfigError("--evidence comes from the LLM's hidden vectors: name the LLM that wrote the samples")
    if args.llm and args.tokenizer:
        raise ConfigError("the LLM brings its own tokenizer: drop --tokenizer")


def configured(args: argparse.Namespace, train_tokens: int) -> Any:
    """Return the preset with the options of the command line; as many epochs as give that number of E-steps."""
    from vlhmm.config import override
    from vlhmm.training.plan import steps_per_epoch_of
    from vlhmm.training.presets import DISTILL_ITERATIONS, preset

    short = {"model.num_states": args.states, "model.num_blocks": args.blocks, "training.seed": args.seed}
    changes = [f"{name}={value}" for name, value in short.items() if value is not None]
    if args.evidence:
        changes.append(f"distillation.weight={args.evidence}")
    config = override(preset(args.preset), [*changes, *args.set])
    named = any(setting.startswith("training.epochs") for setting in args.set)
    if args.iterations is None and (named or args.preset != "distill"):
        return config
    epochs = (args.iterations or DISTILL_ITERATIONS) / steps_per_epoch_of(train_tokens, config.training)
    return override(config, [f"training.epochs={epochs}", f"training.checks_per_epoch={min(4.0, 12 / epochs)}"])


def progress_of(quiet: bool, title: str, unit: str) -> Any:
    """Yield a bar with its rate and the time left on a terminal, a line now and then elsewhere."""
    import sys
    import time
    from contextlib import contextmanager

    if not quiet and sys.stderr.isatty():
        return token_progress(quiet, title)

    @contextmanager
    def lines() -> Any:
        began = shown = time.monotonic()
        first: list[int] = []

        def show(done: int, total: int) -> None:
            nonlocal shown
            now = time.monotonic()
            first.append(done) if not first else None
            if now - shown < 20 or done == first[0]:
                return
            shown, rate = now, (done - first[0]) / (now - began)
            log_to(quiet)(
                f"{title}: {done:,} of {total:,} {unit}  {rate:,.0f} {unit}/s  eta {clock((total - done) / rate)}"
            )

        yield show

    return lines()


def report_text(record: dict[str, Any]) -> list[str]:
    """Return the report as text."""
    rows = [
        (f"HMM, {record['num_states']:,} states", record["hmm_nats"]),
        ("Kneser-Ney 5-gram", record["kn_nats"]),
        (f"mixture of the two ({record['mixture_weight']:.2f} of the HMM)", record["mixture_nats"]),
    ]
    if record["llm_nats"] is not None:
        rows.append(("the LLM itself, which sees the prompt", record["llm_nats"]))
    width = max(len(name) for name, _ in rows)
    state = "" if record["finished"] else " (not finished: the same command resumes)"
    return [
        f"{'nats per token of held-out samples':<{width}}",
        *(f"{name:<{width}}  {value:6.3f}" for name, value in rows),
        f"{record['test_tokens']:,} tokens held out, {record['train_tokens']:,} trained on; {record['hmm_mb']:.0f} MB on disk; "
        f"{clock(60 * record['train_minutes'])} of training{state}; in {record['run']}",
    ]
