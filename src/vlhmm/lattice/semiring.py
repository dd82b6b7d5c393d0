"""Two semirings for the recursions: sum over hidden variables, or maximize. Both in probabilities, scaled row by row.

Input:  a `HMMDistributions`. Output: `SumProduct` or `MaxProduct`, with the same methods.
"""

import torch
from torch import Tensor

from vlhmm.distributions import HMMDistributions


class SumProduct:
    """Messages that sum over states and words."""

    def __init__(self, distributions: HMMDistributions) -> None:
        self.distributions = distributions

    def backward_step(self, beta: Tensor) -> Tensor:
        """Return (n, S) sum_z' p(z' | z) beta(z'), beta (n, S)."""
        return self.distributions.backward_step(beta)

    def backward_step_to(self, block: int, beta: Tensor) -> Tensor:
        """Return (n, S) the same for beta (n, K) on one block."""
        return self.distributions.backward_step_to([block] * len(beta), beta)

    def backward_step_at(self, block: int, beta: Tensor) -> Tensor:
        """Return (n, K) the same for z in one block only, beta (n, S)."""
        return self.distributions.backward_step_at(block, beta)

    def forward_step_tile(self, alpha: Tensor, tile: Tensor) -> Tensor:
        """Return (n, K) sum_z alpha(z) p(z' | z)."""
        return alpha @ tile

    def backward_step_tile(self, tile: Tensor, beta: Tensor) -> Tensor:
        """Return (n, K) sum_z' p(z' | z) beta(z')."""
        return beta @ tile.T

    def join(self, a: Tensor, b: Tensor) -> Tensor:
        """Return two alternatives as one."""
        return a + b

    def total(self, weights: Tensor) -> Tensor:
        """Return all alternatives along the last axis as one."""
        return weights.sum(-1)

    def join_logs(self, logs: Tensor) -> Tensor:
        """Return all alternatives along the first axis as one, in logs."""
        return logs.logsumexp(0)

    def emission(self, words: Tensor) -> Tensor:
        """Return (S,) p(one of the words | z)."""
        return self.distributions.class_emission(words)


class MaxProduct(SumProduct):
    """Messages that keep the most probable state and word."""

    def backward_step(self, beta: Tensor) -> Tensor:
        every = torch.arange(self.distributions.num_states, device=beta.device)
        return self._best_rows(every, beta)

    def backward_step_to(self, block: int, beta: Tensor) -> Tensor:
        # All columns of one block: p(z' | z) for every z, by carrying one indicator a column.
        columns = columns_of(self.distributions, block)
        return torch.stack([(columns * row[:, None]).amax(0) for row in beta])

    def backward_step_at(self, block: int, beta: Tensor) -> Tensor:
        return self._best_rows(self.distributions.states_of_block[block], beta)

    def forward_step_tile(self, alpha: Tensor, tile: Tensor) -> Tensor:
        return (alpha[:, :, None] * tile).amax(1)

    def backward_step_tile(self, tile: Tensor, beta: Tensor) -> Tensor:
        return (beta[:, None, :] * tile).amax(-1)

    def join(self, a: Tensor, b: Tensor) -> Tensor:
        return torch.maximum(a, b)

    def total(self, weights: Tensor) -> Tensor:
        return weights.amax(-1)

    def join_logs(self, logs: Tensor) -> Tensor:
        return logs.amax(0)

    def emission(self, words: Tensor) -> Tensor:
        return self.distributions.class_emission(words, "amax")

    def _best_rows(self, states: Tensor, beta: Tensor) -> Tensor:
        """Return (n, len(states)) max_z' p(z' | z) beta(z')."""
        distributions = self.distributions
        top = beta.amax(dim=1, keepdim=True)
        scaled = (beta / torch.where(top > 0, top, torch.ones_like(top))).to(distributions.dtype)
        result = beta.new_empty(len(beta), len(states))
        for chunk in distributions.row_slices(len(states)):
            rows = distributions.raw_rows(states[chunk])
            product = torch.empty_like(rows)
            for i, row in enumerate(scaled):
                result[i, chunk] = torch.mul(rows, row, out=product).amax(1).double()
        return result * top


def columns_of(distributions: HMMDistributions, block: int) -> Tensor:
    """Return (K, S) p(z' | z) for z' in one block and every z."""
    size = distributions.states_per_block
    unit = torch.eye(size, dtype=torch.float64, device=distributions.device)
    return distributions.backward_step_to([block] * size, unit)
