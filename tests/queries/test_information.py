"""Entropy rate, phrases, divergences, exports and `verify`, against enumeration and broken models."""

import itertools
import json
import math

import numpy as np
import pytest
import query_oracle as oracle
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.testing import assert_allclose
from safetensors.numpy import load_file

from benchmarks.query_speed import bench_queries
from dense_hmm import DenseDistributions, DenseModel, oracle_model, random_model
from query_models import MANY, ids_of, models, real_model, texts
from vlhmm.analysis.export import LOG_ZERO, export, load_export
from vlhmm.analysis.verify import verify
from vlhmm.data.vocabulary import Vocabulary
from vlhmm.errors import DataError, QueryError
from vlhmm.queries.information import entropy_rate, kl_on_text, phrase_probability, predictions

EXACT = dict(rtol=1e-9, atol=1e-12)


@MANY
@given(model=models(max_words=2), data=st.data(), allow_eos=st.booleans())
def test_a_phrase_in_the_next_words_is_every_string(model, data, allow_eos):
    names = [w for w in model.vocabulary.words if w != "<eos>"]
    phrase = data.draw(st.lists(st.sampled_from(names), min_size=1, max_size=2))
    context = data.draw(st.lists(st.sampled_from(model.vocabulary.words), max_size=2))
    ids, wanted, matrices = ids_of(model, context), ids_of(model, phrase), oracle_model(model)
    base = oracle.string_probability(matrices, ids)
    if base == 0:
        with pytest.raises(QueryError, match="probability zero"):
            phrase_probability(model, phrase, 2, context)
        return
    found = phrase_probability(model, phrase, 3, context, allow_eos)
    eos = model.vocabulary.eos
    for n, probability in enumerate(found, start=1):
        expected = 0.0
        for text in itertools.product(range(len(model.vocabulary)), repeat=n):
            seen = text if allow_eos or eos not in text else text[: text.index(eos)]
            if oracle.contains(seen, wanted):
                expected += oracle.string_probability(matrices, [*ids, *text]) / base
        assert_allclose(probability, expected, **EXACT)


def test_phrases_ask_for_something():
    model = random_model(0)
    with pytest.raises(QueryError, match="at least 1"):
        phrase_probability(model, "a", 0)
    with pytest.raises(QueryError, match="would take"):
        phrase_probability(model, "a", 5, memory=100)
    with pytest.raises(QueryError, match="no word '"):
        phrase_probability(model, "nowhere", 5)


@MANY
@given(model=models(max_words=2), seed=st.integers(0, 100), data=st.data())
def test_divergence_along_a_text(model, seed, data):
    words = data.draw(st.lists(st.sampled_from(model.vocabulary.words), min_size=1, max_size=3))
    other = random_model(seed, num_words=len(model.vocabulary) - 2, num_blocks=1, size=3, rule=model.rule)
    ids = ids_of(model, words) + [model.vocabulary.eos]
    ours, theirs = oracle_model(model), oracle_model(other)
    if oracle.string_probability(ours, ids) == 0:
        return
    expected = []
    for t in range(len(ids)):
        p, q = oracle.next_word(ours, ids[:t]), oracle.next_word(theirs, ids[:t])
        expected.append(sum(a * math.log(a / b) for a, b in zip(p, q, strict=True) if a > 0))
    found = kl_on_text(model, other, words)
    assert_allclose(found.token_kl, expected, rtol=1e-9, atol=1e-10)
    assert_allclose(found.kl, np.mean(expected), rtol=1e-9, atol=1e-10)
    ratio = math.log(oracle.string_probability(ours, ids) / oracle.string_probability(theirs, ids))
    assert_allclose(found.log_ratio * len(ids), ratio, rtol=1e-9, atol=1e-10)
    assert kl_on_text(model, model, words).kl == 0


def test_divergence_needs_one_vocabulary_and_a_text():
    with pytest.raises(QueryError, match="different vocabularies"):
        kl_on_text(random_model(0, num_words=2), random_model(0, num_words=3), "a")
    with pytest.raises(QueryError, match="empty text"):
        kl_on_text(random_model(0), random_model(1), "", eos=False)


def known_chain(rule="carry"):
    """A model whose state is its word: an ordinary Markov chain, whose entropy rate has a closed form."""
    vocabulary = Vocabulary(("a", "<unk>", "<eos>"))
    transition = np.array([[0.7, 0.2, 0.1], [0.3, 0.3, 0.4], [0.5, 0.25, 0.25]])
    values, vectors = np.linalg.eig(transition.T)
    stationary = np.real(vectors[:, np.argmax(np.real(values))])
    stationary = stationary / stationary.sum()
    distributions = DenseDistributions(stationary, transition, np.eye(3), [0, 1, 2], [[0], [1], [2]])
    rate = -(stationary[:, None] * transition * np.log(transition)).sum()
    return DenseModel(distributions, vocabulary, rule), rate


