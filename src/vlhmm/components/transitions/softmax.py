r"""The paper's transitions: one softmax over all states, p(z' | z) = exp(u_z . v_z') / sum_z'' exp(u_z . v_z'').

From low-rank factors (neural) or free logits (scalar). The |Z| x |Z| matrix is never held, except for counts where
blocks share states: the gradient of the expected complete log-likelihood streams over row tiles.
"""

from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from vlhmm.components.transitions.tiles import (
    EVERY,
    FEW_STATES,
    PAIRS_AT_ONCE,
    ROWS_AT_ONCE,
    BlockIds,
    TileCounts,
    add_tiles,
    add_tiles_of_runs,
    columns_to_log,
    departures_of_rows,
    detached,
    dot_tiles,
    row_tiles,
    run_of_pair,
    runs,
    tiles_of,
)


@dataclass(frozen=True, eq=False)
class Softmax:
    r"""p(z' | z) = exp(u_z . v_z') / sum over all states. Without a partition, blocks share states.

    In the scalar parameterization, `logits` holds a free |Z| x |Z| matrix instead of factors.
    """

    source: Float[Tensor, "state width"] | None
    target: Float[Tensor, "entered width"] | None
    logits: Float[Tensor, "state entered"] | None
    enterable: Bool[Tensor, " entered"] | None
    states_of_block: Int[Tensor, "block slot"]
    partition: bool = True
    log_normalizer: Float[Tensor, " state"] | None = None  # of every row, once it is known

    @property
    def num_states(self) -> int:
        factor = self.logits if self.logits is not None else self.source
        assert factor is not None
        return factor.shape[0]

    def to(self, **how: Any) -> "Softmax":
        """Return a detached copy with its factors in another dtype or on another device."""
        return replace(self, **detached(self, ("source", "target", "logits"), **how), log_normalizer=None)

    @torch.no_grad()
    def normalized(self) -> "Softmax":
        """Return a copy with every row's normalizer computed. O(S^2 h) once; a tile then costs K^2 h."""
        every = torch.arange(self.num_states, device=self.states_of_block.device)
        parts = [self.scores(states).logsumexp(-1) for states in every.split(ROWS_AT_ONCE)]
        return replace(self, log_normalizer=torch.cat(parts))

    def largest_score(self) -> Tensor:
        """Return the sum of the normalizers, which is not finite if a score overflows."""
        normalizer = self.log_normalizer if self.log_normalizer is not None else self.normalized().log_normalizer
        assert normalizer is not None
        return normalizer.sum()

    def scores(self, states: Int[Tensor, " n"], out: Tensor | None = None) -> Float[Tensor, "n state"]:
        """Return u_z . v_z' for each given z and every z'; -inf where z' may not be entered."""
        if self.logits is not None:
            scores = self.logits[states]
        else:
            assert self.source is not None and self.target is not None
            scores = torch.mm(self.source[states], self.target.t(), out=out)
        allowed = columns_to_log(self.enterable, scores.dtype)
        return scores if allowed is None else scores.add_(allowed)

    @torch.no_grad()
    def rows(self, states: Int[Tensor, " n"], out: Tensor | None = None) -> Float[Tensor, "n state"]:
        """Return p(. | z) for each given state. O(n S h)."""
        scores = self.scores(states, out)
        if self.log_normalizer is not None:
            return scores.sub_(self.log_normalizer[states, None]).exp_()
        return torch.softmax(scores, -1, out=scores)

    def into(self, blocks: BlockIds, width: int) -> "Softmax":
        """Return the same transitions into the first `width` states of some blocks: `rows` has these columns alone."""
        assert self.log_normalizer is not None  # of whole rows: without it, `rows` would take the columns for everything
        columns = self.states_of_block[blocks, :width].flatten()
        return replace(
            self,
            target=None if self.target is None else self.target[columns],
            logits=None if self.logits is None else self.logits[:, columns],
            enterable=None if self.enterable is None else self.enterable[columns],
        )

    @torch.no_grad()
    def tiles(self, from_block: BlockIds, to_block: BlockIds, out: Tensor | None = None) -> TileCounts:
        """Return A[states of from][:, states of to] for each pair. Pairs are sorted by `from`."""
        num_slots = self.states_of_block.shape[1]
        factor = self.logits if self.logits is not None else self.source
        assert factor is not None
        if out is None:
            out = factor.new_empty(len(from_block), num_slots, num_slots)
        if not self.partition and self.log_normalizer is None:  # a row is in many tiles: it is normalized once
            return self.normalized().tiles(from_block, to_block, out)
        if self.log_normalizer is not None and self.logits is None:
            return self._tiles_alone(from_block, to_block, out)
        buffer = factor.new_empty(max(num_slots, ROWS_AT_ONCE), self.num_states)
        for tile in row_tiles(from_block, num_slots):
            states = self.states_of_block[[run.block for run in tile]].flatten()
            rows = self.rows(states, buffer[: len(states)] if self.logits is None else None)
            if num_slots <= FEW_STATES:
                first, last = tile[0].first, tile[-1].last
                where = run_of_pair(tile, out.device), to_block[first:last]
                out[first:last] = tiles_of(rows, num_slots, num_slots)[where]
                continue
            for run, ours in zip(tile, rows.split(num_slots), strict=True):
                blocked = ours.view(num_slots, -1, num_slots).transpose(0, 1)
                torch.index_select(blocked, 0, to_block[run.first : run.last], out=out[run.first : run.last])
        return out

    def _tiles_alone(self, from_block: BlockIds, to_block: BlockIds, out: Tensor) -> TileCounts:
        """Return the tiles without the rest of their rows, using known normalizers."""
        assert self.source is not None and self.target is not None and self.log_normalizer is not None
        allowed = columns_to_log(self.enterable, out.dtype)
        for block, first, last in runs(from_block):
            ours, entered = self.states_of_block[block], self.states_of_block[to_block[first:last]]
            tiles = torch.matmul(self.source[ours], self.target[entered].transpose(1, 2), out=out[first:last])
            tiles -= self.log_normalizer[ours, None]
            if allowed is not None:
                tiles += allowed[entered][:, None]
            tiles.exp_()
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
        """Return sum_p sum_ij counts[p, i, j] log A[p, i, j] over the `slots` i, streaming over a few hundred rows at a time.

        Without `value`, the sum is not computed (it is 0), which saves a pass; the gradient is the same. Known tiles do not
        help here, because the gradient needs whole rows. Where blocks share states, `slots` are states.
        """
        if self.logits is not None:
            return self.scalar_log_likelihood(from_block, to_block, counts[:, slots], slots)
        if not self.partition:
            matrix = self.counts_of_states(from_block, to_block, counts)
            return _SharedSoftmax.apply(self.source, self.target, matrix, self.enterable, value, slots)
        return _StreamedSoftmax.apply(
            self.source, self.target, self, from_block, to_block, counts[:, slots], value, slots
        )

    def counts_of_states(
        self, from_block: BlockIds, to_block: BlockIds, counts: TileCounts
    ) -> Float[Tensor, "state state"]:
        """Return the counts of all pairs summed by states, for blocks that share states: (S, S)."""
        matrix = counts.new_zeros(self.num_states, self.num_states)
        for start, end, tiles in zip(
            from_block.split(PAIRS_AT_ONCE), to_block.split(PAIRS_AT_ONCE), counts.split(PAIRS_AT_ONCE), strict=True
        ):
            rows, columns = self.states_of_block[start], self.states_of_block[end]
            where = rows[:, :, None] * self.num_states + columns[:, None]
            matrix.view(-1).scatter_add_(0, where.view(-1), tiles.reshape(-1))
        return matrix

    def scalar_log_likelihood(self, from_block: Tensor, to_block: Tensor, counts: Tensor, slots: slice) -> Tensor:
        assert self.logits is not None
        value = torch.zeros((), dtype=counts.dtype, device=counts.device)
        allowed = columns_to_log(self.enterable, counts.dtype)
        for block, first, last in runs(from_block):
            states = self.states_of_block[block, slots]
            log_rows = (self.logits[states] if allowed is None else self.logits[states] + allowed).log_softmax(-1)
            dense = counts.new_zeros(len(states), self.num_states)
            add_tiles(dense, to_block[first:last], counts[first:last])
            used = dense > 0
            value = value + (dense[used] * log_rows[used]).sum()
        return value

    def sample(self, states: Int[Tensor, " n"], generator: torch.Generator) -> Int[Tensor, " n"]:
        """Draw z' ~ p(. | z) for each given z."""
        return torch.multinomial(self.rows(states), 1, generator=generator)[:, 0]


