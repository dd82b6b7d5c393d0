"""Convert tokens to the table rows that they read: the boundary between words and blocks, and inference on tables."""

from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from vlhmm.inference.types import Chain


class FilterState(NamedTuple):
    """The filtered posterior after the last token of each row, over the states of its block. Block -1: nothing read yet."""

    block: Int[Tensor, " batch"]
    alpha: Float[Tensor, "batch slot"]


class Pairs(NamedTuple):
    """Distinct (from, to) pairs of blocks, sorted by from, then by to."""

    from_block: Int[Tensor, " pair"]
    to_block: Int[Tensor, " pair"]


def pair_codes(
    block_of_word: Int[Tensor, " word"],
    num_blocks: int,
    tokens: Int[Tensor, "batch time"],
    restart: Bool[Tensor, "batch time"],
    carry_block: Int[Tensor, " batch"],
) -> Int[Tensor, "batch time"]:
    """Return from * M + to for the edge into each token, and -1 where the chain restarts."""
    block = block_of_word[tokens]
    previous = torch.cat([carry_block[:, None], block[:, :-1]], dim=1)
    return torch.where(restart | (previous < 0), -1, previous * num_blocks + block)


def distinct_pairs(codes: Tensor, live: Tensor, num_blocks: int) -> tuple[Int[Tensor, " pair"], Pairs]:
    """Return the sorted distinct codes of the live edges, and the pairs of blocks that they stand for."""
    used = codes[live & (codes >= 0)]
    if num_blocks**2 <= 1 << 24:  # a table of marks is faster than sorting
        marks = torch.zeros(num_blocks**2, dtype=torch.bool, device=codes.device)
        marks[used] = True
        found = marks.nonzero()[:, 0]
    else:
        found = used.unique()
    return found, Pairs(found // num_blocks, found % num_blocks)


def chain_of(
    block_of_word: Int[Tensor, " word"],
    tokens: Tensor,
    lengths: Tensor,
    codes: Tensor,
    known: Int[Tensor, " pair"],
) -> Chain:
    """Return the chain of a batch. Edges with code `known[p]` read tile p."""
    edge_of = torch.searchsorted(known, codes.clamp(min=0)) if len(known) else torch.zeros_like(codes)
    edge_of = torch.where(codes >= 0, edge_of, -1)
    live = torch.arange(tokens.shape[1], device=tokens.device)[None] < lengths[:, None]
    return Chain(block_of_word[tokens], tokens, torch.where(live, edge_of, -1), lengths)


def last_carry(alpha: Tensor, block: Tensor, lengths: Tensor, before: FilterState) -> FilterState:
    """Return the filter state after the last token of each row. An empty row keeps the state before it."""
    last = (lengths - 1).clamp(min=0)
    rows = torch.arange(len(lengths), device=lengths.device)
    empty = lengths == 0
    return FilterState(
        torch.where(empty, before.block, block[rows, last]),
        torch.where(empty[:, None], before.alpha, alpha[rows, last]),
    )
