"""Text drawn from an n-gram model: the sampler's own tables give back p(w | c), and what is drawn has its frequencies."""

import random

import numpy as np
import pytest
import torch
from numpy.testing import assert_allclose

from contract import next_word_distribution
from vlhmm.baselines import estimate
from vlhmm.baselines.ngram_sampling import LONGEST, NgramSampler, sample_text
from vlhmm.data.text import learn
from vlhmm.errors import ConfigError


def model(order: int = 4, lines: int = 300):
    draw = random.Random(3)
    words = [f"w{i}" for i in range(12)]
    text = []
    for _ in range(lines):
        line = [draw.choice(words)]
        while draw.random() < 0.85:
            line.append(words[(words.index(line[-1]) * 3 + draw.randrange(4)) % len(words)])
        text.append(line)
    vocabulary, encoded = learn(text)
    return estimate(encoded, vocabulary, order=order), encoded


def probabilities(sampler: NgramSampler, contexts: np.ndarray) -> np.ndarray:
    """What `draw` does, in probabilities: (V,) for one column of contexts."""
    found, left = np.zeros(sampler.width), 1.0
    for length in range(sampler.order - 1, -1, -1):
        at = contexts[length, 0]
        if at < 0:
            continue
        first, last = sampler.first[length][at], sampler.first[length][at + 1]
        direct = np.diff(sampler.cumulated[length][first : last + 1])
        found[sampler.keys[length][first:last] % sampler.width] += left * direct
        left *= 1 - direct.sum()
    return found[:-1] / found.sum()


@pytest.mark.parametrize("order", [1, 2, 4])
def test_its_tables_are_the_model(order):
    kneser_ney, text = model(order)
    sampler = NgramSampler(kneser_ney.levels)
    for i in range(10):
        contexts = sampler.start(1)
        sentence = text.sentence(i)
        for time in range(len(sentence)):
            wanted = next_word_distribution(kneser_ney, sentence[:time])
            assert_allclose(probabilities(sampler, contexts), wanted, rtol=1e-9, atol=1e-12)
            contexts = sampler.advance(contexts, sentence[time : time + 1].astype(np.int64))


def test_drawn_words_have_the_models_frequencies():
    kneser_ney, text = model()
    sampler, rows = NgramSampler(kneser_ney.levels), 40_000
    contexts, sentence = sampler.start(rows), text.sentence(int(np.argmax(np.diff(text.offsets))))[:3]
    for word in sentence:
        contexts = sampler.advance(contexts, np.full(rows, int(word)))
    drawn = np.bincount(sampler.draw(contexts, torch.Generator().manual_seed(0)), minlength=len(kneser_ney.vocabulary))
    wanted = next_word_distribution(kneser_ney, sentence)
    assert_allclose(drawn / rows, wanted, atol=5 * np.sqrt(0.25 / rows))


def test_a_text_is_whole_lines_and_a_function_of_the_seed():
    kneser_ney, text = model()
    first, second, other = (kneser_ney.sample(5000, torch.Generator().manual_seed(seed)) for seed in (1, 1, 2))
    assert (first.tokens == second.tokens).all()
    assert len(first.tokens) != len(other.tokens) or (first.tokens != other.tokens).any()
    eos = kneser_ney.vocabulary.eos
    assert 5000 <= first.num_tokens < 5000 + LONGEST
    assert (first.tokens[first.offsets[1:] - 1] == eos).all() and (first.tokens == eos).sum() == first.num_sentences
    assert_allclose(first.num_tokens / first.num_sentences, text.num_tokens / text.num_sentences, rtol=0.3)


def test_a_line_that_never_ends_is_ended():
    vocabulary, text = learn([["a"] * 400, ["b"] * 400])
    written = sample_text(estimate(text, vocabulary, order=2).levels, vocabulary.eos, 3000, torch.Generator())
    assert np.diff(written.offsets).max() <= LONGEST


def test_a_model_that_is_not_interpolated_is_refused():
    kneser_ney, _ = model(2)
    level = kneser_ney.levels[1]
    levels = (kneser_ney.levels[0], level._replace(log_prob=level.log_prob - 3))
    with pytest.raises(ConfigError, match="interpolated"):
        NgramSampler(levels)
