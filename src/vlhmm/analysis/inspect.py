"""Descriptions of states, words and blocks. Input: a model and its `Usage`. Output: views, as plain values.

Everything is said of the text the model itself would write, in the long run: `usage` are shares of its tokens,
and what comes next or came before follows the context rule (under "reset" a fresh start comes after every <eos>,
whatever state it was emitted from). Entropies are in nats. Knows nothing of files.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from vlhmm.analysis.stationary import Usage, restart_probability
from vlhmm.data.user_text import known_word
from vlhmm.data.vocabulary import Vocabulary
from vlhmm.errors import QueryError
from vlhmm.results import Result

WORDS_SHOWN = 5  # words that a state or block in a list is shown by


class WordShare(NamedTuple):
    """A word and its probability."""

    word: str
    probability: float


class StateShare(NamedTuple):
    """A state, its probability, and the words it emits most."""

    state: int
    probability: float
    words: list[str]


class BlockShare(NamedTuple):
    """A block, its probability, and its most frequent words."""

    block: int
    probability: float
    words: list[str]


class StateOfWord(NamedTuple):
    """A state that emits a word, and the neighbours of the word in that state."""

    state: int
    share: float  # p(z | word)
    probability: float  # p(word | z)
    words: list[str]
    previous_words: list[WordShare]
    next_words: list[WordShare]


@dataclass(frozen=True, slots=True, kw_only=True)
class StateView(Result):
    """Words, neighbours and usage of a state."""

    state: int
    block: int | None  # none where words have sets of states that overlap
    slot: int | None
    usage: float
    usage_rank: int  # 1: no state is used more
    share_of_block: float | None
    num_words: int
    words: list[WordShare]  # p(x | z)
    entropy: float  # of the words
    next_words: list[WordShare]
    next_states: list[StateShare]
    next_blocks: list[BlockShare]
    next_entropy: float  # of the next state
    previous_words: list[WordShare]
    previous_states: list[StateShare]
    previous_blocks: list[BlockShare]
    previous_entropy: float


@dataclass(frozen=True, slots=True, kw_only=True)
class WordView(Result):
    """The states that emit a word, and its neighbours."""

    word: str
    id: int
    block: int | None
    frequency: float  # the word's share of tokens
    frequency_rank: int
    num_states: int  # that may emit it
    entropy: float  # of p(z | word)
    states: list[StateOfWord]
    previous_words: list[WordShare]
    next_words: list[WordShare]


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockView(Result):
    """Words, neighbours and usage of a block."""

    block: int
    usage: float
    usage_rank: int
    num_states: int
    used_states: float  # perplexity of the usage within the block
    num_words: int
    words: list[WordShare]  # p(x | block)
    entropy: float  # of the words
    states: list[StateShare]  # p(z | block)
    next_words: list[WordShare]
    next_states: list[StateShare]
    next_blocks: list[BlockShare]
    next_entropy: float  # of the next block
    previous_words: list[WordShare]
    previous_states: list[StateShare]
    previous_blocks: list[BlockShare]
    previous_entropy: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary(Result):
    """A whole model."""

    num_states: int
    num_blocks: int | None
    states_per_block: int | None  # of the largest block
    vocabulary_size: int
    context: str
    used_states: float  # exp of the entropy of the usage: the effective number of states
    half_of_tokens: int  # the fewest states that hold half of all tokens
    most_of_tokens: int  # and nine tenths
    states: list[StateShare]
    blocks: list[BlockShare]
    words: list[WordShare]


def entropy(distribution: Float[Tensor, " n"]) -> float:
    """Return -sum p log p, in nats."""
    return float(torch.special.entr(distribution).sum())


class Inspector:
    """A model with the usage of its states, for descriptions."""

    def __init__(self, model: Any, usage: Usage) -> None:
        self.distributions, self.rule = model.distributions, model.rule
        self.blocks = model.distributions.blocks
        self.vocabulary: Vocabulary = model.vocabulary
        self.usage: Tensor = usage.share
        self.restart = restart_probability(self.distributions, self.vocabulary.eos, self.rule)
        self.start: Tensor = self.distributions.start.double()

    # ---- answers

    def summary(self, top: int = 10) -> Summary:
        """Return sizes, how many states are used, and the most used states, blocks and words."""
        check_top(top)
        partition = self.blocks.partition
        held = self.usage.sort(descending=True).values.cumsum(0)
        return Summary(
            num_states=self.blocks.num_real_states,
            num_blocks=self.blocks.num_blocks if partition else None,
            states_per_block=int(self.blocks.num_alive.max()) if partition else None,
            vocabulary_size=len(self.vocabulary),
            context=self.rule,
            used_states=float(torch.tensor(entropy(self.usage)).exp()),
            half_of_tokens=int((held < 0.5).sum()) + 1,
            most_of_tokens=int((held < 0.9).sum()) + 1,
            states=self._states(self.usage, top),
            blocks=self._blocks(self.usage, top),
            words=self._words(self.frequency, top),
        )

    def state(self, state: int, top: int = 10) -> StateView:
        """Return a state's words, usage and neighbours: one row of A, and one column of it."""
        check_top(top)
        check_state(self.blocks, state)
        block, slot = self._place(state)
        at = torch.zeros(self.distributions.states_per_block, dtype=torch.float64, device=self.distributions.device)
        at[slot] = 1
        share = self.usage[state]
        ahead = self._ahead(block, at[None])[0]
        behind, words_behind = self._behind(block, at[None])
        before = normalized(behind[0])
        words, probabilities = self._emission_of(state)
        in_block = self.usage[self.distributions.states_of_block[block]].sum()
        partition = self.blocks.partition
        return StateView(
            state=state,
            block=block if partition else None,
            slot=slot if partition else None,
            usage=float(share),
            usage_rank=rank(self.usage, state),
            share_of_block=float(ratio(share, in_block)) if partition else None,
            num_words=len(words),
            words=[WordShare(self.vocabulary.words[words[i]], p) for i, p in largest(probabilities, top)],
            entropy=entropy(probabilities),
            next_entropy=entropy(ahead),
            previous_entropy=entropy(before),
            **self._neighbours(ahead, before, words_behind[0], top),
        )

    def word(self, word: str, top: int = 10) -> WordView:
        """Return the states that emit a word, p(z | word) ∝ usage(z) p(word | z), and its neighbours in each."""
        check_top(top)
        index = known_word(self.vocabulary, word)
        block = int(self.distributions.block_of_word[index])
        states = self.distributions.states_of_block[block]
        emitted = self.distributions.emission[index].double()
        share = normalized(self.usage[states] * emitted)
        slots = [slot for slot, _ in largest(share, top)]
        # the word itself first, then its states one by one: all of them live in one block
        each = torch.zeros(len(slots) + 1, len(states), dtype=torch.float64, device=self.distributions.device)
        each[0] = share
        each[torch.arange(1, len(slots) + 1), slots] = 1
        fresh = self.rule == "reset" and index == self.vocabulary.eos
        ahead = (
            self.start.expand(len(each), -1)
            if fresh
            else self.distributions.forward_step_from(self._same_block(block, each), each)
        )
        words_ahead = self.distributions.emit(ahead.contiguous())
        each[0] = emitted
        _, words_behind = self._behind(block, each)
        around = [
            (self._words(normalized(before), WORDS_SHOWN), self._words(after, WORDS_SHOWN))
            for before, after in zip(words_behind[1:], words_ahead[1:], strict=True)
        ]
        return WordView(
            word=word,
            id=index,
            block=block if self.blocks.partition else None,
            frequency=float(self.frequency[index]),
            frequency_rank=rank(self.frequency, index),
            num_states=int(self.blocks.num_alive[block]),
            entropy=entropy(share),
            states=[
                StateOfWord(int(states[k]), float(share[k]), float(emitted[k]), self._top_words(int(states[k])), *sides)
                for k, sides in zip(slots, around, strict=True)
            ],
            previous_words=self._words(normalized(words_behind[0]), top),
            next_words=self._words(words_ahead[0], top),
        )

    def block(self, block: int, top: int = 10) -> BlockView:
        """Return a block's words, states, usage and neighbours."""
        check_top(top)
        check_block(self.blocks, block)
        mass = self.usage.view(self.blocks.num_blocks, -1)
        within = normalized(mass[block])
        words = torch.from_numpy(self.blocks.words_of_block(block)).to(self.distributions.device)
        frequency = normalized(self.frequency[words])
        ahead = self._ahead(block, within[None])[0]
        behind, words_behind = self._behind(block, torch.ones_like(within)[None])
        before = normalized(behind[0])
        states = self.distributions.states_of_block[block]
        return BlockView(
            block=block,
            usage=float(mass[block].sum()),
            usage_rank=rank(mass.sum(1), block),
            num_states=int(self.blocks.num_alive[block]),
            used_states=float(torch.tensor(entropy(within)).exp()),
            num_words=len(words),
            words=[WordShare(self.vocabulary.words[words[i]], p) for i, p in largest(frequency, top)],
            entropy=entropy(frequency),
            states=[StateShare(int(states[k]), p, self._top_words(int(states[k]))) for k, p in largest(within, top)],
            next_entropy=entropy(self._by_block(ahead)),
            previous_entropy=entropy(self._by_block(before)),
            **self._neighbours(ahead, before, words_behind[0], top),
        )

    # ---- what comes next, and what came before

    def _neighbours(self, ahead: Tensor, before: Tensor, words_behind: Tensor, top: int) -> dict[str, Any]:
        """Return words, states and blocks on both sides, from distributions over the next and the previous state."""
        return {
            "next_words": self._words(self.distributions.emit(ahead[None])[0], top),
            "next_states": self._states(ahead, top),
            "next_blocks": self._blocks(ahead, top),
            "previous_words": self._words(normalized(words_behind), top),
            "previous_states": self._states(before, top),
            "previous_blocks": self._blocks(before, top),
        }

    def _same_block(self, block: int, rows: Tensor) -> Tensor:
        return torch.full((len(rows),), block, device=self.distributions.device)

    def _ahead(self, block: int, alpha: Float[Tensor, "n slot"]) -> Float[Tensor, "n state"]:
        """Return alpha P for distributions over one block's states: p(the next state)."""
        restart = alpha @ self.restart[self.distributions.states_of_block[block]]
        going_on = alpha * (1 - self.restart[self.distributions.states_of_block[block]])
        moved = self.distributions.forward_step_from(self._same_block(block, alpha), going_on)
        return moved + restart[:, None] * self.start

    def _behind(
        self, block: int, beta: Float[Tensor, "n slot"]
    ) -> tuple[Float[Tensor, "n state"], Float[Tensor, "n word"]]:
        """Return (u(z) (P beta)(z) over states z, the same over the words emitted there): what came before, unnormalized.

        Under "reset" nothing but <eos> comes before a fresh start, and <eos> before nothing else.
        """
        moved = self.usage * self.distributions.backward_step_to(self._same_block(block, beta), beta)
        begun = beta @ self.start[self.distributions.states_of_block[block]]
        words = self.distributions.emit(moved)
        if self.rule == "reset":
            words[:, self.vocabulary.eos] = begun * (self.usage @ self.restart)
        return moved * (1 - self.restart) + begun[:, None] * (self.usage * self.restart), words

    # ---- names

    @cached_property
    def frequency(self) -> Float[Tensor, " word"]:
        """The share of each word among all tokens."""
        return self.distributions.emit(self.usage[None])[0]

    @cached_property
    def _words_by_block(self) -> list[Tensor]:
        order, sizes = self.blocks.words_by_block
        return list(torch.from_numpy(order).to(self.distributions.device).split(sizes.tolist()))

    def _place(self, state: int) -> tuple[int, int]:
        """Return (a block that holds the state, its slot there)."""
        if self.blocks.partition:
            return divmod(state, self.distributions.states_per_block)
        block, slot = (self.distributions.states_of_block == state).nonzero()[0].tolist()
        return block, slot

    def _emission_of(self, state: int) -> tuple[Tensor, Tensor]:
        """Return (the words a state may emit, p(x | z) of each)."""
        if self.blocks.partition:
            block, slot = self._place(state)
            words = self._words_by_block[block]
            return words, self.distributions.emission[words, slot].double()
        words, slots = (
            (self.distributions.states_of_block[self.distributions.block_of_word] == state).nonzero().unbind(1)
        )
        return words, self.distributions.emission[words, slots].double()

    def _top_words(self, state: int) -> list[str]:
        words, probabilities = self._emission_of(state)
        return [self.vocabulary.words[words[i]] for i, _ in largest(probabilities, WORDS_SHOWN)]

    def _by_block(self, distribution: Float[Tensor, " state"]) -> Float[Tensor, " block"]:
        return distribution.view(self.blocks.num_blocks, -1).sum(1)

    def _words(self, distribution: Float[Tensor, " word"], top: int) -> list[WordShare]:
        return [WordShare(self.vocabulary.words[i], p) for i, p in largest(distribution, top)]

    def _states(self, distribution: Float[Tensor, " state"], top: int) -> list[StateShare]:
        return [StateShare(i, p, self._top_words(i)) for i, p in largest(distribution, top)]

    def _blocks(self, distribution: Float[Tensor, " state"], top: int) -> list[BlockShare]:
        """Return the blocks with most of a distribution over states; none where there are no blocks."""
        if not self.blocks.partition:
            return []
        found = []
        for block, p in largest(self._by_block(distribution), top):
            words = self._words_by_block[block]
            names = [self.vocabulary.words[words[i]] for i, _ in largest(self.frequency[words], WORDS_SHOWN)]
            found.append(BlockShare(block, p, names))
        return found