class _StreamedSoftmax(torch.autograd.Function):
    """sum counts * log softmax(u . v): value and gradient in one pass over row tiles.

    With d = counts - (row total) * softmax:  d_source = d @ target,  d_target += d^T @ source. Only rows of blocks that
    have counts are visited. All row tiles use one buffer.
    """

    @staticmethod
    def forward(ctx, source, target, softmax: Softmax, from_block, to_block, counts, with_value, slots):
        source, target = source.detach(), target.detach()
        d_source, d_target = torch.zeros_like(source), torch.zeros_like(target)
        num_rows = counts.shape[1]  # of a block: those of `slots`
        value = torch.zeros((), dtype=torch.float64, device=source.device)
        allowed = columns_to_log(softmax.enterable, source.dtype)
        buffer = source.new_empty(max(num_rows, ROWS_AT_ONCE), target.shape[0])
        departures = counts.sum(dim=-1)  # (P, rows)
        for tile in row_tiles(from_block, num_rows):
            states = softmax.states_of_block[[run.block for run in tile], slots].flatten()
            ours = source[states]
            scores = torch.mm(ours, target.t(), out=buffer[: len(states)])
            if allowed is not None:
                scores += allowed
            totals = departures_of_rows(departures, tile)
            if with_value:
                value -= (totals * scores.logsumexp(-1)).sum(dtype=torch.float64)
                for run, rows in zip(tile, scores.split(num_rows), strict=True):
                    value += dot_tiles(rows, to_block[run.first : run.last], counts[run.first : run.last])
            torch.softmax(scores, -1, out=scores)
            scores *= -totals[:, None]
            add_tiles_of_runs(scores, tile, to_block, counts)
            d_source.index_add_(0, states, scores @ target)
            d_target.addmm_(scores.t(), ours)
        ctx.save_for_backward(d_source, d_target)
        return value.to(source.dtype)

    @staticmethod
    def backward(ctx, *gradients):
        d_source, d_target = ctx.saved_tensors
        return gradients[0] * d_source, gradients[0] * d_target, None, None, None, None, None, None


