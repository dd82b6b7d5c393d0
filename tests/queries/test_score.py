"""Score, next word, state values and plain samples, against writing out every path and string."""

import json
import math
from collections import Counter

import numpy as np
import pytest
import query_oracle as oracle
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.testing import assert_allclose

from dense_hmm import oracle_model, random_model
from query_models import MANY, REAL, ids_of, models, real_model, texts
from vlhmm.errors import QueryError
from vlhmm.queries.decode import posteriors
from vlhmm.queries.next_word import next_distribution
from vlhmm.queries.prefix import begin, prefix_from_json
from vlhmm.queries.sample import sample, sample_streams
from vlhmm.queries.score import score, score_lines, token_scores

EXACT = dict(rtol=1e-9, atol=1e-12)  # float64 throughout


def log(value):
    return math.log(value) if value > 0 else -math.inf


@MANY
@given(model=models(), data=st.data())
def test_the_oracle_sums_every_path(model, data):
    ids = ids_of(model, data.draw(texts(model, min_size=1)))
    assert_allclose(oracle.string_probability(oracle_model(model), ids), oracle.joint(oracle_model(model), ids).sum(), rtol=1e-12)


@MANY
@given(model=models(), data=st.data(), eos=st.booleans())
def test_score_sums_every_path(model, data, eos):
    words = data.draw(texts(model))
    ids = ids_of(model, words) + [model.vocabulary.eos] * eos
    expected = [oracle.string_probability(oracle_model(model), ids[:n]) for n in range(len(ids) + 1)]
    assert_allclose(score(model, words, eos), log(expected[-1]), **EXACT)
    if expected[-1] > 0:
        tokens = token_scores(model, words, eos)
        assert_allclose([t.log_prob for t in tokens], np.diff(np.log(expected)), **EXACT)
        assert [t.oov for t in tokens[: len(words)]] == [word == "zzz" for word in words]


@pytest.mark.parametrize(("kind", "rule"), REAL)
def test_score_and_next_word_of_every_parameterization(kind, rule):
    model = real_model(kind, rule)
    words = "a c <unk> b <eos> d zzz e".split()
    ids = ids_of(model, words)
    assert_allclose(score(model, words, eos=False), log(oracle.string_probability(oracle_model(model), ids)), **EXACT)
    for n in (0, 3, 5, 8):
        found = next_distribution(model, words[:n]).probabilities
        assert_allclose(found, oracle.next_word(oracle_model(model), ids[:n]), **EXACT)


@MANY
@given(model=models(), data=st.data())
def test_next_word_is_every_word_scored(model, data):
    context = data.draw(texts(model))
    ids = ids_of(model, context)
    if oracle.string_probability(oracle_model(model), ids) == 0:
        with pytest.raises(QueryError, match="probability zero"):
            next_distribution(model, context)
        return
    found = next_distribution(model, " ".join(context))
    assert_allclose(found.probabilities, oracle.next_word(oracle_model(model), ids), **EXACT)
    assert_allclose(found.probabilities.sum(), 1, **EXACT)
    best = next_distribution(model, context).top(2)
    assert [w.log_prob for w in best] == sorted((w.log_prob for w in best), reverse=True)
    assert_allclose(best[0].probability, found.probabilities.max(), **EXACT)
    assert_allclose([found[w.word] for w in best], [w.probability for w in best], **EXACT)


@MANY
@given(model=models(), data=st.data())
def test_states_are_values(model, data):
    words = data.draw(texts(model, min_size=1, max_size=5))
    ids = ids_of(model, words)
    state, again = begin(model), begin(model)
    for n, word in enumerate(words):
        kept = state
        state, again = state.step(word), again.step(ids[n])
        assert state == again and hash(state) == hash(again) and state != kept
        assert kept.step(word) == state  # the old one is still what it was
    assert_allclose(state.log_prob, log(oracle.string_probability(oracle_model(model), ids)), **EXACT)
    assert state.num_words == len(words)
    back = prefix_from_json(model, state.to_json())
    assert back == state and back.alpha.tobytes() == state.alpha.tobytes()
    if state.log_prob > -math.inf:
        assert_allclose(state.distribution().probabilities, oracle.next_word(oracle_model(model), ids), **EXACT)
        assert_allclose(state.score("a"), log(oracle.next_word(oracle_model(model), ids)[ids_of(model, "a")[0]]), **EXACT)
        assert_allclose(back.next_word(1)[0].log_prob, state.next_word(1)[0].log_prob, **EXACT)
    else:
        with pytest.raises(QueryError, match="probability zero"):
            state.next_word(1)


