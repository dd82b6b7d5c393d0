"""p(C | prefix) and every next token's ratio against enumeration, and batches against single sequences."""

import itertools

import numpy as np
import pytest
import torch

pytest.importorskip("outlines_core")

from steering.steering_models import EOS, PIECES, random_hmm, steering_hmm, text_probabilities
from steering.test_lookahead import CASES
from vlhmm.errors import ConfigError, QueryError
from vlhmm.steering import text_constraint as tc
from vlhmm.steering.guide import Guide
from vlhmm.steering.token_automaton import token_automaton

BUDGET = 5


def guide_of(name_or_make, model, dtype=torch.float64, budget=BUDGET):
    make = CASES[name_or_make][0] if isinstance(name_or_make, str) else name_or_make
    return Guide(steering_hmm(model, dtype), token_automaton(make().automaton, PIECES, EOS), budget)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize(("blocks", "size", "dtype"), [(1, 5, torch.float64), (3, 3, torch.float64), (2, 6, torch.float32)])
def test_probability_after_every_prefix_equals_enumeration(name, blocks, size, dtype):
    truth = CASES[name][1]
    model = random_hmm(blocks, size, seed=5)
    guide = guide_of(name, model, dtype)
    prefixes = [p for n in range(4) for p in itertools.product(range(5), repeat=n)][:: 3]
    seen = 0
    for prefix in prefixes:
        state = guide.start([()])
        for token in prefix:
            state = guide.step(state, [token])
        expected = sum(text_probabilities(model, truth, BUDGET - len(prefix), prefix).values())
        ratios, log_probability = guide.log_ratios(state)
        found = float(log_probability[0].exp()) if guide.open(state)[0] else 0.0
        assert found == pytest.approx(expected, abs=1e-6)
        if expected > 0:
            seen += 1
            for token in range(len(PIECES)):
                if token in EOS:
                    text = b"".join(PIECES[t] for t in prefix).decode()
                    after = float(truth(text))
                else:
                    left = BUDGET - len(prefix) - 1
                    after = sum(text_probabilities(model, truth, left, (*prefix, token)).values())
                assert float(ratios[0, token].exp()) == pytest.approx(after / expected, rel=1e-5, abs=1e-9)
    assert seen


def test_a_batch_gives_what_single_sequences_give():
    model = random_hmm(3, 4, seed=2)
    guide = guide_of("must_include", model)
    texts = [(0, 2, 1), (2, 0, 2), (3, 2, 0), (4, 2, 5)]
    batch = guide.start([()] * 4)
    singles = [guide.start([()]) for _ in texts]
    for t in range(3):
        batch = guide.step(batch, [text[t] for text in texts])
        singles = [guide.step(state, [text[t]]) for state, text in zip(singles, texts, strict=True)]
        ratios, probabilities = guide.log_ratios(batch)
        for i, single in enumerate(singles):
            one, probability = guide.log_ratios(single)
            torch.testing.assert_close(ratios[i], one[0])
            torch.testing.assert_close(probabilities[i], probability[0])
    back = batch.select([2, 0])
    np.testing.assert_array_equal(back.automaton, batch.automaton[[2, 0]])


def test_contexts_are_read_and_the_end_of_text_restarts_the_chain():
    model = random_hmm(2, 3)
    guide = guide_of("words", model)
    guide.hmm.restart_tokens = frozenset([5])
    state = guide.start([(0, 1), (3, 5, 0, 1), ()])
    torch.testing.assert_close(state.predicted[0], state.predicted[1])
    torch.testing.assert_close(state.predicted[2], guide.hmm.start)
    truth = CASES["words"][1]
    whole = text_probabilities(model, lambda text: truth(text[2:]), BUDGET, (0, 1))
    assert float(guide.log_ratios(state)[1][0].exp()) == pytest.approx(sum(whole.values()), abs=1e-9)


def test_a_constraint_that_the_hmm_holds_impossible_is_met_all_the_same():
    model = random_hmm(2, 3)
    model[2][1] = 0  # the HMM never writes "b"
    model[2][1::2] /= model[2][1::2].sum(axis=0)
    guide = guide_of(lambda: tc.choice("bb"), model)
    state = guide.start([()])
    for expected in ([1], [1], EOS):
        ratios, log_probability = guide.log_ratios(state)
        assert np.flatnonzero(np.isfinite(ratios[0].numpy())).tolist() == expected
        state = guide.step(state, [expected[0]])
    assert state.automaton[0] == guide.automaton.final
    ratios, log_probability = guide.log_ratios(state)
    assert not ratios.any() and not log_probability.any()


def test_budget_is_checked_before_anything_is_made():
    with pytest.raises(QueryError, match="at least 4 tokens with the end token, max_new_tokens is 3"):
        guide_of(lambda: tc.choice("bbb"), random_hmm(), budget=3)
    with pytest.raises(ConfigError, match="max_new_tokens=0"):
        guide_of("words", random_hmm(), budget=0)
