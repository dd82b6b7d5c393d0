"""Constraints on text against Python's own `re`, and their token automata against every segmentation."""

import itertools
import json
import re
import time

import numpy as np
import pytest

pytest.importorskip("outlines_core")

from vlhmm.errors import QueryError
from vlhmm.steering import byte_automaton
from vlhmm.steering import text_constraint as tc
from vlhmm.steering.token_automaton import token_automaton

ALPHABET = ["a", "b", " ", ".", "é"]
TEXTS = ["".join(letters) for n in range(6) for letters in itertools.product(ALPHABET, repeat=n)]


def includes(word, flags=0):
    return lambda text: re.search(rf"(?<!\w){re.escape(word)}(?!\w)", text, flags) is not None


CASES = [
    (lambda: tc.regex("a+b?"), lambda t: re.fullmatch("a+b?", t) is not None),
    (lambda: tc.choice("ab", "a.", "é"), lambda t: t in ("ab", "a.", "é")),
    (lambda: tc.must_include("ab"), includes("ab")),
    (lambda: tc.must_include("a", ["b", "bb"]), lambda t: includes("a")(t) and (includes("b")(t) or includes("bb")(t))),
    (lambda: tc.must_include("A", any_case=True), includes("A", re.I)),
    (lambda: tc.must_include("a."), lambda t: re.search(r"(?<!\w)a\.", t) is not None),
    (lambda: tc.must_not("a", "bb"), lambda t: not includes("a")(t) and not includes("bb")(t)),
    (lambda: tc.words(2, 3), lambda t: 2 <= len(t.split()) <= 3),
    (lambda: tc.words(0, 1), lambda t: len(t.split()) <= 1),
    (lambda: tc.words(0, 0), lambda t: not t.split()),
    (lambda: tc.words(2), lambda t: len(t.split()) >= 2),
    (lambda: tc.prefix("a."), lambda t: t.startswith("a.")),
    (lambda: tc.suffix("é."), lambda t: t.endswith("é.")),
    (lambda: tc.sentence_end(), lambda t: t.endswith(".")),
    (lambda: tc.anything(), lambda t: True),
    (lambda: ~tc.regex("a*"), lambda t: re.fullmatch("a*", t) is None),
    (lambda: tc.prefix("a") & ~tc.suffix("b"), lambda t: t.startswith("a") and not t.endswith("b")),
    (lambda: tc.prefix("b") | tc.words(3, 3), lambda t: t.startswith("b") or len(t.split()) == 3),
    (lambda: ~(tc.must_include("a") | tc.prefix(".")), lambda t: not includes("a")(t) and not t.startswith(".")),
]


@pytest.mark.parametrize(("make", "truth"), CASES)
def test_constraints_accept_what_they_say(make, truth):
    constraint = make()
    wrong = [text for text in TEXTS if constraint.accepts(text) != truth(text)]
    assert not wrong, (constraint, wrong[:5])


@pytest.mark.parametrize(("make", "truth"), CASES)
def test_token_automata_accept_every_segmentation(make, truth):
    pieces = [b"a", b"b", b" ", b".", "é".encode(), b"ab", b" a", b"\xc3", b"\xa9", b"b ", None, b"", None]
    eos = [10, 12]
    automaton = token_automaton(make().automaton, pieces, eos)
    for n in range(4):
        for tokens in itertools.product(range(len(pieces)), repeat=n):
            state = 0
            for token in (*tokens, 10):
                state = automaton.step(state, token)
            try:
                text = b"".join(pieces[token] or b"" for token in tokens).decode()
                expected = truth(text) and all(pieces[token] for token in tokens)
            except UnicodeDecodeError:
                expected = False
            assert (state == automaton.final) == expected, tokens
            assert automaton.step(state, 0) == -1 or state != automaton.final


def test_minimal_and_equal_constraints_have_equal_automata():
    left = tc.must_include("a") & tc.must_include("b")
    right = ~(~tc.must_include("b") | ~tc.must_include("a"))
    assert left.automaton.num_states == right.automaton.num_states
    np.testing.assert_array_equal(left.automaton.delta, right.automaton.delta)


def test_json_schema():
    schema = {"type": "object", "properties": {"age": {"type": "integer"}}, "required": ["age"]}
    for constraint in (tc.json_schema(schema), tc.json_schema(json.dumps(schema))):
        assert constraint.accepts('{"age": 7}') and not constraint.accepts('{"age": "x"}')


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: tc.regex("(a"), "cannot compile"),
        (lambda: tc.regex(r"\bab"), "must_include for whole words"),
        (lambda: tc.must_include(), "at least one word"),
        (lambda: tc.must_include(""), "is empty"),
        (lambda: tc.words(3, 2), "low <= high"),
        (lambda: tc.json_schema("{"), "JSON schema"),
        (lambda: tc.must_include("abcd", "bcda", "cdab", max_states=50), r"automaton of \d+ states, the limit is 50"),
    ],
)
def test_refusals_are_one_line(make, said):
    with pytest.raises(QueryError, match=said) as refused:
        make()
    assert "\n" not in str(refused.value)


def test_budget():
    pieces = [b"a", b"b", None]
    automaton = token_automaton(tc.regex("ab{3}").automaton, pieces, [2])
    assert automaton.distance[0] == 5
    automaton.check_budget(5)
    with pytest.raises(QueryError, match="at least 5 tokens with the end token, max_new_tokens is 4"):
        automaton.check_budget(4)
    empty = token_automaton((tc.prefix("a") & tc.prefix("b")).automaton, pieces, [2])
    with pytest.raises(QueryError, match="no text meets"):
        empty.check_budget(100)


def test_named_constraints_are_combined():
    both = tc.constraint(must_include=["AB", ["b", "é"]], must_not=["a"], words=(2, 3), prefix="ab", any_case=True)
    parts = [
        tc.must_include("AB", ["b", "é"], any_case=True), tc.must_not("a", any_case=True), tc.words(2, 3), tc.prefix("ab"),
    ]  # fmt: skip
    for text in TEXTS:
        assert both.accepts(text) == all(part.accepts(text) for part in parts), text
    others = tc.constraint(regex="a+.*", choice=["ab.", "b."], suffix=".", sentence_end=True)
    assert [text for text in TEXTS if others.accepts(text)] == ["ab."]
    assert tc.constraint(json_schema={"type": "boolean"}).accepts("true")
    assert all(tc.constraint().accepts(text) for text in TEXTS)


@pytest.mark.parametrize("pattern", ["a{1000000000}", "(.*a){50}.{50}"])
def test_a_pattern_that_explodes_is_refused_and_ends_nothing(pattern, monkeypatch):
    monkeypatch.setattr(byte_automaton, "COMPILE_SECONDS", 2)
    with pytest.raises(QueryError, match="too large"):
        tc.regex(pattern)
    with pytest.raises(QueryError, match="too large"):
        tc.json_schema({"type": "string", "pattern": pattern})


def test_long_phrases_take_seconds_and_longer_ones_are_refused():
    began = time.monotonic()
    assert tc.must_include("a" * 1000).automaton.num_states > 1000
    for make in (lambda: tc.must_include("a" * 5000), lambda: tc.words(1, 10**9), lambda: tc.words(10**6)):
        with pytest.raises(QueryError, match="states, the limit is"):
            make()
    assert time.monotonic() - began < 8