class _SharedSoftmax(torch.autograd.Function):
    """The same as `_StreamedSoftmax` for counts by states (S, S). Only enterable columns and rows with counts are visited."""

    @staticmethod
    def forward(ctx, source, target, counts, enterable, with_value, slots):
        source, target = source.detach(), target.detach()
        d_source, d_target = torch.zeros_like(source), torch.zeros_like(target)
        every = torch.arange(len(source), device=source.device)
        columns = every if enterable is None else every[enterable]
        totals = counts.sum(1)
        entered = target[columns]
        d_entered = torch.zeros_like(entered)
        value = torch.zeros((), dtype=torch.float64, device=source.device)
        for states in every[slots][totals[slots] > 0].split(ROWS_AT_ONCE):
            scores, ours = source[states] @ entered.t(), counts[states][:, columns]
            if with_value:
                log_rows = scores - scores.logsumexp(-1, keepdim=True)
                value += (ours * log_rows).sum(dtype=torch.float64)
            scores = torch.softmax(scores, -1).mul_(-totals[states, None]).add_(ours)
            d_source[states] = scores @ entered
            d_entered.addmm_(scores.t(), source[states])
        d_target[columns] = d_entered
        ctx.save_for_backward(d_source, d_target)
        return value.to(source.dtype)

    @staticmethod
    def backward(ctx, *gradients):
        d_source, d_target = ctx.saved_tensors
        return gradients[0] * d_source, gradients[0] * d_target, None, None, None, None
