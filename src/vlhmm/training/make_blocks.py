"""Blocks for a run: the clustering or assignment that the model's configuration names."""

from collections.abc import Callable

import numpy as np

from vlhmm.clustering.assignments import frequency_blocks
from vlhmm.clustering.blocks import Blocks, allocate_states
from vlhmm.clustering.cluster import cluster_words
from vlhmm.components.config import ModelConfig
from vlhmm.data.prepared import token_stream, word_counts_of
from vlhmm.data.text import Text
from vlhmm.data.tokenizer import TokenVocabulary
from vlhmm.data.vocabulary import Vocabulary
from vlhmm.errors import ConfigError
from vlhmm.training.unseen_tokens import token_blocks

MOST = 2  # times the equal share of states, at most, to one block: tiles take the room of the largest


def make_blocks(
    config: ModelConfig,
    tokens: np.ndarray | Text,
    vocabulary: Vocabulary,
    seed: int,
    log: Callable[[str], None] = lambda _: None,
) -> Blocks:
    """Return which states may emit which words, from the training text."""
    vocab_size = len(vocabulary)
    if isinstance(vocabulary, TokenVocabulary) and config.constraint != "brown":
        raise ConfigError(f"a model over a tokenizer's ids takes model.constraint=brown, got {config.constraint}")
    word_counts = word_counts_of(tokens, vocab_size)
    if config.constraint == "none":
        return Blocks.none(vocab_size, config.num_states)
    if config.constraint == "uniform":
        return Blocks.uniform(vocab_size, config.num_states, config.states_per_word, seed)
    if config.constraint == "frequency":
        block_of_word = frequency_blocks(word_counts, config.num_blocks)
    else:
        result = cluster_words(token_stream(tokens), vocab_size, config.num_blocks, sweeps=config.exchange_sweeps)
        log(
            f"{config.num_blocks} Brown clusters in {result.seconds:.1f} s, average mutual information {result.ami_bits:.3f} bits"
        )
        block_of_word = result.block_of_word
        if isinstance(vocabulary, TokenVocabulary):
            block_of_word = token_blocks(result, tokens, vocabulary, config.exchange_sweeps)
    return partition(config, block_of_word, word_counts)


def partition(config: ModelConfig, block_of_word: np.ndarray, word_counts: np.ndarray) -> Blocks:
    """Divide the states equally among blocks, or give more to blocks with more tokens."""
    equal = config.num_states // config.num_blocks
    if config.allocation == "equal":
        return Blocks.partition_of(block_of_word, config.num_blocks, equal)
    tokens_of_block = np.bincount(block_of_word, weights=word_counts, minlength=config.num_blocks).astype(np.int64)
    num_alive = allocate_states(tokens_of_block, config.num_states, maximum=MOST * equal)
    return Blocks.partition_of(block_of_word, config.num_blocks, int(num_alive.max()), num_alive)
