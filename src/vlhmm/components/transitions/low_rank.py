r"""Block-factored transitions whose second factor has low rank: no tile, no exponential of a pair of states.

    p(z' | z) = p(m' | z) \sum_r \phi_z(r) \psi_{z'}(r) / \sum_r \phi_z(r) \Psi_{m'}(r),
    \phi = exp(u), \psi = exp(v), \Psi_{m'} = \sum of \psi over the states of block m'

The channel r is a hidden variable between z and z'. Its expected counts (`ChannelCounts`) are all that training needs,
and they do not grow with the pairs of blocks that occur: that is what makes many blocks affordable.
"""

from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from vlhmm.components.transitions.tiles import BlockIds, TileCounts, block_bound, columns_to_log, detached, runs
from vlhmm.inference.low_rank_torch import ChannelCounts


@dataclass(frozen=True, eq=False)
class LowRank:
    """Block-factored transitions of low rank within blocks. `leave` has the factors for inference through channels."""

    log_block: Float[Tensor, "block slot entered"]  # log p(m' | z)
    source: Float[Tensor, "block slot channel"]  # u
    target: Float[Tensor, "entered to_slot channel"]  # v
    enterable: Bool[Tensor, "entered to_slot"] | None

    @property
    def num_states(self) -> int:
        return self.log_block.shape[0] * self.log_block.shape[1]

    def to(self, **how: Any) -> "LowRank":
        """Return a detached copy with its factors in another dtype or on another device."""
        moved = detached(self, ("log_block", "source", "target"), **how)
        moved["log_block"] = moved["log_block"].log_softmax(-1)  # a wider type shows what rounding had left over
        return replace(self, **moved)

    def largest_score(self) -> Tensor:
        """Return a bound on the absolute scores: exponentials of differences, not a product of the two."""
        return block_bound(self.log_block) + 2 * torch.stack([self.source.abs().amax(), self.target.abs().amax()]).amax()

    def factors(self) -> tuple[Float[Tensor, "block slot channel"], Float[Tensor, "entered to_slot channel"]]:
        """Return (phi, psi), each up to a factor that the normalization removes: one per state, and one per block."""
        v = self.target
        allowed = columns_to_log(self.enterable, v.dtype)
        if allowed is not None:
            v = v + allowed[..., None]
        phi = (self.source - self.source.detach().amax(-1, keepdim=True)).exp()
        return phi, (v - v.detach().amax((1, 2), keepdim=True)).exp()

    @torch.no_grad()
    def leave(self, phi: Tensor, psi: Tensor, from_block: BlockIds, to_block: BlockIds) -> Float[Tensor, "pair slot"]:
        """Return p(m' | z) / (phi_z . Psi_m') for the states z of each pair's first block."""
        mass, log_block = psi.sum(1), self.log_block.detach()
        result = phi.new_empty(len(from_block), phi.shape[1])
        for block, first, last in runs(from_block):
            to = to_block[first:last]
            torch.div(log_block[block][:, to].exp().t(), mass[to] @ phi[block].t(), out=result[first:last])
        return result

    @torch.no_grad()
    def tiles(self, from_block: BlockIds, to_block: BlockIds, out: Tensor | None = None) -> TileCounts:
        """Return A[states of from][:, states of to] for each pair. Pairs are sorted by `from`."""
        phi, psi = self.factors()
        leave, num_slots = self.leave(phi, psi, from_block, to_block), phi.shape[1]
        if out is None:
            out = phi.new_empty(len(from_block), num_slots, num_slots)
        for block, first, last in runs(from_block):
            through = leave[first:last, :, None] * phi[block]
            torch.bmm(through, psi[to_block[first:last]].transpose(1, 2), out=out[first:last])
        return out

    @torch.no_grad()
    def rows(self, states: Int[Tensor, " n"], out: Tensor | None = None) -> Float[Tensor, "n state"]:
        """Return p(. | z) for each given state. O(n S r)."""
        phi, psi = (factor.flatten(0, 1) for factor in self.factors())
        rows = torch.mm(phi[states], psi.t(), out=out).view(len(states), self.log_block.shape[2], -1)
        into_block = self.log_block.flatten(0, 1)[states].exp()
        rows *= (into_block / rows.sum(-1))[..., None]
        return rows.view(len(states), -1)

    def into(self, blocks: BlockIds, width: int) -> "LowRank":
        """Return the same transitions into the first `width` states of some blocks: `rows` has these columns alone."""
        return replace(
            self,
            log_block=self.log_block[:, :, blocks],
            target=self.target[blocks, :width],
            enterable=None if self.enterable is None else self.enterable[blocks, :width],
        )

    def expected_log_likelihood(
        self,
        from_block: BlockIds,
        to_block: BlockIds,
        counts: ChannelCounts,
        value: bool = True,
        tiles: TileCounts | None = None,
    ) -> Tensor:
        """Return sum of counts * log-probabilities of leaving, channels and arriving, differentiable.

        Without `value`, the channels' part is not computed (it is 0); the gradient is the same.
        """
        block_part = (counts.leave * self.log_block[from_block, :, to_block]).sum()
        phi, psi = self.factors()
        return block_part + _Channels.apply(phi, psi, from_block, to_block, counts, value)

    def sample(self, states: Int[Tensor, " n"], generator: torch.Generator) -> Int[Tensor, " n"]:
        """Draw z' ~ p(. | z) for each given z: first its block, then its slot. O(M + K r) each."""
        num_slots = self.log_block.shape[1]
        block, slot = states // num_slots, states % num_slots
        to = torch.multinomial(self.log_block[block, slot].exp(), 1, generator=generator)[:, 0]
        phi, psi = self.factors()
        within = torch.einsum("nr,nkr->nk", phi[block, slot], psi[to])
        return to * num_slots + torch.multinomial(within, 1, generator=generator)[:, 0]


class _Channels(torch.autograd.Function):
    r"""sum of source counts log phi + target counts log psi - leaving counts log(phi . Psi): value and gradient in one pass."""

    @staticmethod
    def forward(ctx, phi, psi, from_block, to_block, counts: ChannelCounts, with_value):
        phi, psi = phi.detach(), psi.detach()
        tiny = torch.finfo(phi.dtype).tiny
        d_phi, d_psi = counts.source / phi.clamp(min=tiny), counts.target / psi.clamp(min=tiny)
        mass, d_mass = psi.sum(1), torch.zeros_like(psi[:, 0])
        value = torch.zeros((), dtype=torch.float64, device=phi.device)
        for block, first, last in runs(from_block):
            to, left = to_block[first:last], counts.leave[first:last]
            entered = mass[to]  # (n, R)
            normalizer = entered @ phi[block].t()  # (n, K)
            weight = left / normalizer
            d_phi[block].addmm_(weight.t(), entered, alpha=-1)
            d_mass.index_add_(0, to, weight @ phi[block], alpha=-1)
            if with_value:
                value -= (left * normalizer.log()).sum(dtype=torch.float64)
        d_psi += d_mass[:, None]
        if with_value:
            for count, factor in ((counts.source, phi), (counts.target, psi)):
                value += (count * factor.clamp(min=tiny).log()).sum(dtype=torch.float64)
        ctx.save_for_backward(d_phi, d_psi)
        return value.to(phi.dtype)

    @staticmethod
    def backward(ctx, *gradients):
        d_phi, d_psi = ctx.saved_tensors
        return gradients[0] * d_phi, gradients[0] * d_psi, None, None, None, None
