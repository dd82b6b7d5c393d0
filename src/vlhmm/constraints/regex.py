r"""Regular expressions over words. Input: a pattern. Output: its syntax tree, or a DFA.

| written | matches |
| --- | --- |
| `word` | that word; words are separated by blanks |
| `.` standing alone | any word (the full stop itself is `\.`; inside a word, as in `mr.`, a dot is a dot) |
| `[a b c]`, `[^a b]` | one of these words; one word that is none of these |
| `x*`, `x+`, `x?` | x any number of times, at least once, at most once |
| `x{3}`, `x{2,4}`, `x{2,}`, `x{,4}` | x repeated 3 times, 2 to 4 times, ... |
| `x y` | x, then y |
| `x\|y` | x or y; `()` group |

A pattern must match the whole text. A backslash makes the next character an ordinary one.
"""

from dataclasses import dataclass

from vlhmm.constraints.dfa import DFA, MAX_STATES, explore, minimal
from vlhmm.errors import QueryError
from vlhmm.limits import digits, shortened

_SPECIAL = set("()[]{}|*+?")
_MAX_NFA = 50_000
_MAX_WORK = 20_000_000  # NFA states looked at while the DFA is made: about ten seconds


def too_large() -> QueryError:
    """Return the error for a pattern that takes too long to compile."""
    return QueryError("the regular expression is too large once its repetitions are written out; shorten them")


@dataclass(frozen=True)
class Word:
    """One word out of `words`; or, if `negated`, one that is not among them."""

    words: tuple[str, ...]
    negated: bool = False


@dataclass(frozen=True)
class Concat:
    parts: tuple["Node", ...]


@dataclass(frozen=True)
class Either:
    parts: tuple["Node", ...]


@dataclass(frozen=True)
class Repeat:
    part: "Node"
    low: int
    high: int | None


Node = Word | Concat | Either | Repeat
ANY = Word((), negated=True)


def parse(pattern: str) -> Node:
    """Return the syntax tree of a pattern; a QueryError names the character that does not fit."""
    return _Parser(pattern).parse()


def words_of(node: Node) -> set[str]:
    """Return the words a pattern names."""
    match node:
        case Word(words):
            return set(words)
        case Repeat(part):
            return words_of(part)
        case _:
            return set().union(*(words_of(part) for part in node.parts))


class _Parser:
    def __init__(self, pattern: str) -> None:
        self.pattern, self.place = pattern, 0

    def parse(self) -> Node:
        node = self.either()
        if self.place < len(self.pattern):
            raise self.error(f"unexpected {self.pattern[self.place]!r}")
        return node

    def error(self, what: str) -> QueryError:
        return QueryError(f"regular expression {shortened(self.pattern)}: {what} at character {self.place + 1}")

    def peek(self) -> str:
        return self.pattern[self.place : self.place + 1]

    def skip_blanks(self) -> None:
        while self.peek().isspace():
            self.place += 1

    def either(self) -> Node:
        parts = [self.concat()]
        while self.peek() == "|":
            self.place += 1
            parts.append(self.concat())
        return parts[0] if len(parts) == 1 else Either(tuple(parts))

    def concat(self) -> Node:
        parts: list[Node] = []
        while True:
            self.skip_blanks()
            if self.peek() in ("", "|", ")"):
                return parts[0] if len(parts) == 1 else Concat(tuple(parts))
            parts.append(self.repeated())

    def repeated(self) -> Node:
        node = self.atom()
        while self.peek() and self.peek() in "*+?{":
            sign = self.peek()
            if sign == "{":
                node = Repeat(node, *self.counts())
                continue
            self.place += 1
            node = Repeat(node, 1 if sign == "+" else 0, 1 if sign == "?" else None)
        return node

    def counts(self) -> tuple[int, int | None]:
        end = self.pattern.find("}", self.place)
        if end < 0:
            raise self.error("'{' without '}'")
        low, comma, high = self.pattern[self.place + 1 : end].replace(" ", "").partition(",")
        if (not low and not high) or any(part and digits(part) is None for part in (low, high)):
            raise self.error("expected {n}, {a,b}, {a,} or {,b}")
        first = digits(low) or 0
        last = first if not comma else digits(high) if high else None
        if last is not None and last < first:
            raise self.error(f"{{{first},{last}}} counts downwards")
        self.place = end + 1
        return first, last

    def atom(self) -> Node:
        sign = self.peek()
        if sign == "(":
            opened, self.place = self.place, self.place + 1
            node = self.either()
            if self.peek() != ")":
                self.place = opened
                raise self.error("'(' without ')'")
            self.place += 1
            return node
        if sign == "[":
            return self.word_set()
        if sign in _SPECIAL:
            raise self.error(f"unexpected {sign!r} (write \\{sign} for the character itself)")
        word, escaped = self.word()
        return ANY if word == "." and not escaped else Word((word,))

    def word(self) -> tuple[str, bool]:
        letters, escaped = [], False
        while self.peek() and not self.peek().isspace() and self.peek() not in _SPECIAL:
            if self.peek() == "\\":
                self.place += 1
                escaped = True
                if not self.peek():
                    raise self.error("nothing after the last backslash")
            letters.append(self.peek())
            self.place += 1
        return "".join(letters), escaped

    def word_set(self) -> Node:
        opened, self.place = self.place, self.place + 1
        negated = self.peek() == "^"
        self.place += negated
        words: list[str] = []
        while True:
            self.skip_blanks()
            if self.peek() == "]":
                break
            if not self.peek():
                self.place = opened
                raise self.error("'[' without ']'")
            if self.peek() in _SPECIAL:
                raise self.error(f"unexpected {self.peek()!r} in a set of words (write \\{self.peek()})")
            words.append(self.word()[0])
        self.place += 1
        if not words:
            self.place = opened
            raise self.error("a set of no words")
        return Word(tuple(words), negated)


