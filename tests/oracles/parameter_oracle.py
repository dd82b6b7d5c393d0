"""From parameters to the model, state by state, in NumPy: written from the formulas, importing nothing it tests.

`weights` are a model's named parameters as arrays, `settings` its configuration as a dictionary. A state is
(block, slot); without a partition there is one block of all states.
"""

from typing import Any

import numpy as np

Weights = dict[str, np.ndarray]


def linear(weights: Weights, name: str, x: np.ndarray) -> np.ndarray:
    return weights[f"{name}.weight"] @ x + weights[f"{name}.bias"]


def residual(weights: Weights, name: str, x: np.ndarray) -> np.ndarray:
    """LayerNorm(ReLU(W2 d + b2) + d) with d = ReLU(W1 x + b1)."""
    inner = np.maximum(linear(weights, f"{name}.first", x), 0)
    total = np.maximum(linear(weights, f"{name}.second", inner), 0) + inner
    normed = (total - total.mean()) / np.sqrt(total.var() + 1e-5)
    return normed * weights[f"{name}.norm.weight"] + weights[f"{name}.norm.bias"]


def embedding(weights: Weights, settings: dict[str, Any], block: int, slot: int) -> np.ndarray:
    own = weights["embedding.state"][block, slot]
    if settings["embedding"] == "factored":
        return np.concatenate([weights["embedding.block"][block, 0], own])
    if settings["embedding"] == "additive":
        return own + weights["embedding.block"][block, 0] + weights["embedding.slot"][slot]
    return own


def side(weights: Weights, settings: dict[str, Any], name: str, block: int, slot: int) -> np.ndarray:
    """What a state's embedding has become before its last layer, on one of four sides."""
    x = embedding(weights, settings, block, slot)
    if settings["embedding"] == "factored":
        x = residual(weights, f"compose.{name}", x)
    if f"networks.{name}.weight" in weights:
        return linear(weights, f"networks.{name}", x)
    return residual(weights, f"networks.{name}", x) if f"networks.{name}.norm.weight" in weights else x


def distribution(scores: np.ndarray) -> np.ndarray:
    weights = np.exp(scores - scores.max())
    return weights / weights.sum()


def dense(
    weights: Weights,
    settings: dict[str, Any],
    states_of_word: list[list[int]],
    num_slots: int,
    alive: np.ndarray,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(start, A, O) of all states; those that are not `alive` are never entered, and their rows are not meant."""
    num_states, num_words = len(alive), len(states_of_word)
    places = [divmod(z, num_slots) for z in range(num_states)]
    scalar, factored = settings["parameterization"] == "scalar", settings["transition"] == "block-factored"
    num_blocks = places[-1][0] + 1

    start_scores, emission = np.full(num_states, -np.inf), np.zeros((num_states, num_words))
    matrix = np.zeros((num_states, num_states))
    for z, (m, i) in enumerate(places):
        if not alive[z]:
            continue
        words = [w for w in range(num_words) if z in states_of_word[w]]
        if scalar:
            start_scores[z] = weights["start_logits"][m, i]
            word_scores = np.array([weights["emission_logits"][w, i] for w in words])
        else:
            start_scores[z] = linear(weights, "start_score", side(weights, settings, "start", m, i))[0]
            if factored:
                start_scores[z] += weights["start_block"][m]
            word_scores = linear(weights, "word", side(weights, settings, "emission", m, i))[words]
        if words:
            emission[z, words] = distribution(word_scores)
        if factored:
            matrix[z] = factored_row(weights, settings, m, i, num_blocks, num_slots, alive)
        elif scalar:
            matrix[z, alive] = distribution(weights["transition_logits"][z, alive])
        else:
            ours = side(weights, settings, "source", m, i)
            scores = np.array([ours @ side(weights, settings, "target", *place) for place in places])
            matrix[z, alive] = distribution(scores[alive])
    return distribution(start_scores), matrix, emission


def factored_row(
    weights: Weights, settings: dict[str, Any], m: int, i: int, num_blocks: int, num_slots: int, alive: np.ndarray
) -> np.ndarray:
    """p(m' | z) p(z' | z, m') of one state."""
    row = np.zeros((num_blocks, num_slots))
    if settings["parameterization"] == "scalar":
        into = distribution(weights["block_logits"][m, i])
    else:
        ours = side(weights, settings, "source", m, i)
        into = distribution(linear(weights, "next_block", ours))
        leaving = linear(weights, "tile_source", ours)
        if settings["source_block_init"]:
            leaving = leaving + weights["source_code"][m, 0]
    for to in range(num_blocks):
        slots = np.flatnonzero(alive.reshape(num_blocks, num_slots)[to])
        if settings["parameterization"] == "scalar":
            within = distribution(weights["tile_logits"][m, to, i, slots])
        else:
            entered = np.array(
                [linear(weights, "tile_target", side(weights, settings, "target", to, j)) for j in slots]
            )
            if settings["source_block_init"]:
                entered = entered + weights["target_code"][slots]
            if settings["within"] == "low-rank":
                shares = np.exp(entered) @ np.exp(leaving)
                within = shares / shares.sum()
            else:
                within = distribution(entered @ leaving)
        row[to, slots] = into[to] * within
    return row.ravel()
