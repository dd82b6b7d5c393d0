"""A constraint as an automaton over the vocabulary, in which words that it does not distinguish form a class.

Input:  a `DFA` over the words a constraint names and one symbol for all others.
Output: `Automaton`: (states x classes) moves and `class_of_word` (V,). <eos> is a class of its own, because
        what follows it depends on the context rule.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from vlhmm.constraints.dfa import DFA, alive


@dataclass(frozen=True, eq=False)
class Automaton:
    """A complete deterministic automaton that reads words."""

    delta: np.ndarray  # (Q, C) int64
    accept: np.ndarray  # (Q,) bool
    class_of_word: np.ndarray  # (V,) int64
    eos_class: int
    initial: int = 0

    @property
    def num_states(self) -> int:
        return len(self.accept)

    @property
    def num_classes(self) -> int:
        return int(self.delta.shape[1])

    @cached_property
    def alive(self) -> np.ndarray:
        """Which states can still accept, (Q,) bool."""
        return alive(DFA(self.delta, self.accept))

    def step(self, state: int, word: int) -> int:
        """Return the state after a word."""
        return int(self.delta[state, self.class_of_word[word]])

    def run(self, ids: Sequence[int]) -> int:
        """Return the state after a sequence of words."""
        state = self.initial
        for word in ids:
            state = self.step(state, word)
        return state

    def accepts(self, ids: Sequence[int]) -> bool:
        """Return whether the automaton accepts a sequence of word ids."""
        return bool(self.accept[self.run(ids)])


def over_vocabulary(automaton: DFA, words: Sequence[int], vocab_size: int, eos: int) -> Automaton:
    """Return the automaton over a vocabulary: symbol i of `automaton` is words[i], its last symbol any other word."""
    symbol = np.full(vocab_size, automaton.num_symbols - 1, dtype=np.int64)
    symbol[np.asarray(words, dtype=np.int64)] = np.arange(len(words))
    # Words whose columns are equal make one class, the <eos> apart.
    columns = np.vstack([automaton.delta, np.zeros((1, automaton.num_symbols), dtype=np.int64)])
    eos_column = np.append(automaton.delta[:, symbol[eos]], 1)
    others = np.unique(np.delete(symbol, eos)) if vocab_size > 1 else np.zeros(0, dtype=np.int64)
    table = np.column_stack([columns[:, others], eos_column])
    distinct, class_of_column = np.unique(table, axis=1, return_inverse=True)
    class_of_column = class_of_column.reshape(-1)
    class_of_symbol = np.zeros(automaton.num_symbols, dtype=np.int64)
    class_of_symbol[others] = class_of_column[:-1]
    class_of_word = class_of_symbol[symbol]
    eos_class = int(class_of_column[-1])
    class_of_word[eos] = eos_class
    return Automaton(distinct[:-1], automaton.accept, class_of_word, eos_class)


def free(vocab_size: int, eos: int) -> Automaton:
    """Return the automaton of no constraint: one state, which accepts everything."""
    return over_vocabulary(DFA(np.zeros((1, 1), dtype=np.int64), np.ones(1, dtype=bool)), [], vocab_size, eos)


def with_free_state(automaton: Automaton) -> tuple[Automaton, int]:
    """Return (the automaton with one more state that reads anything and accepts, that state).

    Messages from that state are those without the constraint: one pass gives both.
    """
    extra = automaton.num_states
    delta = np.vstack([automaton.delta, np.full((1, automaton.num_classes), extra)])
    accept = np.append(automaton.accept, True)
    return Automaton(delta, accept, automaton.class_of_word, automaton.eos_class, automaton.initial), extra