def to_dfa(node: Node, symbol_of_word: dict[str, int], num_symbols: int, max_states: int = MAX_STATES) -> DFA:
    """Return the minimal DFA of a pattern; the last symbol represents every word without its own symbol."""
    nfa = _NFA(symbol_of_word, num_symbols)
    final = nfa.add(node, 0)
    work = 0

    def step(states: frozenset[int], symbol: int) -> frozenset[int]:
        nonlocal work
        work += len(states)
        if work > _MAX_WORK:
            raise too_large()
        return nfa.closure({target for s in states for symbols, target in nfa.moves[s] if symbol in symbols})

    start = nfa.closure({0})
    return minimal(explore(start, step, lambda states: final in states, num_symbols, max_states))


class _NFA:
    """Thompson's construction: moves on symbols, and moves on nothing."""

    def __init__(self, symbol_of_word: dict[str, int], num_symbols: int) -> None:
        self.symbol_of_word, self.every = symbol_of_word, frozenset(range(num_symbols))
        self.moves: list[list[tuple[frozenset[int], int]]] = [[]]
        self.silent: list[list[int]] = [[]]
        self.added = 0

    def state(self) -> int:
        if len(self.moves) >= _MAX_NFA:
            raise too_large()
        self.moves.append([])
        self.silent.append([])
        return len(self.moves) - 1

    def closure(self, states: set[int]) -> frozenset[int]:
        todo = list(states)
        while todo:
            for target in self.silent[todo.pop()]:
                if target not in states:
                    states.add(target)
                    todo.append(target)
        return frozenset(states)

    def add(self, node: Node, source: int) -> int:
        """Return the state in which a match of `node` that began in `source` ends."""
        self.added += 1
        if self.added > 4 * _MAX_NFA:  # repetitions of nothing make no states
            raise too_large()
        match node:
            case Word(words, negated):
                named = frozenset(self.symbol_of_word[word] for word in words)
                target = self.state()
                self.moves[source].append((self.every - named if negated else named, target))
                return target
            case Concat(parts):
                for part in parts:
                    source = self.add(part, source)
                return source
            case Either(parts):
                target = self.state()
                for part in parts:
                    branch = self.state()
                    self.silent[source].append(branch)
                    self.silent[self.add(part, branch)].append(target)
                return target
            case Repeat(part, low, high):
                for _ in range(low):
                    source = self.add(part, source)
                if high is None:
                    loop = self.state()
                    self.silent[source].append(loop)
                    self.silent[self.add(part, loop)].append(loop)
                    return loop
                target = self.state()
                self.silent[source].append(target)
                for _ in range(high - low):
                    source = self.add(part, source)
                    self.silent[source].append(target)
                return target
        raise AssertionError(node)
