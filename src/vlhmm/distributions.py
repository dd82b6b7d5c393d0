"""The distributions of a trained HMM, computed once, for scoring and all queries.

p(z_1) (S,), p(x | z) as a table (V, K), and the transition matrix A by its factors. A itself, |Z| x |Z|, is never
stored: products with it stream over the rows of a few blocks at a time.

Tables are stored in the model's type. Every sum over states is computed in float64, over rows that are normalized in
float64, so that a float32 model preserves probability mass to 1e-15 per step.

The context rule is part of the chain: under "reset" it starts again from p(z_1) after an <eos> (`restarts`).
"""

import copy
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from vlhmm.clustering.blocks import Blocks
from vlhmm.components import emissions
from vlhmm.components.chain_inputs import Pairs
from vlhmm.components.transitions import Softmax
from vlhmm.errors import ConfigError, QueryError
from vlhmm.hmm import ModelPotentials, Transition

RULES = ("reset", "carry")
ROWS_AT_ONCE = 1 << 23  # entries of A made at a time: 32 MB in float32
WIDENED_AT_ONCE = 1 << 18  # of these, entries copied to float64 at a time: 2 MB, which stay in the cache
WORDS_AT_ONCE = 8192  # of the emission table
TILE_CACHE_BYTES = 1 << 27
ROW_CHUNK_BYTES = 1 << 26
SIZE_CLASSES = 16  # of uneven blocks: products spend a few percent on padding


