"""What inference reads and returns: tables of potentials, and which rows of them a batch uses.

Input:  a start table (G, K), an emission table (V, K), transition tiles (P, K, K), all holding
        probabilities, and a `Chain` of indices into them.
Output: `Forward`, `Counts`.
Knows nothing of words, blocks, vocabularies or parameters: only of rows of tables.

At time t a sequence can be in the K states of one block; which states these are is the
caller's business. A chain may restart in the middle of a row (`edge_of == -1`): that is
how several sentences share one row, and how the context rule `reset` is expressed.
"""

from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor


class Potentials(NamedTuple):
    """The tables a chain is scored with (probabilities, one dtype, one device)."""

    start: Float[Tensor, "block slot"]
    emission: Float[Tensor, "word slot"]
    tiles: Float[Tensor, "pair slot_from slot_to"]


class Chain(NamedTuple):
    """Which row of each table every token reads; ragged rows are valid up to `lengths`."""

    start_of: Int[Tensor, "batch time"]
    emit_of: Int[Tensor, "batch time"]
    edge_of: Int[Tensor, "batch time"]  # the tile entered through; -1: restarts from `start`
    lengths: Int[Tensor, " batch"]

    @property
    def live(self) -> Bool[Tensor, "batch time"]:
        """True where a token is, False on padding."""
        time = torch.arange(self.emit_of.shape[1], device=self.emit_of.device)
        return time[None] < self.lengths[:, None]


class Forward(NamedTuple):
    """Filtered posteriors p(z_t | x_<=t) and log p(x_t | x_<t)."""

    alpha: Float[Tensor, "batch time slot"]
    log_scale: Float[Tensor, "batch time"]  # float64


class Counts(NamedTuple):
    """Expected counts under the posterior: the gradient of log p(x) in each log-potential."""

    start: Float[Tensor, "block slot"]
    emission: Float[Tensor, "word slot"]
    tiles: Float[Tensor, "pair slot_from slot_to"]

    @staticmethod
    def zeros_like(potentials: Potentials) -> "Counts":
        return Counts(*(torch.zeros_like(table) for table in potentials))