def test_entropy_rate_of_a_chain_with_a_closed_form():
    model, rate = known_chain()
    found = entropy_rate(model, num_streams=100, num_tokens=200, seed=1)
    assert 0 < found.standard_error < 0.05
    # the start is stationary, so the bias is (H(first word) - rate) / 200
    assert abs(found.value - rate) < 4 * found.standard_error + 0.005
    with pytest.raises(QueryError, match="at least 2"):
        entropy_rate(model, num_streams=1)
    # the standard error is what repeated estimates scatter by
    several = [entropy_rate(model, num_streams=8, num_tokens=10, seed=seed) for seed in range(40)]
    scatter = np.std([estimate.value for estimate in several], ddof=1)
    assert 0.6 < scatter / np.mean([estimate.standard_error for estimate in several]) < 1.6


def test_predictions_are_next_words():
    model = random_model(3, num_words=3)
    ids = ids_of(model, "a b <eos> c".split())
    for t, words in enumerate(predictions(model, ids)):
        assert_allclose(words, oracle.next_word(oracle_model(model), ids[:t]), **EXACT)


# ---- export


@pytest.mark.parametrize("kind", ["paper", "uniform", "uneven-block-factored"])
@pytest.mark.parametrize(("name", "how"), [("m.npz", None), ("m.safetensors", None), ("h.npz", "hmmlearn")])
def test_exports_come_back(tmp_path, kind, name, how):
    model = real_model(kind, "reset")
    written = export(model, tmp_path / name, how)
    back = load_export(tmp_path / name)
    start, transition, emission, *_ = oracle_model(model)
    tolerance = dict(rtol=1e-6, atol=1e-9)  # float32 on disk
    alive = np.flatnonzero(start + transition.sum(0) > 0)  # the others pad the smaller blocks
    assert (len(alive) < len(start)) == kind.startswith("uneven") and back.state_ids.tolist() == alive.tolist()
    assert_allclose(back.start, start[alive], **tolerance)
    assert_allclose(back.transition, transition[np.ix_(alive, alive)], **tolerance)
    assert_allclose(back.emission, emission[alive], **tolerance)
    for matrix in (back.start, back.transition, back.emission):
        assert_allclose(matrix.sum(-1), 1, rtol=1e-6)
    assert back.vocabulary == model.vocabulary
    assert written.num_bytes > 4 * len(alive) * (1 + len(alive))
    assert not list(tmp_path.glob(".*"))


def ctrl_g_probability(arrays, ids):
    """p(ids) by the recursion of Ctrl-G's class: from the last token to the first, in logs."""
    y = np.zeros(len(arrays["gamma"]))
    for t in range(len(ids) - 1, -1, -1):
        if t < len(ids) - 1:
            y = np.log(np.maximum(arrays["alpha_exp"] @ np.exp(y), 1e-300))
        y = y + arrays["beta"][:, ids[t]]
    return np.exp(arrays["gamma"]) @ np.exp(y)


@pytest.mark.parametrize("kind", ["partition", "dead", "zeros", "uniform"])
def test_ctrl_g_folder_has_what_its_class_reads(tmp_path, kind):
    model = random_model(0, kind=kind, num_words=3)
    export(model, tmp_path / "hmm", "ctrl-g")
    arrays = load_file(tmp_path / "hmm" / "model.safetensors")
    config = json.loads((tmp_path / "hmm" / "config.json").read_text())
    start, transition, emission, eos, _ = oracle_model(model)
    size = int(((start + transition.sum(0) > 0) & (np.delete(emission, eos, 1).sum(1) > 0)).sum()) + 1
    assert set(arrays) == {"alpha_exp", "beta", "gamma"}
    assert config == {"hidden_states": size, "vocab_size": emission.shape[1], "eos_token_id": eos}
    assert arrays["alpha_exp"].dtype == np.float32 and arrays["gamma"].shape == (size,)
    assert np.isfinite(arrays["beta"]).all() and (arrays["beta"][:-1, eos] == np.float32(LOG_ZERO)).all()
    for matrix in (np.exp(arrays["gamma"]), arrays["alpha_exp"], np.exp(arrays["beta"])):
        assert_allclose(matrix.sum(-1), 1, rtol=1e-6)
    assert_allclose(load_export(tmp_path / "hmm").start.sum(), 1, rtol=1e-6)


