"""The distributional parameters of a model, computed once: what scoring and every query read.

start (S,), emission (V, K), and the transition matrix A by its factors. A itself, |Z| x |Z|, is never
held: products with it stream over the rows of a few blocks at a time.

Products take and return the caller's type, float64 for every query. Rows are made in the model's type,
then each is divided by its own sum in the caller's type: a float32 model keeps probability mass to 1e-15 per step.
"""

from collections.abc import Iterator
from functools import cached_property
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from vlhmm.clustering.blocks import Blocks
from vlhmm.components import emissions
from vlhmm.components.transitions import Softmax
from vlhmm.hmm import ModelPotentials, Transition

ROWS_AT_ONCE = 1 << 23  # entries of A made at a time: 32 MB in float32
WIDENED_AT_ONCE = 1 << 18  # of these, entries copied to float64 at a time: 2 MB, which stay in the cache
WORDS_AT_ONCE = 8192  # of the emission table


class Tables:
    """Probabilities of a trained HMM, in float32 or float64, with exact products against A."""

    def __init__(self, potentials: ModelPotentials, blocks: Blocks, dtype: torch.dtype | None = None) -> None:
        log_emission = potentials.log_emission.detach()
        dtype = dtype or log_emission.dtype
        self.blocks, self.dtype, self.device = blocks, dtype, log_emission.device
        self.log_emission: Float[Tensor, "word slot"] = log_emission.to(dtype)
        self.start_of_group: Float[Tensor, "group slot"] = potentials.log_start.detach().to(dtype).exp()
        transition = potentials.transition.to(dtype=dtype)
        self.transition: Transition = transition.normalized() if isinstance(transition, Softmax) else transition
        self.group_of_word: Int[Tensor, " word"] = self._index(blocks.group_of_word)
        self.states_of_group: Int[Tensor, "group slot"] = self._index(blocks.states_of_group)
        self.num_states, self.num_groups = blocks.num_states, blocks.num_groups
        self.states_per_block = self.states_of_group.shape[1]
        self.vocab_size = len(self.group_of_word)
        self.emission: Float[Tensor, "word slot"] = log_emission.to(dtype).exp()
        total = self.emission_total  # a float32 log-softmax over a large vocabulary leaves as much as 1e-5 here
        for words in torch.arange(self.vocab_size, device=self.device).split(WORDS_AT_ONCE):
            self.emission[words] = (self.emission[words].double() / total[self._states_of(words)]).to(dtype)
        del self.emission_total  # of the table as it is now: what rounding has left

    @cached_property
    def emission_total(self) -> Float[Tensor, " state"]:
        """sum_x p(x | z) of the stored table, in float64; 1 for a state that emits nothing."""
        total = torch.zeros(self.num_states, dtype=torch.float64, device=self.device)
        for words in torch.arange(self.vocab_size, device=self.device).split(WORDS_AT_ONCE):
            total.index_add_(0, self._states_of(words).flatten(), self.emission[words].double().flatten())
        return torch.where(total > 0, total, 1.0)

    def _states_of(self, words: Int[Tensor, " n"]) -> Int[Tensor, "n slot"]:
        return self.states_of_group[self.group_of_word[words]]

    def _index(self, array: Any) -> Tensor:
        return torch.from_numpy(array).to(self.device)

    @cached_property
    def start(self) -> Float[Tensor, " state"]:
        """p(z_1 = z)."""
        start = torch.zeros(self.num_states, dtype=self.dtype, device=self.device)
        start[self.states_of_group.flatten()] = self.start_of_group.flatten()  # a shared state has one value throughout
        return start

    def double(self) -> "Tables":
        """The same model in float64, every distribution normalized anew."""
        log_emission = self.log_emission.double()
        if self.blocks.partition:
            order, sizes = self._words_by_group
            log_emission = emissions.blocked_scalar(log_emission, order, sizes)
        else:
            totals = emissions.segment_logsumexp(log_emission, self.states_of_group, self.num_states)
            log_emission = log_emission - totals[self.states_of_group]
        log_start = (self.start_of_group.double() / self.start.double().sum()).log()
        return Tables(ModelPotentials(log_start, log_emission, self.transition.to(dtype=torch.float64)), self.blocks)

    # ---- pieces of A

    def rows(self, states: Int[Tensor, " n"]) -> Float[Tensor, "n state"]:
        """p(. | z) for each given state."""
        return self.transition.rows(states)

    def normalized_rows(self, states: Int[Tensor, " n"], dtype: torch.dtype) -> Float[Tensor, "n state"]:
        """p(. | z) for each given state in another type, where each row sums to one to that type's precision."""
        rows = self.rows(states).to(dtype)
        return rows / rows.sum(1, keepdim=True)

    def tiles(self, from_group: Tensor, to_group: Tensor, out: Tensor | None = None) -> Float[Tensor, "pair slot slot"]:
        """A[states of from][:, states of to] for each pair."""
        if len(from_group) and bool((from_group[1:] < from_group[:-1]).any()):
            order = from_group.argsort(stable=True)
            tiles = self.transition.tiles(from_group[order], to_group[order])
            return tiles[order.argsort()]
        return self.transition.tiles(from_group, to_group, out)

    def tile(self, from_group: int, to_group: int) -> Float[Tensor, "slot slot"]:
        """A[states of from][:, states of to]."""
        pair = (torch.tensor([g], device=self.device) for g in (from_group, to_group))
        return self.tiles(*pair)[0]

    def row_chunks(self) -> list[Tensor]:
        """All states, cut into runs whose rows of A fit ROWS_AT_ONCE."""
        return list(torch.arange(self.num_states, device=self.device).split(max(1, ROWS_AT_ONCE // self.num_states)))

    def row_parts(self, dtype: torch.dtype, reached: Tensor | None = None) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """(states, their rows of A, the sums of these rows) a few at a time, in one buffer that the next part overwrites."""
        chunks = self.row_chunks()
        buffer = torch.empty(len(chunks[0]), self.num_states, dtype=self.dtype, device=self.device)
        few = max(1, WIDENED_AT_ONCE // self.num_states) if dtype != self.dtype else len(chunks[0])
        wide = buffer if dtype == self.dtype else torch.empty(few, self.num_states, dtype=dtype, device=self.device)
        for states in chunks:
            if reached is not None:
                states = states[reached[states]]
            if len(states):
                rows = self.transition.rows(states, buffer[: len(states)])
                for some, part in zip(states.split(few), rows.split(few), strict=True):
                    exact = part if dtype == self.dtype else wide[: len(some)].copy_(part)
                    yield some, exact, exact.sum(1)

    def advance(self, alpha: Float[Tensor, "n state"]) -> Float[Tensor, "n state"]:
        """alpha @ A: where each distribution over states goes next, O(S^2 (h + n)). States nobody is in are skipped."""
        result = torch.zeros_like(alpha)
        for states, rows, totals in self.row_parts(alpha.dtype, alpha.any(dim=0)):
            result.addmm_(alpha[:, states] / totals, rows)
        return result

    def retreat(self, beta: Float[Tensor, "n state"]) -> Float[Tensor, "n state"]:
        """beta @ A^T: out[i, z] = sum_z' A[z, z'] beta[i, z'], O(S^2 (h + n))."""
        result = torch.empty_like(beta)
        for states, rows, totals in self.row_parts(beta.dtype):
            result[:, states[0] : states[-1] + 1] = beta @ rows.t() / totals
        return result

    def advance_from(self, groups: Int[Tensor, " n"], alpha: Float[Tensor, "n slot"]) -> Float[Tensor, "n state"]:
        """alpha @ A where row i lives on the states of groups[i] only: O(K S h) a distinct group."""
        result = alpha.new_empty(len(groups), self.num_states)
        for group in groups.unique().tolist():
            chosen = groups == group
            rows = self.normalized_rows(self.states_of_group[group], alpha.dtype)
            result[chosen] = alpha[chosen] @ rows
        return result

    def retreat_to(self, groups: Int[Tensor, " n"], beta: Float[Tensor, "n slot"]) -> Float[Tensor, "n state"]:
        """beta @ A^T where beta[i] lives on the states of groups[i] only."""
        dense = beta.new_zeros(len(groups), self.num_states)
        if self.blocks.partition:
            return self._retreat_to_blocks(groups, beta)
        dense.scatter_(1, self.states_of_group[groups], beta)
        return self.retreat(dense)

    def _retreat_to_blocks(self, groups: Tensor, beta: Tensor) -> Tensor:
        """Only the tiles that lead into the wanted blocks are made (block-factored), or rows of A otherwise."""
        result = beta.new_empty(len(groups), self.num_states)
        every = torch.arange(self.num_groups, device=self.device)
        for group in groups.unique().tolist():
            chosen = groups == group
            into = self.tiles(every, torch.full_like(every, group)).flatten(0, 1).to(beta.dtype)  # (S, K)
            result[chosen] = beta[chosen] @ into.t()
        return result

    def emit(self, predicted: Float[Tensor, "n state"]) -> Float[Tensor, "n word"]:
        """sum_z predicted[z] p(x | z) for every word x."""
        order, sizes = self._words_by_group
        predicted = predicted / self.emission_total.to(predicted.dtype)
        if not self.blocks.partition:
            gathered = [
                (predicted[:, self.states_of_group[words]] * self.emission[words].to(predicted.dtype)).sum(-1)
                for words in torch.arange(self.vocab_size, device=self.device).split(1024)
            ]
            return torch.cat(gathered, dim=1)
        emission = self.emission[order].to(predicted.dtype).split(sizes)
        parts = predicted.view(len(predicted), self.num_groups, -1).unbind(1)
        result = torch.empty(len(predicted), self.vocab_size, dtype=predicted.dtype, device=self.device)
        result[:, order] = torch.cat([p @ e.t() for p, e in zip(parts, emission, strict=True)], dim=1)
        return result

    @cached_property
    def _words_by_group(self) -> tuple[Tensor, list[int]]:
        order, sizes = self.blocks.words_by_group
        return self._index(order), sizes.tolist()

    def sample_next(self, states: Int[Tensor, " n"], generator: torch.Generator) -> Int[Tensor, " n"]:
        """z' ~ p(. | z) for each given z."""
        return self.transition.sample(states, generator)

    def dense(self) -> tuple[Float[Tensor, "state state"], Float[Tensor, "state word"]]:
        """(A, O) in full: for small models, tests and export."""
        transition = self.rows(torch.arange(self.num_states, device=self.device))
        emission = torch.zeros(self.num_states, self.vocab_size, dtype=self.dtype, device=self.device)
        words = torch.arange(self.vocab_size, device=self.device)[:, None]
        emission[self.states_of_group[self.group_of_word], words] = self.emission
        return transition, emission
