"""`vlhmm steer`: generate text with a language model under hard constraints, guided by an HMM."""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

from vlhmm.cli.common import add_format, add_machine_options, log_to, setup, token_progress
from vlhmm.cli.numbers import count, real
from vlhmm.errors import ConfigError, DataError, QueryError
from vlhmm.limits import MAX_NEW_TOKENS, word_range

DESCRIPTION = "Generate texts with a language model under hard constraints, guided by an HMM distilled from it."
EPILOG = """\
RUN is an HMM over the language model's tokens: a run of vlhmm distill, or a folder of Ctrl-G or TRACE. LLM is a folder
written by save_pretrained, a .gguf file, or a name on the Hugging Face hub. pip install 'vlhmm[llm]'

Every text meets every constraint and ends within the token budget. A constraint that cannot be met is refused.

In JSON, log_prob is log p(text | prompt) under the language model at temperature 1; it is not conditioned on the
constraint. log_weight is log p(text | prompt) - log q(text) at the sampling temperature, where q is the distribution
that the text was drawn from: exp(log_weight) weights averages under the language model given the constraint.

examples:
  vlhmm steer runs/smol --llm SmolLM2.gguf --prompt "Write one sentence about a dog." --must-include park,ball -n 5
  vlhmm steer runs/smol --llm SmolLM2.gguf --prompt "Describe the sea." --must-include "wave|waves,wind" --words 5-12
  vlhmm steer runs/smol --llm SmolLM2.gguf --prompt "A person, as JSON." --json-schema person.json --format json
  vlhmm steer runs/smol --llm SmolLM2.gguf --prompts questions.txt --choice yes --choice no --format jsonl
  vlhmm steer runs/smol --llm SmolLM2.gguf --prompt "Write about rain." --must-not rain --particles 8
"""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of this verb."""
    parser.add_argument("run_folder", metavar="RUN", help="an HMM over the language model's tokens")
    parser.add_argument("--llm", metavar="LLM", required=True, help="language model")
    parser.add_argument("--prompt", action="append", default=[], metavar="TEXT", help="prompt; repeatable")
    parser.add_argument("--prompts", metavar="FILE", help="prompts, one per line")
    parser.add_argument("-n", type=count(1, 1_000_000), default=1, metavar="N", help="number of texts per prompt (default: 1)")
    parser.add_argument(
        "--max-new-tokens", type=count(1, MAX_NEW_TOKENS), default=32, metavar="N", help="token budget, the end token included (default: 32)"
    )
    group = parser.add_argument_group("constraints on the text (all of them hold)")
    group.add_argument(
        "--must-include", "--must-contain", action="append", default=[], metavar="A,B|C",
        help="words or phrases that the text contains, separated by commas; | separates alternatives; repeatable",
    )  # fmt: skip
    group.add_argument(
        "--must-not", action="append", default=[], metavar="A,B", help="words or phrases that it does not contain; repeatable"
    )
    group.add_argument("--any-case", action="store_true", help="--must-include and --must-not ignore case")
    group.add_argument("--words", "--length", metavar="A-B", help="A to B words; A- for at least A, A for exactly A")
    group.add_argument("--regex", metavar="PATTERN", help="regular expression that the whole text matches")
    group.add_argument("--choice", action="append", default=[], metavar="TEXT", help="the text is one of those given; repeatable")
    group.add_argument("--json-schema", metavar="FILE", help="the text is a JSON value of this schema: a file, or the schema itself")
    group.add_argument("--prefix", default="", metavar="TEXT", help="beginning of the text")
    group.add_argument("--suffix", default="", metavar="TEXT", help="end of the text")
    group.add_argument("--sentence-end", action="store_true", help="the text ends with . ! or ?")
    drawing = parser.add_argument_group("generation")
    drawing.add_argument("--mode", choices=("sample", "greedy", "beam"), default="sample", help="how to choose tokens (default: sample)")
    drawing.add_argument("--temperature", type=real(1e-6, 1e6), default=1.0, metavar="T", help="sampling temperature (default: 1)")
    drawing.add_argument("--weight", type=real(0, 1e6), default=1.0, metavar="W", help="weight of the HMM (default: 1); 0 only masks impossible tokens")
    drawing.add_argument(
        "--particles", type=count(1, 100_000), default=1, metavar="N", help="sequences per text, resampled by weight (default: 1)"
    )
    drawing.add_argument("--beams", type=count(1, 10_000), default=8, metavar="N", help="beam width, for --mode beam (default: 8)")
    drawing.add_argument("--batch", type=count(1, 100_000), default=16, metavar="N", help="sequences generated in parallel (default: 16)")
    drawing.add_argument("--template", metavar="TEXT", help="prompt template with {prompt} (default: the model's chat template)")
    drawing.add_argument("--precision", choices=("auto", "float32", "bfloat16"), default="auto", help="number format of the language model")
    drawing.add_argument("--read-prompt", action="store_true", help="let the HMM read the prompt too, if it was trained on whole texts")
    add_format(parser, "text", "json", "jsonl")
    add_machine_options(parser)


def run(args: argparse.Namespace) -> int:
    """Generate and print the texts; return 0. Bad input is refused before the language model is loaded."""
    if not args.prompt and not args.prompts:
        raise ConfigError("--prompt is missing; give a prompt, or --prompts FILE")
    setup(args)
    from vlhmm.steering.distill import read_prompts
    from vlhmm.steering.generation import generate, guide_for
    from vlhmm.steering.hmm import DEFAULT_MEMORY
    from vlhmm.steering.llm import open_llm

    log = log_to(args.quiet)
    memory = args.memory or DEFAULT_MEMORY
    prompts = [*args.prompt, *(read_prompts(args.prompts) if args.prompts else [])]
    constraint = constraint_of(args)
    model = load_hmm(args.run_folder, memory)
    check_budget(model, constraint, args.max_new_tokens)
    log(f"loading {args.llm}")
    llm = open_llm(args.llm, args.precision)
    began = time.monotonic()
    with token_progress(args.quiet, "lookahead table") as progress:
        guide = guide_for(
            model, llm.tokenizer, constraint, args.max_new_tokens, llm.end_ids, memory, progress
        )
    log(
        f"{constraint.description}: {guide.automaton.num_states} automaton states, lookahead table of "
        f"{guide.table.nbytes / 1e6:.0f} MB in {time.monotonic() - began:.1f} s"
    )
    began = time.monotonic()
    with token_progress(args.quiet, "writing") as progress:
        texts = generate(
            llm.model, llm.tokenizer, model, prompts, constraint, n=args.n, max_new_tokens=args.max_new_tokens,
            mode=args.mode, weight=args.weight, temperature=args.temperature, particles=args.particles,
            num_beams=args.beams, seed=args.seed, batch=args.batch, template=args.template, read_prompt=args.read_prompt,
            memory=memory, progress=progress,
        )  # fmt: skip
    records = []
    for text in texts:
        records.append(
            {
                "prompt": text.prompt,
                "text": text.text,
                "satisfied": text.satisfied,
                "tokens": len(text.token_ids),
                "log_prob": round(text.log_prob, 4),
                "nats_per_token": round(text.nats_per_token, 4),
                "log_weight": None if text.log_weight is None else round(text.log_weight, 4),
                "token_ids": list(text.token_ids),
            }
        )
    if args.format == "json":
        print(json.dumps(records[0] if len(records) == 1 else records, ensure_ascii=False))
    else:
        for record in records:
            shown = str(record["text"]).replace("\\", "\\\\").replace("\n", "\\n")
            print(json.dumps(record, ensure_ascii=False) if args.format == "jsonl" else shown)
    nats = sum(-text.log_prob for text in texts) / sum(len(text.token_ids) for text in texts)
    log(
        f"{sum(text.satisfied for text in texts)} of {len(texts)} meet the constraint, {nats:.2f} nats per token under "
        f"the language model, {time.monotonic() - began:.1f} s"
    )
    return 0


def constraint_of(args: argparse.Namespace) -> Any:
    """Return the constraint that the options name."""
    from vlhmm.steering.text_constraint import constraint

    return constraint(
        regex=args.regex,
        choice=args.choice,
        json_schema=_schema(args.json_schema),
        must_include=[item.split("|") if "|" in item else item for item in _items(args.must_include, "--must-include")],
        must_not=_items(args.must_not, "--must-not"),
        words=None if args.words is None else word_range(args.words, "--words"),
        prefix=args.prefix,
        suffix=args.suffix,
        sentence_end=args.sentence_end,
        any_case=args.any_case,
    )


def _items(given: list[str], option: str) -> list[str]:
    """Return the words or phrases between the commas of an option, however often it is given."""
    items = [item.strip() for each in given for item in each.split(",")]
    if not all(items):
        raise ConfigError(f"{option} {','.join(given)!r} has an empty word; expected words with commas between them")
    return items


def _schema(given: str | None) -> str | None:
    if given is None or given.lstrip().startswith("{"):
        return given
    try:
        return Path(given).read_text(encoding="utf-8")
    except FileNotFoundError:
        raise DataError(f"no such file: {given}; expected a JSON schema, or the schema itself") from None
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"cannot read {given}: {error}") from None


def load_hmm(folder: str, memory: int) -> Any:
    """Load a run over tokens, or an HMM of Ctrl-G or TRACE; refuse a run over words."""
    from vlhmm.steering.checkpoints import is_checkpoint, read_checkpoint

    if is_checkpoint(folder):
        return read_checkpoint(folder, memory)
    import vlhmm
    from vlhmm.steering.generation import steering_hmm

    model = vlhmm.load(folder)
    steering_hmm(model, memory)
    return model


def check_budget(model: Any, constraint: Any, max_new_tokens: int) -> None:
    """Refuse a constraint that no text within the budget meets, using the run's own tokenizer if it has one."""
    from vlhmm.steering.token_automaton import token_automaton

    if constraint.automaton.empty:
        raise QueryError(f"no text meets {constraint.description}: its parts exclude each other; relax it")
    vocabulary = getattr(model, "vocabulary", None)
    if vocabulary is not None:
        token_automaton(constraint.automaton, vocabulary.token_bytes, [vocabulary.eos]).check_budget(max_new_tokens)
