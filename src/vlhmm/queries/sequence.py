"""A sequence of words -> the chain that inference reads. Input: ids and a `HMMDistributions`. Output: potentials and
`Chain`."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from vlhmm import inference
from vlhmm.distributions import HMMDistributions

_CHUNK_BYTES = 1 << 27


class ChainInputs(NamedTuple):
    """Some words of a sequence, as one row of a batch."""

    potentials: inference.Potentials  # float64, only the rows these words use
    chain: inference.Chain


def chain_inputs(
    distributions: HMMDistributions, ids: Sequence[int], previous: int | None, first: Tensor | None = None
) -> ChainInputs:
    """Return the chain of `ids` (at least one) after the word `previous`, or from a fresh start (None).

    `first`, (K,), replaces the start distribution on the first word's states: p(z_1 | a text before this one).
    """
    before = [previous, *ids[:-1]]
    pairs: dict[tuple[int, int], int] = {}
    edge_of = []
    for word, following in zip(before, ids, strict=True):
        if word is None or distributions.restarts(word):
            edge_of.append(-1)
        else:
            edge_of.append(pairs.setdefault((distributions.block(word), distributions.block(following)), len(pairs)))
    size = distributions.states_per_block
    if pairs:
        tiles = torch.stack(distributions.tiles_of(list(pairs))).double()
    else:
        tiles = torch.zeros(0, size, size, dtype=torch.float64, device=distributions.device)
    words = torch.tensor(ids, device=distributions.device)
    states = distributions.states_of_block[distributions.block_of_word[words]]
    start = distributions.start[states]
    if first is not None:
        start[0] = first
    emission = distributions.emission[words].double() / distributions.emission_total[states]
    row = torch.arange(len(ids), device=distributions.device)[None]
    chain = inference.Chain(
        start_of=row,
        emit_of=row,
        edge_of=torch.tensor([edge_of], device=distributions.device),
        lengths=torch.tensor([len(ids)], device=distributions.device),
    )
    return ChainInputs(inference.Potentials(start, emission, tiles), chain)


def blocks_before(distributions: HMMDistributions, ids: Sequence[int], places: Sequence[int]) -> list[int]:
    """Return the block of the word before each place; -1 where the chain starts or restarts."""
    return [
        -1 if t == 0 or distributions.restarts(ids[t - 1]) else distributions.block(ids[t - 1]) for t in places
    ]


class FilterResult(NamedTuple):
    """What a forward pass leaves: a chunk's filtered posteriors and log p(x_t | x_<t)."""

    alpha: Tensor  # (T, K) float64
    log_probs: Tensor  # (T,) float64


def forward_chunks(
    distributions: HMMDistributions,
    ids: Sequence[int],
    previous: int | None = None,
    carry: Tensor | None = None,
    first: Tensor | None = None,
) -> Iterator[FilterResult]:
    """Yield the forward pass over `ids`, a chunk at a time, so that memory does not grow with the text."""
    size = max(1, _CHUNK_BYTES // (8 * distributions.states_per_block**2))
    for begin in range(0, len(ids), size):
        part = ids[begin : begin + size]
        piece = chain_inputs(distributions, part, previous, first if begin == 0 else None)
        alpha, log_scale = inference.forward(piece.potentials, piece.chain, None if carry is None else carry[None])
        yield FilterResult(alpha[0], log_scale[0])
        previous, carry = part[-1], alpha[0, -1]


def forward(distributions: HMMDistributions, ids: Sequence[int], first: Tensor | None = None) -> FilterResult:
    """Return filtered posteriors p(z_t | x_<=t), (T, K), and log p(x_t | x_<t), (T,); `first` as for `chain_inputs`."""
    chunks = list(forward_chunks(distributions, ids, first=first))
    if not chunks:
        empty = torch.zeros(0, distributions.states_per_block, dtype=torch.float64, device=distributions.device)
        return FilterResult(empty, empty.new_zeros(0))
    return FilterResult(torch.cat([c.alpha for c in chunks]), torch.cat([c.log_probs for c in chunks]))


class PrefixResult(NamedTuple):
    """What reading a sequence leaves, without the messages on the way."""

    log_probs: list[float]  # log p(x_t | x_<t)
    alpha: Tensor | None  # (K,) p(z_T | x) on the last word's states; None if nothing was read


def read(
    distributions: HMMDistributions, ids: Sequence[int], previous: int | None = None, carry: Tensor | None = None
) -> PrefixResult:
    """Return the forward pass over `ids`, keeping only its last message: memory for K states, however long the text."""
    log_probs: list[float] = []
    alpha = None
    for chunk in forward_chunks(distributions, ids, previous, carry):
        log_probs += chunk.log_probs.tolist()
        alpha = chunk.alpha[-1].clone()
    return PrefixResult(log_probs, alpha)
