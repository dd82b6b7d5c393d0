"""Compile a regular expression with outlines-core. Also a program, to compile in a separate process with limits.

A pattern of twenty characters can need more memory than there is; the compiler then ends its process.

Input:  the pattern on standard input; the limits in bytes, seconds and states as arguments.
Output: `compiled` as int64 numbers on standard output. Exit code 2: the pattern is invalid, the reason is on standard
        error. Exit code 3: the automaton has too many states.
"""

import sys
from array import array
from functools import cache

# outlines-core omits transitions from an accepting state into the middle of a character. With a private character
# appended to the pattern, no state within the text is accepting; the states that accept this character are final.
# Texts may not contain characters from U+100000 on, a plane that Unicode leaves unassigned.
MARK = "\U0010ffff"
WRONG, TOO_LARGE = 2, 3  # exit codes


@cache
def _byte_vocabulary():  # type: ignore[no-untyped-def]
    """Return a vocabulary of the 256 single bytes, and outlines-core's compiler."""
    from outlines_core import Index, Vocabulary

    return Vocabulary(256, {bytes([byte]): [byte] for byte in range(256)}), Index


def compiled(pattern: str) -> "array[int]":
    """Return rows of 258 numbers: state, whether it is final, and the next state for each byte (-1: none).

    The first row is the initial state's.

    Raises:
        ValueError: The pattern is invalid.
    """
    vocabulary, index_class = _byte_vocabulary()
    index_class(pattern, vocabulary)  # the pattern alone first: the mark must not complete an invalid one
    index = index_class(f"(?:{pattern}){MARK}", vocabulary)
    transitions, finals = index.get_transitions(), set(index.get_final_states())
    initial = index.get_initial_state()
    rows = array("q")
    for state in [initial, *sorted((set(transitions) | finals) - {initial})]:
        moves = transitions.get(state, {})
        rows.append(state)
        rows.append(state in finals)
        rows.extend(moves.get(byte, -1) for byte in range(256))
    return rows


def main() -> int:
    """Compile the pattern on standard input within the limits."""
    memory, seconds, max_states = map(int, sys.argv[1:])
    try:
        import resource
    except ImportError:  # no such limits on this system; the caller ends the process after its timeout
        pass
    else:
        resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
        resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    try:
        rows = compiled(sys.stdin.buffer.read().decode())
    except ValueError as error:
        print(error, file=sys.stderr)
        return WRONG
    if len(rows) > 258 * max_states:
        return TOO_LARGE
    rows.tofile(sys.stdout.buffer)
    return 0


if __name__ == "__main__":
    sys.exit(main())
