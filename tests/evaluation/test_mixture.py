"""Mixtures: against enumeration, the laws of every language model, EM, the folder, and the command line."""

import io
import itertools
import json
import math
import random
import shutil
import sys

import numpy as np
import pytest
import torch
from numpy.testing import assert_allclose

import vlhmm
import vlhmm.data.vocabulary
from contract import check_language_model
from models import VOCABULARY, small_hmm
from vlhmm.baselines.feed_forward import FeedForward
from vlhmm.baselines.kneser_ney import estimate
from vlhmm.baselines.kneser_ney import save as save_kneser_ney
from vlhmm.baselines.lstm import LSTM
from vlhmm.cli.main import main
from vlhmm.data.text import encode
from vlhmm.distributions import HMMDistributions
from vlhmm.errors import CheckpointError, ConfigError, QueryError
from vlhmm.evaluation.mixture import (
    Mixture,
    component_log_probs,
    fit_weights,
    read_mixture,
    write_mixture,
)
from vlhmm.evaluation.perplexity import evaluate
from vlhmm.language_model import HMMLanguageModel
from vlhmm.queries import left_to_right

LINES = [line.split() for line in ("a b c", "b a d", "a a", "e c b a", "c", "d b a c", "a b c")]


def hmm(kind="block-factored", seed=0):
    model, blocks = small_hmm(kind, seed)
    with torch.no_grad():
        return HMMLanguageModel(VOCABULARY, HMMDistributions(model.potentials(), blocks), "reset")


def kneser_ney(order=3):
    return estimate(encode(LINES, VOCABULARY), VOCABULARY, order)


def neural(kind):
    return kind(VOCABULARY, torch.Generator().manual_seed(3), hidden_size=8).double()


def four():
    return [hmm(), kneser_ney(), neural(FeedForward), neural(LSTM)]


class Stubborn:
    """Gives one word probability zero, and knows nothing (NaN) after a text with that word."""

    rule = "reset"

    def __init__(self, never):
        self.vocabulary, self.never = VOCABULARY, never

    def start(self, batch_size):
        return torch.zeros(batch_size, dtype=torch.bool)

    def score_batch(self, tokens, lengths, carry):
        inside = torch.arange(tokens.shape[1]) < lengths[:, None]
        met = (tokens == self.never) & inside
        usual = torch.full(tokens.shape, -math.log(len(VOCABULARY) - 1), dtype=torch.float64)
        log_prob = torch.where(met, -math.inf, usual)
        before = (met.cumsum(1) - met.long() > 0) | carry[:, None]
        log_prob = torch.where(before, math.nan, log_prob)
        return torch.where(inside, log_prob, 0.0), carry | met.any(1)

    def next_word_probabilities(self, carry):
        row = torch.full((len(VOCABULARY),), 1 / (len(VOCABULARY) - 1), dtype=torch.float64)
        row[self.never] = 0
        return torch.where(carry[:, None], math.nan, row)


def test_every_law_of_a_language_model_holds_for_a_mixture_of_all_kinds():
    check_language_model(Mixture(four(), [0.4, 0.3, 0.2, 0.1]), np.random.default_rng(0), atol=1e-6)


def test_the_laws_hold_where_a_component_finds_the_text_impossible():
    mixture = Mixture([kneser_ney(), Stubborn(3)], [0.5, 0.5])
    check_language_model(mixture, np.random.default_rng(1), atol=1e-9)
    tokens = torch.tensor([[2, 3, 4]])
    (scores,), _ = mixture.score_batch(tokens, torch.tensor([3]), mixture.start(1))
    (alone,), _ = kneser_ney().score_batch(tokens, torch.tensor([3]), kneser_ney().start(1))
    size = len(VOCABULARY)
    expected = [0.5 * math.exp(p) + q for p, q in zip(alone.tolist(), [0.5 / (size - 1), 0, 0.5 / size], strict=True)]
    assert_allclose(scores.exp().numpy(), expected, rtol=1e-12)


