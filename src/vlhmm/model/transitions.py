r"""Transition potentials of two kinds, behind one interface: what every later stage reads of the matrix A.

`Softmax`        p(z' | z) = softmax over all states of u_z . v_z'              (the paper's model)
`BlockFactored`  p(z' | z) = p(m' | z) p(z' | z, m'), m' the block of z'        (ours)

Each comes from low-rank factors (neural) or from free logits (scalar). The |Z| x |Z| matrix is
never held: tiles are made for the block pairs that occur, and the gradient of the expected complete
log-likelihood streams over row tiles.

A transition answers:
    tiles(from_group, to_group)     (P, K, K) probabilities of the given block pairs
    rows(states)                    (n, S) probabilities of leaving the given states
    expected_log_likelihood(...)    sum of counts * log-probabilities, differentiable
    sample(states, generator)       a next state for each given one
"""

from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

Groups = Int[Tensor, " pair"]
TileCounts = Float[Tensor, "pair slot slot"]


def columns_to_log(mask: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """0 where a state may be entered, -inf where not; None if all may."""
    if mask is None or bool(mask.all()):
        return None
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(~mask, -torch.inf)


def runs(from_group: Tensor) -> list[tuple[int, int, int]]:
    """(group, first, last) for each run of equal entries in a sorted list of pairs."""
    groups, sizes = torch.unique_consecutive(from_group, return_counts=True)
    ends = sizes.cumsum(0).tolist()
    return [(g, end - n, end) for g, n, end in zip(groups.tolist(), sizes.tolist(), ends, strict=True)]


@dataclass(frozen=True, eq=False)
class Softmax:
    r"""p(z' | z) = exp(u_z . v_z') / sum over all states. `states_of_group` is None for a partition.

    `logits` holds a free |Z| x |Z| matrix instead of factors in the scalar parameterization.
    """

    source: Float[Tensor, "state width"] | None
    target: Float[Tensor, "state width"] | None
    logits: Float[Tensor, "state state"] | None
    enterable: Bool[Tensor, " state"] | None
    states_of_group: Int[Tensor, "group slot"]
    partition: bool = True

    @property
    def num_states(self) -> int:
        factor = self.logits if self.logits is not None else self.source
        assert factor is not None
        return factor.shape[0]

    def to(self, **how: Any) -> "Softmax":
        """The same, detached, with its factors in another dtype or on another device."""
        moved = {
            name: None if getattr(self, name) is None else getattr(self, name).detach().to(**how)
            for name in ("source", "target", "logits")
        }
        return replace(self, **moved)

    def rows(self, states: Int[Tensor, " n"], out: Tensor | None = None) -> Float[Tensor, "n state"]:
        """p(. | z) for each given state, O(n S h)."""
        if self.logits is not None:
            scores = self.logits[states]
        else:
            assert self.source is not None and self.target is not None
            scores = torch.mm(self.source[states], self.target.t(), out=out)
        allowed = columns_to_log(self.enterable, scores.dtype)
        if allowed is not None:
            scores += allowed
        return torch.softmax(scores, -1, out=scores) if not scores.requires_grad else scores.softmax(-1)

    @torch.no_grad()
    def tiles(self, from_group: Groups, to_group: Groups, out: Tensor | None = None) -> TileCounts:
        """A[states of from][:, states of to] for each pair; pairs are sorted by `from`."""
        num_slots = self.states_of_group.shape[1]
        factor = self.logits if self.logits is not None else self.source
        assert factor is not None
        if out is None:
            out = factor.new_empty(len(from_group), num_slots, num_slots)
        buffer = factor.new_empty(num_slots, self.num_states)
        for group, first, last in runs(from_group):
            rows = self.rows(self.states_of_group[group], buffer if self.logits is None else None)
            if self.partition:
                grouped = rows.view(num_slots, -1, num_slots)
                torch.index_select(grouped.transpose(0, 1), 0, to_group[first:last], out=out[first:last])
            else:
                out[first:last] = rows[:, self.states_of_group[to_group[first:last]]].transpose(0, 1)
        return out

    def expected_log_likelihood(self, from_group: Groups, to_group: Groups, counts: TileCounts) -> Tensor:
        """sum_p sum_ij counts[p, i, j] log A[p, i, j]; its gradient streams over the rows of one block at a time."""
        if self.logits is not None:
            return self.scalar_log_likelihood(from_group, to_group, counts)
        return _StreamedSoftmax.apply(self.source, self.target, self, from_group, to_group, counts)

    def scalar_log_likelihood(self, from_group: Tensor, to_group: Tensor, counts: Tensor) -> Tensor:
        assert self.logits is not None
        value = torch.zeros((), dtype=counts.dtype, device=counts.device)
        allowed = columns_to_log(self.enterable, counts.dtype)
        for group, first, last in runs(from_group):
            states = self.states_of_group[group]
            log_rows = (self.logits[states] if allowed is None else self.logits[states] + allowed).log_softmax(-1)
            dense = dense_rows(self, states, to_group[first:last], counts[first:last])
            used = dense > 0
            value = value + (dense[used] * log_rows[used]).sum()
        return value

    def sample(self, states: Int[Tensor, " n"], generator: torch.Generator) -> Int[Tensor, " n"]:
        """z' ~ p(. | z) for each given z."""
        return torch.multinomial(self.rows(states), 1, generator=generator)[:, 0]


def dense_rows(softmax: Softmax, states: Tensor, to_group: Tensor, counts: Tensor) -> Tensor:
    """(K, S): the counts of transitions out of one group's states, tiles laid side by side."""
    num_slots = len(states)
    rows = counts.new_zeros(num_slots, softmax.num_states)
    if softmax.partition:
        rows.view(num_slots, -1, num_slots)[:, to_group] = counts.transpose(0, 1)
    else:
        columns = softmax.states_of_group[to_group].reshape(-1)
        rows.index_add_(1, columns, counts.transpose(0, 1).reshape(num_slots, -1))
    return rows


class _StreamedSoftmax(torch.autograd.Function):
    """sum counts * log softmax(u . v), value and gradient in one pass over row tiles of one block each.

    With d = counts - (row total) * softmax:  d_source = d @ target,  d_target += d^T @ source. Only rows of blocks that
    have counts are visited; a row tile is (K, S) and lives in one buffer.
    """

    @staticmethod
    def forward(ctx, source, target, softmax: Softmax, from_group, to_group, counts):
        source, target = source.detach(), target.detach()
        d_source, d_target = torch.zeros_like(source), torch.zeros_like(target)
        num_slots, num_states = counts.shape[1], target.shape[0]
        value = torch.zeros((), dtype=torch.float64, device=source.device)
        allowed = columns_to_log(softmax.enterable, source.dtype)
        buffer = source.new_empty(num_slots, num_states)
        for group, first, last in runs(from_group):
            states = softmax.states_of_group[group]
            ours = source[states]
            tiles, columns = counts[first:last], to_group[first:last]
            scores = torch.mm(ours, target.t(), out=buffer)
            if allowed is not None:
                scores += allowed
            totals = tiles.sum(dim=(0, 2))  # expected departures of each state
            if softmax.partition:
                laid = scores.view(num_slots, -1, num_slots)[:, columns].transpose(0, 1)
            else:
                laid = scores[:, softmax.states_of_group[columns]].transpose(0, 1)
            normalizer = scores.logsumexp(-1)
            used = tiles > 0  # a dropped column has score -inf and no counts
            value += (tiles[used] * laid[used]).sum(dtype=torch.float64) - (totals * normalizer).sum(dtype=torch.float64)
            torch.softmax(scores, -1, out=scores)
            scores *= -totals[:, None]
            if softmax.partition:
                # columns are distinct within a block's run, so adding by index is safe
                scores.view(num_slots, -1, num_slots)[:, columns] += tiles.transpose(0, 1)
            else:
                flat = softmax.states_of_group[columns].reshape(-1)
                scores.index_add_(1, flat, tiles.transpose(0, 1).reshape(num_slots, -1))
            if softmax.partition:
                torch.mm(scores, target, out=d_source[group * num_slots : (group + 1) * num_slots])
            else:
                d_source.index_add_(0, states, scores @ target)
            d_target.addmm_(scores.t(), ours)
        ctx.save_for_backward(d_source, d_target)
        return value.to(source.dtype)

    @staticmethod
    def backward(ctx, *gradients):
        d_source, d_target = ctx.saved_tensors
        return gradients[0] * d_source, gradients[0] * d_target, None, None, None, None


@dataclass(frozen=True, eq=False)
class BlockFactored:
    r"""p(z' | z) = p(m' | z) p(z' | z, m'): a softmax over blocks times a softmax over one block's states.

    Exactly normalized, and able to represent every transition matrix. `logits` holds free within-block
    logits (M, M, K, K) instead of factors in the scalar parameterization.
    """

    log_block: Float[Tensor, "block slot block"]  # log p(m' | z)
    source: Float[Tensor, "block slot width"] | None
    target: Float[Tensor, "block slot width"] | None
    logits: Float[Tensor, "block block slot slot"] | None
    enterable: Bool[Tensor, "block slot"] | None

    @property
    def num_states(self) -> int:
        return self.log_block.shape[0] * self.log_block.shape[1]

    def to(self, **how: Any) -> "BlockFactored":
        """The same, detached, with its factors in another dtype or on another device."""
        moved = {
            name: None if getattr(self, name) is None else getattr(self, name).detach().to(**how)
            for name in ("log_block", "source", "target", "logits")
        }
        return replace(self, **moved)

    def within(self, scores: Float[Tensor, "*n slot"], to_group: Tensor) -> Tensor:
        """softmax over the last axis, (..., K) scores of entering the states of `to_group`, in place."""
        allowed = columns_to_log(self.enterable, scores.dtype)
        if allowed is not None:
            scores += allowed[to_group]
        return torch.softmax(scores, -1, out=scores)

    @torch.no_grad()
    def rows(self, states: Int[Tensor, " n"], out: Tensor | None = None) -> Float[Tensor, "n state"]:
        """p(. | z) for each given state, O(n S w)."""
        num_blocks, num_slots = self.log_block.shape[:2]
        block, slot = states // num_slots, states % num_slots
        every = torch.arange(num_blocks, device=states.device)
        if self.logits is not None:
            scores = self.logits[block, :, slot].contiguous()
        else:
            assert self.source is not None and self.target is not None
            flat = None if out is None else out
            scores = torch.mm(self.source[block, slot], self.target.flatten(0, 1).t(), out=flat)
            scores = scores.view(len(states), num_blocks, num_slots)
        self.within(scores, every)
        scores *= self.log_block[block, slot].exp()[..., None]
        return scores.view(len(states), -1)

    @torch.no_grad()
    def tiles(self, from_group: Groups, to_group: Groups, out: Tensor | None = None) -> TileCounts:
        """A[states of from][:, states of to] for each pair; only these are computed. Pairs are sorted by `from`."""
        num_slots = self.log_block.shape[1]
        if out is None:
            out = self.log_block.new_empty(len(from_group), num_slots, num_slots)
        for group, first, last in runs(from_group):
            to = to_group[first:last]
            tiles = out[first:last]
            if self.logits is not None:
                tiles.copy_(self.logits[group, to])
                self.within(tiles.transpose(0, 1), to)
            else:
                assert self.source is not None and self.target is not None
                entered = self.target[to]
                torch.matmul(self.source[group], entered.transpose(1, 2), out=tiles)
                if self.enterable is not None:
                    allowed = columns_to_log(self.enterable, tiles.dtype)
                    if allowed is not None:
                        tiles += allowed[to][:, None]
                torch.softmax(tiles, -1, out=tiles)
            tiles *= self.log_block[group, :, to].exp().t()[..., None]
        return out

    def expected_log_likelihood(self, from_group: Groups, to_group: Groups, counts: TileCounts) -> Tensor:
        """sum_p sum_ij counts[p, i, j] log A[p, i, j]: a block part and a within-block part."""
        departures = counts.sum(-1)  # (P, K): expected moves from a state into a block
        block_part = (departures * self.log_block[from_group, :, to_group]).sum()
        if self.logits is not None:
            scores = self.logits[from_group, to_group]
            allowed = columns_to_log(self.enterable, scores.dtype)
            if allowed is not None:
                scores = scores + allowed[to_group][:, None]
            used = counts > 0
            return block_part + (counts[used] * scores.log_softmax(-1)[used]).sum()
        within = _TiledSoftmax.apply(
            self.source, self.target, self.enterable, from_group, to_group, counts, departures
        )
        return block_part + within

    def sample(self, states: Int[Tensor, " n"], generator: torch.Generator) -> Int[Tensor, " n"]:
        """z' ~ p(. | z) for each given z: first its block, then its slot, O(M + K w) each."""
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
    """sum counts * log softmax(u . v) within tiles, value and gradient in one pass, one source block at a time."""

    @staticmethod
    def forward(ctx, source, target, enterable, from_group, to_group, counts, departures):
        source, target = source.detach(), target.detach()
        d_source, d_target = torch.zeros_like(source), torch.zeros_like(target)
        value = torch.zeros((), dtype=torch.float64, device=source.device)
        allowed = columns_to_log(enterable, source.dtype)
        widest = max((last - first for _, first, last in runs(from_group)), default=0)
        buffer = counts.new_empty(widest, *counts.shape[1:])
        for group, first, last in runs(from_group):
            to, tiles = to_group[first:last], counts[first:last]
            entered = target[to]  # (n, K, w)
            scores = torch.matmul(source[group], entered.transpose(1, 2), out=buffer[: last - first])
            if allowed is not None:
                scores += allowed[to][:, None]
            normalizer = scores.logsumexp(-1)
            value -= (departures[first:last] * normalizer).sum(dtype=torch.float64)
            if allowed is None:
                value += torch.dot(tiles.reshape(-1), scores.view(-1)).double()
            else:
                used = tiles > 0
                value += (tiles[used] * scores[used]).sum(dtype=torch.float64)
            torch.softmax(scores, -1, out=scores)
            scores *= -departures[first:last, :, None]
            scores += tiles  # d(expected log-likelihood) / d(logit)
            d_source[group] = torch.bmm(scores, entered).sum(0)
            d_target.index_add_(0, to, torch.matmul(scores.transpose(1, 2), source[group]))
        ctx.save_for_backward(d_source, d_target)
        return value.to(source.dtype)

    @staticmethod
    def backward(ctx, *gradients):
        d_source, d_target = ctx.saved_tensors
        return gradients[0] * d_source, gradients[0] * d_target, None, None, None, None, None


Transition = Softmax | BlockFactored
