"""The M-step of a scalar model in closed form: normalized counts, with Dirichlet smoothing toward block averages."""

import torch
from torch import Tensor

from vlhmm.inference import Counts
from vlhmm.model.chains import Pairs
from vlhmm.model.hmm import HMM
from vlhmm.model.transitions import runs

TINY = 1e-12  # keeps a logarithm finite where neither counts nor averages give a state any mass


def smoothed(counts: Tensor, average: Tensor, strength: float, dim: int) -> Tensor:
    """log of (counts + strength * average) / total along `dim`."""
    totals = counts + strength * average + TINY
    return (totals / totals.sum(dim, keepdim=True)).log()


@torch.no_grad()
def maximize(hmm: HMM, counts: Counts, pairs: Pairs, smoothing: float) -> None:
    """Sets every parameter to its smoothed maximum of the expected log-likelihood.

    A state's distribution is drawn to the average of its block with the weight of `smoothing` observations.
    """
    by_block = hmm.words_by_group.split(hmm.group_sizes)
    hmm.start_logits.copy_(
        smoothed(counts.start, counts.start.sum() / counts.start.numel() / counts.start.sum(), smoothing, 1)
    )
    total = counts.start.sum(1, keepdim=True)
    hmm.start_logits.add_(((total + TINY) / (total.sum() + TINY * len(total))).log())
    for words in by_block:
        table = counts.emission[words]  # (words of the block, K)
        average = table.sum(1, keepdim=True) / table.sum().clamp(min=TINY)
        hmm.emission_logits[words] = smoothed(table, average, smoothing, 0)
    if hmm.config.transition == "softmax":
        num_slots = counts.start.shape[1]
        for group, first, last in runs(pairs.from_group):
            rows = counts.tiles.new_zeros(num_slots, len(hmm.group_sizes), num_slots)
            rows[:, pairs.to_group[first:last]] = counts.tiles[first:last].transpose(0, 1)
            rows = rows.view(num_slots, -1)
            average = rows.sum(0, keepdim=True) / rows.sum().clamp(min=TINY)
            hmm.transition_logits[group * num_slots : (group + 1) * num_slots] = smoothed(rows, average, smoothing, 1)
        return
    departures = counts.tiles.sum(-1)
    hmm.block_logits.zero_()
    into_block = torch.zeros_like(hmm.block_logits)
    into_block[pairs.from_group, :, pairs.to_group] = departures
    average = into_block.sum(1, keepdim=True) / into_block.sum((1, 2), keepdim=True).clamp(min=TINY)
    hmm.block_logits.copy_(smoothed(into_block, average, smoothing, 2))
    hmm.tile_logits.zero_()
    average = counts.tiles.sum(1, keepdim=True) / counts.tiles.sum((1, 2), keepdim=True).clamp(min=TINY)
    hmm.tile_logits[pairs.from_group, pairs.to_group] = smoothed(counts.tiles, average, smoothing, 2)
