"""Small models of every kind, for tests."""

import numpy as np
import torch

from vlhmm.clustering.blocks import Blocks
from vlhmm.components.config import ModelConfig
from vlhmm.data.vocabulary import EOS, UNK, Vocabulary
from vlhmm.hmm import HMM

VOCABULARY = Vocabulary((EOS, UNK, "a", "b", "c", "d", "e"))

KINDS = {
    "paper": dict(),
    "linear": dict(network="linear"),
    "factored-embedding": dict(embedding="factored"),
    "additive": dict(embedding="additive"),
    "scalar": dict(parameterization="scalar"),
    "block-factored": dict(transition="block-factored"),
    "block-factored-coded": dict(transition="block-factored", embedding="additive", source_block_init=4.0),
    "block-factored-linear": dict(transition="block-factored", network="linear", embedding="additive"),
    "block-factored-scalar": dict(transition="block-factored", parameterization="scalar"),
    "low-rank": dict(transition="block-factored", within="low-rank"),
    "low-rank-coded": dict(transition="block-factored", within="low-rank", embedding="additive", source_block_init=4.0),
    "none": dict(constraint="none", num_blocks=1),
    "uneven": dict(allocation="tokens"),
    "uneven-block-factored": dict(allocation="tokens", transition="block-factored"),
    "uneven-low-rank": dict(allocation="tokens", transition="block-factored", within="low-rank"),
    "uniform": dict(constraint="uniform", states_per_word=3),
}


def small_blocks(kind: str) -> Blocks:
    size = len(VOCABULARY)
    block_of_word = np.array([0, 1, 2, 0, 1, 2, 2])
    if kind == "none":
        return Blocks.none(size, 6)
    if kind == "uniform":
        return Blocks.uniform(size, 9, 3, seed=1)
    if kind.startswith("uneven"):
        return Blocks.partition_of(block_of_word, 3, 4, np.array([4, 2, 1]))
    return Blocks.partition_of(block_of_word, 3, 4)


def small_hmm(kind: str, seed: int = 0, dtype: torch.dtype = torch.float64) -> tuple[HMM, Blocks]:
    blocks = small_blocks(kind)
    settings = {
        "num_states": blocks.num_states,
        "num_blocks": 3,
        "hidden_size": 6,
        "tile_width": 4,
        **KINDS[kind],
    }
    hmm = HMM(ModelConfig(**settings), blocks, seed=seed).to(dtype)
    with torch.no_grad():  # away from the calm first values, so that no mistake hides in a flat table
        generator = torch.Generator().manual_seed(seed + 1)
        for parameter in hmm.parameters():
            parameter += 0.7 * torch.randn(parameter.shape, generator=generator, dtype=dtype)
    return hmm, blocks
