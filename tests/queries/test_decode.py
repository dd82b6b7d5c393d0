"""States behind a text, and words given both sides, against the table of every path."""

import math

import numpy as np
import pytest
import query_oracle as oracle
from hypothesis import given
from hypothesis import strategies as st
from numpy.testing import assert_allclose

from dense_hmm import oracle_model, random_model
from query_models import MANY, REAL, ids_of, models, real_model, texts
from vlhmm.analysis.export import export
from vlhmm.errors import QueryError
from vlhmm.queries.decode import decode, posteriors
from vlhmm.queries.infill import prepare
from vlhmm.queries.prefix import begin
from vlhmm.queries.word_posterior import surprisal, word_posterior, word_posteriors

EXACT = dict(rtol=1e-9, atol=1e-12)


def table_of(model, ids, eos, eos_state="sum"):
    """p(words[, <eos>], path of the words): every path, the <eos>'s own state summed over or on an axis of its own."""
    table = oracle.joint(oracle_model(model), [*ids, model.vocabulary.eos] if eos else ids)
    return table.sum(-1) if eos and eos_state == "sum" else table


def whole(decoding):
    """The path's states, that of <eos> included where it has one."""
    return (*decoding.states, *([] if decoding.eos_state is None else [decoding.eos_state]))


def check_decoding(model, words, eos):
    ids = ids_of(model, words)
    table = table_of(model, ids, eos)
    total = table.sum()
    if total == 0:
        with pytest.raises(QueryError, match="probability zero"):
            posteriors(model, words, eos)
        return
    known = posteriors(model, words, eos)
    assert_allclose(known.log_likelihood, math.log(total), **EXACT)
    for t in range(len(ids)):
        others = tuple(axis for axis in range(len(ids)) if axis != t)
        marginal = table.sum(others) / total
        up_to = oracle.joint(oracle_model(model), ids[: t + 1])
        filtered = up_to.sum(tuple(range(t))) / up_to.sum()
        states = known.states[t].numpy()
        for got, expected in ((known.smoothed, marginal), (known.filtered, filtered)):
            spread = np.zeros_like(expected)
            np.add.at(spread, states, got[t].numpy())
            assert_allclose(spread, expected, **EXACT)
        if not eos and t == len(ids) - 1:
            assert_allclose(known.filtered[t].numpy(), known.smoothed[t].numpy(), **EXACT)
    for eos_state in ("max", "sum"):
        paths = table_of(model, ids, eos, eos_state)
        best = decode(model, words, eos=eos, eos_state=eos_state)[0]
        assert_allclose(best.log_prob, math.log(paths.max()), **EXACT)
        assert_allclose(paths[whole(best)], paths.max(), **EXACT)
        assert (best.eos_state is not None) == (eos and eos_state == "max")
        several = decode(model, words, k=4, eos=eos, eos_state=eos_state)
        ranked = np.sort(paths.reshape(-1))[::-1]
        expected = [p for p in ranked[:4] if p > 0]
        assert_allclose([d.log_prob for d in several], np.log(expected), **EXACT)
        assert_allclose([paths[whole(d)] for d in several], expected, **EXACT)
        assert len({whole(d) for d in several}) == len(several)
    word_by_word = decode(model, words, method="posterior", eos=eos)[0]
    for t, probability in enumerate(word_by_word.posteriors):
        others = tuple(axis for axis in range(len(ids)) if axis != t)
        assert_allclose(probability, (table.sum(others) / total).max(), **EXACT)


@MANY
@given(model=models(), data=st.data(), eos=st.booleans())
def test_states_are_those_of_every_path(model, data, eos):
    check_decoding(model, data.draw(texts(model, min_size=1, max_size=4)), eos)


@pytest.mark.parametrize(("kind", "rule"), REAL)
def test_states_of_every_parameterization(kind, rule):
    model = real_model(kind, rule)
    check_decoding(model, "a <eos> zzz c".split(), eos=True)


def check_cloze(model, words, eos, allow_eos):
    matrices = oracle_model(model)
    ids = ids_of(model, words) + [model.vocabulary.eos] * eos
    every = []
    for t in range(len(words)):
        weights = np.array(
            [oracle.string_probability(matrices, [*ids[:t], w, *ids[t + 1 :]]) for w in range(matrices[2].shape[1])]
        )
        if not allow_eos:
            weights[model.vocabulary.eos] = 0
        every.append(weights)
    if any(weights.sum() == 0 for weights in every):
        with pytest.raises(QueryError, match="probability zero"):
            list(word_posteriors(model, words, eos, allow_eos))
        return
    found = list(word_posteriors(model, words, eos, allow_eos))
    for t, weights in enumerate(every):
        assert_allclose(found[t].probabilities, weights / weights.sum(), **EXACT)
        assert_allclose(word_posterior(model, words, t, eos, allow_eos).probabilities, found[t].probabilities, **EXACT)


@MANY
@given(model=models(), data=st.data(), eos=st.booleans(), allow_eos=st.booleans())
def test_a_word_given_both_sides_is_every_word_scored(model, data, eos, allow_eos):
    check_cloze(model, data.draw(texts(model, min_size=1, max_size=4)), eos, allow_eos)


@pytest.mark.parametrize(("kind", "rule"), REAL)
def test_a_word_given_both_sides_in_every_parameterization(kind, rule):
    check_cloze(real_model(kind, rule), "a <eos> zzz c".split(), eos=True, allow_eos=True)