def test_states_refuse_what_is_not_theirs():
    model, other = random_model(0), random_model(1, num_blocks=3)
    line = begin(model).step("a").to_json()
    with pytest.raises(QueryError, match="another model"):
        prefix_from_json(other, line)
    assert json.loads(line)["block"] == begin(model).step("a").block and "group" not in line
    with pytest.raises(QueryError, match="not a prefix"):
        prefix_from_json(model, "{}")
    damaged = json.loads(line) | {"alpha": ["0x1p0"]}
    with pytest.raises(QueryError, match="damaged"):
        prefix_from_json(model, json.dumps(damaged))
    with pytest.raises(ValueError, match="read-only"):
        begin(model).step("a").alpha[0] = 1


@MANY
@given(model=models(), data=st.data())
def test_lines_carry_or_reset(model, data):
    lines = [data.draw(texts(model, max_size=2)) for _ in range(2)]
    ids = [[*ids_of(model, line), model.vocabulary.eos] for line in lines]
    first, second = score_lines(model, lines)
    whole = oracle.string_probability(oracle_model(model), ids[0] + ids[1])
    assert_allclose(first.log_prob, log(oracle.string_probability(oracle_model(model), ids[0])), **EXACT)
    if first.log_prob > -math.inf:  # the rule decides what the second line knows; the oracle knows the rule too
        assert_allclose(first.log_prob + second.log_prob, log(whole), **EXACT)
    assert first.num_tokens == len(ids[0]) and first.num_oov == lines[0].count("zzz")
    assert first.num_unk == lines[0].count("<unk>")


@pytest.mark.parametrize("rule", ["reset", "carry"])
def test_long_texts_are_read_in_chunks(rule, monkeypatch):
    model = random_model(12, num_words=3, num_blocks=2, size=2, rule=rule)
    words = "a b <eos> c zzz a c <eos> b a".split()
    ids = ids_of(model, words)
    monkeypatch.setattr("vlhmm.queries.sequence._CHUNK_BYTES", 8 * 4 * 3)  # three words a chunk
    expected = [oracle.string_probability(oracle_model(model), ids[:n]) for n in range(len(ids) + 1)]
    assert_allclose([t.log_prob for t in token_scores(model, words, eos=False)], np.diff(np.log(expected)), **EXACT)
    assert_allclose(next_distribution(model, words).probabilities, oracle.next_word(oracle_model(model), ids), **EXACT)
    assert_allclose(posteriors(model, words, eos=False).log_likelihood, np.log(expected[-1]), **EXACT)


def all_texts(model, max_tokens, prompt=()):
    """{what follows the prompt: probability}, up to <eos> or cut after max_tokens."""
    matrices, eos = oracle_model(model), model.vocabulary.eos
    ids = ids_of(model, prompt)
    base = oracle.string_probability(matrices, ids)
    table = {}

    def extend(words):
        if len(words) == max_tokens or (words and words[-1] == eos):
            table[tuple(words)] = oracle.string_probability(matrices, [*ids, *words]) / base
            return
        for word in range(matrices[2].shape[1]):
            extend([*words, word])

    extend([])
    return table


@pytest.mark.parametrize("prompt", ["", "a", "a <eos>", "zzz b"])
@pytest.mark.parametrize(("kind", "rule"), [("partition", "reset"), ("uniform", "carry"), ("dead", "carry")])
def test_samples_agree_with_their_probabilities(kind, rule, prompt):
    model = random_model(5, num_words=2, num_blocks=2, size=2, kind=kind, rule=rule)
    expected = all_texts(model, 3, prompt.split())
    assert_allclose(sum(expected.values()), 1, rtol=1e-12)
    drawn = sample(model, 4000, prompt, max_tokens=3, seed=11)
    counts = Counter(tuple(ids_of(model, s.words)) + (model.vocabulary.eos,) * s.ended for s in drawn)
    statistic, degrees = oracle.chi_square(counts, expected)
    assert statistic < oracle.chi_square_limit(degrees)
    assert all(s.exact and s.text.startswith(prompt) for s in drawn)


