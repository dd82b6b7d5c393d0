"""Words to blocks by other means than clustering, and every kind of constraint by its name.

Input: a token stream and numbers. Output: `Blocks`. Knows nothing of models.
"""

from __future__ import annotations

import difflib

import numpy as np

from vlhmm.blocks.bigrams import check_tokens
from vlhmm.blocks.brown import Progress, check_num_blocks
from vlhmm.blocks.clustering import DEFAULT_SWEEPS, cluster_words
from vlhmm.blocks.structure import Blocks, allocate_states, share_states
from vlhmm.errors import ConfigError

KINDS = ("brown", "frequency", "uniform", "none")


def frequency_blocks(word_count: np.ndarray, num_blocks: int) -> np.ndarray:
    """block_of_word (V,): words by falling count, cut into runs of about equally many tokens, none empty.

    Each run takes the words that bring it nearest to its share of the tokens still to be had. Words of equal
    count come by id, words that never occur last.
    """
    counts = np.asarray(word_count, dtype=np.int64)
    check_num_blocks(num_blocks, len(counts))
    order = np.argsort(-counts, kind="stable")
    tokens_before = np.concatenate([[0], np.cumsum(counts[order])])
    block_of_word = np.empty(len(counts), dtype=np.int64)
    start = 0
    for block in range(num_blocks - 1):
        blocks_left = num_blocks - block
        target = tokens_before[start] + (tokens_before[-1] - tokens_before[start]) / blocks_left
        stop = int(np.searchsorted(tokens_before, target))
        if stop > start + 1 and target - tokens_before[stop - 1] <= tokens_before[stop] - target:
            stop -= 1
        stop = min(max(stop, start + 1), len(counts) - (blocks_left - 1))
        block_of_word[order[start:stop]] = block
        start = stop
    block_of_word[order[start:]] = num_blocks - 1
    return block_of_word


def make_blocks(
    kind: str,
    tokens: np.ndarray,
    vocab_size: int,
    *,
    num_states: int,
    num_blocks: int = 128,
    states_per_word: int | None = None,
    power: float = 0.0,
    sweeps: int = DEFAULT_SWEEPS,
    seed: int = 0,
    progress: Progress | None = None,
) -> Blocks:
    """The emission constraint of a kind: brown, frequency (both partitions), uniform or none.

    `power` above 0 gives blocks states in proportion to tokens^power (see `allocate_states`), padded to the
    largest; 0 gives all equally many. `states_per_word` and `seed` are for uniform, which takes
    num_states / num_blocks states per word unless told.
    """
    if kind not in KINDS:
        near = difflib.get_close_matches(kind, KINDS, n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise ConfigError(f"no kind of blocks named {kind!r}, expected one of {', '.join(KINDS)}{hint}")
    if kind == "none":
        return Blocks.none(vocab_size, num_states)
    if kind == "uniform":
        share = states_per_word or share_states(num_states, num_blocks)
        return Blocks.uniform(vocab_size, num_states, share, seed)
    if not power:
        share_states(num_states, num_blocks)  # refuse before minutes of clustering, not after
    word_count = np.bincount(check_tokens(tokens, vocab_size), minlength=vocab_size)
    if kind == "brown":
        block_of_word = cluster_words(tokens, vocab_size, num_blocks, sweeps, progress).block_of_word
    else:
        block_of_word = frequency_blocks(word_count, num_blocks)
    if not power:
        return Blocks.partition_of(block_of_word, num_blocks, share_states(num_states, num_blocks))
    tokens_of_block = np.bincount(block_of_word, weights=word_count, minlength=num_blocks)
    num_alive = allocate_states(tokens_of_block, num_states, power=power)
    return Blocks.partition_of(block_of_word, num_blocks, int(num_alive.max()), num_alive)
