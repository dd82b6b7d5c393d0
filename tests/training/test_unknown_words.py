"""Rare words held out as <unk>: how many, which, and what a model makes of them."""

import random

import numpy as np
import pytest

from vlhmm.config import override
from vlhmm.data.corpora import load_texts
from vlhmm.data.text import encode, learn
from vlhmm.errors import ConfigError
from vlhmm.training.config import DistillationConfig, RunConfig, TrainingConfig
from vlhmm.training.model import load_hmm
from vlhmm.training.plan import make_plan
from vlhmm.training.presets import preset
from vlhmm.training.trainer import train
from vlhmm.training.unknown_words import UnknownWords, unknown_rates

HELD_OUT = TrainingConfig(method="em", batch="sentences", unknown_words="held-out")


def text_with(counts: dict[str, int]):
    words = [word for word, count in counts.items() for _ in range(count)]
    return learn([words[i : i + 5] for i in range(0, len(words), 5)])


def test_rates_are_good_and_turings():
    """By hand: n_1 = 12, n_2 = 3, n_3 = 1: 1 - 2 * 3/12 = 1/2, 1 - 3 * 1/(2 * 3) = 1/2, 1; made non-increasing: 1/2 each.
    Together 12/2 + 6/2 + 3/2 = 10.5 tokens; scaled by 12 / 10.5, 12 tokens."""
    counts = {f"one{i}": 1 for i in range(12)} | {f"two{i}": 2 for i in range(3)} | {"three": 3, "many": 20}
    vocabulary, text = text_with(counts)
    rates = dict(zip(vocabulary.words, unknown_rates(text.tokens, vocabulary), strict=True))
    for word in ("one0", "two1", "three"):
        assert rates[word] == pytest.approx(0.5 * 12 / 10.5)
    assert rates["many"] == rates["<eos>"] == rates["<unk>"] == 0
    held_out = UnknownWords(text, vocabulary, HELD_OUT)
    expected = held_out.expected_counts()
    assert expected[vocabulary.unk] == pytest.approx(12)
    assert expected.sum() == pytest.approx(text.num_tokens)


def test_every_epoch_draws_anew_and_a_seed_draws_the_same():
    vocabulary, text = text_with({f"word{i}": 1 + i % 4 for i in range(400)} | {"many": 50})
    held_out = UnknownWords(text, vocabulary, HELD_OUT)
    first, second = held_out.at(0), held_out.at(1)
    assert (first.tokens == UnknownWords(text, vocabulary, HELD_OUT).at(0).tokens).all()
    assert (first.tokens != second.tokens).any()
    many = vocabulary.id_of["many"]
    for epoch in (first, second):
        changed = epoch.tokens != text.tokens
        assert (epoch.tokens[changed] == vocabulary.unk).all()
        assert not (text.tokens[changed] == many).any() and (epoch.offsets == text.offsets).all()
    drawn = np.mean([np.bincount(held_out.at(i).tokens, minlength=len(vocabulary)) for i in range(60)], axis=0)
    np.testing.assert_allclose(drawn[vocabulary.unk], held_out.expected_counts()[vocabulary.unk], rtol=0.05)


def test_a_text_with_unknown_words_of_its_own_is_left_as_it_is():
    vocabulary, text = text_with({"<unk>": 2, "once": 1, "twice": 2})
    assert not UnknownWords(text, vocabulary, HELD_OUT).any
    vocabulary, text = text_with({"often": 9, "too": 9})  # and so is one without rare words
    assert not UnknownWords(text, vocabulary, HELD_OUT).any


def test_all_words_once_are_not_all_held_out():
    vocabulary, text = text_with({f"word{i}": 1 for i in range(100)})
    assert unknown_rates(text.tokens, vocabulary).max() == 0.8


def test_the_plan_reads_another_text_every_epoch():
    vocabulary, text = text_with({f"word{i}": 1 + i % 3 for i in range(300)})
    unknown = UnknownWords(text, vocabulary, HELD_OUT)
    for settings, extra in ((HELD_OUT, None), (HELD_OUT, text), (TrainingConfig(unknown_words="held-out"), None)):
        plan = make_plan(text, settings, vocabulary.eos, extra, unknown)
        counted = []
        for epoch in (0, 1, 0):
            tokens = np.concatenate(
                [
                    row[:n].numpy()
                    for step in plan(epoch)
                    for b in step
                    for row, n in zip(b.tokens, b.lengths, strict=True)
                ]
            )
            counted.append(np.bincount(tokens, minlength=len(vocabulary)))
        assert (counted[0] != counted[1]).any() and (counted[0] == counted[2]).all()
        once = counted[0] - (0 if extra is None else np.bincount(text.tokens, minlength=len(vocabulary)))
        assert (once == np.bincount(unknown.at(0).tokens, minlength=len(vocabulary))).all()


def test_a_guide_needs_the_text_as_it_is():
    with pytest.raises(ConfigError, match="as-is"):
        RunConfig(
            training=TrainingConfig(method="em", batch="sentences", unknown_words="held-out"),
            distillation=DistillationConfig(weight=1.0),
        )


def test_a_model_expects_unknown_words_where_they_stand(tmp_path):
    """Names follow 'mister'; each is rare. A new one is likely there, and nowhere else."""
    draw = random.Random(0)
    lines = [
        ["mister", f"name{draw.randrange(400)}", "runs" if draw.random() < 0.5 else "sleeps", "."] for _ in range(300)
    ]
    for name, part in (("train", lines[:240]), ("valid", lines[240:])):
        (tmp_path / f"{name}.txt").write_text("\n".join(map(" ".join, part)) + "\n")
    corpus = load_texts(tmp_path / "train.txt", tmp_path / "valid.txt")
    assert corpus.valid.num_oov > 10
    probability, valid = {}, {}
    for rule in ("held-out", "as-is"):
        changes = [f"training.unknown_words={rule}", "model.num_states=32", "training.epochs=40"]
        valid[rule] = train(corpus, override(preset("tiny"), changes), tmp_path / rule).best_valid
        import vlhmm

        model = vlhmm.load(tmp_path / rule)
        probability[rule] = {
            after: dict((w.word, w.probability) for w in model.next_word(after))["<unk>"]
            for after in ("mister", "mister name1")
        }
    expected = corpus.valid.num_oov / (corpus.valid.num_tokens / 5)
    assert 0.5 * expected < probability["held-out"]["mister"] < 2 * expected
    assert probability["held-out"]["mister name1"] < 0.1
    assert probability["as-is"]["mister"] < 0.02
    assert valid["held-out"] < valid["as-is"]
    assert load_hmm(tmp_path / "held-out")[2].training.unknown_words == "held-out"
    assert encode([["mister", "newcomer"]], corpus.vocabulary).num_oov == 1
