"""How fast the queries answer. Input: a model. Output: the four figures that are promised for 2^15 states."""

import time
from collections.abc import Callable
from functools import partial
from statistics import median
from typing import Any

from vlhmm.data.user_text import generator_of
from vlhmm.queries.infill import prepare
from vlhmm.queries.next_word import next_distribution
from vlhmm.queries.sample import sample, sample_streams


def bench_queries(model: Any, seed: int = 0) -> dict[str, float]:
    """Return {next_ms, sample_tokens_per_s, infill_1_s, infill_5_s}, parameters cached, each after one call to
    warm up.

    A context and a sentence of 20 words are drawn from the model; the gap stands in the sentence's middle.
    """
    words = _sentence(model, 20, seed)

    def next_words(context: list[str]) -> object:
        return next_distribution(model, context).top(10)

    next_words(words[:5])
    contexts = [words[:n] for n in range(1, 20)]
    times = [_seconds(partial(next_words, context)) for context in contexts]
    sample(model, 8, max_tokens=8, seed=seed)
    began = time.perf_counter()
    drawn = sample(model, 256, max_tokens=64, seed=seed + 1)
    tokens = sum(len(text.words) + text.ended for text in drawn)
    rate = tokens / (time.perf_counter() - began)
    one = [*words[:10], "[MASK]", *words[11:]]
    five = [*words[:8], "[MASK:5]", *words[13:]]
    prepare(model, one).sample(1, seed)
    return {
        "next_ms": 1000 * median(times),
        "sample_tokens_per_s": rate,
        "infill_1_s": median(_seconds(lambda: prepare(model, one).sample(1, seed)) for _ in range(3)),
        "infill_5_s": _seconds(lambda: prepare(model, five).sample(1, seed)),
    }


def _sentence(model: Any, length: int, seed: int) -> list[str]:
    """Return words of the model's own drawing, without <eos>."""
    distributions, vocabulary = model.distributions, model.vocabulary
    found: list[int] = []
    while len(found) < length:
        stream = sample_streams(distributions, 1, 4 * length, generator_of(seed))[0].tolist()
        found += [word for word in stream if word != vocabulary.eos]
        seed += 1
    return vocabulary.decode(found[:length])


def _seconds(run: Callable[[], Any]) -> float:
    began = time.perf_counter()
    run()
    return time.perf_counter() - began
