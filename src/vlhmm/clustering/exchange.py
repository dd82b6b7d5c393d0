"""The exchange algorithm: classes improved by moving one word at a time.

Input: adjacent-word counts and a class per word. Output: better classes, of the same number. Knows nothing
of where the first classes came from.

As Kneser and Ney (1993) and Martin et al. (1998) describe it: words by falling frequency, each to the class
that makes the average mutual information largest, over and over, until no word gains by moving.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from vlhmm.clustering._kernels import UNIT, exchange_words, xlogx_table
from vlhmm.clustering.bigrams import Bigrams, class_pairs_of
from vlhmm.clustering.brown import Progress, check_num_blocks, frequency_order
from vlhmm.errors import ConfigError

WORDS_PER_REPORT = 4096


class ExchangeResult(NamedTuple):
    """Classes after the moves."""

    block_of_word: np.ndarray  # (V,) words the text does not hold keep what they had
    gain_bits: np.ndarray  # (sweeps made,) AMI won by each sweep
    num_moves: np.ndarray  # (sweeps made,) words moved by each; a last 0: no single move gains any more


def exchange(
    bigrams: Bigrams,
    block_of_word: np.ndarray,
    num_blocks: int,
    sweeps: int = 30,
    progress: Progress | None = None,
) -> ExchangeResult:
    """Return classes no worse than those given, after at most `sweeps` passes over the words or when no word moves.

    O(M) for each class among a word's neighbours, word and sweep. Blocks keep at least one word that
    occurs.
    """
    if sweeps < 0:
        raise ConfigError(f"sweeps={sweeps} must be 0 (none) or more")
    order = frequency_order(bigrams.word_count)
    check_num_blocks(num_blocks, len(order))
    classes = np.array(block_of_word, dtype=np.int64)
    seen = classes[order]
    if seen.min() < 0 or seen.max() >= num_blocks:
        raise ConfigError(f"blocks run from {seen.min()} to {seen.max()}, expected 0 to {num_blocks - 1}")
    sizes = np.bincount(seen, minlength=num_blocks)
    pairs = class_pairs_of(bigrams, classes, num_blocks)
    transposed = np.ascontiguousarray(pairs.T)
    first, second = pairs.sum(axis=1), pairs.sum(axis=0)
    table = xlogx_table(bigrams.num_pairs)
    gains: list[float] = []
    moves: list[int] = []
    while len(moves) < sweeps and (not moves or moves[-1]):
        moved = gained = 0
        for start in range(0, len(order), WORDS_PER_REPORT):
            some = order[start : start + WORDS_PER_REPORT]
            part = exchange_words(table, bigrams, some, classes, pairs, transposed, first, second, sizes)
            moved, gained = moved + part[0], gained + part[1]
            if progress:
                progress(f"exchange sweep {len(moves) + 1}", start + len(some), len(order))
        moves.append(moved)
        gains.append(gained / (UNIT * np.log(2.0) * max(bigrams.num_pairs, 1)))
    return ExchangeResult(classes, np.array(gains), np.array(moves, dtype=np.int64))
