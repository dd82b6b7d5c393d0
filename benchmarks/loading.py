"""What the checks of a run folder cost when a model is loaded: an untrained one of 2^15 states, which costs the same.

    python -m benchmarks.loading --record benchmarks/results/loading.json

The checks are the manifest (a checksum of every file), tensors by name, shape, dtype and finiteness, and whether the
probabilities overflow. Loads with and without them take turns; what differs between two runs of a machine is in both.
Seconds are medians, of the wall clock and of the processor. A busy machine changes the former far more than the latter.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any
from unittest import mock

import numpy as np
import torch

import vlhmm
from benchmarks import machine
from benchmarks.material import synthetic_corpus
from vlhmm.cli import numbers
from vlhmm.clustering.assignments import frequency_blocks
from vlhmm.clustering.blocks import Blocks
from vlhmm.config import override
from vlhmm.data.atomic_io import write_atomically
from vlhmm.distributions import HMMDistributions
from vlhmm.training import run_folder
from vlhmm.training.calibration import Factors
from vlhmm.training.model import build_hmm
from vlhmm.training.presets import preset
from vlhmm.training.run_folder import RunFolder

NUM_WORDS = 10_000


def write_model(folder: Path, states: int, blocks: int, settings: list[str]) -> None:
    """Write a run folder as `vlhmm train --preset em-ptb` leaves it, with initial weights."""
    config = override(preset("em-ptb"), [f"model.num_states={states}", f"model.num_blocks={blocks}", *settings])
    corpus = synthetic_corpus(200_000, NUM_WORDS, 0)
    counts = corpus.train.word_counts(NUM_WORDS)
    made = Blocks.partition_of(frequency_blocks(counts, blocks), blocks, states // blocks)
    run = RunFolder(folder)
    folder.mkdir()
    made.write(run.blocks_path, corpus.vocabulary.words, counts)
    run.create(config, corpus.vocabulary, {"name": "synthetic"})
    with torch.no_grad():
        run.save_model(dict(build_hmm(config, made, corpus.train).state_dict()))
    run.save_calibration(Factors(1.1, 0.9, 1.05))


@contextlib.contextmanager
def without_checks() -> Iterator[None]:
    """Load without the checks."""
    with (
        mock.patch.object(run_folder, "check_contents", lambda *_, **__: True),
        mock.patch.object(run_folder, "check_tensors", lambda *_, **__: None),
        mock.patch.object(HMMDistributions, "is_finite", lambda _: True),
    ):
        yield


def measure(folder: Path, rounds: int) -> dict[str, Any]:
    """Return the medians of seconds with and without the checks, and of the ratios of consecutive loads."""
    wall: dict[bool, list[float]] = {True: [], False: []}
    processor: dict[bool, list[float]] = {True: [], False: []}
    vlhmm.load(folder)  # imports, and the files come to memory
    for number in range(rounds):
        for checks in (True, False) if number % 2 else (False, True):
            with contextlib.nullcontext() if checks else without_checks():
                began, before = time.perf_counter(), time.process_time()
                vlhmm.load(folder)
                processor[checks].append(time.process_time() - before)
                wall[checks].append(time.perf_counter() - began)
    found: dict[str, Any] = {"rounds": rounds}
    for name, seconds in (("wall", wall), ("processor", processor)):
        pairs = np.array(seconds[True]) / np.array(seconds[False])
        found[name] = {
            "with_checks_seconds": round(median(seconds[True]), 4),
            "without_checks_seconds": round(median(seconds[False]), 4),
            "ratio_of_medians": round(median(seconds[True]) / median(seconds[False]), 4),
            "median_of_ratios": round(float(np.median(pairs)), 4),
            "ratio_of_minima": round(min(seconds[True]) / min(seconds[False]), 4),
        }
    return found


def main(arguments: list[str] | None = None) -> int:
    """Return 0 if the median ratio, by the wall clock, is at most 1.15."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.loading", description="What checking a model's files costs.")
    parser.add_argument("--states", type=numbers.count(1, 1 << 20), default=1 << 15, help="default: 32,768")
    parser.add_argument("--blocks", type=numbers.count(1, 1 << 16), default=128, help="default: 128")
    parser.add_argument("--rounds", type=numbers.count(1, 10_000), default=40, help="loads of each kind (default: 40)")
    parser.add_argument("--set", dest="settings", action="append", default=[], metavar="A.B=C", help="change a setting of em-ptb")
    parser.add_argument("--record", metavar="FILE", help="write the figures there, as JSON")
    args = parser.parse_args(arguments)
    words = [f"--states {args.states}", f"--blocks {args.blocks}", f"--rounds {args.rounds}", *(f"--set {s}" for s in args.settings)]
    record: dict[str, Any] = {"command": " ".join(["python -m benchmarks.loading", *words]), "commit": machine.commit()}
    record |= {"machine": machine.describe(torch.get_num_threads()), "states": args.states, "blocks": args.blocks}
    with tempfile.TemporaryDirectory(prefix="vlhmm-loading-") as name:
        run = Path(name) / "run"
        write_model(run, args.states, args.blocks, args.settings)
        sizes = {path.name: path.stat().st_size for path in sorted(run.iterdir()) if path.is_file()}
        record |= {"bytes": sizes, "load_before": os.getloadavg()[0], **measure(run, args.rounds)}
    record["load_after"] = os.getloadavg()[0]
    text = json.dumps(record, indent=2) + "\n"
    sys.stdout.write(text)
    if args.record:
        write_atomically(args.record, text.encode())
    return 0 if record["wall"]["median_of_ratios"] <= 1.15 else 1


if __name__ == "__main__":
    sys.exit(main())