@MANY
@given(model=models(), data=st.data(), padding=st.integers(1, 5))
def test_ctrl_g_may_fill_a_text_up_with_eos(tmp_path_factory, model, data, padding):
    """p(words <eos> ... <eos>) of the exported matrices is the model's p(words <eos>), however many <eos> there are."""
    words = [word for word in data.draw(texts(model, max_size=3)) if word != "<eos>"]
    folder = tmp_path_factory.mktemp("ctrl-g")
    export(model, folder, "ctrl-g")
    arrays = {name: array.astype(np.float64) for name, array in load_file(folder / "model.safetensors").items()}
    ids, eos = ids_of(model, words), model.vocabulary.eos
    expected = oracle.string_probability(oracle_model(model), [*ids, eos])
    found = ctrl_g_probability(arrays, [*ids, *[eos] * padding])
    assert_allclose(found, expected, rtol=1e-5, atol=1e-9)
    unfinished = ctrl_g_probability(arrays, ids) if ids else 1.0
    assert_allclose(unfinished, oracle.string_probability(oracle_model(model), ids), rtol=1e-5, atol=1e-9)


def test_hmmlearn_arrays_are_distributions(tmp_path):
    model = random_model(2, kind="uniform", num_words=2, num_blocks=3, size=2)
    export(model, tmp_path / "h.npz", "hmmlearn")
    with np.load(tmp_path / "h.npz", allow_pickle=False) as file:
        for name in ("startprob_", "transmat_", "emissionprob_"):
            assert file[name].dtype == np.float64
            assert_allclose(file[name].sum(-1), 1, rtol=1e-12)


def test_exports_refuse(tmp_path, monkeypatch):
    model = random_model(0)
    with pytest.raises(QueryError, match="ends neither|neither the suffix"):
        export(model, tmp_path / "model.bin")
    with pytest.raises(QueryError, match="unknown kind"):
        export(model, tmp_path / "m", "onnx")
    (tmp_path / "bad.npz").write_bytes(b"nothing")
    (tmp_path / "bad.safetensors").write_bytes(b"nothing")
    for name in ("bad.npz", "bad.safetensors", "missing.npz", "."):
        with pytest.raises(DataError, match="cannot read"):
            load_export(tmp_path / name)
    monkeypatch.setattr("vlhmm.analysis.export.HMMLEARN_MAX_STATES", 1)
    with pytest.raises(QueryError, match="too many"):
        export(model, tmp_path / "m.npz", "hmmlearn")
    monkeypatch.setattr("vlhmm.analysis.export.export_bytes", lambda *_: 1 << 60)
    with pytest.raises(QueryError, match="free some space"):
        export(model, tmp_path / "m.npz")


# ---- verify


@pytest.mark.parametrize("kind", ["paper", "block-factored", "uniform", "uneven", "none"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_sound_model_is_verified(kind, dtype):
    checks = verify(real_model(kind, "reset" if dtype is torch.float32 else "carry", dtype=dtype), seed=1)
    assert all(check.passed for check in checks), checks
    assert sum(check.cases for check in checks) > 40


BREAKS = {
    "next words sum to one": lambda t: t.emission.mul_(1.001),
    "the parameters are distributions": lambda t: t.A.mul_(0.999),
}


@pytest.mark.parametrize("what", [*BREAKS, "emit", "tiles", "retreat", "double"])
def test_a_broken_model_is_found_out(what):
    model = random_model(4, num_words=4, num_blocks=3, size=3)
    distributions = model.distributions
    assert all(check.passed for check in verify(model))
    if what in BREAKS:
        BREAKS[what](distributions)
    elif what == "emit":
        distributions.emit = lambda predicted: predicted.double() @ distributions.O.double().roll(1, 1)
    elif what == "tiles":
        distributions._kept_tiles.clear()
        distributions.tile = lambda g, g2: (
            distributions.A[distributions.states_of_block[g]][:, distributions.states_of_block[g2]] * 1.01
        )
    elif what == "retreat":
        distributions.backward_step = lambda beta: (beta @ distributions.A.T) * 1.02
    else:
        distributions.double = lambda: random_model(5, num_words=4, num_blocks=3, size=3).distributions
        distributions.dtype = torch.float32
        distributions.A, distributions.O, distributions.emission = (
            distributions.A.float(),
            distributions.O.float(),
            distributions.emission.float(),
        )
    assert not all(check.passed for check in verify(model))


def test_nan_is_never_exact(monkeypatch):
    monkeypatch.setattr("vlhmm.analysis.verify._sums", lambda model, texts: [0.0, math.nan, 0.0])
    checks = verify(random_model(4, num_words=4, num_blocks=3, size=3))
    assert [check.name for check in checks if not check.passed] == ["next words sum to one"]


def test_the_bench_gives_its_four_figures():
    found = bench_queries(real_model("block-factored", "reset"))
    assert set(found) == {"next_ms", "sample_tokens_per_s", "infill_1_s", "infill_5_s"}
    assert all(value > 0 for value in found.values())
