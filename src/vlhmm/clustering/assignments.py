"""Words to blocks by frequency alone: what clustering is compared with.

Input: word counts. Output: a block per word. `Blocks` itself makes the constraints `uniform` and `none`.
"""

from __future__ import annotations

import numpy as np

from vlhmm.clustering.brown import check_num_blocks


def frequency_blocks(word_count: np.ndarray, num_blocks: int) -> np.ndarray:
    """Return block_of_word (V,): words by falling count, cut into runs of about equally many tokens, none empty.

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
