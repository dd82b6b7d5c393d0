"""Perplexity: its definition on a model whose probabilities are known, under both rules and any stream count."""

import json
import math
import os

import numpy as np
import pytest
import torch

from models import VOCABULARY, small_hmm
from vlhmm.cli.evaluate import described
from vlhmm.config import to_json
from vlhmm.data.text import Text, encode
from vlhmm.distributions import HMMDistributions
from vlhmm.errors import ConfigError, DataError
from vlhmm.evaluation.perplexity import evaluate, perplexity, token_log_probs
from vlhmm.language_model import HMMLanguageModel


class Counting:
    """p(x) = 1 / (2 + number of tokens read since the start): every token's score tells its context."""

    vocabulary = VOCABULARY

    def start(self, batch_size):
        return torch.zeros(batch_size)

    def score_batch(self, tokens, lengths, carry):
        time = torch.arange(tokens.shape[1])[None]
        read = carry[:, None] + time
        live = time < lengths[:, None]
        return torch.where(live, -torch.log(2.0 + read.double()), 0.0), carry + lengths


TEXT = encode([["a", "b"], ["zebra", "<unk>", "c"], [], ["a"]], VOCABULARY)


def test_reset_scores_each_line_from_the_start():
    expected = [-math.log(2 + i) for line in (2, 3, 0, 1) for i in range(line + 1)]
    np.testing.assert_allclose(token_log_probs(Counting(), TEXT, "reset", batch_tokens=5), expected, rtol=1e-12)


@pytest.mark.parametrize("streams", [1, 2, 3, 10, 99])
@pytest.mark.parametrize("batch_tokens", [1, 4, 1000])
def test_carry_scores_streams_from_theirs(streams, batch_tokens):
    count = min(streams, TEXT.num_tokens)
    short, longer = divmod(TEXT.num_tokens, count)
    expected = [-math.log(2 + i) for stream in range(count) for i in range(short + (stream < longer))]
    report = evaluate(Counting(), TEXT, "carry", streams, batch_tokens)
    np.testing.assert_allclose(token_log_probs(Counting(), TEXT, "carry", count, batch_tokens), expected, rtol=1e-12)
    assert report.log_likelihood == pytest.approx(sum(expected)) and report.streams == count


def test_report_counts_and_definitions():
    report = evaluate(Counting(), TEXT, "reset")
    scores = [-math.log(2 + i) for line in (2, 3, 0, 1) for i in range(line + 1)]
    assert (report.sentences, report.words, report.tokens, report.oov, report.literal_unk) == (4, 6, 10, 1, 1)
    assert report.perplexity == pytest.approx(math.exp(-sum(scores) / 10))
    assert report.perplexity_without_oov == pytest.approx(math.exp(-(sum(scores) - scores[3]) / 9))  # zebra
    assert report.bits_per_token == pytest.approx(-sum(scores) / math.log(2) / 10)
    assert report.bits_per_byte == pytest.approx(-sum(scores) / math.log(2) / TEXT.num_bytes)
    assert TEXT.num_bytes == len("a b\nzebra <unk> c\n\na\n")


def test_a_text_of_ids_without_words_has_no_bits_per_byte():
    """Texts made of ids, by sampling or from lines, do not know their bytes."""
    ids = Text(TEXT.tokens, TEXT.offsets, TEXT.num_oov, TEXT.num_unk, 0, TEXT.literal_unk)
    for rule in ("reset", "carry"):
        report, known = evaluate(Counting(), ids, rule), evaluate(Counting(), TEXT, rule)
        assert math.isnan(report.bits_per_byte) and report.perplexity == known.perplexity
    row = {"file": "ids", **report.to_dict()}
    assert "bits per byte" not in described(row) and "nan" not in described(row)
    assert json.loads(to_json(row))["bits_per_byte"] is None  # JSON has no NaN


def test_impossible_text_is_infinite_not_nan():
    assert perplexity(-math.inf, 3) == math.inf


def test_hmm_perplexity_is_the_same_for_any_batching():
    hmm, blocks = small_hmm("block-factored")
    model = HMMLanguageModel(VOCABULARY, HMMDistributions(hmm.potentials(), blocks))
    lines = [["a", "b", "c"], ["d"], ["e", "e", "zebra", "a", "b"], [], ["c", "d"]]
    text = encode(lines, VOCABULARY)
    for rule, streams in (("reset", 16), ("carry", 1), ("carry", 3)):
        numbers = [evaluate(model, text, rule, streams, n).perplexity for n in (1, 3, 7, 1000)]
        assert max(numbers) - min(numbers) < 1e-9


def test_refusals():
    with pytest.raises(DataError, match="no token to score"):
        evaluate(Counting(), encode([], VOCABULARY))
    with pytest.raises(ConfigError, match="reset or carry"):
        evaluate(Counting(), TEXT, "forget")  # type: ignore[arg-type]


@pytest.mark.skipif("VLHMM_DATA" not in os.environ, reason="VLHMM_DATA is not set")
def test_ptb_test_split_has_its_official_counts():
    from vlhmm.data import load_corpus

    corpus = load_corpus("ptb")

    class Uniform(Counting):
        vocabulary = corpus.vocabulary

        def score_batch(self, tokens, lengths, carry):
            live = torch.arange(tokens.shape[1])[None] < lengths[:, None]
            return torch.where(live, -math.log(len(self.vocabulary)), 0.0).double(), carry

    report = evaluate(Uniform(), corpus.test)
    assert (report.sentences, report.tokens, report.vocabulary_size) == (3_761, 82_430, 10_000)
    assert report.perplexity == pytest.approx(10_000)
