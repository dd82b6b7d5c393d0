"""Inference through channels against inference on the tiles they stand for."""

import numpy as np
import pytest
import torch
from torch.testing import assert_close

from vlhmm.inference import low_rank_numba, low_rank_torch, torch_backend
from vlhmm.inference.low_rank_torch import ChannelCounts, ChannelPotentials
from vlhmm.inference.numba_backend import Workspace
from vlhmm.inference.types import Chain, Counts, Potentials

GROUPS, SLOTS, CHANNELS, WORDS = 3, 5, 6, 7
LENGTHS = torch.tensor([6, 3, 0, 5])


def tables(dtype):
    """Random tables for every pair of blocks; none of them normalized, which nothing here relies on."""
    generator = torch.Generator().manual_seed(4)

    def positive(*shape):
        return torch.rand(*shape, generator=generator, dtype=torch.float64).add(0.05).to(dtype)

    pairs = torch.cartesian_prod(torch.arange(GROUPS), torch.arange(GROUPS)).T
    return ChannelPotentials(
        positive(GROUPS, SLOTS),
        positive(WORDS, SLOTS),
        positive(GROUPS**2, SLOTS),
        positive(GROUPS, SLOTS, CHANNELS),
        positive(GROUPS, SLOTS, CHANNELS),
        *(row.contiguous() for row in pairs),
    )


def chain_and_carry(dtype):
    """Ragged rows, one of them empty, a fresh start within one, and two that go on from a carried state."""
    generator = torch.Generator().manual_seed(5)
    block = torch.randint(GROUPS, (4, 7), generator=generator)
    edge = block[:, :-1] * GROUPS + block[:, 1:]
    edge[0, 3] = edge[1, 0] = -1
    live = torch.arange(6)[None] < LENGTHS[:, None]
    words = torch.randint(WORDS, (4, 6), generator=generator)
    carry = torch.rand(4, SLOTS, generator=generator, dtype=torch.float64).to(dtype)
    return Chain(block[:, 1:].contiguous(), words, torch.where(live, edge, -1), LENGTHS), carry


def counts_from_tiles(potentials, chain, carry):
    """The same counts by way of the tiles: a move's count is shared among channels as the tile's sum is."""
    through = torch.einsum("pi,pir,pjr->pijr", potentials.leave, potentials.source[potentials.from_row],
                           potentials.target[potentials.to_row])  # fmt: skip
    tiles = Potentials(potentials.start, potentials.emission, through.sum(-1))
    counts = Counts.zeros_like(tiles)
    passed = torch_backend.add_expected_counts(counts, tiles, chain, carry)
    shared = counts.tiles[..., None] * through / through.sum(-1, keepdim=True)
    source, target = torch.zeros_like(potentials.source), torch.zeros_like(potentials.target)
    source.index_add_(0, potentials.from_row, shared.sum(2))
    target.index_add_(0, potentials.to_row, shared.sum(1))
    return passed, ChannelCounts(counts.start, counts.emission, counts.tiles.sum(-1), source, target)


def spoiled():
    """A workspace full of what an earlier batch might have left."""
    workspace = Workspace()
    for name in ("alpha", "posterior", "right", "leaving", "before", "through", "back", "scale"):
        workspace.arrays[name] = np.full(1000, np.nan)
    return workspace


@pytest.mark.parametrize("way", ["plain", "kernels", "spoiled"])
@pytest.mark.parametrize("carried", [True, False])
def test_counts_equal_those_of_the_tiles(way, carried):
    potentials = tables(torch.float64)
    chain, carry = chain_and_carry(torch.float64)
    if not carried:
        chain, carry = chain._replace(edge_of=chain.edge_of.index_fill(1, torch.tensor([0]), -1)), None
    passed, expected = counts_from_tiles(potentials, chain, carry)
    found = ChannelCounts.zeros_like(potentials)
    for _ in range(2):  # sums over batches
        if way == "plain":
            ours = low_rank_torch.add_expected_counts(found, potentials, chain, carry)
        else:
            workspace = spoiled() if way == "spoiled" else None
            ours = low_rank_numba.add_expected_counts(found, potentials, chain, carry, workspace)
    assert_close(ours.alpha, passed.alpha, rtol=1e-11, atol=1e-13)
    assert_close(ours.log_scale, passed.log_scale, rtol=1e-11, atol=1e-13)
    for name, count, twice in zip(found._fields, expected, low_rank_torch.finish_counts(found, potentials), strict=True):
        assert_close(twice, 2 * count, rtol=1e-10, atol=1e-12, msg=lambda m, name=name: f"{name}: {m}")


@pytest.mark.parametrize("way", [low_rank_torch, low_rank_numba])
def test_impossible_text_has_no_nan(way):
    potentials = tables(torch.float64)
    silent, (chain, carry) = potentials._replace(emission=potentials.emission * 0), chain_and_carry(torch.float64)
    counts = ChannelCounts.zeros_like(silent)
    assert way.add_expected_counts(counts, silent, chain, carry).log_scale.sum() == -torch.inf
    assert all(not count.isnan().any() for count in low_rank_torch.finish_counts(counts, silent))


def test_kernels_are_the_same_on_one_thread_and_on_two():
    potentials, (chain, carry) = tables(torch.float32), chain_and_carry(torch.float32)
    found, threads = [], torch.get_num_threads()
    try:
        for number in (1, 2):
            torch.set_num_threads(number)
            counts = ChannelCounts.zeros_like(potentials)
            low_rank_numba.add_expected_counts(counts, potentials, chain, carry)
            found.append(counts)
    finally:
        torch.set_num_threads(threads)
    for one, two in zip(*found, strict=True):
        assert torch.equal(one, two)
