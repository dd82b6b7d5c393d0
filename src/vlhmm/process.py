"""A model as a stochastic process: its tables, its context rule, and messages in float64.

Input:  `Tables` (any dtype), the id of <eos>, the context rule.
Output: `Process`, through which every query reads the model; float64 in, float64 out.

Tables may hold float32. Every sum over states is taken in float64, over rows that are normalized in float64, so that
no probability mass is lost on the way. Under the rule "reset" the chain starts
afresh after an <eos>: `restarts` says so, and whoever walks the chain asks it.
"""

from collections import OrderedDict
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from vlhmm.errors import QueryError

RULES = ("reset", "carry")
_TILE_CACHE_BYTES = 1 << 27
_ROW_CHUNK_BYTES = 1 << 26


class Process:
    """p(z_1), p(z' | z), p(x | z) and the context rule, as the queries read them."""

    def __init__(self, tables: Any, eos: int, rule: str) -> None:
        if rule not in RULES:
            raise QueryError(f"unknown context rule {rule!r}, expected one of {', '.join(RULES)}")
        self.tables, self.eos, self.rule = tables, int(eos), rule
        self.dtype, self.device = tables.start.dtype, tables.start.device
        self.num_states, self.num_groups = int(tables.num_states), int(tables.num_groups)
        self.vocab_size, self.states_per_group = tables.emission.shape
        self.group_of_word: Tensor = torch.as_tensor(tables.group_of_word, device=self.device).long()
        self.states_of_group: Tensor = torch.as_tensor(tables.states_of_group, device=self.device).long()
        self.start: Tensor = tables.start.reshape(-1).double()
        self.start = self.start / self.start.sum()
        self._tiles: OrderedDict[tuple[int, int], Tensor] = OrderedDict()
        self._group_of_word = self.group_of_word.tolist()

    # ---- one word

    def group(self, word: int) -> int:
        """The group of states that may emit `word`."""
        return self._group_of_word[word]

    def states(self, word: int) -> Tensor:
        """(K,) ids of the states that may emit `word`."""
        return self.states_of_group[self._group_of_word[word]]

    def emission(self, word: int) -> Tensor:
        """(K,) p(word | z) for z in `states(word)`."""
        return self.tables.emission[word].double() / self.tables.emission_total[self.states(word)]

    def start_at(self, word: int) -> Tensor:
        """(K,) p(z_1 = z) for z in `states(word)`."""
        return self.start[self.states(word)]

    def restarts(self, word: int) -> bool:
        """Whether the chain starts afresh after `word`."""
        return self.rule == "reset" and word == self.eos

    def tiles(self, pairs: Sequence[tuple[int, int]]) -> list[Tensor]:
        """(K, K) tiles p(z' | z) of (from, to) groups, in the tables' type; the latest are kept."""
        found = {pair: self._tiles[pair] for pair in pairs if pair in self._tiles}
        missing = list(dict.fromkeys(pair for pair in pairs if pair not in found))
        if missing:
            sources, targets = zip(*missing, strict=True)
            made = self.tables.tiles(
                torch.tensor(sources, device=self.device), torch.tensor(targets, device=self.device)
            )
            found.update(zip(missing, made.unbind(0), strict=True))
        tile_bytes = self.states_per_group**2 * self.start.new_empty((), dtype=self.dtype).element_size()
        capacity = max(8, _TILE_CACHE_BYTES // tile_bytes)
        for pair in missing[-capacity:]:
            self._tiles[pair] = found[pair].clone()  # a view would keep the whole batch of tiles alive
        for pair in pairs:
            if pair in self._tiles:
                self._tiles.move_to_end(pair)
        while len(self._tiles) > capacity:
            self._tiles.popitem(last=False)
        return [found[pair] for pair in pairs]

    def edge(self, word: int, following: int) -> Tensor:
        """(K, K) p(z' | z, word) from the states of `word` to those of `following`, a fresh start
        included."""
        if self.restarts(word):
            return self.start_at(following).expand(self.states_per_group, -1)
        return self.tiles([(self.group(word), self.group(following))])[0].double()

    # ---- vectors over all states

    def advance(self, alpha: Tensor) -> Tensor:
        """(n, S) alpha A."""
        return self.tables.advance(alpha.double())

    def retreat(self, beta: Tensor) -> Tensor:
        """(n, S) sum_z' p(z' | z) beta(z')."""
        return self.tables.retreat(beta.double())

    def advance_from(self, groups: Sequence[int], alpha: Tensor) -> Tensor:
        """(n, S) alpha A where row i lives on the states of groups[i]; alpha is (n, K)."""
        index = torch.as_tensor(groups, device=self.device).long()
        return self.tables.advance_from(index, alpha.double())

    def retreat_to(self, groups: Sequence[int], beta: Tensor) -> Tensor:
        """(n, S) sum_z' p(z' | z) beta(z') where row i lives on the states of groups[i]; beta is (n, K)."""
        index = torch.as_tensor(groups, device=self.device).long()
        return self.tables.retreat_to(index, beta.double())

    def retreat_at(self, group: int, beta: Tensor) -> Tensor:
        """(n, K) sum_z' p(z' | z) beta(z') for z in one group only; beta is (n, S). One pass over K rows."""
        return beta.double() @ self.rows(self.states_of_group[group]).T

    def rows(self, states: Tensor) -> Tensor:
        """(n, S) p(z' | z) for each z of `states`."""
        return self.tables.normalized_rows(states, torch.float64)

    def row_chunks(self, num_rows: int) -> list[slice]:
        """Slices of so many rows of S float64 that a chunk stays small."""
        size = max(1, _ROW_CHUNK_BYTES // (8 * self.num_states))
        return [slice(first, min(first + size, num_rows)) for first in range(0, num_rows, size)]

    def emit(self, weights: Tensor) -> Tensor:
        """(n, V) sum_z weights(z) p(x | z)."""
        return self.tables.emit(weights.double())

    # ---- what states emit

    def class_emission(self, words: Tensor) -> Tensor:
        """(S,) sum of p(x | z) over the given words."""
        return self._scatter(words, "sum")

    def class_peak(self, words: Tensor) -> Tensor:
        """(S,) largest p(x | z) among the given words."""
        return self._scatter(words, "amax")

    def _scatter(self, words: Tensor, reduce: str) -> Tensor:
        total = torch.zeros(self.num_states, dtype=torch.float64, device=self.device)
        for part in words.split(8192):
            where = self.states_of_group[self.group_of_word[part]].reshape(-1)
            total.scatter_reduce_(0, where, self.tables.emission[part].double().reshape(-1), reduce)
        return total / self.tables.emission_total

    @cached_property
    def emitted(self) -> "Emitted":
        """The words of each state."""
        return Emitted(self)


class Emitted:
    """Each state's words and their probabilities, in one array sorted by state: for drawing words."""

    def __init__(self, process: Process) -> None:
        size = process.states_per_group
        state = process.states_of_group[process.group_of_word].reshape(-1)
        order = state.argsort(stable=True)
        self.word = torch.div(order, size, rounding_mode="floor")
        self.probability = process.tables.emission.reshape(-1)[order].double() / process.tables.emission_total[state[order]]
        counts = torch.bincount(state, minlength=process.num_states)
        self.first = torch.cat([counts.new_zeros(1), counts.cumsum(0)])

    def words(self, state: int) -> tuple[Tensor, Tensor]:
        """(words, p(x | z)) of one state, by id."""
        span = slice(int(self.first[state]), int(self.first[state + 1]))
        return self.word[span], self.probability[span]

    def running_sums(self, allowed: Tensor) -> Tensor:
        """Sums for `draw` over the words that are `allowed`, (V,) bool."""
        weights = self.probability * allowed[self.word]
        return torch.cat([weights.new_zeros(1), weights.cumsum(0)])

    @cached_property
    def all_words(self) -> Tensor:
        """Sums for `draw` over every word."""
        return torch.cat([self.probability.new_zeros(1), self.probability.cumsum(0)])

    def draw(self, states: Tensor, uniform: Tensor, sums: Tensor | None = None) -> Tensor:
        """A word for each state by inversion of `uniform` numbers: from p(x | z), over the words of
        `sums`."""
        sums = self.all_words if sums is None else sums
        low, high = sums[self.first[states]], sums[self.first[states + 1]]
        target = torch.minimum(low + uniform * (high - low), torch.nextafter(high, low))
        return self.word[torch.searchsorted(sums, target, right=True) - 1]


def process_of(model: Any) -> Process:
    """The model's `Process`, made once per model."""
    cached = getattr(model, "_query_process", None)
    if cached is not None and cached.tables is model.tables and cached.rule == model.rule:
        return cached
    process = Process(model.tables, model.vocabulary.eos, model.rule)
    try:
        object.__setattr__(model, "_query_process", process)
    except AttributeError:  # a model with slots is asked again each time
        pass
    return process
