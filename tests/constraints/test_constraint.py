"""Constraints and their automata, against Python's `re` and plain search on every short text."""

import itertools

import numpy as np
import pytest
import query_oracle as oracle
from hypothesis import given, settings
from hypothesis import strategies as st

from query_models import MANY
from vlhmm.constraints.constraint import (
    compile_constraint,
    length,
    must_contain,
    must_not,
    regex,
)
from vlhmm.constraints.dfa import DFA, minimal
from vlhmm.data.vocabulary import Vocabulary
from vlhmm.errors import QueryError

VOCABULARY = Vocabulary(("a", "b", "c", ".", "mr.", "<unk>", "<eos>"))
TEXTS = [ids for n in range(5) for ids in itertools.product(range(len(VOCABULARY)), repeat=n)]
SHORT = [ids for ids in TEXTS if len(ids) < 4]


def accepted(constraint, texts=TEXTS):
    automaton = compile_constraint(constraint, VOCABULARY)
    return {ids for ids in texts if automaton.accepts(ids)}


def letter(word):
    return oracle.letters([VOCABULARY.id_of[word]])


def translated(pattern):
    """Our pattern for Python's `re`, a letter for each word; for patterns without escapes."""
    out = pattern.replace(" ", "")
    for word in ("<unk>", "a", "b", "c"):
        out = out.replace(word, f"({letter(word)})" if "[" not in pattern else letter(word))
    return out


PATTERNS = [
    "a",
    ".",
    ". *".replace(" ", ""),
    "a b*",
    "(a|b c)+",
    "(a b?){2}",
    "(a|b){1,2} c",
    "(a|b){2,} .",
    "(. c){,1}",
    "a* b* c*",
    "(a*)* b",
    "((a|b)* c)?",
    "[a b] [^a]",
    "[^a b <unk>]+",
    "() a",
    "a | b a",
    "",
]


@pytest.mark.parametrize("pattern", PATTERNS)
def test_patterns_match_as_pythons_do(pattern):
    theirs = translated(pattern)
    expected = {ids for ids in TEXTS if oracle.matches(theirs, ids)}
    assert accepted(regex(pattern)) == expected


atoms = st.sampled_from(["a", "b", "c", ".", "[a c]", "[^b]"])
nested = st.recursive(
    atoms,
    lambda inner: st.one_of(
        st.tuples(inner, inner).map(lambda p: f"({p[0]} {p[1]})"),
        st.tuples(inner, inner).map(lambda p: f"({p[0]}|{p[1]})"),
        st.tuples(inner, st.sampled_from(["*", "+", "?", "{2}", "{1,2}", "{,2}", "{1,}"])).map(
            lambda p: f"({p[0]}){p[1]}"
        ),
    ),
    max_leaves=5,
)


@MANY
@given(pattern=nested)
def test_random_patterns_match_as_pythons_do(pattern):
    theirs = pattern.replace(" ", "")
    for word in "abc":
        theirs = theirs.replace(word, letter(word))
    assert accepted(regex(pattern), SHORT) == {ids for ids in SHORT if oracle.matches(theirs, ids)}


def test_dots_and_escapes():
    stop, mister = VOCABULARY.id_of["."], VOCABULARY.id_of["mr."]
    assert accepted(regex("\\.")) == {(stop,)}
    assert accepted(regex("mr. \\.")) == {(mister, stop)}
    assert accepted(regex("[. a]")) == {(stop,), (VOCABULARY.id_of["a"],)}
    assert accepted(regex("\\a")) == {(VOCABULARY.id_of["a"],)}
    assert len(accepted(regex("."))) == len(VOCABULARY)


@pytest.mark.parametrize(
    ("pattern", "what"),
    [
        ("(a", r"'\(' without '\)' at character 1"),
        ("a)", r"unexpected '\)' at character 2"),
        ("*a", r"unexpected '\*'"),
        ("[a", r"'\[' without '\]'"),
        ("[]", "a set of no words"),
        ("[a |]", "in a set of words"),
        ("a{2", "'{' without '}'"),
        ("a{x}", r"expected \{n\}"),
        ("a{,}", r"expected \{n\}"),
        ("a{3,1}", "counts downwards"),
        ("a\\", "backslash"),
    ],
)
def test_malformed_patterns_are_refused(pattern, what):
    with pytest.raises(QueryError, match=what):
        regex(pattern)