@pytest.mark.parametrize("text", [[], [2], [2, 3], [4, 4, 2], [1, 6, 5, 2]])
def test_next_word_is_the_weighted_sum_and_agrees_with_scores(text):
    models, weights = four(), [0.1, 0.2, 0.3, 0.4]
    mixture = Mixture(models, weights)
    size = len(VOCABULARY)
    rows = torch.tensor([[*text, word] for word in range(size)])
    lengths = torch.full((size,), len(text) + 1)
    by_hand = np.zeros(size)
    for model, weight in zip(models, weights, strict=True):  # every continuation, one at a time
        by_hand += weight * model.score_batch(rows, lengths, model.start(size))[0][:, -1].exp().numpy()
    carry = mixture.start(1)
    if text:
        _, carry = mixture.score_batch(torch.tensor([text]), torch.tensor([len(text)]), carry)
    found = mixture.next_word_probabilities(carry)[0].numpy()
    assert_allclose(found, by_hand, rtol=1e-6)
    assert_allclose(found.sum(), 1, atol=1e-9)
    assert_allclose(mixture.score_batch(rows, lengths, mixture.start(size))[0][:, -1].exp().numpy(), by_hand, rtol=1e-9)


def test_texts_of_up_to_three_words_and_what_is_longer_sum_to_one():
    mixture = Mixture([hmm(), kneser_ney()], [0.3, 0.7])
    size, eos = len(VOCABULARY), VOCABULARY.eos
    words = [word for word in range(size) if word != eos]
    total = 0.0
    for length in range(3):
        texts = torch.tensor([[*text, eos] for text in itertools.product(words, repeat=length)])
        total += (
            mixture.score_batch(texts, torch.full((len(texts),), length + 1), mixture.start(len(texts)))[0]
            .sum(1)
            .exp()
            .sum()
        )
    texts = torch.tensor(list(itertools.product(words, repeat=3)))
    total += mixture.score_batch(texts, torch.full((len(texts),), 3), mixture.start(len(texts)))[0].sum(1).exp().sum()
    assert_allclose(float(total), 1, atol=1e-9)


def test_em_never_falls_and_finds_the_best_weight():
    log_probs = np.log(np.random.default_rng(5).dirichlet(np.ones(3), size=400).T)
    found = fit_weights(log_probs[:2], tolerance=1e-14)
    assert (np.diff(found.log_likelihoods) >= -1e-12).all() and len(found.log_likelihoods) > 3
    assert_allclose(found.weights.sum(), 1)
    grid = np.linspace(0, 1, 10_001)[:, None]
    values = np.log(grid * np.exp(log_probs[0]) + (1 - grid) * np.exp(log_probs[1])).mean(1)
    assert_allclose(found.weights[0], grid[values.argmax(), 0], atol=2e-4)
    assert found.log_likelihoods[-1] >= values.max() - 1e-9


def test_em_leaves_a_useless_component_nothing():
    log_probs = np.log(np.array([[0.5, 0.2, 0.4], [0.1, 0.1, 0.1]]))
    assert fit_weights(log_probs).weights[1] < 1e-4


def test_em_reads_what_the_mixture_scores():
    text = encode(LINES, VOCABULARY)
    models = four()
    log_probs = component_log_probs(models, text)
    found = fit_weights(log_probs)
    report = evaluate(Mixture(models, found.weights), text)
    assert_allclose(report.log_likelihood / text.num_tokens, found.log_likelihoods[-1], rtol=1e-9)


def test_samples_are_drawn_from_the_mixture():
    mixture = Mixture([hmm(), kneser_ney()], [0.5, 0.5])
    carry = mixture.start(1)
    expected = mixture.next_word_probabilities(carry)[0].numpy()
    drawn = left_to_right.sample(mixture, 4000, max_tokens=1, scores=True, seed=7)
    words = [sample.words[0] if sample.words else "<eos>" for sample in drawn]
    shares = np.array([words.count(word) for word in VOCABULARY.words]) / len(words)
    assert_allclose(shares, expected, atol=4 * np.sqrt(0.25 / 4000))
    assert_allclose(drawn[0].log_prob, math.log(expected[VOCABULARY.id_of[words[0]]]), rtol=1e-6)
    assert left_to_right.sample(mixture, 5, "a b", seed=1) == left_to_right.sample(mixture, 5, "a b", seed=1)


