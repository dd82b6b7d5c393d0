r"""Transition potentials of two kinds, behind one interface: what every later stage reads of the matrix A.

`Softmax`        p(z' | z) = softmax over all states of u_z . v_z'              (the paper's model)
`BlockFactored`  p(z' | z) = p(m' | z) p(z' | z, m'), m' the block of z'        (ours)

Each comes from low-rank factors (neural) or from free logits (scalar). The |Z| x |Z| matrix is
never held (but for counts where blocks share states): tiles are made for the block pairs that occur, and
the gradient of the expected complete log-likelihood streams over row tiles.

A transition answers:
    tiles(from_block, to_block)     (P, K, K) probabilities of the given block pairs
    rows(states)                    (n, S) probabilities of leaving the given states
    expected_log_likelihood(...)    sum of counts * log-probabilities, differentiable; of all slots or of some
    sample(states, generator)       a next state for each given one
"""

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

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


class Run(NamedTuple):
    """The pairs first .. last - 1 of a sorted list leave one block."""

    block: int
    first: int
    last: int


def runs(from_block: Tensor) -> list[Run]:
    """The runs of equal entries in a sorted list of pairs."""
    blocks, sizes = torch.unique_consecutive(from_block, return_counts=True)
    ends = sizes.cumsum(0).tolist()
    return [Run(g, end - n, end) for g, n, end in zip(blocks.tolist(), sizes.tolist(), ends, strict=True)]


def cut(every: list[Run], at_most: int) -> list[Run]:
    """The same runs in parts of at most so many pairs."""
    return [
        Run(block, begin, min(begin + at_most, last))
        for block, first, last in every
        for begin in range(first, last, at_most)
    ]


def run_of_pair(tile: list[Run], device: torch.device) -> Int[Tensor, " pair"]:
    """For every pair of the runs, which of them it belongs to."""
    sizes = torch.tensor([run.last - run.first for run in tile], device=device)
    return torch.arange(len(tile), device=device).repeat_interleave(sizes)


