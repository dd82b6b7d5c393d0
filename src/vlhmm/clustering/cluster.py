"""Word classes from a text in one call: Brown's algorithm, then exchange, then the tree above the classes."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from vlhmm.clustering.bigrams import class_pairs_of, count_bigrams, count_bigrams_of_arrays, mutual_information
from vlhmm.clustering.brown import Progress, block_order, merge_classes, merge_words, number_blocks
from vlhmm.clustering.exchange import exchange
from vlhmm.errors import ConfigError

DEFAULT_SWEEPS = 30  # PTB at 128 blocks stops gaining after 13, WikiText-2 nearly after 25


@dataclass(frozen=True, eq=False)
class ClusteringResult:
    """Word classes, numbered by falling token count, and how good they are."""

    block_of_word: np.ndarray  # (V,)
    num_blocks: int
    word_count: np.ndarray  # (V,) tokens of each word in the text
    paths: tuple[str, ...]  # (M,) bit string per block, as wcluster writes them
    merges: np.ndarray  # (M - 1, 2) block ids (kept, absorbed): the tree behind the paths
    merge_losses: np.ndarray  # (M - 1,) AMI each of these merges would lose, in bits
    ami_bits: float
    brown_ami_bits: float  # before the exchange
    num_moves: tuple[int, ...]  # words moved in each exchange sweep; a last 0 means nothing was left to gain
    seconds: float


def cluster_words(
    tokens: np.ndarray | Iterable[np.ndarray],
    vocab_size: int,
    num_blocks: int,
    sweeps: int = DEFAULT_SWEEPS,
    progress: Progress | None = None,
) -> ClusteringResult:
    """Return word classes that keep much of the average mutual information of adjacent words of a token stream.

    The stream is one array, or an iterable of consecutive ones, which gives the same classes in bounded memory.

    `sweeps=0` gives Brown's algorithm alone. Words the text does not hold go where `place_unseen` says.
    Nothing is drawn at random and sums are of integers, so the same tokens give the same classes.
    """
    if sweeps < 0:  # before the merging, not after
        raise ConfigError(f"sweeps={sweeps} must be 0 (none) or more")
    began = time.perf_counter()
    if isinstance(tokens, np.ndarray):
        bigrams = count_bigrams(tokens, vocab_size)
    else:
        bigrams = count_bigrams_of_arrays(tokens, vocab_size)
    brown = merge_words(bigrams, num_blocks, progress)
    moved = exchange(bigrams, brown.block_of_word, num_blocks, sweeps, progress)
    block_of_word = number_blocks(moved.block_of_word, bigrams.word_count, num_blocks)
    tree = merge_classes(class_pairs_of(bigrams, block_of_word, num_blocks))
    # Blocks of equal count are put in the order of their paths, which a `paths` file can restore.
    order = block_order(block_of_word, bigrams.word_count, num_blocks, tree.paths)
    new_of_old = np.argsort(order)
    block_of_word = new_of_old[block_of_word]
    ami_bits = mutual_information(class_pairs_of(bigrams, block_of_word, num_blocks))
    return ClusteringResult(
        block_of_word=block_of_word,
        num_blocks=num_blocks,
        word_count=bigrams.word_count,
        paths=tuple(tree.paths[block] for block in order.tolist()),
        merges=new_of_old[tree.merges],
        merge_losses=tree.losses,
        ami_bits=ami_bits,
        brown_ami_bits=ami_bits - float(moved.gain_bits.sum()),
        num_moves=tuple(moved.num_moves.tolist()),
        seconds=time.perf_counter() - began,
    )
