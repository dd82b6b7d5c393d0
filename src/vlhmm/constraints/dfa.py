"""Deterministic automata over a small alphabet of symbols: products, complements, minimal forms.

Input and output: `DFA`. Symbols are numbers 0..m-1; the caller gives them a meaning.
"""

from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from vlhmm.errors import QueryError

MAX_STATES = 4096
MAX_CELLS = 1 << 20  # states times symbols: seconds
S = TypeVar("S", bound=Hashable)


@dataclass(frozen=True, eq=False)
class DFA:
    """A complete deterministic automaton; its initial state is 0."""

    delta: np.ndarray  # (Q, symbols) int64: the state after a symbol
    accept: np.ndarray  # (Q,) bool

    @property
    def num_states(self) -> int:
        return len(self.accept)

    @property
    def num_symbols(self) -> int:
        return int(self.delta.shape[1])

    def accepts(self, symbols: Iterable[int]) -> bool:
        """Return whether the sequence ends in an accepting state."""
        state = 0
        for symbol in symbols:
            state = int(self.delta[state, symbol])
        return bool(self.accept[state])


def check_size(num_states: int, num_symbols: int, max_states: int = MAX_STATES) -> None:
    """Raise a QueryError if the automaton would be too large."""
    if num_states > max_states:
        raise QueryError(
            f"the constraint needs an automaton of more than {max_states:,} states; name fewer "
            "phrases, ask for them in a given order, or shorten its repetitions and lengths"
        )
    if num_states * num_symbols > MAX_CELLS:
        raise QueryError(
            f"the constraint names {num_symbols - 1:,} different words and needs an automaton of {num_states:,} or more "
            f"states: more than {MAX_CELLS:,} transitions; name fewer words"
        )


def explore(
    initial: S,
    step: Callable[[S, int], S],
    accepts: Callable[[S], bool],
    num_symbols: int,
    max_states: int = MAX_STATES,
) -> DFA:
    """Return the DFA whose states are what `step` reaches from `initial`; refuse more than `max_states` of them."""
    check_size(1, num_symbols, max_states)
    index = {initial: 0}
    order, rows = [initial], []
    for state in order:  # grows while it is walked
        row = []
        for symbol in range(num_symbols):
            following = step(state, symbol)
            if following not in index:
                index[following] = len(order)
                order.append(following)
                check_size(len(order), num_symbols, max_states)
            row.append(index[following])
        rows.append(row)
    return DFA(np.array(rows, dtype=np.int64).reshape(len(order), num_symbols), np.array([accepts(s) for s in order]))


def product(left: DFA, right: DFA, both: bool, max_states: int = MAX_STATES) -> DFA:
    """Return the DFA of sequences that both accept, or that one of them accepts."""
    a, b = left.delta.tolist(), right.delta.tolist()

    def step(pair: tuple[int, int], symbol: int) -> tuple[int, int]:
        return a[pair[0]][symbol], b[pair[1]][symbol]

    def accepts(pair: tuple[int, int]) -> bool:
        x, y = bool(left.accept[pair[0]]), bool(right.accept[pair[1]])
        return (x and y) if both else (x or y)

    return minimal(explore((0, 0), step, accepts, left.num_symbols, max_states))


def complement(automaton: DFA) -> DFA:
    """Return the DFA of sequences that `automaton` refuses."""
    return DFA(automaton.delta, ~automaton.accept)


def minimal(automaton: DFA) -> DFA:
    """Return the smallest DFA of the same sequences, its states numbered as a breadth-first walk meets them.

    Moore's refinement: states are equivalent until a symbol distinguishes them; O(Q^2 symbols) at worst. Rounds compare a
    hash of where a state leads, as states with different hashes are different. When a round finds no more blocks, they
    are compared in full; should two hashes have been equal by chance, that is seen, and all is done again in full.
    """
    delta, block = automaton.delta, automaton.accept.astype(np.int64)
    factors = np.random.default_rng(0).integers(1 << 62, size=automaton.num_symbols, dtype=np.int64) * 2 + 1
    count, exact = len(np.unique(block)), False
    while True:
        following = block[delta]
        if exact:
            _, block = np.unique(np.column_stack([block, following]), axis=0, return_inverse=True)
        else:
            # int64 products wrap around
            mixed = (following + 1) @ factors * 0x9E3779B97F4A7C1 + (block + 1) * factors[0]
            _, block = np.unique(mixed, return_inverse=True)
        block = block.reshape(-1)
        if block.max() + 1 <= count:
            leader = np.zeros(len(block), dtype=np.int64)
            leader[block] = np.arange(len(block))
            alike = leader[block]
            same = (block[delta] == block[delta[alike]]).all() and (automaton.accept == automaton.accept[alike]).all()
            if exact or same:
                break
            block, exact = automaton.accept.astype(np.int64), True
        count = len(np.unique(block))
    representative = np.zeros(count, dtype=np.int64)
    representative[block[::-1]] = np.arange(len(block))[::-1]
    table = block[delta[representative]].tolist()
    accept = automaton.accept[representative]
    return explore(
        int(block[0]),
        lambda s, c: table[s][c],
        lambda s: bool(accept[s]),
        automaton.num_symbols,
        count,
    )


def alive(automaton: DFA) -> np.ndarray:
    """Return (Q,) bool: the states from which something is accepted."""
    can = automaton.accept.copy()
    while True:
        wider = can | can[automaton.delta].any(axis=1)
        if (wider == can).all():
            return can
        can = wider
