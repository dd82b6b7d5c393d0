"""Compile constraints on text to deterministic automata over bytes.

Input:  regular expressions (compiled by `outlines-core`), other automata.
Output: `ByteAutomaton`, minimal. State -1 (`DEAD`) rejects every continuation and is not stored.
"""

import importlib.util
import subprocess
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np

from vlhmm.errors import ConfigError, QueryError
from vlhmm.limits import shortened
from vlhmm.steering import compile_regex
from vlhmm.steering.compile_regex import MARK, compiled

MAX_STATES = 2048  # of a whole constraint, after minimization
_EXPLORE_FACTOR = 64  # intermediate products may have this many times more states
DEAD = -1
COMPILE_SECONDS = 10  # of processor time, for a regular expression given by a user
COMPILE_MEMORY = 1 << 30  # bytes, for the same


@dataclass(frozen=True, eq=False)
class ByteAutomaton:
    """A deterministic automaton over bytes. State 0 is initial; -1 rejects every continuation."""

    delta: np.ndarray  # (Q, 256) int32: the state after a byte, or -1
    accept: np.ndarray  # (Q,) bool

    @property
    def num_states(self) -> int:
        return len(self.accept)

    @property
    def empty(self) -> bool:
        """Return whether no text is accepted."""
        return not self.accept.any()

    def accepts(self, text: str | bytes) -> bool:
        """Return whether the whole text is accepted."""
        state = 0
        for byte in text.encode() if isinstance(text, str) else text:
            state = int(self.delta[state, byte])
            if state == DEAD:
                return False
        return bool(self.accept[state])


def from_regex(pattern: str, ours: bool = True) -> ByteAutomaton:
    """Compile a regular expression that must match the whole text. Look-around and back-references are not supported.

    `ours` is False for a pattern given by a user. It is compiled in a separate process with limits on time and memory.
    """
    if importlib.util.find_spec("outlines_core") is None:
        raise ConfigError("constraints on text need outlines-core: pip install 'vlhmm[llm]'")
    try:
        rows = np.array(compiled(pattern)) if ours else _compiled_apart(pattern)
    except ValueError as error:
        reason = " ".join(str(error).split())
        if "no way to reach" in reason.lower() or "doesn't have a way" in reason.lower():
            return ByteAutomaton(np.full((1, 256), DEAD, dtype=np.int32), np.zeros(1, dtype=bool))
        raise QueryError(
            f"cannot compile the regular expression {shortened(pattern, 80)}: {reason[:120]}; "
            "look-around, back-references and Unicode \\b are not regular: use must_include for whole words"
        ) from None
    rows = rows.reshape(-1, 2 + 256)
    names, final, following = rows[:, 0], rows[:, 1].astype(bool), rows[:, 2:]
    order = np.argsort(names)
    places = order[np.searchsorted(names, following, sorter=order)]
    delta = np.where(following == DEAD, DEAD, places).astype(np.int32)
    ended = np.arange(len(names))
    for byte in MARK.encode():
        ended = np.where(ended == DEAD, DEAD, delta[ended, byte])
    delta[:, MARK.encode()[0]] = DEAD
    return minimal(ByteAutomaton(delta, (ended != DEAD) & final[ended]))


def _compiled_apart(pattern: str) -> np.ndarray:
    """Compile a pattern in a separate process. Raise a QueryError if it exceeds the limits."""
    allowed = [str(each) for each in (COMPILE_MEMORY, COMPILE_SECONDS, MAX_STATES * _EXPLORE_FACTOR)]
    command = [sys.executable, "-P", str(Path(compile_regex.__file__)), *allowed]
    try:
        ended = subprocess.run(command, input=pattern.encode(), capture_output=True, timeout=2 * COMPILE_SECONDS)
    except subprocess.TimeoutExpired:
        code, reason, rows = None, "", b""
    else:
        code, reason, rows = ended.returncode, ended.stderr.decode(errors="replace"), ended.stdout
    if code == compile_regex.WRONG:
        raise ValueError(reason)
    if code != 0:
        raise QueryError(
            f"the regular expression {shortened(pattern, 80)} is too large: compiling it takes more than {COMPILE_SECONDS} s, "
            f"{COMPILE_MEMORY >> 20:,} MiB or {MAX_STATES * _EXPLORE_FACTOR:,} states; shorten its repetitions"
        )
    return np.frombuffer(rows, dtype=np.int64)


@cache
def any_text() -> ByteAutomaton:
    """Return the automaton of all valid UTF-8 texts."""
    return from_regex("(?s).*")