class HMMDistributions:
    """p(z_1), p(z' | z) and p(x | z) of a trained HMM, with exact products against A.

    Args:
        potentials: The log-probabilities that the parameters give.
        blocks: Which states may emit a word.
        dtype: Type of the tables; that of the potentials if not given. Products are in float64 whatever it is.
    """

    eos: int = -1  # the word after which the chain may restart, set by `under`
    rule: str = "reset"
    interrupt: Callable[[], None] | None = None  # called between parts of long products; stops them by raising

    def __init__(self, potentials: ModelPotentials, blocks: Blocks, dtype: torch.dtype | None = None) -> None:
        log_emission = potentials.log_emission.detach()
        dtype = dtype or log_emission.dtype
        self.blocks, self.dtype, self.device = blocks, dtype, log_emission.device
        self.log_emission: Float[Tensor, "word slot"] = log_emission.to(dtype)
        self.start_of_block: Float[Tensor, "block slot"] = potentials.log_start.detach().to(dtype).exp()
        transition = potentials.transition.to(dtype=dtype)
        self.transition: Transition = transition.normalized() if isinstance(transition, Softmax) else transition
        self.block_of_word: Int[Tensor, " word"] = self._index(blocks.block_of_word)
        self.states_of_block: Int[Tensor, "block slot"] = self._index(blocks.states_of_block)
        self.num_states, self.num_blocks = blocks.num_states, blocks.num_blocks
        self.states_per_block = self.states_of_block.shape[1]
        self.vocab_size = len(self.block_of_word)
        self.emission: Float[Tensor, "word slot"] = log_emission.to(dtype).exp()
        total = self.emission_total  # a float32 log-softmax over a large vocabulary leaves as much as 1e-5 here
        for words in torch.arange(self.vocab_size, device=self.device).split(WORDS_AT_ONCE):
            self.emission[words] = (self.emission[words].double() / total[self._states_of(words)]).to(dtype)
        del self.emission_total  # computed again from the rounded table
        self._kept_tiles: OrderedDict[tuple[int, int], Tensor] = OrderedDict()

    def is_finite(self) -> bool:
        """Return whether the distributions are finite: even finite parameters may be so large that products overflow.

        Cost: one pass over the tables and over the factors of A. A product u . v is at most |u| |v| times its width.
        """
        tables = (self.start_of_block.sum(), self.emission.sum(), self.transition.largest_score())
        return all(bool(torch.isfinite(total)) for total in tables)

    def under(self, rule: str, eos: int) -> "HMMDistributions":
        """Return the same distributions under a context rule; `eos` is the word after which "reset" starts again."""
        if rule not in RULES:
            raise QueryError(f"unknown context rule {rule!r}, expected one of {', '.join(RULES)}")
        chain = copy.copy(self)
        chain.rule, chain.eos = rule, int(eos)
        return chain

    @cached_property
    def emission_total(self) -> Float[Tensor, " state"]:
        """sum_x p(x | z) of the stored table, in float64; 1 for a state that emits nothing."""
        total = torch.zeros(self.num_states, dtype=torch.float64, device=self.device)
        for words in torch.arange(self.vocab_size, device=self.device).split(WORDS_AT_ONCE):
            total.index_add_(0, self._states_of(words).flatten(), self.emission[words].double().flatten())
        return torch.where(total > 0, total, 1.0)

    def _states_of(self, words: Int[Tensor, " n"]) -> Int[Tensor, "n slot"]:
        return self.states_of_block[self.block_of_word[words]]

    def _index(self, array: Any) -> Tensor:
        return torch.from_numpy(array).to(self.device)

    @cached_property
    def start(self) -> Float[Tensor, " state"]:
        """p(z_1 = z), in float64."""
        start = torch.zeros(self.num_states, dtype=torch.float64, device=self.device)
        # a shared state has one value throughout
        start[self.states_of_block.flatten()] = self.start_of_block.flatten().double()
        return start / start.sum()

    def double(self) -> "HMMDistributions":
        """Return the same model in float64, with every distribution normalized again."""
        log_emission = self.log_emission.double()
        if self.blocks.partition:
            order, sizes = self._words_by_block
            log_emission = emissions.blocked_scalar(log_emission, order, sizes)
        else:
            totals = emissions.segment_logsumexp(log_emission, self.states_of_block, self.num_states)
            log_emission = log_emission - totals[self.states_of_block]
        log_start = self.start[self.states_of_block].log()
        potentials = ModelPotentials(log_start, log_emission, self.transition.to(dtype=torch.float64))
        double = HMMDistributions(potentials, self.blocks)
        double.rule, double.eos = self.rule, self.eos
        return double

    # ---- one word

    @cached_property
    def _block_of_word(self) -> list[int]:
        return self.block_of_word.tolist()

    def block(self, word: int) -> int:
        """Return the block of states that may emit `word`."""
        return self._block_of_word[word]

    def states(self, word: int) -> Int[Tensor, " slot"]:
        """Return the states that may emit `word`."""
        return self.states_of_block[self._block_of_word[word]]

    def emission_of(self, word: int) -> Float[Tensor, " slot"]:
        """Return p(word | z) for z in `states(word)`."""
        return self.emission[word].double() / self.emission_total[self.states(word)]

    def start_at(self, word: int) -> Float[Tensor, " slot"]:
        """Return p(z_1 = z) for z in `states(word)`."""
        return self.start[self.states(word)]

    def restarts(self, word: int) -> bool:
        """Return whether the chain starts again from p(z_1) after `word`."""
        return self.rule == "reset" and word == self.eos

    def edge(self, word: int, following: int) -> Float[Tensor, "slot slot"]:
        """Return p(z' | z, word) from the states of `word` to those of `following`; p(z_1) if the chain restarts."""
        if self.restarts(word):
            return self.start_at(following).expand(self.states_per_block, -1)
        return self.tiles_of([(self.block(word), self.block(following))])[0].double()

    # ---- parts of A

    def raw_rows(self, states: Int[Tensor, " n"]) -> Float[Tensor, "n state"]:
        """Return p(. | z) for each given state in the model's type, as its parameters give it."""
        return self.transition.rows(states)

    def rows(self, states: Int[Tensor, " n"]) -> Float[Tensor, "n state"]:
        """Return p(. | z) for each given state, in float64; each row sums to one."""
        return self.normalized_rows(states, torch.float64)

    def normalized_rows(self, states: Int[Tensor, " n"], dtype: torch.dtype) -> Float[Tensor, "n state"]:
        """Return p(. | z) for each given state in another type, where each row sums to one to that type's precision."""
        rows = self.raw_rows(states).to(dtype)
        return rows / rows.sum(1, keepdim=True)

    # The smaller ones of uneven blocks are filled up with states that are never entered. Products pass over them.

    @cached_property
    def real_states(self) -> Int[Tensor, " state"]:
        """The states that exist."""
        if not self.blocks.partition:
            return torch.arange(self.num_states, device=self.device)
        return self._index(self.blocks.states_of_block[self.blocks.alive])

    @cached_property
    def _num_alive(self) -> list[int]:
        alive: list[int] = self.blocks.num_alive.tolist()
        return alive

    @cached_property
    def _entered(self) -> tuple[Int[Tensor, " column"], list[Transition]]:
        """The states that `entering_rows` has as columns, and the transitions into each part of them."""
        if len(self.real_states) == self.num_states:
            return self.real_states, [self.transition]
        classes = [(self._index(blocks), width) for blocks, width in self.blocks.size_classes(SIZE_CLASSES)]
        states = torch.cat([self.states_of_block[blocks, :width].flatten() for blocks, width in classes])
        return states, [self.transition.into(blocks, width) for blocks, width in classes]

    @property
    def entered_states(self) -> Int[Tensor, " column"]:
        """The states that the columns of `entering_rows` belong to: all that exist, in another order, and a few of padding."""
        return self._entered[0]

    def entering_rows(self, states: Int[Tensor, " n"], out: Tensor | None = None) -> Float[Tensor, "n column"]:
        """Return p(z' | z) for each given z and each z' of `entered_states`, in the model's type."""
        parts = self._entered[1]
        if len(parts) == 1:
            return parts[0].rows(states, out)
        every = [transition.rows(states) for transition in parts]
        return torch.cat(every, dim=1) if out is None else torch.cat(every, dim=1, out=out)

    def row_slices(self, num_rows: int) -> list[slice]:
        """Return slices of a few rows of S float64 numbers."""
        size = max(1, ROW_CHUNK_BYTES // (8 * self.num_states))
        return [slice(first, min(first + size, num_rows)) for first in range(0, num_rows, size)]

    def tiles(self, from_block: Tensor, to_block: Tensor, out: Tensor | None = None) -> Float[Tensor, "pair slot slot"]:
        """Return A[states of from][:, states of to] for each pair."""
        if len(from_block) and bool((from_block[1:] < from_block[:-1]).any()):
            order = from_block.argsort(stable=True)
            tiles = self.transition.tiles(from_block[order], to_block[order])
            return tiles[order.argsort()]
        return self.transition.tiles(from_block, to_block, out)

    def tiles_of(self, pairs: Sequence[tuple[int, int]]) -> list[Tensor]:
        """Return the (K, K) tiles of (from, to) blocks in the model's type; those used last are kept."""
        found = {pair: self._kept_tiles[pair] for pair in pairs if pair in self._kept_tiles}
        missing = list(dict.fromkeys(pair for pair in pairs if pair not in found))
        if missing:
            sources, targets = (torch.tensor(blocks, device=self.device) for blocks in zip(*missing, strict=True))
            found.update(zip(missing, self.tiles(sources, targets).unbind(0), strict=True))
        capacity = max(8, TILE_CACHE_BYTES // (self.states_per_block**2 * self.emission.element_size()))
        for pair in missing[-capacity:]:
            self._kept_tiles[pair] = found[pair].clone()  # a view would keep the whole batch of tiles alive
        for pair in pairs:
            if pair in self._kept_tiles:
                self._kept_tiles.move_to_end(pair)
        while len(self._kept_tiles) > capacity:
            self._kept_tiles.popitem(last=False)
        return [found[pair] for pair in pairs]

    def row_chunks(self) -> list[Tensor]:
        """Return the states that exist, cut into runs whose rows of A fit ROWS_AT_ONCE."""
        return list(self.real_states.split(max(1, ROWS_AT_ONCE // len(self.entered_states))))

    def row_parts(self, reached: Tensor | None = None) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Yield (states, their `entering_rows` in float64, the sums of these rows) a few at a time.

        The rows are in one buffer, which the next part overwrites.
        """
        chunks, num_columns = self.row_chunks(), len(self.entered_states)
        buffer = torch.empty(len(chunks[0]), num_columns, dtype=self.dtype, device=self.device)
        is_wide = self.dtype == torch.float64
        few = len(chunks[0]) if is_wide else max(1, WIDENED_AT_ONCE // num_columns)
        wide = buffer if is_wide else torch.empty(few, num_columns, dtype=torch.float64, device=self.device)
        for states in chunks:
            if self.interrupt is not None:
                self.interrupt()
            if reached is not None:
                states = states[reached[states]]
            if len(states):
                rows = self.entering_rows(states, buffer[: len(states)])
                for some, part in zip(states.split(few), rows.split(few), strict=True):
                    exact = part if is_wide else wide[: len(some)].copy_(part)
                    yield some, exact, exact.sum(1)

    # ---- products, in float64

    def forward_step(self, alpha: Float[Tensor, "n state"]) -> Float[Tensor, "n state"]:
        """Return alpha @ A for each row, in O(S^2 (h + n)). States with probability zero in every row are skipped."""
        alpha = alpha.double()
        entered = alpha.new_zeros(len(alpha), len(self.entered_states))
        for states, rows, totals in self.row_parts(alpha.any(dim=0)):
            entered.addmm_(alpha[:, states] / totals, rows)
        return torch.zeros_like(alpha).index_copy_(1, self.entered_states, entered)

    def backward_step(self, beta: Float[Tensor, "n state"]) -> Float[Tensor, "n state"]:
        """Return beta @ A^T: out[i, z] = sum_z' p(z' | z) beta[i, z'], O(S^2 (h + n)); 0 for padding."""
        result = torch.zeros_like(beta, dtype=torch.float64)
        entered = beta.double()[:, self.entered_states]
        for states, rows, totals in self.row_parts():
            result[:, states] = entered @ rows.t() / totals
        return result

    def forward_step_from(self, blocks: Sequence[int] | Tensor, alpha: Float[Tensor, "n slot"]) -> Float[Tensor, "n state"]:
        """Return alpha @ A where row i lives on the states of blocks[i] only: O(K S h) per distinct block."""
        alpha, blocks = alpha.double(), self._block_index(blocks)
        result = alpha.new_zeros(len(blocks), self.num_states)
        for block in blocks.unique().tolist():
            if self.interrupt is not None:
                self.interrupt()
            chosen = (blocks == block).nonzero()
            rows = self._exact_rows_of(block)
            result[chosen, self.entered_states] = alpha[chosen[:, 0], : len(rows)] @ rows
        return result

    def _exact_rows_of(self, block: int) -> Float[Tensor, "slot column"]:
        """Return the `entering_rows` of a block's states in float64; each sums to one."""
        rows = self.entering_rows(self.states_of_block[block, : self._num_alive[block]]).double()
        return rows / rows.sum(1, keepdim=True)

    def predict(self, blocks: Sequence[int] | Tensor, alpha: Float[Tensor, "n slot"]) -> Float[Tensor, "n state"]:
        """Return p(z_{t+1}) for each row, from the filter alpha[i] on the states of blocks[i]; p(z_1) for block -1."""
        blocks = self._block_index(blocks)
        predicted = self.start.expand(len(blocks), -1).clone()
        going = (blocks >= 0).nonzero()[:, 0]
        if len(going):
            predicted[going] = self.forward_step_from(blocks[going], alpha[going])
        return predicted

    def backward_step_to(self, blocks: Sequence[int] | Tensor, beta: Float[Tensor, "n slot"]) -> Float[Tensor, "n state"]:
        """Return beta @ A^T where beta[i] lives on the states of blocks[i] only; 0 for padding."""
        beta, blocks = beta.double(), self._block_index(blocks)
        if self.blocks.partition:
            return self._backward_step_to_blocks(blocks, beta)
        dense = beta.new_zeros(len(blocks), self.num_states)
        dense.scatter_(1, self.states_of_block[blocks], beta)
        return self.backward_step(dense)

    def backward_step_at(self, block: int, beta: Float[Tensor, "n state"]) -> Float[Tensor, "n slot"]:
        """Return sum_z' p(z' | z) beta(z') for z in one block only: one pass over K rows; 0 for padding."""
        rows = self._exact_rows_of(block)
        result = beta.new_zeros(len(beta), self.states_per_block, dtype=torch.float64)
        result[:, : len(rows)] = beta.double()[:, self.entered_states] @ rows.T
        return result

    def _block_index(self, blocks: Sequence[int] | Tensor) -> Tensor:
        return torch.as_tensor(blocks, device=self.device).long()

    def _backward_step_to_blocks(self, blocks: Tensor, beta: Tensor) -> Tensor:
        """Return beta @ A^T for some blocks, by the columns of A that enter them."""
        result = beta.new_zeros(len(blocks), self.num_states)
        for block in blocks.unique().tolist():
            chosen, width = (blocks == block).nonzero(), self._num_alive[block]
            into = self.transition.into(torch.tensor([block], device=self.device), width)
            columns = into.rows(self.real_states).double()  # (S, K)
            result[chosen, self.real_states] = beta[chosen[:, 0], :width] @ columns.t()
        return result

    def emit(self, predicted: Float[Tensor, "n state"]) -> Float[Tensor, "n word"]:
        """Return sum_z predicted[z] p(x | z) for every word x."""
        order, sizes = self._words_by_block
        predicted = predicted.double() / self.emission_total
        if not self.blocks.partition:
            gathered = [
                (predicted[:, self.states_of_block[words]] * self.emission[words].double()).sum(-1)
                for words in torch.arange(self.vocab_size, device=self.device).split(1024)
            ]
            return torch.cat(gathered, dim=1)
        emission = self.emission[order].double().split(sizes)
        parts = predicted.view(len(predicted), self.num_blocks, -1).unbind(1)
        result = torch.empty(len(predicted), self.vocab_size, dtype=predicted.dtype, device=self.device)
        result[:, order] = torch.cat([p @ e.t() for p, e in zip(parts, emission, strict=True)], dim=1)
        return result

    @cached_property
    def _words_by_block(self) -> tuple[Tensor, list[int]]:
        order, sizes = self.blocks.words_by_block
        return self._index(order), sizes.tolist()

    # ---- what states emit

    def class_emission(self, words: Int[Tensor, " n"], reduce: str = "sum") -> Float[Tensor, " state"]:
        """Return the sum of p(x | z) over the given words x, or with "amax" the largest."""
        total = torch.zeros(self.num_states, dtype=torch.float64, device=self.device)
        for part in words.split(WORDS_AT_ONCE):
            total.scatter_reduce_(
                0, self._states_of(part).reshape(-1), self.emission[part].double().reshape(-1), reduce
            )
        return total / self.emission_total

    @cached_property
    def emitted(self) -> "EmittedWords":
        """Return the words of each state."""
        return EmittedWords(self)

    # ---- all of it

    def sample_next(self, states: Int[Tensor, " n"], generator: torch.Generator) -> Int[Tensor, " n"]:
        """Return z' ~ p(. | z) for each given z."""
        return self.transition.sample(states, generator)

    def dense(self) -> tuple[Float[Tensor, "state state"], Float[Tensor, "state word"]]:
        """Return (A, O) in full: for small models, tests and export."""
        transition = self.raw_rows(torch.arange(self.num_states, device=self.device))
        emission = torch.zeros(self.num_states, self.vocab_size, dtype=self.dtype, device=self.device)
        words = torch.arange(self.vocab_size, device=self.device)[:, None]
        emission[self.states_of_block[self.block_of_word], words] = self.emission
        return transition, emission


class EmittedWords:
    """The words of each state and their probabilities, in one array sorted by state, for drawing words."""

    def __init__(self, distributions: HMMDistributions) -> None:
        size = distributions.states_per_block
        state = distributions.states_of_block[distributions.block_of_word].reshape(-1)
        order = state.argsort(stable=True)
        self.word = torch.div(order, size, rounding_mode="floor")
        self.probability = (
            distributions.emission.reshape(-1)[order].double() / distributions.emission_total[state[order]]
        )
        counts = torch.bincount(state, minlength=distributions.num_states)
        self.first = torch.cat([counts.new_zeros(1), counts.cumsum(0)])

    def words(self, state: int) -> tuple[Tensor, Tensor]:
        """Return (words, p(x | z)) of one state, by id."""
        span = slice(int(self.first[state]), int(self.first[state + 1]))
        return self.word[span], self.probability[span]

    def running_sums(self, allowed: Tensor) -> Tensor:
        """Return sums for `draw` over the words that are `allowed`, (V,) bool."""
        weights = self.probability * allowed[self.word]
        return torch.cat([weights.new_zeros(1), weights.cumsum(0)])

    @cached_property
    def all_words(self) -> Tensor:
        """Return sums for `draw` over every word."""
        return torch.cat([self.probability.new_zeros(1), self.probability.cumsum(0)])

    def draw(self, states: Tensor, uniform: Tensor, sums: Tensor | None = None) -> Tensor:
        """Draw a word for each state from p(x | z) by inversion of `uniform` numbers, among the words of `sums`."""
        sums = self.all_words if sums is None else sums
        low, high = sums[self.first[states]], sums[self.first[states + 1]]
        target = torch.minimum(low + uniform * (high - low), torch.nextafter(high, low))
        return self.word[torch.searchsorted(sums, target, right=True) - 1]


class TileCache:
    """Transition tiles of the block pairs seen so far, each computed once, within a memory budget."""

    def __init__(self, distributions: HMMDistributions, memory: int) -> None:
        self.distributions = distributions
        size = distributions.states_per_block
        tile_bytes = size * size * distributions.emission.element_size()
        self.capacity = int(min(memory // tile_bytes, distributions.num_blocks**2))
        if self.capacity < 1:
            raise ConfigError(
                f"one transition tile takes {tile_bytes:,} bytes, the limit is {int(memory):,}; raise --memory"
            )
        self.slots = 0
        # with very many blocks (one per word) a table of all pairs is too large: nothing is kept between calls
        self.keeps = distributions.num_blocks**2 <= 1 << 24
        self.slot_of_code = torch.full((distributions.num_blocks**2 if self.keeps else 0,), -1, dtype=torch.long)

    def take_room_of(self, other: "TileCache") -> None:
        """Use the memory of a cache that is no longer needed: fresh pages are slow."""
        if (
            other.capacity == self.capacity
            and other.distributions.dtype == self.distributions.dtype
            and "tiles" in vars(other)
        ):
            self.tiles = other.tiles

    @cached_property
    def tiles(self) -> Float[Tensor, "pair slot slot"]:
        """Return room for `capacity` tiles. The system provides a page of it when it is first written."""
        size = self.distributions.states_per_block
        return torch.empty(self.capacity, size, size, dtype=self.distributions.dtype, device=self.distributions.device)

    def edges(self, codes: Int[Tensor, "batch time"], live: Tensor) -> Int[Tensor, "batch time"] | None:
        """Return the index in `tiles` of each live edge's tile (-1: restart), or None if they do not fit."""
        codes = torch.where(live, codes, -1).cpu()
        used = codes[codes >= 0].unique()
        if not self.keeps:
            return self._edges_uncached(codes, used)
        missing = used[self.slot_of_code[used] < 0]
        if self.slots + len(missing) > self.capacity:
            if len(used) > self.capacity:
                return None
            self.slot_of_code.fill_(-1)
            self.slots, missing = 0, used
        if len(missing):
            self._fill(missing, self.slots)
            self.slot_of_code[missing] = torch.arange(self.slots, self.slots + len(missing))
            self.slots += len(missing)
        return torch.where(codes >= 0, self.slot_of_code[codes.clamp(min=0)], -1).to(self.distributions.device)

    def _edges_uncached(self, codes: Tensor, used: Tensor) -> Tensor | None:
        if len(used) > self.capacity:
            return None
        self._fill(used, 0)
        found = torch.searchsorted(used, codes.clamp(min=0)) if len(used) else torch.zeros_like(codes)
        return torch.where(codes >= 0, found, -1).to(self.distributions.device)

    def _fill(self, codes: Tensor, first: int) -> None:
        codes = codes.to(self.distributions.device)
        pairs = Pairs(codes // self.distributions.num_blocks, codes % self.distributions.num_blocks)
        self.distributions.tiles(*pairs, out=self.tiles[first : first + len(codes)])
