"""Where the time of large models goes: CPU seconds of every part of a step, on one thread, beside the arithmetic.

    python -m benchmarks.large_models --data-dir DATA --out benchmarks/results/large-models.json

iteration    one iteration of EM at 2^15 states in 256 blocks (preset em-ptb): E-step and M-step, and the seconds that the
             matrix products of the M-step take at the rate of one large product, measured in the same process
growth       a gradient step at 2^15 and at 2^17 states with 256 states a block, low-rank and softmax within blocks

CPU seconds of the process, so that other programs on the machine count less.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch

from benchmarks import machine
from benchmarks.material import choose_corpus, read_blocks, write_blocks, write_corpus
from benchmarks.training_speed import run_config
from vlhmm.cli.numbers import tokens
from vlhmm.data import Corpus
from vlhmm.data.atomic_io import write_atomically
from vlhmm.malloc import kept_memory
from vlhmm.products import fast_products
from vlhmm.training.config import RunConfig
from vlhmm.training.e_step import expectation
from vlhmm.training.presets import preset
from vlhmm.training.run_folder import RunFolder
from vlhmm.training.trainer import Trainer


def step_parts(corpus: Corpus, config: RunConfig, folder: Path, rounds: int) -> tuple[dict[str, Any], Trainer]:
    """Return the median CPU seconds of the parts of a step, after one for warming up."""
    write_blocks(corpus, config.model.num_blocks, 0, folder)
    blocks = read_blocks(folder, config.model.num_states, config.model.num_blocks)
    trainer = Trainer(corpus, config, RunFolder(folder / "run"), blocks, "cpu", None)
    found: list[list[float]] = []
    for _ in range(1 + rounds):
        batches, at = trainer.batches(), [time.process_time()]
        mask = trainer.mask()
        at.append(time.process_time())
        prepared = trainer.prepared.get(batches)
        at.append(time.process_time())
        potentials = trainer.hmm.potentials(mask)
        at.append(time.process_time())
        expected = expectation(potentials, prepared, None, trainer.buffers)
        at.append(time.process_time())
        trainer.m_step.take(potentials, mask, expected, trainer.at.step, 1e-3)
        at.append(time.process_time())
        trainer.at.step += 1
        found.append([b - a for a, b in zip(at[:-1], at[1:], strict=True)])
    names = ("mask", "prepare", "potentials", "e_step", "m_step")
    parts = {name: round(median(column), 3) for name, column in zip(names, zip(*found[1:], strict=True), strict=True)}
    # a text's batches are prepared once where a step is the whole of it
    return {
        "num_states": config.model.num_states,
        "num_blocks": config.model.num_blocks,
        "tokens": expected.tokens,
        "pairs": len(prepared.pairs.from_block),
        "cpu_seconds": parts,
        "tokens_per_cpu_s": round(expected.tokens / sum(parts.values())),
    }, trainer


def m_step_operations(trainer: Trainer, pairs: int, updates: int) -> dict[str, float]:
    """Return the operations in the matrix products of an M-step with softmax tiles and residual networks (a multiply-add is two)."""
    hmm, slots = trainer.hmm, trainer.mask().slots
    num_slots = trainer.blocks.states_per_block if slots is None else slots.shape[1]
    num_blocks, width, hidden = trainer.blocks.num_blocks, hmm.config.tile_width, hmm.config.hidden_size
    states = num_blocks * num_slots
    product = 2.0 * pairs * num_slots**2 * width  # of three an update; the first update knows the tiles
    forward = 4 * 2.0 * states * hidden**2 + 2.0 * states * hidden * (num_blocks + 2 * width)
    forward += 2.0 * trainer.blocks.vocab_size * num_slots * hidden
    # forward of all updates but the first, whose potentials are the E-step's, and twice that backward in each
    return {"tiles": (3 * updates - 1) * product, "networks": (3 * updates - 1) * forward}


def matmul_rate(size: int = 2048, rounds: int = 5) -> float:
    """Return the operations per CPU second of one large matrix product."""
    a = torch.randn(size, size, generator=torch.Generator().manual_seed(0))
    found = []
    for _ in range(rounds):
        began = time.process_time()
        a @ a
        found.append(2.0 * size**3 / (time.process_time() - began))
    return median(found)


def iteration(corpus: Corpus, folder: Path, rounds: int) -> dict[str, Any]:
    """Return an iteration of EM as the preset has it, and the bound of its M-step."""
    parts, trainer = step_parts(corpus, preset("em-ptb"), folder, rounds)
    rate, updates = matmul_rate(), trainer.settings.m_step_updates
    operations = m_step_operations(trainer, parts["pairs"], updates)
    bound = sum(operations.values()) / rate
    return {
        **parts,
        "m_step_updates": updates,
        "m_step_operations": operations,
        "matmul_gflops": rate / 1e9,
        "m_step_bound_cpu_seconds": bound,
        "m_step_by_bound": parts["cpu_seconds"]["m_step"] / bound,
    }


def growth(corpus: Corpus, folder: Path, rounds: int, within: str, batch_tokens: int) -> dict[str, Any]:
    """Return the two sizes, and the speed of the larger by that of the smaller."""
    points = []
    for num_states in (2**15, 2**17):
        settings = {
            "num_states": num_states, "num_blocks": num_states // 256, "hidden_size": 256, "state_dropout": 0.5, "seed": 0,
            "transition": "block-factored", "within": within, "batch_tokens": batch_tokens,
        }  # fmt: skip
        points.append(step_parts(corpus, run_config(settings), folder, rounds)[0])
    small, large = (point["tokens_per_cpu_s"] for point in points)
    return {"batch_tokens": batch_tokens, "points": points, "ratio": large / small}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.large_models", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--corpus", choices=("ptb", "sotu", "synthetic"), default="ptb")
    parser.add_argument("--data-dir", metavar="DIR", help="where ptb lies (default: $VLHMM_DATA)")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--low-rank-tokens", type=tokens, default=1_000_000, help="tokens of the largest step")
    parser.add_argument("--softmax-tokens", type=tokens, default=131_072, help="the same, softmax within blocks")
    parser.add_argument("--only", choices=("iteration", "growth"))
    parser.add_argument("--out", metavar="FILE.json")
    args = parser.parse_args(arguments)
    torch.set_num_threads(1)
    corpus, instead = choose_corpus(args.corpus, args.data_dir, 1_000_000, 0)
    row: dict[str, Any] = {"corpus": corpus.name, "corpus_instead": instead, "machine": machine.describe(1)}
    row["commit"] = machine.commit()
    with tempfile.TemporaryDirectory(prefix="vlhmm-large-") as scratch, kept_memory(), fast_products():
        folder = Path(scratch)
        write_corpus(corpus, folder)
        if args.only != "growth":
            row["iteration"] = iteration(corpus, folder, args.rounds)
        if args.only != "iteration":
            row["growth"] = {
                "low_rank": growth(corpus, folder, args.rounds, "low-rank", args.low_rank_tokens),
                "softmax": growth(corpus, folder, args.rounds, "softmax", args.softmax_tokens),
            }
    written = json.dumps(row, indent=1) + "\n"
    sys.stdout.write(written)
    if args.out:
        write_atomically(args.out, written.encode())
    return 0


if __name__ == "__main__":
    sys.exit(main())
