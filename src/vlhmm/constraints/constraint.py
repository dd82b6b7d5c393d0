"""Constraints on a text: words, phrases, lengths and patterns, joined by `&`, `|` and `~`.

    must_contain("trade", "foreign powers") & ~must_contain("war") & length(5, 12)

`compile_constraint` turns one into a minimal automaton over the vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from operator import and_

import numpy as np

from vlhmm.constraints import regex as patterns
from vlhmm.constraints.automaton import Automaton, over_vocabulary
from vlhmm.constraints.dfa import DFA, MAX_STATES, check_size, complement, minimal, product
from vlhmm.data.user_text import known_word
from vlhmm.data.vocabulary import Vocabulary
from vlhmm.errors import QueryError
from vlhmm.limits import MAX_COUNT, shortened

Phrase = tuple[str, ...]


class Constraint:
    """A set of texts. `a & b`, `a | b` and `~a` are constraints too.

    Example:
        >>> rule = vlhmm.must_contain("dog") & ~vlhmm.must_not("cat") & vlhmm.length(2, 5)
        >>> sorted(rule.words())
        ['cat', 'dog']
    """

    def __and__(self, other: "Constraint") -> "Constraint":
        return Pair(self, other, both=True)

    def __or__(self, other: "Constraint") -> "Constraint":
        return Pair(self, other, both=False)

    def __invert__(self) -> "Constraint":
        return Not(self)

    def words(self) -> set[str]:
        """Return the words that the constraint names."""
        raise NotImplementedError

    def dfa(self, symbol_of_word: dict[str, int], num_symbols: int, max_states: int) -> DFA:
        """Return the minimal DFA. Its last symbol represents every word that the constraint does not name."""
        raise NotImplementedError


@dataclass(frozen=True)
class Pair(Constraint):
    """Texts that satisfy both constraints, or at least one of them."""

    left: Constraint
    right: Constraint
    both: bool

    def words(self) -> set[str]:
        return self.left.words() | self.right.words()

    def dfa(self, symbol_of_word: dict[str, int], num_symbols: int, max_states: int) -> DFA:
        left, right = (part.dfa(symbol_of_word, num_symbols, max_states) for part in (self.left, self.right))
        return product(left, right, self.both, max_states)


@dataclass(frozen=True)
class Not(Constraint):
    part: Constraint

    def words(self) -> set[str]:
        return self.part.words()

    def dfa(self, symbol_of_word: dict[str, int], num_symbols: int, max_states: int) -> DFA:
        return complement(self.part.dfa(symbol_of_word, num_symbols, max_states))


@dataclass(frozen=True)
class Contains(Constraint):
    """Texts with these phrases in this order, one beginning after the one before has ended."""

    phrases: tuple[Phrase, ...]

    def words(self) -> set[str]:
        return {word for phrase in self.phrases for word in phrase}

    def dfa(self, symbol_of_word: dict[str, int], num_symbols: int, max_states: int) -> DFA:
        """Return the automaton of Knuth, Morris and Pratt for each phrase, one after the other. O(all words * symbols).

        With n of a phrase's words matched, the next symbol continues the match, or else leads where it leads from the
        longest proper border of those n words. The automaton is already minimal: no two states need equally many
        words to accept.
        """
        total = sum(map(len, self.phrases))
        check_size(total + 1, num_symbols, max_states)
        delta = np.zeros((total + 1, num_symbols), dtype=np.int64)
        first = 0
        for phrase in self.phrases:
            border = first  # of the words matched so far
            delta[first] = first
            for place, word in enumerate(phrase):
                symbol, state = symbol_of_word[word], first + place
                if place:
                    delta[state] = delta[border]
                    border = int(delta[border, symbol])
                delta[state, symbol] = state + 1
            first += len(phrase)
        delta[total] = total
        return DFA(delta, np.arange(total + 1) == total)


@dataclass(frozen=True)
class Length(Constraint):
    """Texts of `low` to `high` words."""

    low: int
    high: int | None

    def words(self) -> set[str]:
        return set()

    def dfa(self, symbol_of_word: dict[str, int], num_symbols: int, max_states: int) -> DFA:
        last = self.low if self.high is None else self.high + 1  # beyond it nothing changes any more
        if last + 1 > max_states:
            raise QueryError(
                f"length {self.low} to {self.high} needs {last + 1:,} automaton states, the limit is "
                f"{max_states:,}; ask for shorter texts"
            )
        count = np.arange(last + 1)
        delta = np.repeat(np.minimum(count + 1, last)[:, None], num_symbols, axis=1)
        accept = count >= self.low if self.high is None else (count >= self.low) & (count <= self.high)
        return DFA(delta, accept)


@dataclass(frozen=True)
class Regex(Constraint):
    """Texts that a pattern over words matches from end to end; see `vlhmm.constraints.regex`."""

    pattern: str

    def __post_init__(self) -> None:
        patterns.parse(self.pattern)

    def words(self) -> set[str]:
        return patterns.words_of(patterns.parse(self.pattern))

    def dfa(self, symbol_of_word: dict[str, int], num_symbols: int, max_states: int) -> DFA:
        return patterns.to_dfa(patterns.parse(self.pattern), symbol_of_word, num_symbols, max_states)


def must_contain(*phrases: str | Sequence[str], in_order: bool = False) -> Constraint:
    """Return the constraint that a text contains every phrase.

    Args:
        phrases: Words or phrases, as strings or sequences of words.
        in_order: The phrases must follow each other in the order given, without overlap. By default they may occur in
            any order and may overlap.

    Returns:
        A constraint for `sample` and `infill`.

    Raises:
        QueryError: There is no phrase, or an empty one.

    Example:
        >>> model.infill("the [MASK] runs .", constraint=vlhmm.must_contain("dog"))[0].text
        'the dog runs .'
    """
    if not phrases:
        raise QueryError("must_contain needs at least one word or phrase")
    parts = tuple(_phrase(phrase) for phrase in phrases)
    if in_order:
        return Contains(parts)
    return reduce(and_, (Contains((part,)) for part in parts))


def must_not(*phrases: str | Sequence[str]) -> Constraint:
    """Return the constraint that a text contains none of the phrases.

    Args:
        phrases: Words or phrases, as strings or sequences of words.

    Returns:
        A constraint for `sample` and `infill`.

    Raises:
        QueryError: There is no phrase, or an empty one.

    Example:
        >>> "dog" in model.infill("the [MASK] runs .", constraint=vlhmm.must_not("dog"))[0].text
        False
    """
    if not phrases:
        raise QueryError("must_not needs at least one word or phrase")
    return reduce(and_, (~Contains((_phrase(phrase),)) for phrase in phrases))


def length(low: int, high: int | None = None) -> Constraint:
    """Return the constraint that a text has `low` to `high` words, or at least `low` words.

    Args:
        low: The smallest number of words.
        high: The largest number of words; None for no limit.

    Returns:
        A constraint for `sample` and `infill`.

    Raises:
        QueryError: The range is empty or negative.

    Example:
        >>> model.infill("the [MASK:1-3] .", constraint=vlhmm.length(4))[0].text.count(" ") >= 3
        True
    """
    if low < 0 or (high is not None and high < low):
        raise QueryError(f"length {low} to {high} is no range, expected 0 <= low <= high")
    if high is not None and max(low, high) > MAX_COUNT:
        raise QueryError(f"length {shortened(low)} to {shortened(high)}: expected at most {MAX_COUNT:,} words")
    return Length(low, high)


def regex(pattern: str) -> Constraint:
    """Return the constraint that a regular expression over words matches the whole text.

    Args:
        pattern: Words separated by blanks. A single `.` is any word, `[a b]` one of these words, `[^a b]` any other
            word; `* + ? {2} {2,4} | ( )` as usual. See `vlhmm.constraints.regex`.

    Returns:
        A constraint for `sample` and `infill`.

    Raises:
        QueryError: The pattern has a syntax error.

    Example:
        >>> model.infill("the [MASK] runs .", constraint=vlhmm.regex("the [cat man] .*"))[0].gaps[0][0] in ("cat", "man")
        True
    """
    return Regex(pattern)


def compile_constraint(constraint: Constraint, vocabulary: Vocabulary, max_states: int = MAX_STATES) -> Automaton:
    """Return the minimal automaton of a constraint over a vocabulary, which must have all words that it names."""
    if not isinstance(constraint, Constraint):
        raise QueryError(f"{shortened(constraint)} is a {type(constraint).__name__}, expected a constraint such as must_contain(...)")
    words = sorted(constraint.words())
    ids = [known_word(vocabulary, word) for word in words]
    symbol_of_word = {word: i for i, word in enumerate(words)}
    automaton = minimal(constraint.dfa(symbol_of_word, len(words) + 1, max_states))
    return over_vocabulary(automaton, ids, len(vocabulary), vocabulary.eos)


def _phrase(phrase: str | Sequence[str]) -> Phrase:
    words = tuple(phrase.split()) if isinstance(phrase, str) else tuple(str(word) for word in phrase)
    if not words:
        raise QueryError("a phrase of no words, expected at least one word")
    return words