def intersection(left: ByteAutomaton, right: ByteAutomaton, max_states: int = MAX_STATES) -> ByteAutomaton:
    """Return the automaton of the texts that both automata accept."""
    return _product(left, right, True, max_states)


def union(left: ByteAutomaton, right: ByteAutomaton, max_states: int = MAX_STATES) -> ByteAutomaton:
    """Return the automaton of the texts that at least one automaton accepts."""
    return _product(left, right, False, max_states)


def complement(automaton: ByteAutomaton, max_states: int = MAX_STATES) -> ByteAutomaton:
    """Return the automaton of the valid UTF-8 texts that `automaton` rejects."""
    sink = automaton.num_states
    delta = np.vstack([automaton.delta, np.full((1, 256), DEAD, dtype=np.int32)])
    delta[delta == DEAD] = sink
    refused = ByteAutomaton(delta, np.append(~automaton.accept, True))
    return intersection(refused, any_text(), max_states)


def _product(left: ByteAutomaton, right: ByteAutomaton, both: bool, max_states: int) -> ByteAutomaton:
    """Build the product automaton breadth-first, one frontier at a time. O(reached pairs * byte classes)."""
    table = np.concatenate([left.delta, right.delta])
    _, first, byte_class = np.unique(table, axis=1, return_index=True, return_inverse=True)
    byte_class = byte_class.reshape(-1)
    # one extra row for the rejecting state, which index -1 then selects
    a = np.vstack([left.delta[:, first], np.full((1, len(first)), DEAD)]).astype(np.int64)
    b = np.vstack([right.delta[:, first], np.full((1, len(first)), DEAD)]).astype(np.int64)
    width = right.num_states + 1
    # both parts are shifted by one: 0 is the rejecting state
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
    check_size(result.num_states, max_states)
    return result


def check_size(num_states: int, max_states: int) -> None:
    """Raise a QueryError if `num_states` exceeds `max_states`."""
    if num_states > max_states:
        raise QueryError(_too_large(f"{num_states:,}", max_states))


def _too_large(size: str, max_states: int) -> str:
    return (
        f"the constraint needs an automaton of {size} states, the limit is {max_states:,}; "
        "name fewer words, shorten repetitions and ranges, or raise max_states"
    )


def equivalent(first: np.ndarray, moves: np.ndarray) -> np.ndarray:
    """Refine the partition `first` until all states of a block move to the same blocks (Moore's algorithm).

    Returns the block number of each state, (Q,). A chain of n states takes n rounds, so rounds compare 64-bit hashes of
    the rows; the last round compares the rows themselves.
    """
    keys = np.random.default_rng(0).integers(1 << 64, size=2 + moves.shape[1], dtype=np.uint64)
    block, count, hashed = first, 0, True
    while True:
        rows = np.column_stack([first, block, block[moves]])
        if hashed:
            rows = (rows.astype(np.uint64) * keys).sum(axis=1)
        _, block = np.unique(rows, axis=None if hashed else 0, return_inverse=True)
        block = block.reshape(-1)
        found = int(block.max()) + 1
        if found == count and not hashed:
            return block
        hashed, count = hashed and found > count, found


def minimal(automaton: ByteAutomaton) -> ByteAutomaton:
    """Minimize an automaton: drop states that are unreachable or cannot accept, and merge equivalent ones (Moore)."""
    _, first, byte_class = np.unique(automaton.delta, axis=1, return_index=True, return_inverse=True)
    byte_class = byte_class.reshape(-1)
    sink = automaton.num_states
    moves = automaton.delta[:, first].astype(np.int64)
    moves = np.vstack([np.where(moves == DEAD, sink, moves), np.full((1, len(first)), sink)])
    accept = np.append(automaton.accept, False)
    block = equivalent(accept.astype(np.int64), moves)
    count = int(block.max()) + 1
    _, representative = np.unique(block, return_index=True)
    table, final, dead = block[moves[representative]], accept[representative], int(block[sink])
    if block[0] == dead:
        return ByteAutomaton(np.full((1, 256), DEAD, dtype=np.int32), np.zeros(1, dtype=bool))
    order, seen = [int(block[0])], {int(block[0])}
    for state in order:  # the list grows during the loop
        for following in dict.fromkeys(table[state][byte_class].tolist()):  # by byte: one numbering per language
            if following != dead and following not in seen:
                seen.add(following)
                order.append(following)
    number = np.full(count, DEAD, dtype=np.int32)
    number[order] = np.arange(len(order))
    return ByteAutomaton(number[table[order]][:, byte_class], final[order])
