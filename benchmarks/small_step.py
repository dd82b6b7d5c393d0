"""A small training step beside its arithmetic: python -m benchmarks.small_step [--states 1024] [--format json]

One optimizer step by the paper's recipe: 16 streams of 32 tokens, half of the states dropped, AdamW; a synthetic text with
10,000 words in 128 blocks, one thread. Beside it, alone, what the step cannot do without:

    6 products (S, h) (h, h) for each of three residual networks: forward, and backward for inputs and weights
    3 products (S, S) by h: scores of the transitions, and their gradient on both sides
    3 products (V, h) (h, K): scores of the emissions, and their gradient on both sides
    the optimizer's update of every parameter

with S states kept, K of a block, width h and V words. Times are processor time, the least of many, so that other work on the
machine disturbs them little. The ratio says how much of a step is overhead: 1 would be none.
"""

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable

import numpy as np
import torch

from benchmarks.machine import commit, describe
from benchmarks.material import synthetic_corpus
from vlhmm.clustering.blocks import Blocks
from vlhmm.config import override
from vlhmm.malloc import kept_memory
from vlhmm.products import fast_products
from vlhmm.training.presets import preset
from vlhmm.training.run_folder import RunFolder
from vlhmm.training.trainer import Trainer


def least_ms(function: Callable[[], object], repeats: int) -> float:
    """Return the least processor time of a call, in milliseconds; the first tenth of the calls only warms up."""
    times = []
    for _ in range(repeats + max(1, repeats // 10)):
        began = time.process_time()
        function()
        times.append(time.process_time() - began)
    return 1000 * min(times[-repeats:])


def trainer_of(states: int, blocks: int, words: int, folder: str) -> Trainer:
    """Return a run of the paper's recipe that has not begun, on a synthetic text."""
    corpus = synthetic_corpus(60_000, words, seed=0)
    changes = [f"model.num_states={states}", f"model.num_blocks={blocks}", "training.context=paper"]
    block_of_word = np.arange(len(corpus.vocabulary)) % blocks
    partition = Blocks.partition_of(block_of_word, blocks, states // blocks)
    return Trainer(corpus, override(preset("paper-ptb"), changes), RunFolder(folder), partition, "cpu", None)


def arithmetic_ms(trainer: Trainer, repeats: int) -> dict[str, float]:
    """Return the products and the update of a step alone, in milliseconds."""
    kept = trainer.mask().slots
    assert kept is not None
    num_kept, slots, width = kept.numel(), kept.shape[1], trainer.config.model.hidden_size
    words = len(trainer.corpus.vocabulary)
    states, square = torch.randn(num_kept, width), torch.randn(width, width)
    hidden, scores = torch.empty(num_kept, width), torch.empty(num_kept, num_kept)
    table, few, emitted = torch.randn(words, width), torch.randn(width, slots), torch.empty(words, slots)
    parameters = [torch.nn.Parameter(p.detach().clone()) for p in trainer.hmm.parameters()]
    for parameter in parameters:
        parameter.grad = torch.randn_like(parameter)
    optimizer = torch.optim.AdamW(parameters, fused=True)
    return {
        "networks": 3 * 6 * least_ms(lambda: torch.mm(states, square, out=hidden), repeats),
        "transitions": 3 * least_ms(lambda: torch.mm(states, states.t(), out=scores), repeats),
        "emissions": 3 * least_ms(lambda: torch.mm(table, few, out=emitted), repeats),
        "optimizer": least_ms(optimizer.step, repeats),
    }


def measure(states: int = 1024, blocks: int = 128, words: int = 10_000, repeats: int = 100) -> dict[str, object]:
    """Return the step's time, its arithmetic's, and their ratio."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with tempfile.TemporaryDirectory() as folder, kept_memory(), fast_products():
            trainer = trainer_of(states, blocks, words, folder)
            step = least_ms(lambda: trainer.train_step(trainer.batches()), repeats)
            parts = arithmetic_ms(trainer, repeats)
    finally:
        torch.set_num_threads(threads)
    arithmetic = sum(parts.values())
    return {
        "num_states": states,
        "num_blocks": blocks,
        "vocabulary": words,
        "tokens": trainer.settings.num_streams * trainer.settings.segment_length,
        "step_ms": round(step, 3),
        "arithmetic_ms": round(arithmetic, 3),
        "ratio": round(step / arithmetic, 3),
        "parts_ms": {name: round(value, 3) for name, value in parts.items()},
    }


def main(arguments: list[str] | None = None) -> int:
    """Print one measurement."""
    parser = argparse.ArgumentParser("python -m benchmarks.small_step", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--states", type=int, default=1024, metavar="N", help="a multiple of --blocks (default: 1024)")
    parser.add_argument("--blocks", type=int, default=128, metavar="M", help="default: 128")
    parser.add_argument("--words", type=int, default=10_000, metavar="V", help="vocabulary (default: 10,000)")
    parser.add_argument("--repeats", type=int, default=100, metavar="N", help="steps timed (default: 100)")
    parser.add_argument("--format", choices=("text", "json"), default="text", help="default: text")
    args = parser.parse_args(arguments)
    if min(args.states, args.blocks, args.words, args.repeats) < 1 or args.states % args.blocks:
        parser.error("expected positive numbers, and --states a multiple of --blocks")
    found = measure(args.states, args.blocks, args.words, args.repeats)
    if args.format == "json":
        print(json.dumps({**found, "commit": commit(), "machine": describe()}))
    else:
        parts = ", ".join(f"{name} {ms:.2f}" for name, ms in found["parts_ms"].items())  # type: ignore[attr-defined]
        print(
            f"{found['num_states']:,} states, {found['tokens']} tokens: step {found['step_ms']:.2f} ms, "
            f"arithmetic {found['arithmetic_ms']:.2f} ms ({parts}), ratio {found['ratio']:.2f}"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
