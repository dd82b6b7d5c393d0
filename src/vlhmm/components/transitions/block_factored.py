"""Block-factored transitions: p(z' | z) = p(m' | z) p(z' | z, m'), m' the block of z'."""

from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from vlhmm.components.transitions.tiles import (
    ENTRIES_AT_ONCE,
    EVERY,
    BlockIds,
    TileCounts,
    block_bound,
    columns_to_log,
    cut,
    detached,
    runs,
)


@dataclass(frozen=True, eq=False)
class BlockFactored:
    r"""p(z' | z) = p(m' | z) p(z' | z, m'): a softmax over blocks times a softmax over the states of one block.

    Exactly normalized, and able to represent every transition matrix. In the scalar parameterization, `logits` holds free
    within-block logits (M, M, K, K) instead of factors.
    """

    log_block: Float[Tensor, "block slot entered"]  # log p(m' | z)
    source: Float[Tensor, "block slot width"] | None
    target: Float[Tensor, "entered to_slot width"] | None
    logits: Float[Tensor, "block entered slot to_slot"] | None
    enterable: Bool[Tensor, "entered to_slot"] | None

    @property
    def num_states(self) -> int:
        return self.log_block.shape[0] * self.log_block.shape[1]

    def to(self, **how: Any) -> "BlockFactored":
        """Return a detached copy with its factors in another dtype or on another device."""
        moved = detached(self, ("log_block", "source", "target", "logits"), **how)
        moved["log_block"] = moved["log_block"].log_softmax(-1)  # a wider type shows what rounding had left over
        return replace(self, **moved)

    def largest_score(self) -> Tensor:
        """Return a bound on the absolute scores, |u| |v| times their width. It is not finite if one of them overflows."""
        bound = block_bound(self.log_block)
        if self.logits is not None:
            return bound + self.logits.abs().amax()
        assert self.source is not None and self.target is not None
        return bound + self.source.abs().amax() * self.target.abs().amax() * self.source.shape[-1]

    def within(self, scores: Float[Tensor, "*n slot"], to_block: Tensor) -> Tensor:
        """Replace the scores of entering the states of `to_block`, (..., K), by their softmax over the last axis."""
        allowed = columns_to_log(self.enterable, scores.dtype)
        if allowed is not None:
            scores += allowed[to_block]
        return torch.softmax(scores, -1, out=scores)

    @torch.no_grad()
    def rows(self, states: Int[Tensor, " n"], out: Tensor | None = None) -> Float[Tensor, "n state"]:
        """Return p(. | z) for each given state. O(n S w)."""
        num_slots, num_entered = self.log_block.shape[1:]
        block, slot = states // num_slots, states % num_slots
        every = torch.arange(num_entered, device=states.device)
        if self.logits is not None:
            scores = self.logits[block, :, slot].contiguous()
        else:
            assert self.source is not None and self.target is not None
            scores = torch.mm(self.source[block, slot], self.target.flatten(0, 1).t(), out=out)
            scores = scores.view(len(states), num_entered, -1)
        self.within(scores, every)
        scores *= self.log_block[block, slot].exp()[..., None]
        return scores.view(len(states), -1)

    def into(self, blocks: BlockIds, width: int) -> "BlockFactored":
        """Return the same transitions into the first `width` states of some blocks: `rows` has these columns alone."""
        return replace(
            self,
            log_block=self.log_block[:, :, blocks],
            target=None if self.target is None else self.target[blocks, :width],
            logits=None if self.logits is None else self.logits[:, blocks, :, :width],
            enterable=None if self.enterable is None else self.enterable[blocks, :width],
        )

    @torch.no_grad()
    def tiles(self, from_block: BlockIds, to_block: BlockIds, out: Tensor | None = None) -> TileCounts:
        """Return A[states of from][:, states of to] for each pair. Pairs are sorted by `from`. O(P K^2 w)."""
        num_slots = self.log_block.shape[1]
        if out is None:
            out = self.log_block.new_empty(len(from_block), num_slots, num_slots)
        for block, first, last in runs(from_block):
            to = to_block[first:last]
            tiles = out[first:last]
            if self.logits is not None:
                tiles.copy_(self.logits[block, to])
                self.within(tiles.transpose(0, 1), to)
            else:
                assert self.source is not None and self.target is not None
                entered = self.target[to]
                torch.matmul(self.source[block], entered.transpose(1, 2), out=tiles)
                allowed = columns_to_log(self.enterable, tiles.dtype)
                if allowed is not None:
                    tiles += allowed[to][:, None]
                torch.softmax(tiles, -1, out=tiles)
            tiles *= self.log_block[block, :, to].exp().t()[..., None]
        return out

    def expected_log_likelihood(
        self,
        from_block: BlockIds,
        to_block: BlockIds,
        counts: TileCounts,
        value: bool = True,
        tiles: TileCounts | None = None,
        slots: slice = EVERY,
    ) -> Tensor:
        """Return sum_p sum_ij counts[p, i, j] log A[p, i, j] over the `slots` i: a block part plus a within-block part.

        Without `value`, the second part is not computed, which saves a pass; the gradient is the same. If the `tiles` of these
        pairs under these parameters are given, they are used instead of being computed again.
        """
        counts = counts[:, slots]
        departures = counts.sum(-1)  # (P, rows): expected moves from a state into a block
        block_part = (departures * self.log_block[from_block, slots, to_block]).sum()
        if self.logits is not None:
            scores = self.logits[from_block, to_block, slots]
            allowed = columns_to_log(self.enterable, scores.dtype)
            if allowed is not None:
                scores = scores + allowed[to_block][:, None]
            used = counts > 0
            return block_part + (counts[used] * scores.log_softmax(-1)[used]).sum()
        known = None if tiles is None else tiles[:, slots]
        within = _TiledSoftmax.apply(
            self.source, self.target, self, from_block, to_block, counts, departures, value, known, slots
        )
        return block_part + within

    def sample(self, states: Int[Tensor, " n"], generator: torch.Generator) -> Int[Tensor, " n"]:
        """Draw z' ~ p(. | z) for each given z: first its block, then its slot. O(M + K w) each."""
        num_slots = self.log_block.shape[1]
        block, slot = states // num_slots, states % num_slots
        to = torch.multinomial(self.log_block[block, slot].exp(), 1, generator=generator)[:, 0]
        if self.logits is not None:
            scores = self.logits[block, to, slot].clone()
        else:
            assert self.source is not None and self.target is not None
            scores = torch.einsum("nd,nkd->nk", self.source[block, slot], self.target[to])
        within = self.within(scores, to)
        return to * num_slots + torch.multinomial(within, 1, generator=generator)[:, 0]


