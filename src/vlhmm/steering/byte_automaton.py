"""Deterministic automata over bytes: what a constraint on text is compiled to.

Input:  regular expressions (compiled by `outlines-core`), other automata.
Output: `ByteAutomaton`, minimal, without its dead state: -1 stands for "cannot be accepted any more".
"""

from dataclasses import dataclass
from functools import cache

import numpy as np

from vlhmm.errors import ConfigError, QueryError

MAX_STATES = 2048  # of a whole constraint, after minimization
_EXPLORE_FACTOR = 64  # intermediate products may be this many times larger before the count stops
DEAD = -1
# outlines-core leaves out the moves from an accepting state into the middle of a character. With a private
# character behind the pattern, no state within the text is accepting; those from which it is accepted are. Texts may
# not have characters of its plane, U+100000 and above, which Unicode assigns to nothing.
_MARK = "\U0010ffff"


@dataclass(frozen=True, eq=False)
class ByteAutomaton:
    """A deterministic automaton over bytes; its initial state is 0, and -1 is the state of refusal."""

    delta: np.ndarray  # (Q, 256) int32: the state after a byte, or -1
    accept: np.ndarray  # (Q,) bool

    @property
    def num_states(self) -> int:
        return len(self.accept)

    @property
    def empty(self) -> bool:
        """Whether no text at all is accepted."""
        return not self.accept.any()

    def accepts(self, text: str | bytes) -> bool:
        """Whether the whole text is accepted."""
        state = 0
        for byte in text.encode() if isinstance(text, str) else text:
            state = int(self.delta[state, byte])
            if state == DEAD:
                return False
        return bool(self.accept[state])


def from_regex(pattern: str) -> ByteAutomaton:
    """Compile a regular expression that must match the whole text. No look-around, no back-references."""
    vocabulary, index_class = _byte_vocabulary()
    try:
        index_class(pattern, vocabulary)  # alone first: the mark must not complete a broken pattern
        index = index_class(f"(?:{pattern}){_MARK}", vocabulary)
    except ValueError as error:
        reason = " ".join(str(error).split())
        if "no way to reach" in reason.lower() or "doesn't have a way" in reason.lower():
            return ByteAutomaton(np.full((1, 256), DEAD, dtype=np.int32), np.zeros(1, dtype=bool))
        raise QueryError(
            f"cannot compile the regular expression {pattern[:80]!r}: {reason[:120]}; "
            "look-around, back-references and Unicode \\b are not regular: use must_include for whole words"
        ) from None
    transitions, finals = index.get_transitions(), set(index.get_final_states())
    initial = index.get_initial_state()
    names = [initial, *sorted((set(transitions) | finals) - {initial})]
    number = {name: i for i, name in enumerate(names)}
    delta = np.full((len(names), 256), DEAD, dtype=np.int32)
    for name, moves in transitions.items():
        for byte, following in moves.items():
            if byte < 256:
                delta[number[name], byte] = number[following]
    ended = np.arange(len(names))
    for byte in _MARK.encode():
        ended = np.where(ended == DEAD, DEAD, delta[ended, byte])
    final = np.array([name in finals for name in names])
    delta[:, _MARK.encode()[0]] = DEAD
    return minimal(ByteAutomaton(delta, (ended != DEAD) & final[ended]))


@cache
def _byte_vocabulary():  # type: ignore[no-untyped-def]
    """A vocabulary of the 256 single bytes, and the compiler: automata over bytes come out."""
    try:
        from outlines_core import Index, Vocabulary
    except ImportError:
        raise ConfigError("constraints on text need outlines-core: pip install 'vlhmm[llm]'") from None
    return Vocabulary(256, {bytes([byte]): [byte] for byte in range(256)}), Index


@cache
def any_text() -> ByteAutomaton:
    """Every valid UTF-8 text."""
    return from_regex("(?s).*")


def intersection(left: ByteAutomaton, right: ByteAutomaton, max_states: int = MAX_STATES) -> ByteAutomaton:
    """Texts that both accept."""
    return _product(left, right, True, max_states)


def union(left: ByteAutomaton, right: ByteAutomaton, max_states: int = MAX_STATES) -> ByteAutomaton:
    """Texts that at least one accepts."""
    return _product(left, right, False, max_states)


def complement(automaton: ByteAutomaton, max_states: int = MAX_STATES) -> ByteAutomaton:
    """Valid UTF-8 texts that `automaton` refuses."""
    sink = automaton.num_states
    delta = np.vstack([automaton.delta, np.full((1, 256), DEAD, dtype=np.int32)])
    delta[delta == DEAD] = sink
    refused = ByteAutomaton(delta, np.append(~automaton.accept, True))
    return intersection(refused, any_text(), max_states)


