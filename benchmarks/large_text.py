"""A text larger than memory should be: drawn from a model, prepared, clustered, trained on and evaluated.

    python -m benchmarks.large_text --tokens 200M --vocab 50000 --states 2^14 --out benchmarks/results/large-text.json

Every stage is a process of its own, so its peak memory is its own. The last stage trains the same model on the same
lines from memory and from a prepared folder, one step each in turn, and compares their tokens per second.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import numba
import numpy as np

from benchmarks.machine import describe
from vlhmm.cli.common import log_to
from vlhmm.cli.numbers import duration, tokens
from vlhmm.data.atomic_io import write_atomically
from vlhmm.data.prepared import PreparedText, PreparedWriter
from vlhmm.data.text import Text, write_text
from vlhmm.data.vocabulary import EOS, UNK, Vocabulary

NUM_CLASSES, VARIANTS, SUCCESSORS = 512, 4, 48  # of the model the text is drawn from: 2048 states
SENTENCE_END = 1 / 22
CHUNK = 1 << 22


class Source:
    """An HMM with 2048 states: a class of words and a variant, which decides what follows."""

    def __init__(self, vocab_size: int, seed: int) -> None:
        draw = np.random.default_rng(seed)
        self.vocabulary = Vocabulary((EOS, UNK, *(f"w{i}" for i in range(vocab_size - 2))))
        weight = 1 / (np.arange(vocab_size - 2) + 2.7)  # Zipf's law, as Mandelbrot has it
        class_of_word = draw.integers(0, NUM_CLASSES, vocab_size - 2)
        class_of_word[:NUM_CLASSES] = draw.permutation(NUM_CLASSES)  # none is empty
        order = np.argsort(class_of_word, kind="stable")
        self.words = (order + 2).astype(np.int32)
        self.starts = np.searchsorted(class_of_word[order], np.arange(NUM_CLASSES + 1))
        self.word_sums = np.concatenate([[0.0], np.cumsum(weight[order])])
        mass = np.bincount(class_of_word, weights=weight, minlength=NUM_CLASSES)
        num_states = NUM_CLASSES * VARIANTS
        state_mass = np.repeat(mass / mass.sum(), VARIANTS) / VARIANTS
        self.next_state = draw.choice(num_states, size=(num_states, SUCCESSORS), p=state_mass).astype(np.int32)
        self.next_sums = np.cumsum(draw.dirichlet(np.full(SUCCESSORS, 0.5), size=num_states), axis=1)

    def draw(self, num_tokens: int, seed: int) -> Text:
        """Return about so many tokens in whole lines."""
        ids = np.empty(num_tokens + 4096, dtype=np.int32)
        size = _draw(ids, num_tokens, seed, self.words, self.starts, self.word_sums, self.next_state, self.next_sums)
        ends = np.flatnonzero(ids[:size] == 0) + 1
        return Text(ids[:size], np.concatenate([[0], ends]), 0, 0, 6 * size)


@numba.njit
def _draw(ids, num_tokens, seed, words, starts, word_sums, next_state, next_sums):
    np.random.seed(seed)
    place, state = 0, 0
    while place < num_tokens:
        state = np.random.randint(0, len(next_state))
        length = 1
        while length < 4000:
            place_of_next = np.searchsorted(next_sums[state], np.random.random())
            state = next_state[state, min(place_of_next, next_state.shape[1] - 1)]
            low, high = starts[state // VARIANTS], starts[state // VARIANTS + 1]
            target = word_sums[low] + np.random.random() * (word_sums[high] - word_sums[low])
            word = np.searchsorted(word_sums[low + 1 : high], target, side="right")
            ids[place] = words[low + word]
            place += 1
            length += 1
            if np.random.random() < SENTENCE_END:
                break
        ids[place] = 0  # <eos>
        place += 1
    return place


# ---- stages, each in a process of its own


def stage_draw(folder: Path, settings: dict[str, Any]) -> dict[str, Any]:
    """Return the prepared text, a validation text, and the first tokens as a text file."""
    source = Source(settings["vocab"], settings["seed"])
    write_text(folder / "valid.txt", source.draw(200_000, seed=1), source.vocabulary)
    write_text(folder / "first.txt", source.draw(settings["text_tokens"], seed=2), source.vocabulary)
    done = 0
    with PreparedWriter(folder / "prepared", source.vocabulary) as writer:
        while done < settings["tokens"]:
            text = source.draw(min(CHUNK, settings["tokens"] - done), seed=100 + done // CHUNK)
            writer.add(text)
            done += text.num_tokens
    return {"tokens": done}


def stage_prepare(folder: Path, settings: dict[str, Any]) -> dict[str, Any]:
    """Run vlhmm prepare on the text file."""
    from vlhmm.data.prepared import prepare

    text = prepare([folder / "first.txt"], folder / "first", shard_tokens=1 << 22)
    return {"tokens": text.num_tokens}


def stage_cluster(folder: Path, settings: dict[str, Any]) -> dict[str, Any]:
    """Run vlhmm cluster on the prepared text; training uses its paths."""
    from vlhmm.clustering.cluster import cluster_words
    from vlhmm.clustering.paths import write_paths

    text = PreparedText(folder / "prepared")
    found = cluster_words(text.token_arrays(), len(text.vocabulary), settings["blocks"], settings["sweeps"])
    write_paths(folder / "paths", text.vocabulary.words, found.block_of_word, found.paths, found.word_count)
    return {"tokens": text.num_tokens, "ami_bits": found.ami_bits, "sweeps": len(found.num_moves)}


def run_config(settings: dict[str, Any], epochs: float = 1.0) -> Any:
    from vlhmm.config import override
    from vlhmm.training.presets import preset

    changes = {
        "model.num_states": settings["states"],
        "model.num_blocks": settings["blocks"],
        "model.network": "linear",
        "training.em_tokens": settings["em_tokens"],
        "training.epochs": epochs,
        "training.checks_per_epoch": 4,
        "training.calibrate": "false",
    }
    return override(preset("default"), [f"{name}={value}" for name, value in changes.items()])


def blocks_of(folder: Path, config: Any, vocabulary: Vocabulary, counts: np.ndarray) -> Any:
    from vlhmm.clustering.paths import read_paths
    from vlhmm.training.make_blocks import partition

    return partition(config.model, read_paths(folder / "paths", vocabulary.words).block_of_word, counts)


def stage_train(folder: Path, settings: dict[str, Any]) -> dict[str, Any]:
    """Return one pass of EM over rotating shares, or as much of it as the time allows."""
    from vlhmm.data.corpora import load_texts
    from vlhmm.training.trainer import train

    config, corpus = run_config(settings), load_texts(folder / "prepared", folder / "valid.txt")
    blocks = blocks_of(folder, config, corpus.vocabulary, corpus.train.word_counts(len(corpus.vocabulary)))
    seen = []
    result = train(
        corpus, config, folder / "run", blocks=blocks, time_limit=settings["train_seconds"],
        progress=lambda status: seen.append((status.step, status.tokens_per_second, status.valid)),
    )  # fmt: skip
    share = result.step / result.total_steps
    return {
        "tokens": round(share * corpus.train.num_tokens),
        "share_of_pass": share,
        "steps": result.step,
        "total_steps": result.total_steps,
        "parameters": result.num_parameters,
        "valid_perplexity": seen[-1][2] if seen else None,
    }


def stage_evaluate(folder: Path, settings: dict[str, Any]) -> dict[str, Any]:
    """Run vlhmm evaluate on the first part of the prepared text, as a prepared text of its own."""
    import vlhmm
    from vlhmm.evaluation.perplexity import evaluate
    from vlhmm.training.run_folder import RunFolder

    run = RunFolder(folder / "run")
    if not run.model_path.exists():  # training was stopped before its first validation
        checkpoint = run.load_checkpoint()
        assert checkpoint is not None
        run.save_model({n.removeprefix("model."): t for n, t in checkpoint[1].items() if n.startswith("model.")})
    model = vlhmm.load_any(folder / "run", memory=1 << 30)
    text, part = PreparedText(folder / "prepared"), folder / "part"
    shutil.rmtree(part, ignore_errors=True)
    with PreparedWriter(part, text.vocabulary) as writer:
        size = min(CHUNK, settings["evaluate_tokens"])
        for piece in text.parts(size)[: max(1, settings["evaluate_tokens"] // size)]:
            writer.add(text.read([piece]))
    prepared = PreparedText(part)
    report = evaluate(model, prepared)
    return {"tokens": prepared.num_tokens, "perplexity": report.perplexity}


def stage_compare(folder: Path, settings: dict[str, Any]) -> dict[str, Any]:
    """Time steps over the same lines from memory and from disk, alternately."""
    from vlhmm.data.corpora import load_texts
    from vlhmm.data.prepared import prepare
    from vlhmm.training.run_folder import RunFolder
    from vlhmm.training.trainer import Trainer

    config, trainers = run_config(settings, epochs=100), {}
    vocabulary = PreparedText(folder / "prepared").vocabulary
    prepare([folder / "first.txt"], folder / "same", vocabulary)
    for name, path in (("memory", "first.txt"), ("prepared", "same")):
        corpus = load_texts(folder / path, folder / "valid.txt", vocabulary=vocabulary)
        blocks = blocks_of(folder, config, vocabulary, corpus.train.word_counts(len(vocabulary)))
        trainers[name] = Trainer(corpus, config, RunFolder(folder / f"compare-{name}"), blocks, "cpu", None)
    rates: dict[str, list[float]] = {name: [] for name in trainers}
    for _ in range(settings["rounds"] + 1):
        for name, trainer in trainers.items():
            began = time.process_time()
            count = trainer.train_step(trainer.batches())
            rates[name].append(count / (time.process_time() - began))
    steady = {name: median(values[1:]) for name, values in rates.items()}
    ratios = [b / a for a, b in zip(rates["memory"][1:], rates["prepared"][1:], strict=True)]
    return {
        "memory_tokens_per_cpu_s": steady["memory"],
        "prepared_tokens_per_cpu_s": steady["prepared"],
        "prepared_vs_memory": median(ratios),
        "rounds": len(ratios),
    }


STAGES = {
    "draw": stage_draw,
    "prepare": stage_prepare,
    "cluster": stage_cluster,
    "train": stage_train,
    "evaluate": stage_evaluate,
    "compare": stage_compare,
}


def run_stage(name: str, folder: Path, settings: dict[str, Any]) -> dict[str, Any]:
    """Run one stage in a process of its own: its figures, wall and CPU seconds, and peak resident memory."""
    began = time.perf_counter()
    command = [sys.executable, "-m", "benchmarks.large_text", "--stage", name, "--folder", str(folder)]
    process = subprocess.Popen([*command, "--settings", json.dumps(settings)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    out = process.stdout.read()
    if process.wait():
        raise SystemExit(f"the stage {name} failed")
    found = json.loads(out.splitlines()[-1])
    seconds = time.perf_counter() - began
    return {**found, "seconds": round(seconds, 1)}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.large_text", description=__doc__)
    parser.add_argument("--tokens", type=tokens, default=200_000_000)
    parser.add_argument("--text-tokens", type=tokens, default=8_000_000, help="of them as a text file")
    parser.add_argument("--evaluate-tokens", type=tokens, default=8_000_000)
    parser.add_argument("--vocab", type=int, default=50_000)
    parser.add_argument("--states", default="2^14")
    parser.add_argument("--blocks", type=int, default=256)
    parser.add_argument("--sweeps", type=int, default=5)
    parser.add_argument("--em-tokens", type=tokens, default=2_000_000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--train-time", type=duration, default=None, help="stop training after so long")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default=",".join(STAGES), help="some stages, on a folder that has the others'")
    parser.add_argument("--folder", help="where the texts go (default: a temporary folder)")
    parser.add_argument("--out", metavar="FILE.json")
    parser.add_argument("--stage", choices=STAGES, help=argparse.SUPPRESS)
    parser.add_argument("--settings", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.stage:
        from vlhmm.cli.main import prepare_process

        prepare_process()
        found = STAGES[args.stage](Path(args.folder), json.loads(args.settings))
        used = resource.getrusage(resource.RUSAGE_SELF)
        found |= {"cpu_seconds": round(used.ru_utime + used.ru_stime, 1), "peak_gb": round(used.ru_maxrss / 1e6, 3)}
        print(json.dumps(found))
        return 0
    settings = {name: getattr(args, name) for name in ("tokens", "text_tokens", "evaluate_tokens", "vocab", "states")}
    settings |= {name: getattr(args, name) for name in ("blocks", "sweeps", "em_tokens", "rounds", "seed")}
    settings["train_seconds"] = args.train_time
    note = log_to(False)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(args.folder or scratch)
        folder.mkdir(parents=True, exist_ok=True)
        row: dict[str, Any] = {"settings": settings, "machine": describe(), "load_average": os.getloadavg()[0]}
        for name in args.only.split(","):
            row[name] = run_stage(name, folder, settings)
            note(f"{name}: {json.dumps(row[name])}")
            if args.out:
                write_atomically(args.out, (json.dumps(row, indent=1) + "\n").encode())
    row["peak_gb"] = max(row[name]["peak_gb"] for name in row if name in STAGES)
    if args.out:
        write_atomically(args.out, (json.dumps(row, indent=1) + "\n").encode())
    print(json.dumps(row))
    return 0


if __name__ == "__main__":
    sys.exit(main())