class _TiledSoftmax(torch.autograd.Function):
    """sum counts * log softmax(u . v) within tiles: value and gradient in one pass, one source block at a time.

    The tiles of a block are side by side, (rows, n, K), so that each of the three products of a block is one wide matrix
    product. With separate products in memory order it runs at half the speed.
    """

    @staticmethod
    def forward(
        ctx, source, target, transition: BlockFactored, from_block, to_block, counts, departures, with_value, known, slots
    ):  # fmt: skip
        source, target, log_block = source.detach(), target.detach(), transition.log_block.detach()
        d_source, d_target = torch.zeros_like(source), torch.zeros_like(target)
        value = torch.zeros((), dtype=torch.float64, device=source.device)
        allowed = columns_to_log(transition.enterable, source.dtype)
        num_rows, (num_slots, width) = counts.shape[1], target.shape[1:]
        alive = transition.enterable
        living = [num_rows] * len(source) if alive is None else alive[:, slots].sum(1).tolist()
        parts = cut(runs(from_block), max(1, ENTRIES_AT_ONCE // max(1, num_rows * num_slots)))
        widest = max((last - first for _, first, last in parts), default=0)
        buffer = counts.new_empty(widest * num_rows * num_slots)
        entered_buffer, d_entered_buffer = (counts.new_empty(widest, num_slots, width) for _ in range(2))
        for block, first, last in parts:
            rows, n = living[block], last - first  # states after them, in a block smaller than others, are never left
            to, tiles = to_block[first:last], counts[first:last, :rows].transpose(0, 1)
            ours, entered = source[block, slots][:rows], entered_buffer[:n]  # (rows, w), (n, K, w)
            torch.index_select(target, 0, to, out=entered)
            wide = buffer[: rows * n * num_slots].view(rows, n * num_slots)
            scores = wide.view(rows, n, num_slots)
            weight = -departures[first:last, :rows].t()
            if known is not None and not with_value:
                # a tile is p(block | z) p(z' | z, block): the second factor is what the softmax would give
                into_block = log_block[block, slots][:rows, to].exp().clamp(min=torch.finfo(scores.dtype).tiny)
                torch.mul(known[first:last, :rows].transpose(0, 1), (weight / into_block)[..., None], out=scores)
            else:
                torch.mm(ours, entered.flatten(0, 1).t(), out=wide)
                if allowed is not None:
                    scores += allowed[to]
                if with_value:
                    used = tiles > 0
                    value += (tiles[used] * scores[used]).sum(dtype=torch.float64)
                    value += (weight * scores.logsumexp(-1)).sum(dtype=torch.float64)
                torch.softmax(scores, -1, out=scores)
                scores *= weight[..., None]
            scores += tiles  # d(expected log-likelihood) / d(logit)
            d_source[block, slots][:rows].addmm_(wide, entered.flatten(0, 1))
            d_entered = d_entered_buffer[:n]
            torch.mm(wide.t(), ours, out=d_entered.flatten(0, 1))
            d_target.index_add_(0, to, d_entered)
        ctx.save_for_backward(d_source, d_target)
        return value.to(source.dtype)

    @staticmethod
    def backward(ctx, *gradients):
        d_source, d_target = ctx.saved_tensors
        return gradients[0] * d_source, gradients[0] * d_target, *[None] * 8
