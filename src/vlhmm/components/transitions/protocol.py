"""What every later stage asks of the matrix A: one protocol, whatever the kind of transition."""

from typing import Any, Protocol, TypeVar

import torch
from jaxtyping import Float, Int
from torch import Tensor

from vlhmm.components.transitions.tiles import BlockIds, TileCounts

Counts = TypeVar("Counts", contravariant=True)  # expected counts: of tiles, or of channels where the rank is low


class Transitions(Protocol[Counts]):
    """p(z' | z), never stored as a dense matrix."""

    @property
    def num_states(self) -> int: ...

    def to(self, **how: Any) -> "Transitions[Counts]":
        """Return a detached copy in another dtype or on another device."""
        ...

    def largest_score(self) -> Tensor:
        """Return a bound on the absolute scores whose softmax gives the rows. It is not finite if one of them overflows."""
        ...

    def tiles(self, from_block: BlockIds, to_block: BlockIds, out: Tensor | None = None) -> TileCounts:
        """Return the probabilities of the given block pairs, (P, K, K)."""
        ...

    def rows(self, states: Int[Tensor, " n"], out: Tensor | None = None) -> Float[Tensor, "n state"]:
        """Return the probabilities of leaving the given states, (n, S)."""
        ...

    def into(self, blocks: BlockIds, width: int) -> "Transitions[Counts]":
        """Return the same transitions into the first `width` states of some blocks: `rows` has these columns alone.

        For blocks that share no states, with all of a block's states among the first `width`.
        """
        ...

    def expected_log_likelihood(
        self,
        from_block: BlockIds,
        to_block: BlockIds,
        counts: Counts,
        value: bool = True,
        tiles: TileCounts | None = None,
    ) -> Tensor:
        """Return sum of counts * log-probabilities, differentiable. Without `value`, only its gradient is computed.

        `Softmax` and `BlockFactored` also take `slots`, the rows of some slots only, for an M-step in parts.
        """
        ...

    def sample(self, states: Int[Tensor, " n"], generator: torch.Generator) -> Int[Tensor, " n"]:
        """Draw z' ~ p(. | z) for each given z."""
        ...
