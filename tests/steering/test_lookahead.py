"""Lookahead tables against enumeration, and the fast products against plain ones."""

import re

import numpy as np
import pytest
import torch

pytest.importorskip("outlines_core")

from steering.steering_models import EOS, PIECES, dense_emission, random_hmm, steering_hmm, text_probabilities
from vlhmm.errors import QueryError
from vlhmm.steering import text_constraint as tc
from vlhmm.steering.lookahead import LookaheadTable, lookahead_table
from vlhmm.steering.token_automaton import token_automaton


def word(w):
    return lambda t: re.search(rf"(?<!\w){w}(?!\w)", t) is not None


CASES = {
    "regex": (lambda: tc.regex("(ab)*b? ?a"), lambda t: re.fullmatch("(ab)*b? ?a", t) is not None),
    "choice": (lambda: tc.choice("ab", "a b"), lambda t: t in ("ab", "a b")),
    "must_include": (lambda: tc.must_include("a", ["b", "ab"]), lambda t: word("a")(t) and (word("b")(t) or word("ab")(t))),
    "any_case": (lambda: tc.must_include("AB", any_case=True), word("ab")),
    "must_not": (lambda: tc.must_not("a", "bb"), lambda t: not word("a")(t) and not word("bb")(t)),
    "words": (lambda: tc.words(2, 3), lambda t: 2 <= len(t.split()) <= 3),
    "prefix": (lambda: tc.prefix("ab"), lambda t: t.startswith("ab")),
    "suffix": (lambda: tc.suffix(" a"), lambda t: t.endswith(" a")),
    "and-or-not": (
        lambda: (tc.prefix("a") | tc.suffix("b")) & ~tc.words(1, 1),
        lambda t: (t.startswith("a") or t.endswith("b")) and len(t.split()) != 1,
    ),
}


def beta(table, level, state):
    """beta_level(state, .) without its scale, in float64."""
    row = table.row_of[level][state]
    return table.values[level][row].double() * np.exp(table.log_scale[level][state]) if row >= 0 else 0


def total(table, hmm, level):
    """p(C) at the start with `level` tokens: one step by hand."""
    result = 0.0
    for token in range(len(PIECES)):
        following = table.automaton.step(0, token)
        if following >= 0:
            block, size = int(hmm.block_of_token[token]), hmm.states_per_block
            at_block = (hmm.start.double() * beta(table, level - 1, following))[block * size : (block + 1) * size]
            result += float((at_block * hmm.emission[token].double()).sum())
    return result


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize(("blocks", "dtype"), [(1, torch.float64), (3, torch.float64), (3, torch.float32)])
def test_probability_of_the_constraint_equals_enumeration(name, blocks, dtype):
    make, truth = CASES[name]
    model = random_hmm(blocks)
    hmm = steering_hmm(model, dtype)
    automaton = token_automaton(make().automaton, PIECES, EOS)
    table = lookahead_table(hmm, automaton, 5)
    for level in (3, 5):
        expected = sum(text_probabilities(model, truth, level).values())
        assert total(table, hmm, level) == pytest.approx(expected, abs=1e-6, rel=1e-5)


def plain_table(model, automaton, levels):
    """beta by its definition: dense matrices in float64, a token at a time."""
    start, transition, emission, block = model
    full = dense_emission(emission, block, len(start))
    table = [np.zeros((automaton.num_states, len(start)))]
    table[0][automaton.final] = 1
    for _ in range(levels - 1):
        gamma = np.zeros_like(table[0])
        for state in range(automaton.num_states):
            for token in range(len(emission)):
                following = automaton.step(state, token)
                if following >= 0:
                    gamma[state] += full[:, token] * table[-1][following]
        table.append(gamma @ transition.T)
        table[-1][automaton.final] = 1
    return table


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize(("blocks", "size", "memory"), [(1, 3, 1 << 30), (7, 2, 1 << 30), (5, 13, 1), (3, 70, 1 << 30), (3, 70, 1)])
def test_products_of_shared_parts_equal_plain_ones(dtype, blocks, size, memory):
    model = random_hmm(blocks, size, seed=3)
    hmm = steering_hmm(model, dtype, memory=memory)
    automaton = token_automaton((tc.must_include("ab", "b", "aab") | tc.words(3, 3)).automaton, PIECES, EOS)
    table = LookaheadTable(hmm, automaton, 9)
    table.fill()
    compared = 0
    for level, expected in enumerate(plain_table(model, automaton, 9)):
        for state in np.flatnonzero(table.needed(level)):
            found = beta(table, level, state).numpy()
            np.testing.assert_allclose(found, expected[state], rtol=2e-6 if dtype == torch.float32 else 1e-12)
            compared += 1
    assert compared > 30


def test_very_improbable_constraints_keep_their_digits():
    """float32 ends at 1e-45; the table goes on."""
    model = random_hmm(2, 3)
    model[2][0] *= 1e-7  # token "a"
    model[2][0::2] /= model[2][0::2].sum(axis=0)
    automaton = token_automaton(tc.regex("a{12}").automaton, PIECES[:3] + [None] * 4, EOS)
    table = lookahead_table(steering_hmm(model, torch.float32), automaton, 13)
    exact = lookahead_table(steering_hmm(model, torch.float64), automaton, 13)
    left = np.log(table.values[12][0].double().numpy()) + table.log_scale[12][1]
    right = np.log(exact.values[12][0].numpy()) + exact.log_scale[12][1]
    assert right.max() < -150
    np.testing.assert_allclose(left, right, rtol=1e-6)


def test_tables_are_kept_by_content_and_within_the_budget():
    hmm = steering_hmm(random_hmm())
    first = token_automaton(tc.prefix("a").automaton, PIECES, EOS)
    table = lookahead_table(hmm, first, 6)
    assert lookahead_table(hmm, token_automaton(tc.regex("(?s)a.*").automaton, PIECES, EOS), 3) is table
    assert lookahead_table(hmm, first, 7) is not table
    hmm.memory = hmm.tables[first.content_hash].nbytes
    lookahead_table(hmm, token_automaton(tc.choice("b").automaton, PIECES, EOS), 3)
    assert len(hmm.tables) == 1
    with pytest.raises(QueryError, match="raise memory"):
        lookahead_table(hmm, first, 1000)
