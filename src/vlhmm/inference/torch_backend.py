r"""Forward-backward in probability space with one scaling constant per step, in plain torch.

$\hat\alpha_t = p(z_t | x_{\le t})$ and $c_t = p(x_t | x_{<t})$, so $\log p(x) = \sum_t \log c_t$. Runs on
any device; on a CPU the compiled form in `numba_backend` is the fast one, and this is its reference. Where all edges share one
tile (every state emits every word) a step is one matrix product for the whole batch, and this is the fast one.
"""

import torch
from jaxtyping import Float
from torch import Tensor

from vlhmm.inference.types import Chain, Counts, Forward, Potentials


def onward(rows: Float[Tensor, "n slot"], tiles: Tensor, edge: Tensor) -> Float[Tensor, "n slot"]:
    """Return rows[b] @ tiles[edge[b]]"""
    return rows @ tiles[0] if len(tiles) == 1 else torch.bmm(rows[:, None], tiles[edge])[:, 0]


def forward(potentials: Potentials, chain: Chain, carry: Float[Tensor, "batch slot"] | None = None) -> Forward:
    """Return filtered posteriors and log p(x_t | x_<t), in O(T K^2) a sequence; padding gets zeros."""
    start, emission, tiles = potentials
    batch, time = chain.emit_of.shape
    size = emission.shape[1]
    alpha = emission.new_zeros(batch, time, size)
    scale = emission.new_ones(batch, time)
    previous = emission.new_zeros(batch, size) if carry is None else carry
    live = chain.live
    for t in range(time):
        arrive = start[chain.start_of[:, t]]
        moves = chain.edge_of[:, t] >= 0
        if moves.any():
            moved = onward(previous[moves], tiles, chain.edge_of[moves, t])
            arrive = arrive.index_copy(0, moves.nonzero()[:, 0], moved)
        joint = arrive * emission[chain.emit_of[:, t]]
        total = joint.sum(1)
        filtered = joint / torch.where(total > 0, total, torch.ones_like(total))[:, None]
        alpha[:, t] = filtered * live[:, t, None]
        scale[:, t] = torch.where(live[:, t], total, torch.ones_like(total))
        previous = torch.where(live[:, t, None], filtered, previous)
    return Forward(alpha, scale.double().log())


def backward(potentials: Potentials, chain: Chain, forward: Forward) -> tuple[Tensor, Tensor]:
    r"""Return $p(z_t | x)$ and $r_t = \beta_t \, p(x_t | z_t) / c_t$, both (B, T, K), zero on padding.

    The expected count of an edge is $\hat\alpha_{t-1}(i) A_{ij} r_t(j)$.
    """
    _, emission, tiles = potentials
    alpha, log_scale = forward
    posterior, right = torch.zeros_like(alpha), torch.zeros_like(alpha)
    batch, time, size = alpha.shape
    beta = alpha.new_ones(batch, size)
    inverse_scale = torch.where(log_scale > -torch.inf, (-log_scale).exp(), 0).to(alpha.dtype)  # impossible text: 0
    live, transposed = chain.live, tiles.transpose(1, 2)
    for t in range(time - 1, -1, -1):
        inside = live[:, t, None]
        posterior[:, t] = alpha[:, t] * beta * inside
        right[:, t] = emission[chain.emit_of[:, t]] * beta * inverse_scale[:, t, None] * inside
        moves = (chain.edge_of[:, t] >= 0) & live[:, t]
        beta = torch.where(inside, torch.ones_like(beta), beta)  # before a fresh start nothing is owed
        if moves.any():
            moved = onward(right[moves, t], transposed, chain.edge_of[moves, t])
            beta = beta.index_copy(0, moves.nonzero()[:, 0], moved)
    return posterior, right


def add_expected_counts(
    counts: Counts,
    potentials: Potentials,
    chain: Chain,
    carry: Float[Tensor, "batch slot"] | None = None,
) -> Forward:
    """Add the expected counts of a batch to `counts`, in place; returns the forward pass."""
    passed = forward(potentials, chain, carry)
    posterior, right = backward(potentials, chain, passed)
    live, tiles = chain.live, potentials.tiles
    counts.emission.index_add_(0, chain.emit_of[live], posterior[live])
    fresh = live & (chain.edge_of < 0)
    counts.start.index_add_(0, chain.start_of[fresh], posterior[fresh])
    previous = torch.zeros_like(passed.alpha)
    previous[:, 1:] = passed.alpha[:, :-1]
    if carry is not None:
        previous[:, 0] = carry
    if len(tiles) == 1:
        moves = live & (chain.edge_of >= 0)
        counts.tiles[0] += tiles[0] * (previous[moves].t() @ right[moves])
        return passed
    for t in range(chain.emit_of.shape[1]):
        moves = live[:, t] & (chain.edge_of[:, t] >= 0)
        if moves.any():
            edge = chain.edge_of[moves, t]
            outer = previous[moves, t, :, None] * right[moves, t, None, :]
            counts.tiles.index_add_(0, edge, outer * tiles[edge])
    return passed
