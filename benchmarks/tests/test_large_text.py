"""The text that `benchmarks.large_text` draws: whole lines, the same for the same seed, by Zipf's law."""

import numpy as np

from benchmarks.large_text import Source


def test_the_text_is_a_function_of_the_seed():
    source = Source(vocab_size=2_000, seed=1)
    text = source.draw(20_000, seed=3)
    np.testing.assert_array_equal(text.tokens, source.draw(20_000, seed=3).tokens)
    assert not np.array_equal(text.tokens[:1000], source.draw(20_000, seed=4).tokens[:1000])
    assert 20_000 <= text.num_tokens == text.offsets[-1] < 24_100
    assert (text.tokens[text.offsets[1:] - 1] == source.vocabulary.eos).all()
    assert text.tokens.max() < 2_000 and not (text.tokens == source.vocabulary.unk).any()
    assert 10 < text.num_tokens / text.num_sentences < 40
    counts = np.sort(text.word_counts(2_000)[2:])[::-1]
    assert counts[0] > 20 * counts[200] > 0