@MANY
@given(model=models(rules=("carry",)), data=st.data())
def test_under_carry_a_line_is_decoded_given_the_lines_before(model, data):
    """Against every path of the two lines as one text, the states of the first line summed over."""
    first, line = data.draw(texts(model, max_size=2)), data.draw(texts(model, min_size=1, max_size=2))
    ids, eos = ids_of(model, line), model.vocabulary.eos
    history = [*ids_of(model, first), eos]
    joint = oracle.joint(oracle_model(model), [*history, *ids, eos]).sum(tuple(range(len(history))))
    past = oracle.string_probability(oracle_model(model), history)
    before = begin(model).read_line(first)
    if joint.sum() == 0:
        with pytest.raises(QueryError, match="probability zero"):
            decode(model, line, before=before)
        return
    known = posteriors(model, line, before=before)
    assert_allclose(known.log_likelihood, math.log(joint.sum() / past), **EXACT)
    best = decode(model, line, before=before)[0]
    assert_allclose(best.log_prob, math.log(joint.max() / past), **EXACT)
    assert_allclose(joint[whole(best)], joint.max(), **EXACT)
    for t, smoothed in enumerate(known.smoothed.numpy()):
        marginal = joint.sum(tuple(axis for axis in range(len(ids) + 1) if axis != t)) / joint.sum()
        spread = np.zeros_like(marginal)
        np.add.at(spread, known.states[t].numpy(), smoothed)
        assert_allclose(spread, marginal, **EXACT)
    for surprise in surprisal(model, line, before=before):
        t = surprise.position
        weights = [
            oracle.string_probability(oracle_model(model), [*history, *ids[:t], w, *ids[t + 1 :], eos])
            for w in range(len(model.vocabulary))
        ]
        weights[eos] = 0
        with np.errstate(divide="ignore"):
            assert_allclose(surprise.log_prob, np.log(weights[ids[t]] / sum(weights)), **EXACT)


def test_best_fill_and_decode_agree_on_the_state_of_eos():
    """Both maximize over the state of <eos>: the best path of a filled text is the path that filled it."""
    model = random_model(3, num_words=3, num_blocks=3, size=3)
    best = prepare(model, "a [MASK:2] b").best()
    path = decode(model, best.fill.text)[0]
    log_total = prepare(model, "a [MASK:2] b").log_evidence
    assert_allclose(best.path_log_prob + log_total, path.log_prob, **EXACT)
    assert path.log_prob < decode(model, best.fill.text, eos_state="sum")[0].log_prob


def test_paths_are_hmmlearns(tmp_path):
    """Viterbi over the words and the <eos> of the exported matrices, by another program."""
    hmmlearn = pytest.importorskip("hmmlearn.hmm")
    model = real_model("uneven-block-factored", "carry")
    export(model, tmp_path / "m.npz", "hmmlearn")
    with np.load(tmp_path / "m.npz", allow_pickle=False) as file:
        other = hmmlearn.CategoricalHMM(n_components=len(file["startprob_"]))
        for name in ("startprob_", "transmat_", "emissionprob_"):
            setattr(other, name, file[name])
    for line in ("a", "a b zzz c", "c c a <eos> b", "b <unk> a"):
        ids = [*ids_of(model, line.split()), model.vocabulary.eos]
        log_prob, states = other.decode(np.array(ids)[:, None])
        best = decode(model, line)[0]
        assert_allclose(best.log_prob, log_prob, rtol=1e-9)
        assert whole(best) == tuple(states)
        filtered_to_the_end = decode(model, line, eos_state="sum")[0]
        assert filtered_to_the_end.log_prob > log_prob


def test_spot_finds_the_least_expected():
    model = random_model(1, num_words=4, num_blocks=3)
    words = "a b zzz c a".split()
    found = surprisal(model, words, top_k=2)
    assert [s.log_prob for s in found] == sorted(s.log_prob for s in found)
    assert sorted(s.position for s in found) == list(range(5))
    for surprise in found:
        expected = word_posterior(model, words, surprise.position)
        assert_allclose(surprise.log_prob, expected.log_prob(words[surprise.position]), **EXACT)
        assert [w.word for w in surprise.expected] == [w.word for w in expected.top(2)]
        higher = (expected.probabilities > expected[words[surprise.position]]).sum()
        assert surprise.rank == higher + 1
        assert surprise.oov == (surprise.position == 2)
    assert_allclose(word_posterior(model, words, -1).probabilities, word_posterior(model, words, 4).probabilities)


def test_bad_questions_are_refused():
    model = random_model(0)
    for wrong, what in (
        (lambda: decode(model, ""), "empty text"),
        (lambda: decode(model, "a", method="best"), "unknown method"),
        (lambda: decode(model, "a", k=0), "at least 1"),
        (lambda: decode(model, "a", eos_state="mean"), "expected max or sum"),
        (lambda: decode(model, "a", method="posterior", k=2), "1 for posterior"),
        (lambda: posteriors(model, ["a"] * 100, memory=1000), "split the text"),
        (lambda: list(word_posteriors(model, ["a"] * 100, memory=1000)), "split the text"),
        (lambda: word_posterior(model, "a b", 2), "position 2 in a text of 2 words"),
        (lambda: word_posterior(model, "", 0), "position 0 in a text of 0 words"),
    ):
        with pytest.raises(QueryError, match=what):
            wrong()
