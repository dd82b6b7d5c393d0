r"""Exact inference where every transition runs through R channels: tiles that are never made.

    A_p(i, j) = leave_p(i) \sum_r source_{from(p)}(i, r) target_{to(p)}(j, r)

A step is two products with a (K, R) table in place of one with a (K, K) tile, and a tile need not exist, however
many pairs of blocks occur. The expected counts of a pair's K x K moves are not needed either: the channel is a hidden
variable like any other, and its counts (which state took which channel, which channel led to which state) are sums
over blocks, not over pairs.

Plain torch here, for every device; on a CPU `low_rank_numba` computes the same numbers.
"""

from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from vlhmm.inference.types import Chain, Forward


class ChannelPotentials(NamedTuple):
    """The tables a chain is scored with (probabilities, one dtype, one device)."""

    start: Float[Tensor, "block slot"]
    emission: Float[Tensor, "word slot"]
    leave: Float[Tensor, "pair slot"]
    source: Float[Tensor, "block slot channel"]
    target: Float[Tensor, "block slot channel"]
    from_row: Int[Tensor, " pair"]  # the row of `source` that a pair leaves from ...
    to_row: Int[Tensor, " pair"]  # ... and that of `target` it leads to


class ChannelCounts(NamedTuple):
    """Expected counts: the gradient of log p(x) in the logarithm of each table."""

    start: Float[Tensor, "block slot"]
    emission: Float[Tensor, "word slot"]
    leave: Float[Tensor, "pair slot"]
    source: Float[Tensor, "block slot channel"]
    target: Float[Tensor, "block slot channel"]

    @staticmethod
    def zeros_like(potentials: ChannelPotentials) -> "ChannelCounts":
        return ChannelCounts(*(torch.zeros_like(table) for table in potentials[:5]))


class Messages(NamedTuple):
    """What both passes leave behind, all zero on padding and where a chain restarts, but for `posterior`."""

    posterior: Float[Tensor, "batch time slot"]  # p(z_t | x)
    before: Float[Tensor, "batch time slot"]  # p(z_t-1 | x), of the state that is left
    leaving: Float[Tensor, "batch time slot"]  # p(z_t-1 | x_<t) leave(z_t-1)
    through: Float[Tensor, "batch time channel"]  # leaving @ source
    right: Float[Tensor, "batch time slot"]  # p(x_t | z_t) beta_t(z_t) / c_t
    back: Float[Tensor, "batch time channel"]  # right @ target


def forward_backward(
    potentials: ChannelPotentials, chain: Chain, carry: Float[Tensor, "batch slot"] | None = None
) -> tuple[Forward, Messages]:
    """Return both passes, O(T K R) a sequence."""
    start, emission, leave, source, target, from_row, to_row = potentials
    batch, time = chain.emit_of.shape
    size, width = source.shape[1:]
    live = chain.live
    alpha, before, leaving, right, posterior = (emission.new_zeros(batch, time, size) for _ in range(5))
    through, back = (emission.new_zeros(batch, time, width) for _ in range(2))
    scale = emission.new_ones(batch, time)
    held = emission.new_zeros(batch, size) if carry is None else carry
    for t in range(time):
        arrive = start[chain.start_of[:, t]]
        moves = ((chain.edge_of[:, t] >= 0) & live[:, t]).nonzero()[:, 0]
        if len(moves):
            edge = chain.edge_of[moves, t]
            leaving[moves, t] = held[moves] * leave[edge]
            through[moves, t] = torch.bmm(leaving[moves, t, None], source[from_row[edge]])[:, 0]
            arrive[moves] = torch.bmm(target[to_row[edge]], through[moves, t, :, None])[..., 0]
        joint = arrive * emission[chain.emit_of[:, t]]
        total = joint.sum(1)
        filtered = joint / torch.where(total > 0, total, torch.ones_like(total))[:, None]
        alpha[:, t] = filtered * live[:, t, None]
        scale[:, t] = torch.where(live[:, t], total, torch.ones_like(total))
        held = torch.where(live[:, t, None], filtered, held)
    beta = alpha.new_ones(batch, size)
    inverse_scale = torch.where(scale > 0, 1 / scale, 0)  # impossible text: 0
    for t in range(time - 1, -1, -1):
        inside = live[:, t, None]
        posterior[:, t] = alpha[:, t] * beta * inside
        right[:, t] = emission[chain.emit_of[:, t]] * beta * inverse_scale[:, t, None] * inside
        moves = ((chain.edge_of[:, t] >= 0) & live[:, t]).nonzero()[:, 0]
        beta = torch.where(inside, torch.ones_like(beta), beta)  # before a fresh start nothing is owed
        if len(moves):
            edge = chain.edge_of[moves, t]
            back[moves, t] = torch.bmm(right[moves, t, None], target[to_row[edge]])[:, 0]
            taken = torch.bmm(source[from_row[edge]], back[moves, t, :, None])[..., 0]
            before[moves, t] = leaving[moves, t] * taken
            beta = beta.index_copy(0, moves, leave[edge] * taken)
    return Forward(alpha, scale.double().log()), Messages(posterior, before, leaving, through, right, back)


def add_expected_counts(
    counts: ChannelCounts, potentials: ChannelPotentials, chain: Chain, carry: Tensor | None = None
) -> Forward:
    """Add a batch's counts to `counts`, those of `source` and `target` still to be multiplied by the tables."""
    passed, messages = forward_backward(potentials, chain, carry)
    live = chain.live
    counts.emission.index_add_(0, chain.emit_of[live], messages.posterior[live])
    fresh, moves = live & (chain.edge_of < 0), live & (chain.edge_of >= 0)
    counts.start.index_add_(0, chain.start_of[fresh], messages.posterior[fresh])
    edge = chain.edge_of[moves]
    counts.leave.index_add_(0, edge, messages.before[moves])
    sides = (
        (counts.source, potentials.from_row[edge], messages.leaving[moves], messages.back[moves]),
        (counts.target, potentials.to_row[edge], messages.right[moves], messages.through[moves]),
    )
    for sums, rows, state, channel in sides:
        for row in rows.unique().tolist():
            chosen = rows == row
            sums[row].addmm_(state[chosen].t(), channel[chosen])
    return passed


def finish_counts(counts: ChannelCounts, potentials: ChannelPotentials) -> ChannelCounts:
    """Return expected counts, from what was gathered under these potentials."""
    counts.source.mul_(potentials.source)
    counts.target.mul_(potentials.target)
    return counts
