"""Calibration: a factor on each kind of logit, chosen on the validation text after training.

A model that has fitted its training text too well is too sure of itself. Three numbers mend much of that: one
multiplies the logits of emissions, one those of the next block (or of the next state, under one softmax), one
those of the state within it. The last layer before each softmax takes its factor in, so the calibrated model is
one of the same family, exactly normalized.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from vlhmm.components.config import ModelConfig
from vlhmm.errors import ConfigError

if TYPE_CHECKING:
    from vlhmm.training.run_folder import RunFolder

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
    """Return the parameters that each factor multiplies; those a model does not have are left out."""
    factored = config.transition == "block-factored"
    if config.parameterization == "scalar":
        transitions = {"transition": ("block_logits",), "within": ("tile_logits",)}
        return {
            "emission": ("emission_logits",),
            **(transitions if factored else {"transition": ("transition_logits",)}),
        }
    emission = ("word.weight", "word.bias")
    if factored:
        within = ("tile_source.weight", "tile_source.bias", *(("source_code",) if config.source_block_init else ()))
        layers = {"emission": emission, "transition": ("next_block.weight", "next_block.bias"), "within": within}
        if config.within == "low-rank":  # a sum over channels has no logits to multiply
            del layers["within"]
        return layers
    last = "networks.source.norm" if config.network == "residual" else "networks.source"
    return {"emission": emission, "transition": (f"{last}.weight", f"{last}.bias")}


def scaled(weights: dict[str, Tensor], config: ModelConfig, factors: Factors) -> dict[str, Tensor]:
    """Return the weights with the factors in them."""
    by = {name: getattr(factors, kind) for kind, names in last_layers(config).items() for name in names}
    return {name: tensor * by[name] if name in by else tensor for name, tensor in weights.items()}


def search(
    perplexity: Callable[[Factors], float], kinds: tuple[str, ...], should_stop: Callable[[], Any] = lambda: False
) -> tuple[Factors, float] | None:
    """Find the best factors by coordinate descent from 1 with shrinking steps; return them and their perplexity, or None."""
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


def calibrate(
    folder: RunFolder,
    config: ModelConfig,
    perplexity: Callable[[dict[str, Tensor]], float],
    device: torch.device,
    should_stop: Callable[[], Any],
) -> dict[str, Any] | None:
    """Find the best factors for the best model of a run and write them to its folder. Returns the journal's line.

    None if it was stopped before the end: nothing is written then, and the next call starts over.
    """
    began = time.monotonic()
    weights = {name: tensor.to(device) for name, tensor in folder.load_model().items()}
    kinds = tuple(last_layers(config))
    found = search(lambda tried: perplexity(scaled(weights, config, tried)), kinds, should_stop)
    if found is None:
        return None
    factors, valid = found
    folder.save_calibration(factors)
    by_kind = {kind: getattr(factors, kind) for kind in kinds}
    event = {"event": "calibrated", "valid": valid, **by_kind, "seconds": round(time.monotonic() - began, 2)}
    folder.journal(event)
    return event