def test_an_end_of_line_in_a_context_starts_afresh_under_reset():
    mixture = Mixture([hmm(), neural(LSTM)], [0.5, 0.5])
    fresh = left_to_right.next_distribution(mixture, "a").probabilities
    assert_allclose(left_to_right.next_distribution(mixture, "c b <eos> a").probabilities, fresh, rtol=1e-9)
    carried = Mixture(mixture.components, [0.5, 0.5], "carry")
    assert not np.allclose(left_to_right.next_distribution(carried, "c b <eos> a").probabilities, fresh, rtol=1e-3)


def test_wrong_weights_and_vocabularies_are_refused():
    with pytest.raises(ConfigError, match="as many weights"):
        Mixture([kneser_ney()], [0.5, 0.5])
    with pytest.raises(ConfigError, match="not all 0"):
        Mixture([kneser_ney()], [0.0])
    other = vlhmm.data.vocabulary.Vocabulary(("<eos>", "<unk>", "a"))
    with pytest.raises(ConfigError, match="different vocabularies"):
        Mixture([kneser_ney(), estimate(encode([["a"]], other), other, 2)], [1, 1])


# ---- the folder and the command line


def toy_lines(count, seed):
    draw = random.Random(seed)
    return [
        " ".join(
            ["the", draw.choice(["big", "small"]), draw.choice(["cat", "dog", "cow"]), draw.choice(["runs", "eats"])]
        )
        for _ in range(count)
    ]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("mix")
    for name, count, seed in (("train", 200, 1), ("valid", 40, 2), ("test", 40, 3)):
        (folder / f"{name}.txt").write_text("\n".join(toy_lines(count, seed)) + "\n")
    texts = [str(folder / "train.txt"), "--valid", str(folder / "valid.txt"), "--quiet"]
    hmm_options = ["--preset", "tiny", "--states", "32", "--blocks", "8", "--epochs", "3"]
    assert main(["train", *texts, *hmm_options, "--out", str(folder / "hmm")]) == 0
    assert main(["baseline", "kn", *texts, "--out", str(folder / "kn")]) == 0
    small = ["--set", "hidden_size=8", "--epochs", "1"]
    assert main(["baseline", "lstm", *texts, *small, "--out", str(folder / "lstm")]) == 0
    names = [str(folder / name) for name in ("hmm", "kn", "lstm")]
    valid = ["--valid", str(folder / "valid.txt"), "--quiet"]
    assert main(["mix", *names, *valid, "--out", str(folder / "mixed")]) == 0
    return folder


def test_the_saved_mixture_is_loaded_and_evaluated(runs, capsys):
    model = vlhmm.load_any(runs / "mixed")
    parts = [vlhmm.load_any(runs / name) for name in ("hmm", "kn", "lstm")]
    valid = encode((line.split() for line in (runs / "valid.txt").read_text().splitlines()), model.vocabulary)
    report = evaluate(model, valid)
    assert_allclose(report.perplexity, json.loads((runs / "mixed" / "config.json").read_text())["valid"]["perplexity"])
    best = min(evaluate(part, valid).perplexity for part in parts)
    assert report.perplexity <= best + 1e-9
    assert_allclose(evaluate(Mixture(parts, model.weights), valid).log_likelihood, report.log_likelihood, rtol=1e-12)
    capsys.readouterr()
    assert main(["evaluate", str(runs / "mixed"), str(runs / "valid.txt"), "--format", "json", "--quiet"]) == 0
    assert_allclose(json.loads(capsys.readouterr().out)["perplexity"], report.perplexity)
    assert_allclose(model.perplexity(runs / "valid.txt").perplexity, report.perplexity)


def test_score_next_and_sample_agree(runs, capsys, monkeypatch):
    folder, model = str(runs / "mixed"), vlhmm.load_any(runs / "mixed")
    line = "the big cat runs"
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(f"{line}\n".encode())))
    assert main(["score", folder, "--per", "token", "--format", "jsonl", "--quiet"]) == 0
    scored = json.loads(capsys.readouterr().out)
    assert_allclose(scored["log_prob"], model.score(line))
    for t, token in enumerate(scored["words"]):
        context = " ".join(line.split()[:t])
        assert main(["next", folder, context, "--top-k", "0", "--format", "json"]) == 0
        found = json.loads(capsys.readouterr().out)
        assert_allclose(found["sum"], 1, atol=1e-5)
        by_word = {each["word"]: each["log_prob"] for each in found["words"]}
        assert_allclose(by_word[token["word"]], token["log_prob"], atol=1e-5)
    assert main(["sample", folder, "--prompt", "the big", "-n", "3", "--scores", "--format", "json"]) == 0
    for each in json.loads(capsys.readouterr().out):
        assert each["exact"] and each["text"].startswith("the big ")
        if each["ended"]:
            assert_allclose(each["log_prob"], model.score(each["text"]) - model.score("the big", eos=False), atol=1e-4)


