"""The M-step of a scalar model in closed form: normalized counts, with Dirichlet smoothing in two steps.

A state's distribution is drawn to the average of its block, and the block's average to that of all text, each with the
weight of `smoothing` observations: a block that never followed another in training may yet follow it.
"""

import torch
from torch import Tensor

from vlhmm.components.chain_inputs import Pairs
from vlhmm.components.transitions.tiles import runs
from vlhmm.hmm import HMM
from vlhmm.inference import Counts

TINY = 1e-12  # keeps a logarithm finite where neither counts nor averages give a state any mass


def normalized(counts: Tensor, dim: int) -> Tensor:
    """Return counts / total along `dim`."""
    totals = counts + TINY
    return totals / totals.sum(dim, keepdim=True)


def smoothed(counts: Tensor, average: Tensor, strength: float, dim: int) -> Tensor:
    """Return (counts + strength * average) / total along `dim`."""
    return normalized(counts + strength * average, dim)


@torch.no_grad()
def maximize(hmm: HMM, counts: Counts, pairs: Pairs, smoothing: float) -> None:
    """Set every parameter to its smoothed maximum of the expected log-likelihood."""
    num_blocks, num_slots = counts.start.shape
    words_of_blocks = hmm.words_by_block.split(hmm.block_sizes)
    emitted = torch.stack([counts.emission[words].sum(0) for words in words_of_blocks])  # (M, K): how often each state was
    blocks, slots = normalized(emitted.sum(1), 0), normalized(emitted, 1)  # p(m) and p(z | m) in all text

    first_block = smoothed(counts.start.sum(1), blocks, smoothing, 0)
    hmm.start_logits.copy_(first_block.log()[:, None] + smoothed(counts.start, slots, smoothing, 1).log())
    for words in words_of_blocks:
        table = counts.emission[words]  # (words of the block, K)
        average = normalized(table.sum(1, keepdim=True), 0)
        hmm.emission_logits[words] = smoothed(table, average, smoothing, 0).log()
    if hmm.config.transition == "softmax":
        everywhere = (blocks[:, None] * slots).view(1, -1)
        for block, first, last in runs(pairs.from_block):
            rows = counts.tiles.new_zeros(num_slots, num_blocks, num_slots)
            rows[:, pairs.to_block[first:last]] = counts.tiles[first:last].transpose(0, 1)
            rows = rows.view(num_slots, -1)
            average = smoothed(rows.sum(0, keepdim=True), everywhere, smoothing, 1)
            states = slice(block * num_slots, (block + 1) * num_slots)
            hmm.transition_logits[states] = smoothed(rows, average, smoothing, 1).log()
        return
    into_block = torch.zeros_like(hmm.block_logits)  # (from, slot, to)
    into_block[pairs.from_block, :, pairs.to_block] = counts.tiles.sum(-1)
    average = smoothed(into_block.sum(1, keepdim=True), blocks, smoothing, 2)
    hmm.block_logits.copy_(smoothed(into_block, average, smoothing, 2).log())
    hmm.tile_logits.copy_(slots.log()[None, :, None].expand_as(hmm.tile_logits))  # of pairs never seen
    average = smoothed(counts.tiles.sum(1, keepdim=True), slots[pairs.to_block, None], smoothing, 2)
    hmm.tile_logits[pairs.from_block, pairs.to_block] = smoothed(counts.tiles, average, smoothing, 2).log()
