"""Questions a model answers exactly: score, next word, sample, infill, constrain, decode, posteriors.

Everything here takes a model with `tables`, `vocabulary` and `rule`, and returns nats. The names below are
loaded when they are first used: torch takes its time.
"""

from importlib import import_module
from typing import Any

_HOME = {
    "State": "state",
    "begin": "state",
    "state_from_json": "state",
    "score": "scoring",
    "token_scores": "scoring",
    "score_lines": "scoring",
    "next_word": "prediction",
    "next_distribution": "prediction",
    "WordDistribution": "prediction",
    "sample": "sampling",
    "constrained": "sampling",
    "infill": "infilling",
    "prepare": "infilling",
    "Fill": "infilling",
    "must_contain": "constraint",
    "must_not": "constraint",
    "length": "constraint",
    "regex": "constraint",
    "parse_constraint": "constraint",
    "compile_constraint": "constraint",
    "word_posterior": "cloze",
    "word_posteriors": "cloze",
    "spot": "cloze",
    "decode": "decoding",
    "posteriors": "decoding",
    "entropy_rate": "quantities",
    "phrase_probability": "quantities",
    "kl_on_text": "quantities",
    "verify": "verification",
    "export": "exporting",
    "load_export": "exporting",
    "bench_queries": "bench",
    "QueryMethods": "api",
}
__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