@pytest.mark.parametrize("kind", ["kn", "lstm"])
def test_baselines_answer_score_next_and_sample_too(runs, kind, capsys):
    assert main(["next", str(runs / kind), "the", "--format", "json"]) == 0
    assert_allclose(json.loads(capsys.readouterr().out)["sum"], 1, atol=1e-6)
    assert main(["sample", str(runs / kind), "-n", "2", "--max-tokens", "5"]) == 0
    assert main(["score", str(runs / kind), str(runs / "valid.txt"), "--quiet"]) == 0


def test_what_a_mixture_cannot_answer_names_the_hmm_inside(runs, capsys):
    folder = str(runs / "mixed")
    questions = (
        ["infill", folder, "the [MASK] cat"],
        ["decode", folder],
        ["surprisal", folder],
        ["inspect", folder],
        ["information", folder, "entropy"],
        ["verify", folder],
        ["export", folder, "model.npz"],
        ["sample", folder, "--must-contain", "cat"],
    )
    hmm_folder = next(p.folder for p in read_mixture(folder).components if (p.folder / "blocks.tsv").exists())
    for question in questions:
        assert main(question) == 2, question
        err = capsys.readouterr().err
        assert err.count("\n") == 1 and "holds a mixture, which has no hidden states" in err and str(hmm_folder) in err
    assert main(["infill", str(hmm_folder), "the [MASK] cat"]) == 0
    model = vlhmm.load_any(folder)
    for method in (
        "infill",
        "gaps",
        "word_posterior",
        "word_posteriors",
        "surprisal",
        "best_fill",
        "gap_distributions",
        "decode",
        "posteriors",
    ):
        with pytest.raises(QueryError, match="no exact answer"):
            getattr(model, method)("the [MASK] cat", 1)
    with pytest.raises(QueryError, match="no exact answer"):
        model.begin()


def test_given_weights_mixtures_of_mixtures_and_a_second_writing(runs, tmp_path, capsys):
    out = str(tmp_path / "two")
    assert main(["mix", str(runs / "hmm"), str(runs / "kn"), "--weights", "1,3", "--out", out, "--format", "json"]) == 0
    assert [part["weight"] for part in json.loads(capsys.readouterr().out)["components"]] == [0.25, 0.75]
    flat = str(tmp_path / "flat")
    assert main(["mix", out, str(runs / "lstm"), "--valid", str(runs / "valid.txt"), "--out", flat, "--quiet"]) == 0
    assert len(vlhmm.load_any(flat).components) == 3
    assert main(["mix", str(runs / "kn"), "--weights", "1", "--out", flat, "--quiet"]) == 0
    assert len(vlhmm.load_any(flat).components) == len(list((tmp_path / "flat" / "components").iterdir())) == 1


def test_bad_input_gets_one_line(runs, tmp_path, capsys):
    valid = ["--valid", str(runs / "valid.txt")]
    (tmp_path / "other.txt").write_text("x y z\nx y\n")
    other = str(tmp_path / "other.txt")
    assert main(["baseline", "kn", other, "--valid", other, "--out", str(tmp_path / "kn"), "--quiet"]) == 0
    capsys.readouterr()
    (tmp_path / "file").write_text("no folder")
    for arguments, what in (
        ([str(runs / "hmm"), str(tmp_path / "kn"), *valid, "--out", str(tmp_path / "m")], "different vocabularies"),
        ([str(runs / "hmm"), "--out", str(tmp_path / "m")], "--valid is missing"),
        ([str(runs / "hmm"), str(tmp_path / "nowhere"), *valid, "--out", str(tmp_path / "m")], "does not exist"),
        ([str(runs / "hmm"), *valid, "--out", str(runs / "kn")], "would overwrite it"),
        ([str(runs / "hmm"), *valid, "--out", str(tmp_path / "file")], "is a file"),
        ([str(runs / "hmm"), *valid, "--out", str(tmp_path)], "holds other files"),
        ([str(runs / "hmm"), "--weights", "a,b", "--out", str(tmp_path / "m")], "expected numbers"),
        ([str(runs / "hmm"), "--weights", "1,2", "--out", str(tmp_path / "m")], "as many weights"),
        ([str(runs / "mixed"), *valid, "--out", str(runs / "mixed")], "choose another --out"),
    ):
        assert main(["mix", *arguments, "--quiet"]) == 2, arguments
        err = capsys.readouterr().err
        assert err.startswith("vlhmm: ") and err.count("\n") == 1 and what in err, err
    assert not (tmp_path / "m").exists()


