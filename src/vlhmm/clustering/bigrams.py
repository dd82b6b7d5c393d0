"""Adjacent words of a text, counted.

Input: one stream of word ids, `<eos>` a word like others, in memory or array by array. Output: sparse counts of
adjacent pairs, and the average mutual information a division of the words into classes keeps. Knows nothing of how
classes are found.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy as np

from vlhmm.clustering._kernels import add_class_pairs, merge_counts, merged_size, transpose_counts
from vlhmm.errors import ConfigError, DataError


class Bigrams(NamedTuple):
    """n(v, w), how often w follows v, found by either word.

    The words after v are after_word[after_start[v] : after_start[v + 1]], and so on for those before.
    """

    after_start: np.ndarray  # (V+1,)
    after_word: np.ndarray  # (P,)
    after_count: np.ndarray  # (P,)
    before_start: np.ndarray  # (V+1,)
    before_word: np.ndarray  # (P,)
    before_count: np.ndarray  # (P,)
    twice_count: np.ndarray  # (V,) n(w, w)
    first_count: np.ndarray  # (V,) pairs that begin with w
    second_count: np.ndarray  # (V,) pairs that end with w
    word_count: np.ndarray  # (V,) tokens

    @property
    def num_pairs(self) -> int:
        """Tokens less one."""
        return int(self.first_count.sum())


def check_tokens(tokens: np.ndarray, vocab_size: int) -> np.ndarray:
    """Return the tokens as int64, refused if there are none or if one is outside the vocabulary."""
    tokens = np.asarray(tokens)
    if tokens.ndim != 1 or not np.issubdtype(tokens.dtype, np.integer):
        raise DataError(f"tokens must be one row of word ids, got shape {tokens.shape} of {tokens.dtype}")
    if not len(tokens):
        raise DataError("the text has no tokens; word classes need at least one")
    if tokens.min() < 0 or tokens.max() >= vocab_size:
        wrong = tokens[(tokens < 0) | (tokens >= vocab_size)][0]
        raise DataError(f"token {wrong} is not a word id of a vocabulary of {vocab_size} (0 to {vocab_size - 1})")
    return tokens.astype(np.int64)


def count_bigrams(tokens: np.ndarray, vocab_size: int) -> Bigrams:
    """Return n(v, w) of adjacent tokens, in O(N log N)."""
    tokens = check_tokens(tokens, vocab_size)
    pairs, counts = np.unique(tokens[:-1] * vocab_size + tokens[1:], return_counts=True)
    first, second = np.divmod(pairs, vocab_size)
    counts = counts.astype(np.int64)
    by_second = np.argsort(second, kind="stable")
    twice = np.zeros(vocab_size, dtype=np.int64)
    twice[first[first == second]] = counts[first == second]
    return Bigrams(
        after_start=_starts(first, vocab_size),
        after_word=second,
        after_count=counts,
        before_start=_starts(second, vocab_size),
        before_word=first[by_second],
        before_count=counts[by_second],
        twice_count=twice,
        first_count=np.bincount(tokens[:-1], minlength=vocab_size).astype(np.int64),
        second_count=np.bincount(tokens[1:], minlength=vocab_size).astype(np.int64),
        word_count=np.bincount(tokens, minlength=vocab_size).astype(np.int64),
    )


def count_bigrams_of_arrays(arrays: Iterable[np.ndarray], vocab_size: int, chunk: int = 1 << 22) -> Bigrams:
    """Return n(v, w) of a text that comes in consecutive arrays: the counts of `count_bigrams` on their concatenation.

    Chunks are counted one by one and merged, so memory depends on how many different pairs there are, about 24 bytes
    each, and not on how long the text is. O(N log N).
    """
    runs: list[tuple[np.ndarray, np.ndarray]] = []  # sorted codes v V + w and their counts, the longest run first
    words = np.zeros(vocab_size, dtype=np.int64)
    first_word = last_word = -1
    for tokens in _overlapping_chunks(arrays, vocab_size, chunk):
        if first_word < 0:
            first_word = int(tokens[0])
            words[first_word] += 1
        words += np.bincount(tokens[1:], minlength=vocab_size)
        last_word = int(tokens[-1])
        codes, counts = np.unique(tokens[:-1] * vocab_size + tokens[1:], return_counts=True)
        runs.append((codes, counts.astype(np.int32)))
        while len(runs) > 1 and len(runs[-2][0]) < 2 * len(runs[-1][0]):
            _merge_last(runs)
    if first_word < 0:
        raise DataError("the text has no tokens; word classes need at least one")
    while len(runs) > 1:
        _merge_last(runs)
    codes, after_count = runs.pop()
    if after_count.sum(dtype=np.int64) != words.sum() - 1:
        raise DataError("one pair of words occurs more than 2^31 times; remove what the text repeats")
    after_word = (codes % vocab_size).astype(np.int32)
    after_start = np.searchsorted(codes, np.arange(vocab_size + 1) * vocab_size)
    diagonal = np.arange(vocab_size) * (vocab_size + 1)
    place = np.minimum(np.searchsorted(codes, diagonal), max(0, len(codes) - 1))
    twice = np.zeros(vocab_size, dtype=np.int64)
    if len(codes):
        twice = np.where(codes[place] == diagonal, after_count[place], 0).astype(np.int64)
    del codes
    before_start = _starts(after_word, vocab_size)
    before_word, before_count = np.empty_like(after_word), np.empty_like(after_count)
    transpose_counts(after_start, after_word, after_count, before_start, before_word, before_count)
    first_count, second_count = words.copy(), words.copy()
    first_count[last_word] -= 1
    second_count[first_word] -= 1
    return Bigrams(
        after_start=after_start,
        after_word=after_word,
        after_count=after_count,
        before_start=before_start,
        before_word=before_word,
        before_count=before_count,
        twice_count=twice,
        first_count=first_count,
        second_count=second_count,
        word_count=words,
    )


def _overlapping_chunks(arrays: Iterable[np.ndarray], vocab_size: int, chunk: int) -> Iterator[np.ndarray]:
    """Yield the text in int64 arrays of about `chunk` tokens, each beginning with the last token of the one before."""
    last = np.zeros(0, dtype=np.int64)
    for array in arrays:
        for start in range(0, len(array), chunk):
            tokens = np.concatenate([last, check_tokens(array[start : start + chunk], vocab_size)])
            last = tokens[-1:]
            yield tokens


def _merge_last(runs: list[tuple[np.ndarray, np.ndarray]]) -> None:
    """Replace the last two runs by one."""
    (others, other_counts), (codes, counts) = runs.pop(), runs.pop()
    merged = np.empty(merged_size(codes, others), dtype=np.int64)
    merged_counts = np.empty(len(merged), dtype=np.int32)
    merge_counts(codes, counts, others, other_counts, merged, merged_counts)
    runs.append((merged, merged_counts))


def class_pairs_of(bigrams: Bigrams, block_of_word: np.ndarray, num_blocks: int) -> np.ndarray:
    """Return n(i, j) (M, M) of blocks, added up from the counts of words; what `count_class_pairs` counts in a text."""
    pairs = np.zeros((num_blocks, num_blocks), dtype=np.int64)
    blocks = np.asarray(block_of_word, dtype=np.int64)
    add_class_pairs(bigrams.after_start, bigrams.after_word, bigrams.after_count, blocks, pairs)
    return pairs


def count_class_pairs(tokens: np.ndarray, block_of_word: np.ndarray, num_blocks: int) -> np.ndarray:
    """Return n(i, j) (M, M): how often a word of block j follows one of block i."""
    blocks = np.asarray(block_of_word, dtype=np.int64)
    if blocks.min() < 0 or blocks.max() >= num_blocks:
        raise ConfigError(f"blocks run from {blocks.min()} to {blocks.max()}, expected 0 to {num_blocks - 1}")
    stream = blocks[check_tokens(tokens, len(blocks))]
    pairs = np.bincount(stream[:-1] * num_blocks + stream[1:], minlength=num_blocks * num_blocks)
    return pairs.reshape(num_blocks, num_blocks).astype(np.int64)


def average_mutual_information(tokens: np.ndarray, block_of_word: np.ndarray, num_blocks: int) -> float:
    r"""Return $\sum_{ij} p(i,j) \log_2 \frac{p(i,j)}{p(i)\,p(j)}$ in bits, i and j the blocks of adjacent tokens."""
    return mutual_information(count_class_pairs(tokens, block_of_word, num_blocks))


def mutual_information(pairs: np.ndarray) -> float:
    """Return average mutual information in bits of the counts n(i, j) of adjacent blocks."""
    joint = pairs.astype(np.float64)
    total = joint.sum()
    if not total:
        return 0.0
    first, second = joint.sum(axis=1), joint.sum(axis=0)
    i, j = np.nonzero(joint)
    seen = joint[i, j]
    return float(np.sum(seen * (np.log2(seen) + np.log2(total) - np.log2(first[i]) - np.log2(second[j]))) / total)


def _starts(sorted_by: np.ndarray, vocab_size: int) -> np.ndarray:
    starts = np.zeros(vocab_size + 1, dtype=np.int64)
    np.cumsum(np.bincount(sorted_by, minlength=vocab_size), out=starts[1:])
    return starts
