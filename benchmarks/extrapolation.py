"""What a step of the naive program costs at sizes it cannot reach, from those it did."""

from typing import Any

from benchmarks.errors import WorkerError


def operations(variant: str, num_states: int, tokens: int, vocab_size: int, width: int) -> float:
    """Return the operations in matrix products that grow with |Z|: logits, emissions and, if `dense`, the recursion."""
    per_token = 6.0 * num_states**2 if variant == "dense" else 0.0
    return 6.0 * num_states**2 * width + 6.0 * num_states * vocab_size * width + tokens * per_token


def extrapolated_seconds(sizes: list[dict[str, Any]], wanted: float) -> float:
    """Return seconds of a step of `wanted` operations: in proportion to the largest size, or along the last two if
    that is less, so that what does not grow with |Z| is not multiplied. Both lean to the naive side.
    """
    *_, last = sizes
    proportional = last["seconds"] * wanted / last["operations"]
    if len(sizes) < 2:
        return proportional
    before = sizes[-2]
    slope = max(0.0, (last["seconds"] - before["seconds"]) / (last["operations"] - before["operations"]))
    return max(last["seconds"], min(proportional, last["seconds"] + slope * (wanted - last["operations"])))


def at_size(climbed: dict[str, Any], variant: str, num_states: int, vocab_size: int, width: int) -> dict[str, Any]:
    """Return {tokens_per_s, extrapolated, measured_states, …} of the naive program at `num_states`."""
    largest = climbed["sizes"][-1]
    tokens = largest["tokens"]
    exact = next((size for size in climbed["sizes"] if size["num_states"] == num_states), None)
    if exact is not None:
        seconds = exact["seconds"]
    else:
        if variant == "blocked" and len(climbed["sizes"]) < 2:  # most of its first size does not grow with |Z|
            raise WorkerError("naive, blocked: it reached one size only, two are needed to extrapolate")
        wanted = operations(variant, num_states, tokens, vocab_size, width)
        seconds = extrapolated_seconds(climbed["sizes"], wanted)
    return {
        "num_states": num_states,
        "seconds": seconds,
        "tokens_per_s": tokens / seconds,
        "extrapolated": exact is None,
        "measured_states": largest["num_states"],
        "measured_tokens_per_s": tokens / largest["seconds"],
    }
