"""A small grammar, and the settings that tests train with."""

import random

from vlhmm.config import override
from vlhmm.training.config import RunConfig
from vlhmm.training.presets import preset

GRADIENT = [
    "training.method=gradient", "training.batch=streams", "training.num_streams=4", "training.segment_length=16",
    "training.epochs=4", "training.checks_per_epoch=1",
]  # fmt: skip


def toy_lines(count: int, seed: int) -> list[list[str]]:
    """Sentences of a small grammar with memory: subjects agree with verbs three words later."""
    draw = random.Random(seed)
    lines = []
    for _ in range(count):
        one = draw.random() < 0.5
        line = [
            "the",
            draw.choice(["big", "small"]),
            draw.choice(["cat", "dog"]) if one else draw.choice(["cats", "dogs"]),
        ]
        lines.append([*line, draw.choice(["here", "there"]), "runs" if one else "run", "."])
    return lines


def tiny(*changes: str) -> RunConfig:
    """Settings of a model that trains in a second."""
    return override(preset("tiny"), ["model.num_states=32", "model.num_blocks=4", *changes])
