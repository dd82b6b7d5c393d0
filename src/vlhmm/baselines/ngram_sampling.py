r"""Draw text from an interpolated n-gram model, many lines at a time.

The model's p(w | c) = d(c, w) + gamma(c) p(w | h), with h the context c without its first word, is a recipe for
drawing: with probability gamma(c) = 1 - sum_w d(c, w) continue with the shorter context, else draw a word in proportion
to d(c, w). Each word costs a binary search or two per order.
"""

from collections.abc import Callable

import numpy as np
import torch

from vlhmm.baselines.ngrams import Level, find
from vlhmm.data.text import Text
from vlhmm.errors import ConfigError

ROWS_AT_ONCE = 4096  # lines written side by side
LONGEST = 1000  # words of a line: a model of a text without line ends might never write one
ROUNDING = 1e-9


class NgramSampler:
    """The cumulated d(c, w) of every order, and lookups of contexts."""

    def __init__(self, levels: tuple[Level, ...]) -> None:
        """Prepare in O(n log n) for n n-grams; refuse a model that is not interpolated."""
        self.width = len(levels[0].keys)  # V + 1; <s> is V
        self.keys = [level.keys for level in levels]
        prob = [np.exp(level.log_prob) for level in levels]
        unigram = prob[0].copy()
        unigram[-1] = 0.0
        self.cumulated = [np.concatenate([[0.0], np.cumsum(unigram)])]
        self.first: list[np.ndarray] = [np.array([0, self.width])]
        suffix = np.zeros(self.width, dtype=np.int64)  # index, an order below, of an n-gram without its first word
        for n in range(1, len(levels)):
            context, word = self.keys[n] // self.width, self.keys[n] % self.width
            shorter = word if n == 1 else find(self.keys[n - 1], suffix[context] * self.width + word)
            backoff = np.exp(levels[n - 1].log_backoff)[context]
            direct = prob[n] - backoff * np.where(shorter >= 0, prob[n - 1][shorter], 0.0)
            if (shorter < 0).any() or (len(direct) and direct.min() < -ROUNDING):
                raise ConfigError("only an interpolated n-gram model can write text; estimate one: vlhmm baseline kn")
            self.cumulated.append(np.concatenate([[0.0], np.cumsum(direct.clip(min=0.0))]))
            self.first.append(np.searchsorted(self.keys[n], np.arange(len(self.keys[n - 1]) + 1) * self.width))
            suffix = shorter

    @property
    def order(self) -> int:
        return len(self.keys)

    def start(self, rows: int) -> np.ndarray:
        """Return contexts of `rows` lines that begin, (order, rows): by length, the index of their last words or -1."""
        contexts = np.full((self.order, rows), -1, dtype=np.int64)
        contexts[0] = 0
        if self.order > 1:
            contexts[1] = self.width - 1
        return contexts

    def draw(self, contexts: np.ndarray, generator: torch.Generator) -> np.ndarray:
        """Return a next word for each column of contexts."""
        words = np.full(contexts.shape[1], -1, dtype=np.int64)
        for length in range(self.order - 1, -1, -1):
            rows = np.flatnonzero((words < 0) & (contexts[length] >= 0))
            at = contexts[length, rows]
            first, last = self.first[length][at], self.first[length][at + 1]
            low, high = self.cumulated[length][first], self.cumulated[length][last]
            drawn = torch.rand(len(rows), generator=generator, dtype=torch.float64).numpy()
            target = low + (drawn * (high - low) if length == 0 else drawn)
            taken = (target < high) & (last > first)
            index = np.searchsorted(self.cumulated[length], target[taken], side="right") - 1
            index = np.clip(index, first[taken], last[taken] - 1)
            words[rows[taken]] = self.keys[length][index] % self.width
        return words

    def advance(self, contexts: np.ndarray, words: np.ndarray) -> np.ndarray:
        """Return the contexts after these words."""
        longer = np.full_like(contexts, -1)
        longer[0] = 0
        if self.order > 1:
            longer[1] = words
        for length in range(2, self.order):
            known = np.flatnonzero(contexts[length - 1] >= 0)
            wanted = contexts[length - 1, known] * self.width + words[known]
            longer[length, known] = find(self.keys[length - 1], wanted)
        return longer


def sample_text(
    levels: tuple[Level, ...],
    eos: int,
    num_tokens: int,
    generator: torch.Generator,
    progress: Callable[[int, int], None] = lambda _, __: None,
) -> Text:
    """Return whole lines of about `num_tokens` tokens in all, their <eos> included. Seconds per million tokens.

    Lines are finished in the order in which they began, so that short ones are not preferred.
    """
    sampler = NgramSampler(levels)
    lines: list[np.ndarray] = []
    written = 0
    while written < num_tokens:
        rows = ROWS_AT_ONCE if num_tokens - written > 100 * ROWS_AT_ONCE else max(16, (num_tokens - written) // 100)
        contexts, alive = sampler.start(rows), np.arange(rows)
        written_words = np.full((rows, 64), eos, dtype=np.int32)
        lengths = np.zeros(rows, dtype=np.int64)
        for time in range(LONGEST):
            if time == written_words.shape[1]:
                written_words = np.concatenate([written_words, np.full_like(written_words, eos)], axis=1)
            words = sampler.draw(contexts, generator) if time < LONGEST - 1 else np.full(len(alive), eos)
            written_words[alive, time] = words
            lengths[alive] = time + 1
            going_on = words != eos
            if not going_on.any():
                break
            contexts, alive = sampler.advance(contexts, words)[:, going_on], alive[going_on]
        for row, length in zip(written_words, lengths, strict=True):
            if written >= num_tokens:
                break
            lines.append(row[:length])
            written += int(length)
        progress(min(written, num_tokens), num_tokens)
    offsets = np.concatenate([[0], np.cumsum([len(line) for line in lines])]).astype(np.int64)
    return Text(np.concatenate(lines).astype(np.int32), offsets, 0, 0, 0)