def _product(left: ByteAutomaton, right: ByteAutomaton, both: bool, max_states: int) -> ByteAutomaton:
    """Breadth-first product by whole frontiers: O(pairs reached * byte classes)."""
    table = np.concatenate([left.delta, right.delta])
    _, first, byte_class = np.unique(table, axis=1, return_index=True, return_inverse=True)
    byte_class = byte_class.reshape(-1)
    # one extra row stands for the state of refusal, so that -1 indexes it
    a = np.vstack([left.delta[:, first], np.full((1, len(first)), DEAD)]).astype(np.int64)
    b = np.vstack([right.delta[:, first], np.full((1, len(first)), DEAD)]).astype(np.int64)
    width = right.num_states + 1
    # both parts shifted by one: 0 is the state of refusal
    known = np.array([1 * width + 1], dtype=np.int64)
    frontier, sources, targets = known, [], []
    explored_limit = max_states * _EXPLORE_FACTOR
    while len(frontier):
        x, y = frontier // width - 1, frontier % width - 1
        following_x, following_y = a[x] + 1, b[y] + 1
        dead = (following_x == 0) | (following_y == 0) if both else (following_x == 0) & (following_y == 0)
        codes = np.where(dead, -1, following_x * width + following_y)
        sources.append(frontier)
        targets.append(codes)
        frontier = np.setdiff1d(codes[codes >= 0], known)
        known = np.union1d(known, frontier)
        if len(known) > explored_limit:
            raise QueryError(_too_large(f"more than {explored_limit:,}", max_states))
    order = np.argsort(np.concatenate(sources))
    codes = np.concatenate(targets)[order]  # rows in the order of `known`
    delta = np.where(codes >= 0, np.searchsorted(known, codes), DEAD).astype(np.int32)
    x, y = known // width - 1, known % width - 1
    accept_x = np.append(left.accept, False)[x]
    accept_y = np.append(right.accept, False)[y]
    accept = accept_x & accept_y if both else accept_x | accept_y
    swap = np.arange(len(known))  # the initial pair becomes state 0
    initial = int(np.searchsorted(known, width + 1))
    swap[[0, initial]] = swap[[initial, 0]]
    delta = delta[swap]
    delta = np.where(delta == DEAD, DEAD, swap[delta])[:, byte_class].astype(np.int32)
    result = minimal(ByteAutomaton(delta, accept[swap]))
    check_size(result, max_states)
    return result


def check_size(automaton: ByteAutomaton, max_states: int) -> None:
    """Refuse an automaton above the limit of states."""
    if automaton.num_states > max_states:
        raise QueryError(_too_large(f"{automaton.num_states:,}", max_states))


def _too_large(size: str, max_states: int) -> str:
    return (
        f"the constraint needs an automaton of {size} states, the limit is {max_states:,}; "
        "name fewer words, shorten repetitions and ranges, or raise max_states"
    )


def minimal(automaton: ByteAutomaton) -> ByteAutomaton:
    """The smallest automaton of the same texts: reachable, able to accept, and all distinguishable (Moore)."""
    _, first, byte_class = np.unique(automaton.delta, axis=1, return_index=True, return_inverse=True)
    byte_class = byte_class.reshape(-1)
    sink = automaton.num_states
    moves = automaton.delta[:, first].astype(np.int64)
    moves = np.vstack([np.where(moves == DEAD, sink, moves), np.full((1, len(first)), sink)])
    accept = np.append(automaton.accept, False)
    block = accept.astype(np.int64)
    count = len(np.unique(block))
    while True:
        _, block = np.unique(np.column_stack([block, block[moves]]), axis=0, return_inverse=True)
        block = block.reshape(-1)
        if block.max() + 1 == count:
            break
        count = int(block.max()) + 1
    _, representative = np.unique(block, return_index=True)
    table, final, dead = block[moves[representative]], accept[representative], int(block[sink])
    if block[0] == dead:
        return ByteAutomaton(np.full((1, 256), DEAD, dtype=np.int32), np.zeros(1, dtype=bool))
    order, seen = [int(block[0])], {int(block[0])}
    for state in order:  # grows while it is walked
        for following in dict.fromkeys(table[state][byte_class].tolist()):  # by byte: one numbering per language
            if following != dead and following not in seen:
                seen.add(following)
                order.append(following)
    number = np.full(count, DEAD, dtype=np.int32)
    number[order] = np.arange(len(order))
    return ByteAutomaton(number[table[order]][:, byte_class], final[order])