@pytest.mark.parametrize("kind", ["paper", "block-factored", "uniform", "uneven-block-factored"])
def test_samples_of_real_tables_agree_with_their_probabilities(kind):
    model = real_model(kind, "reset")
    expected = all_texts(model, 2)
    drawn = sample(model, 4000, max_tokens=2, seed=3)
    counts = Counter(tuple(ids_of(model, s.words)) + (model.vocabulary.eos,) * s.ended for s in drawn)
    statistic, degrees = oracle.chi_square(counts, expected)
    assert statistic < oracle.chi_square_limit(degrees)


def test_streams_go_on_as_the_rule_says():
    for rule in ("reset", "carry"):
        model = random_model(3, num_words=1, rule=rule)
        streams = sample_streams(model.distributions, 4000, 3, torch.Generator().manual_seed(1)).tolist()
        matrices, size = oracle_model(model), len(model.vocabulary)
        expected = {
            (a, b, c): oracle.string_probability(matrices, (a, b, c))
            for a in range(size)
            for b in range(size)
            for c in range(size)
        }
        statistic, degrees = oracle.chi_square(Counter(map(tuple, streams)), expected)
        assert statistic < oracle.chi_square_limit(degrees)


def test_samples_have_their_scores_and_seeds():
    model = random_model(2, num_words=2)
    first = sample(model, 5, "a", max_tokens=4, scores=True, seed=1)
    assert first == sample(model, 5, "a", max_tokens=4, scores=True, seed=1)
    assert first != sample(model, 5, "a", max_tokens=4, scores=True, seed=2)
    assert sample(model, 2, seed=np.random.default_rng(1)) == sample(model, 2, seed=np.random.default_rng(1))
    for text in first:
        whole = score(model, text.text, eos=text.ended)
        assert_allclose(text.log_prob, whole - score(model, "a", eos=False), rtol=1e-9)


def test_reweighed_samples_follow_the_reweighed_distribution():
    model = random_model(4, num_words=3)
    plain = next_distribution(model, "a").probabilities
    order = np.argsort(-plain, kind="stable")
    cases = {
        "temperature": (dict(temperature=0.5), plain**2),
        "top_k": (dict(top_k=2), np.where(np.isin(np.arange(len(plain)), order[:2]), plain, 0)),
        "top_p": (
            dict(top_p=float(plain[order[0]]) + 1e-6),
            np.where(np.isin(np.arange(len(plain)), order[:2]), plain, 0),
        ),
        "both": (dict(temperature=2.0, top_k=1), np.where(np.arange(len(plain)) == order[0], plain, 0)),
    }
    for name, (wishes, weights) in cases.items():
        drawn = sample(model, 2000, "a", max_tokens=1, seed=5, **wishes)
        assert not any(s.exact for s in drawn), name
        counts = Counter(model.vocabulary.eos if s.ended else ids_of(model, s.words)[0] for s in drawn)
        expected = {i: p for i, p in enumerate(weights / weights.sum()) if p > 0}
        statistic, degrees = oracle.chi_square(counts, expected)
        assert set(counts) <= set(expected), name
        assert statistic < oracle.chi_square_limit(degrees), name


def test_reweighing_by_nothing_is_the_model():
    model = random_model(6, num_words=2, rule="carry")
    expected = all_texts(model, 3, ["b"])
    drawn = sample(model, 3000, "b", max_tokens=3, top_k=100, seed=8)
    counts = Counter(tuple(ids_of(model, s.words)) + (model.vocabulary.eos,) * s.ended for s in drawn)
    statistic, degrees = oracle.chi_square(counts, expected)
    assert statistic < oracle.chi_square_limit(degrees)


@pytest.mark.parametrize(
    ("wishes", "what"),
    [
        (dict(n=0), "expected at least 1"),
        (dict(max_tokens=0), "expected at least 1"),
        (dict(temperature=0.0), "temperature"),
        (dict(temperature=math.nan), "temperature"),
        (dict(top_k=0), "top_k"),
        (dict(top_p=1.5), "top_p"),
        (dict(seed="x"), "seed"),
    ],
)
def test_bad_wishes_are_refused(wishes, what):
    with pytest.raises(QueryError, match=what):
        sample(random_model(0), **wishes)


def test_an_impossible_prompt_is_refused():
    model = random_model(0, num_words=2)
    model.distributions.emission[model.vocabulary.id_of["a"]] = 0
    with pytest.raises(QueryError, match="probability zero"):
        sample(model, prompt="a")
    assert score(model, "a") == -math.inf