def tiles_of(rows: Tensor, num_rows: int, num_slots: int) -> Tensor:
    """(runs, blocks, rows of a block, K): a view of rows (rows of the runs, S) as tiles."""
    return rows.view(len(rows) // num_rows, num_rows, -1, num_slots).transpose(1, 2)


FEW_STATES = 16  # of a block: up to here one call moves the tiles of many runs, as one for each costs more than its arithmetic

EVERY = slice(None)  # the slots of a block whose rows are looked at: all of them

PAIRS_AT_ONCE = 256  # of tiles that are added up by states: their positions take eight bytes an entry
ENTRIES_AT_ONCE = 1 << 20  # of tiles side by side: 4 MB, which stay in cache from one operation to the next
ROWS_AT_ONCE = 512  # of the transition matrix: enough for matrix products to run at full speed, 32 MB at 2^14 columns


def row_tiles(from_block: Tensor, num_slots: int) -> list[list[Run]]:
    """The runs, a few blocks at a time: about ROWS_AT_ONCE rows of the matrix together."""
    every, at_once = runs(from_block), max(1, ROWS_AT_ONCE // num_slots)
    return [every[i : i + at_once] for i in range(0, len(every), at_once)]


@dataclass(frozen=True, eq=False)
class Softmax:
    r"""p(z' | z) = exp(u_z . v_z') / sum over all states. Without a partition, blocks share states.

    `logits` holds a free |Z| x |Z| matrix instead of factors in the scalar parameterization.
    """

    source: Float[Tensor, "state width"] | None
    target: Float[Tensor, "state width"] | None
    logits: Float[Tensor, "state state"] | None
    enterable: Bool[Tensor, " state"] | None
    states_of_block: Int[Tensor, "block slot"]
    partition: bool = True
    log_normalizer: Float[Tensor, " state"] | None = None  # of every row, once it is known

    @property
    def num_states(self) -> int:
        factor = self.logits if self.logits is not None else self.source
        assert factor is not None
        return factor.shape[0]

    def to(self, **how: Any) -> "Softmax":
        """The same, detached, with its factors in another dtype or on another device."""
        moved: dict[str, Any] = {
            name: None if getattr(self, name) is None else getattr(self, name).detach().to(**how)
            for name in ("source", "target", "logits")
        }
        return replace(self, **moved, log_normalizer=None)

    @torch.no_grad()
    def normalized(self) -> "Softmax":
        """The same with every row's normalizer computed once, O(S^2 h): tiles then cost only themselves."""
        every = torch.arange(self.num_states, device=self.states_of_block.device)
        parts = [self.scores(states).logsumexp(-1) for states in every.split(ROWS_AT_ONCE)]
        return replace(self, log_normalizer=torch.cat(parts))

    def scores(self, states: Int[Tensor, " n"], out: Tensor | None = None) -> Float[Tensor, "n state"]:
        """u_z . v_z' for each given z and every z'; -inf where z' may not be entered."""
        if self.logits is not None:
            scores = self.logits[states]
        else:
            assert self.source is not None and self.target is not None
            scores = torch.mm(self.source[states], self.target.t(), out=out)
        allowed = columns_to_log(self.enterable, scores.dtype)
        return scores if allowed is None else scores.add_(allowed)

    @torch.no_grad()
    def rows(self, states: Int[Tensor, " n"], out: Tensor | None = None) -> Float[Tensor, "n state"]:
        """p(. | z) for each given state, O(n S h)."""
        scores = self.scores(states, out)
        if self.log_normalizer is not None:
            return scores.sub_(self.log_normalizer[states, None]).exp_()
        return torch.softmax(scores, -1, out=scores)

    @torch.no_grad()
    def tiles(self, from_block: Groups, to_block: Groups, out: Tensor | None = None) -> TileCounts:
        """A[states of from][:, states of to] for each pair; pairs are sorted by `from`."""
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

    def _tiles_alone(self, from_block: Groups, to_block: Groups, out: Tensor) -> TileCounts:
        """The tiles without the rest of their rows, where the normalizers are known."""
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
        from_block: Groups,
        to_block: Groups,
        counts: TileCounts,
        value: bool = True,
        tiles: TileCounts | None = None,
        slots: slice = EVERY,
    ) -> Tensor:
        """sum_p sum_ij counts[p, i, j] log A[p, i, j] over the `slots` i; its gradient streams over a few hundred rows at a
        time.

        Without `value` the number itself is left out (it is 0), which saves a pass; the gradient is the same. Tiles that
        are known already do not help here: the gradient needs whole rows. Where blocks share states, `slots` are states.
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
        self, from_block: Groups, to_block: Groups, counts: TileCounts
    ) -> Float[Tensor, "state state"]:
        """The counts of all pairs, added up by states: where blocks share states, many tiles meet in one entry."""
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
        """z' ~ p(. | z) for each given z."""
        return torch.multinomial(self.rows(states), 1, generator=generator)[:, 0]


class _StreamedSoftmax(torch.autograd.Function):
    """sum counts * log softmax(u . v), value and gradient in one pass over row tiles.

    With d = counts - (row total) * softmax:  d_source = d @ target,  d_target += d^T @ source. Only rows of blocks that
    have counts are visited; a row tile lives in one buffer.
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


def departures_of_rows(departures: Tensor, tile: list[Run]) -> Tensor:
    """(rows of the runs,): what leaves each row, from the pairs' (P, rows of a block)."""
    if departures.shape[1] > FEW_STATES:
        return torch.cat([departures[run.first : run.last].sum(0) for run in tile])
    first, last = tile[0].first, tile[-1].last
    totals = departures.new_zeros(len(tile), departures.shape[1])
    return totals.index_add_(0, run_of_pair(tile, departures.device), departures[first:last]).flatten()


def add_tiles_of_runs(rows: Tensor, tile: list[Run], to_block: Tensor, counts: Tensor) -> None:
    """Adds the runs' tiles (P, rows of a block, K) to their places in `rows` (rows of the runs, S), in place."""
    if counts.shape[1] > FEW_STATES:
        for run, ours in zip(tile, rows.split(counts.shape[1]), strict=True):
            add_tiles(ours, to_block[run.first : run.last], counts[run.first : run.last])
        return
    first, last = tile[0].first, tile[-1].last
    where = run_of_pair(tile, rows.device), to_block[first:last]
    tiles_of(rows, counts.shape[1], counts.shape[2])[where] += counts[first:last]  # no pair is there twice


def dot_tiles(rows: Tensor, to_block: Tensor, tiles: Tensor) -> Tensor:
    """sum of tiles (P, rows, K) * the same entries of `rows` (rows, S)."""
    entries = rows.view(len(rows), -1, tiles.shape[-1])[:, to_block].transpose(0, 1)
    used = tiles > 0  # a dropped column has score -inf and no counts
    return (tiles[used] * entries[used]).sum(dtype=torch.float64)


def add_tiles(rows: Tensor, to_block: Tensor, tiles: Tensor) -> None:
    """Adds the tiles (P, rows, K) to their columns of `rows` (rows, S), in place."""
    blocked = rows.view(len(rows), -1, tiles.shape[-1]).transpose(0, 1)
    blocked.index_add_(0, to_block, tiles)


class _SharedSoftmax(torch.autograd.Function):
    """As `_StreamedSoftmax`, from counts by states (S, S): only columns that may be entered and rows with counts."""

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
        moved: dict[str, Any] = {
            name: None if getattr(self, name) is None else getattr(self, name).detach().to(**how)
            for name in ("log_block", "source", "target", "logits")
        }
        moved["log_block"] = moved["log_block"].log_softmax(-1)  # a wider type shows what rounding had left over
        return replace(self, **moved)

    def within(self, scores: Float[Tensor, "*n slot"], to_block: Tensor) -> Tensor:
        """softmax over the last axis, (..., K) scores of entering the states of `to_block`, in place."""
        allowed = columns_to_log(self.enterable, scores.dtype)
        if allowed is not None:
            scores += allowed[to_block]
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
    def tiles(self, from_block: Groups, to_block: Groups, out: Tensor | None = None) -> TileCounts:
        """A[states of from][:, states of to] for each pair; only these are computed. Pairs are sorted by `from`."""
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
                if self.enterable is not None:
                    allowed = columns_to_log(self.enterable, tiles.dtype)
                    if allowed is not None:
                        tiles += allowed[to][:, None]
                torch.softmax(tiles, -1, out=tiles)
            tiles *= self.log_block[block, :, to].exp().t()[..., None]
        return out

    def expected_log_likelihood(
        self,
        from_block: Groups,
        to_block: Groups,
        counts: TileCounts,
        value: bool = True,
        tiles: TileCounts | None = None,
        slots: slice = EVERY,
    ) -> Tensor:
        """sum_p sum_ij counts[p, i, j] log A[p, i, j] over the `slots` i: a block part and a within-block part.

        Without `value` the number of the second part is left out, which saves a pass; the gradient is the same. So it is
        with the `tiles` of these very pairs and parameters, where they are known already: they are not made again.
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
    """sum counts * log softmax(u . v) within tiles, value and gradient in one pass, one source block at a time.

    The tiles of a block lie side by side, (rows, n, K), so that each of the three products of a block is one matrix product
    as wide as its tiles together. Product by product, as they lie in memory, they run at half the speed.
    """

    @staticmethod
    def forward(
        ctx,
        source,
        target,
        transition: BlockFactored,
        from_block,
        to_block,
        counts,
        departures,
        with_value,
        known,
        slots,
    ):
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
