"""Calibration: a factor on each kind of logit, chosen on the validation text after training.

A model that has fitted its training text too well is too sure of itself. Three numbers mend much of that: one
multiplies the logits of emissions, one those of the next block (or of the next state, under one softmax), one
those of the state within it. The last layer before each softmax takes its factor in, so the calibrated model is
one of the same family, exactly normalized.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from vlhmm.components.config import ModelConfig
from vlhmm.errors import ConfigError

STEPS = (0.1, 0.05, 0.025)  # of the search, one after another
LEAST, MOST = 0.25, 4.0  # a model that wants less or more than that is not fitted, and no factor mends it
GAIN = 1e-5  # of perplexity, relatively, that a step must bring: what is less is rounding


@dataclass(frozen=True, slots=True)
class Factors:
    """What multiplies the logits: of p(x | z), of p(m' | z) or p(z' | z), of p(z' | z, m')."""

    emission: float = 1.0
    transition: float = 1.0
    within: float = 1.0

    def __post_init__(self) -> None:
        for name in ("emission", "transition", "within"):
            if not LEAST <= getattr(self, name) <= MOST:
                raise ConfigError(f"{name} is {getattr(self, name)}, expected a factor from {LEAST} to {MOST}")


def last_layers(config: ModelConfig) -> dict[str, tuple[str, ...]]:
    """The parameters that each factor multiplies; those a model does not have are left out."""
    factored = config.transition == "block-factored"
    if config.parameterization == "scalar":
        transitions = {"transition": ("block_logits",), "within": ("tile_logits",)}
        return {
            "emission": ("emission_logits",),
            **(transitions if factored else {"transition": ("transition_logits",)}),
        }
    emission = ("word.weight", "word.bias")
    if factored:
        within = ("tile_source.weight", "tile_source.bias", *(("source_code",) if config.slot_code else ()))
        layers = {"emission": emission, "transition": ("next_block.weight", "next_block.bias"), "within": within}
        if config.within == "low-rank":  # a sum over channels has no logits to multiply
            del layers["within"]
        return layers
    last = "networks.source.norm" if config.network == "residual" else "networks.source"
    return {"emission": emission, "transition": (f"{last}.weight", f"{last}.bias")}


def scaled(weights: dict[str, Tensor], config: ModelConfig, factors: Factors) -> dict[str, Tensor]:
    """The weights with the factors in them."""
    by = {name: getattr(factors, kind) for kind, names in last_layers(config).items() for name in names}
    return {name: tensor * by[name] if name in by else tensor for name, tensor in weights.items()}


def search(
    perplexity: Callable[[Factors], float], kinds: tuple[str, ...], should_stop: Callable[[], Any] = lambda: False
) -> tuple[Factors, float] | None:
    """The best factors found from 1 on, one kind at a time, in ever smaller steps, and their perplexity; None if stopped."""
    best = Factors()
    least = perplexity(best)
    for step in STEPS:
        improved = True
        while improved:
            improved = False
            for kind in kinds:
                for direction in (-step, step):
                    factor = round(getattr(best, kind) + direction, 3)
                    if not LEAST <= factor <= MOST:
                        continue
                    if should_stop():
                        return None
                    tried = replace(best, **{kind: factor})
                    value = perplexity(tried)
                    if value < least * (1 - GAIN):
                        best, least, improved = tried, value, True
                        break
    return best, least
