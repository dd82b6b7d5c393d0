"""Pairs of blocks and their (K, K) tiles: functions that every kind of transition uses."""

from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

BlockIds = Int[Tensor, " pair"]
TileCounts = Float[Tensor, "pair slot slot"]
FEW_STATES = 16  # of a block: up to here one call moves the tiles of many runs, as one for each costs more than its arithmetic
EVERY = slice(None)  # the slots of a block whose rows are looked at: all of them
PAIRS_AT_ONCE = 256  # of tiles that are added up by states: their positions take eight bytes an entry
ENTRIES_AT_ONCE = 1 << 20  # of tiles side by side: 4 MB, which stay in cache from one operation to the next
ROWS_AT_ONCE = 512  # of the transition matrix: enough for matrix products to run at full speed, 32 MB at 2^14 columns


def columns_to_log(mask: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """Return 0 for states that may be entered and -inf for others; None if all may be entered."""
    if mask is None or bool(mask.all()):
        return None
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(~mask, -torch.inf)


def detached(owner: object, names: tuple[str, ...], **how: Any) -> dict[str, Any]:
    """Return some factors of a transition, those that it has, in another dtype or on another device."""
    factors = {name: getattr(owner, name) for name in names}
    return {name: None if factor is None else factor.detach().to(**how) for name, factor in factors.items()}


class Run(NamedTuple):
    """The pairs first .. last - 1 of a sorted list, which leave the same block."""

    block: int
    first: int
    last: int


def runs(from_block: Tensor) -> list[Run]:
    """Return the runs of equal entries in a sorted list of pairs."""
    blocks, sizes = torch.unique_consecutive(from_block, return_counts=True)
    ends = sizes.cumsum(0).tolist()
    return [Run(g, end - n, end) for g, n, end in zip(blocks.tolist(), sizes.tolist(), ends, strict=True)]


def cut(every: list[Run], at_most: int) -> list[Run]:
    """Return the runs divided into parts of at most `at_most` pairs."""
    return [
        Run(block, begin, min(begin + at_most, last))
        for block, first, last in every
        for begin in range(first, last, at_most)
    ]


def run_of_pair(tile: list[Run], device: torch.device) -> Int[Tensor, " pair"]:
    """Return the index of the run that each pair belongs to."""
    sizes = torch.tensor([run.last - run.first for run in tile], device=device)
    return torch.arange(len(tile), device=device).repeat_interleave(sizes)


def tiles_of(rows: Tensor, num_rows: int, num_slots: int) -> Tensor:
    """Return a view of rows (rows of the runs, S) as tiles (runs, blocks, rows of a block, K)."""
    return rows.view(len(rows) // num_rows, num_rows, -1, num_slots).transpose(1, 2)


def row_tiles(from_block: Tensor, num_slots: int) -> list[list[Run]]:
    """Return the runs in parts of about ROWS_AT_ONCE rows of the matrix."""
    every, at_once = runs(from_block), max(1, ROWS_AT_ONCE // num_slots)
    return [every[i : i + at_once] for i in range(0, len(every), at_once)]


def departures_of_rows(departures: Tensor, tile: list[Run]) -> Tensor:
    """Return the counts of leaving each row of the runs, from those of the pairs (P, rows of a block)."""
    if departures.shape[1] > FEW_STATES:
        return torch.cat([departures[run.first : run.last].sum(0) for run in tile])
    first, last = tile[0].first, tile[-1].last
    totals = departures.new_zeros(len(tile), departures.shape[1])
    return totals.index_add_(0, run_of_pair(tile, departures.device), departures[first:last]).flatten()


def add_tiles_of_runs(rows: Tensor, tile: list[Run], to_block: Tensor, counts: Tensor) -> None:
    """Add the tiles of the runs (P, rows of a block, K) to their places in `rows` (rows of the runs, S), in place."""
    if counts.shape[1] > FEW_STATES:
        for run, ours in zip(tile, rows.split(counts.shape[1]), strict=True):
            add_tiles(ours, to_block[run.first : run.last], counts[run.first : run.last])
        return
    first, last = tile[0].first, tile[-1].last
    where = run_of_pair(tile, rows.device), to_block[first:last]
    tiles_of(rows, counts.shape[1], counts.shape[2])[where] += counts[first:last]  # no pair is there twice


def dot_tiles(rows: Tensor, to_block: Tensor, tiles: Tensor) -> Tensor:
    """Return the sum of tiles (P, rows, K) times the same entries of `rows` (rows, S)."""
    entries = rows.view(len(rows), -1, tiles.shape[-1])[:, to_block].transpose(0, 1)
    used = tiles > 0  # a dropped column has score -inf and no counts
    return (tiles[used] * entries[used]).sum(dtype=torch.float64)


def add_tiles(rows: Tensor, to_block: Tensor, tiles: Tensor) -> None:
    """Add the tiles (P, rows, K) to their columns of `rows` (rows, S), in place."""
    blocked = rows.view(len(rows), -1, tiles.shape[-1]).transpose(0, 1)
    blocked.index_add_(0, to_block, tiles)


def block_bound(log_block: Tensor) -> Tensor:
    """Return 0 if every log p(m' | z) is at most 0, else infinity. With a NaN the maximum is NaN."""
    return torch.where(log_block.amax() <= 0, log_block.new_zeros(()), torch.inf)
