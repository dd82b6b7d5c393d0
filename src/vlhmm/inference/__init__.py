"""Exact inference on chains whose tokens admit K states each: potentials -> messages.

`forward`, `posteriors`, `add_expected_counts` and `log_likelihood` choose the compiled kernels on a
CPU and plain torch elsewhere; both compute the same numbers (`numba_backend.py`, `torch_backend.py`), and
`log_space.py` is the log-space reference implementation they are tested against.
"""

import os

import torch
from jaxtyping import Float
from torch import Tensor

from vlhmm.inference import log_space, low_rank_torch, torch_backend
from vlhmm.inference.low_rank_torch import ChannelCounts, ChannelPotentials
from vlhmm.inference.types import Chain, Counts, Forward, Potentials
from vlhmm.inference.viterbi import sample_posterior, viterbi

__all__ = [
    "Chain",
    "ChannelCounts",
    "ChannelPotentials",
    "Counts",
    "Forward",
    "Potentials",
    "add_expected_counts",
    "forward",
    "log_likelihood",
    "posteriors",
    "log_space",
    "sample_posterior",
    "use_kernels",
    "viterbi",
]


def use_kernels(table: Tensor) -> bool:
    """Return whether the compiled kernels serve this table: on a CPU, unless VLHMM_KERNELS=0."""
    return table.device.type == "cpu" and os.environ.get("VLHMM_KERNELS", "1") != "0"


def by_kernels(potentials: Potentials) -> bool:
    """Return whether the kernels are the fast way: not where one tile serves all edges, which is one product per step."""
    return use_kernels(potentials.emission) and len(potentials.tiles) != 1


def forward(
    potentials: Potentials, chain: Chain, carry: Float[Tensor, "batch slot"] | None = None, workspace=None
) -> Forward:
    """Return filtered posteriors p(z_t | x_<=t) and log p(x_t | x_<t), in O(T K^2) a sequence."""
    if by_kernels(potentials):
        from vlhmm.inference import numba_backend

        return numba_backend.forward(potentials, chain, carry, workspace)
    return torch_backend.forward(potentials, chain, carry)


def posteriors(
    potentials: Potentials, chain: Chain, carry: Float[Tensor, "batch slot"] | None = None
) -> Float[Tensor, "batch time slot"]:
    """Return smoothed posteriors p(z_t | x), zero on padding, in O(T K^2) a sequence."""
    passed = forward(potentials, chain, carry)
    if by_kernels(potentials):
        from vlhmm.inference import numba_backend

        return numba_backend.backward(potentials, chain, passed)[0]
    return torch_backend.backward(potentials, chain, passed)[0]


def add_expected_counts(
    counts: Counts | ChannelCounts,
    potentials: Potentials | ChannelPotentials,
    chain: Chain,
    carry: Float[Tensor, "batch slot"] | None = None,
    workspace=None,
) -> Forward:
    """Add a batch's expected counts to `counts`, in place; returns the forward pass.

    What it gathers may still have to be multiplied by the tables, once for many batches: call `finish_counts` after
    the last.
    """
    if isinstance(potentials, ChannelPotentials):
        assert isinstance(counts, ChannelCounts)
        if use_kernels(potentials.emission):
            from vlhmm.inference import low_rank_numba

            return low_rank_numba.add_expected_counts(counts, potentials, chain, carry, workspace)
        return low_rank_torch.add_expected_counts(counts, potentials, chain, carry)
    assert isinstance(counts, Counts)
    if by_kernels(potentials):
        from vlhmm.inference import numba_backend

        workspace = workspace or numba_backend.Workspace()
        passed = numba_backend.forward(potentials, chain, carry, workspace)
        posterior, right = numba_backend.backward(potentials, chain, passed, workspace)
        numba_backend.add_edge_sums(counts.tiles, potentials.emission, chain, passed.alpha, right, carry)
        numba_backend.add_table_counts(counts, chain, posterior)
        return passed
    return torch_backend.add_expected_counts(counts, potentials, chain, carry)


def finish_counts(counts: Counts | ChannelCounts, potentials: Potentials | ChannelPotentials) -> Counts | ChannelCounts:
    """Return expected counts, from what `add_expected_counts` gathered under these potentials."""
    if isinstance(counts, ChannelCounts):
        assert isinstance(potentials, ChannelPotentials)
        return low_rank_torch.finish_counts(counts, potentials)
    assert isinstance(potentials, Potentials)
    if by_kernels(potentials):
        from vlhmm.inference import numba_backend

        numba_backend.multiply_tiles(counts.tiles, potentials.tiles)
    return counts


class _LogLikelihood(torch.autograd.Function):
    """log p of a batch, whose gradient in a log-potential is its expected count."""

    @staticmethod
    def forward(ctx, log_start, log_emission, log_tiles, chain, carry):
        potentials = Potentials(log_start.exp(), log_emission.exp(), log_tiles.exp())
        counts = Counts.zeros_like(potentials)
        passed = add_expected_counts(counts, potentials, chain, carry)
        ctx.save_for_backward(*finish_counts(counts, potentials))
        return passed.log_scale.sum()

    @staticmethod
    def backward(ctx, *gradients):
        (gradient,) = gradients
        return *(count * gradient.to(count.dtype) for count in ctx.saved_tensors), None, None


def log_likelihood(
    log_start: Float[Tensor, "block slot"],
    log_emission: Float[Tensor, "word slot"],
    log_tiles: Float[Tensor, "pair slot slot"],
    chain: Chain,
    carry: Float[Tensor, "batch slot"] | None = None,
) -> Float[Tensor, ""]:
    """Return log p(x) of the whole batch in float64, differentiable in the log-potentials by the posterior identity.

    The carry is a constant: gradients are truncated there.
    """
    return _LogLikelihood.apply(log_start, log_emission, log_tiles, chain, carry)