def test_a_folder_that_was_altered_is_refused(runs, tmp_path):
    copy = tmp_path / "copy"

    def fresh():
        shutil.rmtree(copy, ignore_errors=True)
        shutil.copytree(runs / "mixed", copy)
        return json.loads((copy / "config.json").read_text())

    config = fresh()
    first = copy / "components" / config["components"][0]["name"] / "model.safetensors"
    first.write_bytes(first.read_bytes()[:-1] + b"\0")
    with pytest.raises(CheckpointError, match="differs from the file that was mixed"):
        vlhmm.load_any(copy)
    for change, what in (
        ({"name": "../../hmm"}, "outside its folder"),
        ({"sha256": {"../x": "0"}}, "outside its folder"),
        ({"weight": 0.9}, "sum to one"),
        ({"weight": 3.0}, "from 0 to 1"),
        ({"weight": "much"}, "from 0 to 1"),
    ):
        config = fresh()
        config["components"][0] |= change
        (copy / "manifest.json").unlink()  # which would refuse any change of config.json
        (copy / "config.json").write_text(json.dumps(config))
        with pytest.raises(CheckpointError, match=what):
            vlhmm.load_any(copy)
    config = fresh()
    name = config["components"][0]["name"]
    shutil.move(copy / "components" / name, tmp_path / "elsewhere")
    (copy / "components" / name).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(CheckpointError, match="outside its folder"):
        vlhmm.load_any(copy)


def test_a_saved_mixture_does_not_need_its_sources(tmp_path):
    save_kneser_ney(kneser_ney(), tmp_path / "kn")
    write_mixture(tmp_path / "mixed", [tmp_path / "kn", tmp_path / "kn"], [0.5, 0.5], "reset")
    shutil.rmtree(tmp_path / "kn")
    text = encode(LINES, VOCABULARY)
    assert evaluate(vlhmm.load_any(tmp_path / "mixed"), text).perplexity == pytest.approx(
        evaluate(kneser_ney(), text).perplexity, rel=1e-12
    )


def test_train_mix_kn_saves_the_mixture_beside(runs, tmp_path, capsys):
    texts = [str(runs / "train.txt"), "--valid", str(runs / "valid.txt"), "--quiet"]
    options = ["--preset", "tiny", "--states", "32", "--blocks", "8", "--epochs", "3", "--mix", "kn"]
    out = str(tmp_path / "hmm")
    assert main(["train", *texts, *options, "--out", out, "--format", "json"]) == 0
    summary = json.loads(capsys.readouterr().out)
    mixed, parts = summary["mixture"], summary["mixture"]["components"]
    assert mixed["run"] == f"{out}-mixture" and mixed["perplexity"] <= min(part["perplexity"] for part in parts) + 1e-9
    assert_allclose(vlhmm.load_any(mixed["run"]).perplexity(runs / "valid.txt").perplexity, mixed["perplexity"])
    kneser_ney = vlhmm.load_any(runs / "kn")
    valid = encode((line.split() for line in (runs / "valid.txt").read_text().splitlines()), kneser_ney.vocabulary)
    assert_allclose(evaluate(kneser_ney, valid).perplexity, parts[1]["perplexity"])
    assert main(["train", *texts, *options, "--out", out]) == 0  # again: the finished run, mixed anew
    assert "mixture" in capsys.readouterr().out
    assert main(["train", *texts, *options, "--out", out, "--mix-out", str(runs / "kn")]) == 2
    assert "would overwrite it" in capsys.readouterr().err
    assert main(["train", *texts, *options, "--out", out, "--mix-out", out]) == 2
    assert "own folder" in capsys.readouterr().err