def largest(distribution: Float[Tensor, " n"], top: int) -> list[tuple[int, float]]:
    """Return (index, value) of the `top` largest values above zero, largest first, ties by index."""
    values, order = distribution.sort(descending=True, stable=True)
    pairs = zip(order[:top].tolist(), values[:top].tolist(), strict=True)
    return [(index, value) for index, value in pairs if value > 0]


def rank(values: Float[Tensor, " n"], index: int) -> int:
    """Return the rank of the value at `index`: 1 for the largest."""
    return int((values > values[index]).sum()) + 1


def ratio(part: Tensor, whole: Tensor) -> Tensor:
    """Return part / whole, or 0 if both are zero."""
    return torch.where(whole > 0, part / whole, torch.zeros_like(part))


def normalized(weights: Float[Tensor, " n"]) -> Float[Tensor, " n"]:
    """Return weights / their sum; all zeros stay zeros: what never happens has no neighbours."""
    return ratio(weights, weights.sum())


# ---- refusals


def check_top(top: int) -> None:
    """Raise a QueryError if nothing would be shown."""
    if top < 1:
        raise QueryError(f"top is {top}, expected at least 1")


def check_state(blocks: Any, state: int) -> None:
    """Raise a QueryError if the model has no such state."""
    if not 0 <= state < blocks.num_states:
        raise QueryError(f"no state {state}: the model's states are 0 to {blocks.num_states - 1}")
    if blocks.partition:
        block, slot = divmod(state, blocks.states_per_block)
        alive = int(blocks.num_alive[block])
        if slot >= alive:
            first = block * blocks.states_per_block
            raise QueryError(f"no state {state}: block {block} has the states {first} to {first + alive - 1} only")


def check_block(blocks: Any, block: int) -> None:
    """Raise a QueryError if the model has no such block."""
    if not blocks.partition:
        raise QueryError("the model has no blocks: every word has its own set of states; ask for a word or a state")
    if not 0 <= block < blocks.num_blocks:
        raise QueryError(f"no block {block}: the model's blocks are 0 to {blocks.num_blocks - 1}")