phrases = st.lists(st.sampled_from(["a", "b", "c"]), min_size=1, max_size=3)


@settings(MANY, max_examples=15)
@given(first=phrases, second=phrases, low=st.integers(0, 3), more=st.integers(0, 2))
def test_phrases_and_lengths(first, second, low, more):
    one, two = ([VOCABULARY.id_of[w] for w in phrase] for phrase in (first, second))
    has = {ids for ids in TEXTS if oracle.contains(ids, one)}
    has_two = {ids for ids in TEXTS if oracle.contains(ids, two)}
    sized = {ids for ids in TEXTS if low <= len(ids) <= low + more}
    every = set(TEXTS)
    assert accepted(must_contain(first)) == has
    assert accepted(must_contain(" ".join(first), second)) == has & has_two
    assert accepted(must_contain(first, second, in_order=True)) == {
        ids for ids in TEXTS if oracle.contains_in_order(ids, [one, two])
    }
    assert accepted(must_not(first, second)) == every - has - has_two
    assert accepted(length(low, low + more)) == sized
    assert accepted(length(low)) == {ids for ids in TEXTS if len(ids) >= low}
    assert accepted(must_contain(first) & ~must_contain(second) | length(low, low + more)) == has - has_two | sized


def test_automata_are_minimal_and_words_fall_into_classes():
    automaton = compile_constraint(must_contain("a b"), VOCABULARY)
    assert automaton.num_states == 3
    assert automaton.num_classes == 4  # a, b, <eos>, all others
    same = compile_constraint(regex(".* a b .*"), VOCABULARY)
    assert same.num_states == 3
    anything = compile_constraint(must_contain("a") | ~must_contain("a"), VOCABULARY)
    assert anything.num_states == 1 and anything.num_classes == 2
    assert compile_constraint(length(2, 4), VOCABULARY).num_states == 6
    assert compile_constraint(must_contain("<eos>"), VOCABULARY).num_states == 2
    assert set(np.flatnonzero(automaton.class_of_word == automaton.eos_class)) == {VOCABULARY.eos}


@MANY
@given(data=st.data(), size=st.integers(1, 6), symbols=st.integers(1, 2))
def test_minimal_automata_accept_the_same_and_tell_their_states_apart(data, size, symbols):
    delta = np.array([[data.draw(st.integers(0, size - 1)) for _ in range(symbols)] for _ in range(size)])
    accept = np.array([data.draw(st.booleans()) for _ in range(size)])
    whole = DFA(delta, accept)
    small = minimal(whole)
    words = [w for n in range(7) for w in itertools.product(range(symbols), repeat=n)]
    assert all(whole.accepts(w) == small.accepts(w) for w in words)

    def language(state):
        seen = []
        for word in words:
            now = state
            for symbol in word:
                now = small.delta[now, symbol]
            seen.append(bool(small.accept[now]))
        return tuple(seen)

    assert len({language(s) for s in range(small.num_states)}) == small.num_states


def test_exploding_constraints_are_refused():
    with pytest.raises(QueryError, match="more than 4,096 states"):
        compile_constraint(regex("(a|b)* a (a|b){14}"), VOCABULARY)
    with pytest.raises(QueryError, match="automaton states"):
        compile_constraint(length(0, 100_000), VOCABULARY)
    with pytest.raises(QueryError, match="too large once"):
        compile_constraint(regex("((a{99}){99}){99}"), VOCABULARY)
    with pytest.raises(QueryError, match="no word '"):
        compile_constraint(must_contain("nowhere"), VOCABULARY)


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: must_contain(),
        lambda: must_not(),
        lambda: must_contain(" "),
        lambda: length(3, 2),
        lambda: length(-1),
    ],
)
def test_empty_wishes_are_refused(wrong):
    with pytest.raises(QueryError):
        wrong()
