"""Brown clustering: words to classes by merging, and the binary tree above the classes.

Input: a stream of word ids. Output: a class per word, the merges that led there, a bit string per class.
Knows nothing of words as text, of states or of files.

The algorithm (Brown et al. 1992, with the window Liang 2005 describes): the M most frequent words start as
classes of their own; every next word, by falling frequency, becomes class M + 1, and the two classes whose
merge loses least average mutual information become one. Words still waiting are one further class that
takes no part in merges, so what is compared is always the mutual information of the whole text under a real
division of its words.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from vlhmm.clustering._kernels import UNIT, Members, add_words, empty_window, merge_all, xlogx_table
from vlhmm.clustering.bigrams import Bigrams
from vlhmm.errors import ConfigError

Progress = Callable[[str, int, int], None]  # (what is done, steps done, steps in all)

WORDS_PER_REPORT = 256  # short enough that Ctrl-C is heard within a moment


class BrownResult(NamedTuple):
    """Classes and how they came about.

    Merge r followed on the word of rank M + r (0 is the most frequent); classes in it are named by their most
    frequent word, the more frequent one first.
    """

    block_of_word: np.ndarray  # (V,) -1 for words the text does not hold
    merges: np.ndarray  # (seen words - M, 2) word ids
    losses: np.ndarray  # (seen words - M,) AMI lost by each merge, in bits


class Tree(NamedTuple):
    """The binary tree over M classes."""

    merges: np.ndarray  # (M - 1, 2) class ids (kept, absorbed), a merged class being named by its smallest id
    losses: np.ndarray  # (M - 1,) AMI lost by each merge, in bits
    paths: tuple[str, ...]  # (M,) one bit string per class, none the beginning of another


def frequency_order(word_count: np.ndarray) -> np.ndarray:
    """Return the ids of words that occur, most frequent first, ties by id."""
    order = np.argsort(-np.asarray(word_count), kind="stable")
    return order[np.asarray(word_count)[order] > 0]


def check_num_blocks(num_blocks: int, num_seen: int) -> None:
    """Refuse a number of blocks the seen words cannot fill."""
    if num_blocks < 1:
        raise ConfigError(f"num_blocks={num_blocks} must be at least 1")
    if num_blocks > num_seen:
        raise ConfigError(
            f"num_blocks={num_blocks} is more than the {num_seen} different words of the text; every block "
            f"needs a word, ask for at most {num_seen} blocks"
        )


def merge_words(bigrams: Bigrams, num_blocks: int, progress: Progress | None = None) -> BrownResult:
    """Compute Brown's classes of the words that occur, in O(M^2 + M n) per word with n classes among its neighbours."""
    order = frequency_order(bigrams.word_count)
    check_num_blocks(num_blocks, len(order))
    num_slots = num_blocks + 1
    table = xlogx_table(bigrams.num_pairs)
    window = empty_window(num_slots, num_context=1)
    window.pairs[num_slots, num_slots] = bigrams.num_pairs
    window.first[num_slots] = window.second[num_slots] = bigrams.num_pairs
    members = Members(
        slot_of_word=np.full(len(bigrams.word_count), num_slots, dtype=np.int64),
        head=np.full(num_slots + 1, -1, dtype=np.int64),
        following=np.full(len(bigrams.word_count), -1, dtype=np.int64),
        leader=np.full(num_slots + 1, -1, dtype=np.int64),
    )
    merges = np.zeros((len(order), 2), dtype=np.int64)
    losses = np.zeros(len(order), dtype=np.int64)
    empty_slot = 0
    for start in range(0, len(order), WORDS_PER_REPORT):
        stop = min(start + WORDS_PER_REPORT, len(order))
        empty_slot = add_words(table, window, members, bigrams, order, start, stop, empty_slot, merges, losses)
        if progress:
            progress("merging", stop, len(order))
    block_of_slot = np.full(num_slots + 1, -1, dtype=np.int64)
    block_of_slot[np.flatnonzero(members.head >= 0)] = np.arange(num_blocks)
    return BrownResult(
        block_of_word=block_of_slot[members.slot_of_word],
        merges=order[merges[num_blocks:]],
        losses=_bits(losses[num_blocks:], bigrams.num_pairs),
    )


def merge_classes(class_pairs: np.ndarray) -> Tree:
    """Return the tree that merging the M classes of the counts (M, M) down to one makes, in O(M^3) time.

    The class with the smaller id is the `0` side of every fork; a single class has the path `0`.
    """
    num_classes = len(class_pairs)
    merges = np.zeros((num_classes - 1, 2), dtype=np.int64)
    losses = np.zeros(num_classes - 1, dtype=np.int64)
    total = int(class_pairs.sum())
    window = empty_window(num_classes, num_context=0)
    merge_all(xlogx_table(total), window, np.ascontiguousarray(class_pairs, dtype=np.int64), merges, losses)
    return Tree(merges, _bits(losses, total), paths_of_merges(merges, num_classes))


def paths_of_merges(merges: np.ndarray, num_classes: int) -> tuple[str, ...]:
    """Return a bit string per class: the way down to it from the last merge, 0 to the kept side, 1 to the other."""
    members = [[index] for index in range(num_classes)]
    paths = [""] * num_classes
    for kept, absorbed in merges.tolist():
        for index in members[kept]:
            paths[index] = "0" + paths[index]
        for index in members[absorbed]:
            paths[index] = "1" + paths[index]
        members[kept] += members[absorbed]
    return tuple(path or "0" for path in paths)


def number_blocks(block_of_word: np.ndarray, word_count: np.ndarray, num_blocks: int) -> np.ndarray:
    """Place unseen words, and number the blocks by falling token count, ties by their first words."""
    placed = place_unseen(block_of_word, word_count, num_blocks)
    new_of_old = np.empty(num_blocks, dtype=np.int64)
    new_of_old[block_order(placed, word_count, num_blocks)] = np.arange(num_blocks)
    return new_of_old[placed]


def block_order(
    block_of_word: np.ndarray, word_count: np.ndarray, num_blocks: int, tie_break: tuple[str, ...] | None = None
) -> np.ndarray:
    """Return block ids by falling token count; ties by `tie_break`, or by the block's first word."""
    tokens = np.bincount(block_of_word, weights=word_count, minlength=num_blocks)
    if tie_break is None:
        first_word = np.full(num_blocks, len(block_of_word), dtype=np.int64)
        np.minimum.at(first_word, block_of_word, np.arange(len(block_of_word)))
        return np.lexsort((first_word, -tokens))
    return np.array(sorted(range(num_blocks), key=lambda block: (-tokens[block], tie_break[block])), dtype=np.int64)


def place_unseen(block_of_word: np.ndarray, word_count: np.ndarray, num_blocks: int) -> np.ndarray:
    """Return block_of_word with every word the text does not hold in the block that most rare words share.

    Rare words are those of the smallest count that occurs: by Good and Turing's argument a block's share of
    them is its share of what has not been seen yet. Ties go to the block with more words, then to the lower
    id.
    """
    blocks = np.array(block_of_word, dtype=np.int64)
    count = np.asarray(word_count)
    seen = count > 0
    if seen.all():
        return blocks
    rare = np.bincount(blocks[seen & (count == count[seen].min())], minlength=num_blocks)
    words = np.bincount(blocks[seen], minlength=num_blocks)
    blocks[~seen] = np.lexsort((-words, -rare))[0]
    return blocks


def _bits(fixed_point: np.ndarray, num_pairs: int) -> np.ndarray:
    return fixed_point / (UNIT * np.log(2.0) * max(num_pairs, 1))
