"""Batches: every token once and in order, however the text is cut."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vlhmm.data.batches import sentence_batches, sentence_groups, stream_batches
from vlhmm.data.text import Text, encode, shuffled
from vlhmm.data.vocabulary import Vocabulary
from vlhmm.errors import ConfigError

EOS_ID = 0


def text_of(lengths):
    """A text whose words are all different (1, 2, 3, ...), so that no mix-up can hide; <eos> is 0."""
    tokens = np.arange(1, sum(lengths) + 1, dtype=np.int32)
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    tokens[offsets[1:] - 1] = EOS_ID
    return Text(tokens, offsets, num_oov=0, num_unk=0, num_bytes=0)


def rows_of(batch):
    return [row[:n].tolist() for row, n in zip(batch.tokens, batch.lengths, strict=True)]


def streams_of(batches):
    """The rows of consecutive batches joined: what each stream holds in all."""
    return [sum(parts, []) for parts in zip(*map(rows_of, batches), strict=True)]


lengths_of_sentences = st.lists(st.integers(1, 9), min_size=1, max_size=40)
rules = st.sampled_from(["reset", "carry", "paper"])


@given(lengths=lengths_of_sentences, budget=st.integers(1, 30), seed=st.none() | st.integers(0, 9))
def test_sentence_batches_hold_every_sentence_once(lengths, budget, seed):
    text = text_of(lengths)
    generator = None if seed is None else torch.Generator().manual_seed(seed)
    batches = sentence_batches(text, budget, generator)
    got = sorted(row for batch in batches for row in rows_of(batch))
    assert got == sorted(text.sentence(i).tolist() for i in range(text.num_sentences))
    for batch in batches:
        assert batch.tokens.numel() <= budget or len(batch.tokens) == 1
        assert batch.tokens.shape[1] == batch.lengths.max()
        assert batch.restart[:, 0].all() and not batch.restart[:, 1:].any()
        assert not batch.continues
        assert batch.tokens.dtype == batch.lengths.dtype == torch.int64 and batch.restart.dtype == torch.bool


def test_sentence_longer_than_the_budget_has_a_batch_of_its_own():
    batches = sentence_batches(text_of([2, 50, 2, 3]), tokens_per_batch=10)
    assert [len(batch.tokens) for batch in batches if batch.lengths.max() == 50] == [1]


def test_sentence_batches_pad_little():
    lengths = np.random.default_rng(0).integers(1, 60, size=3000).tolist()
    batches = sentence_batches(text_of(lengths), 512, torch.Generator().manual_seed(0))
    padded = sum(batch.tokens.numel() for batch in batches)
    assert padded < 1.03 * sum(lengths)
    assert padded > 0.85 * 512 * len(batches)  # and the batches are full


def test_shuffle_is_the_generators_alone():
    text = text_of([3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5] * 5)

    def order(seed):
        return np.concatenate(sentence_groups(text, 12, torch.Generator().manual_seed(seed))).tolist()

    torch.manual_seed(0)
    first = order(1)
    torch.manual_seed(1)
    assert order(1) == first
    assert order(2) != first
    assert np.concatenate(sentence_groups(text, 12)).tolist() == sorted(
        range(55), key=lambda i: (-np.diff(text.offsets)[i], i)
    )


@given(lengths=lengths_of_sentences, num_streams=st.integers(1, 12), segment=st.integers(1, 12), rule=rules)
def test_stream_batches_hold_every_token_in_order(lengths, num_streams, segment, rule):
    text = text_of(lengths)
    batches = stream_batches(text, num_streams, segment, EOS_ID, rule)
    streams = streams_of(batches)
    assert sum(streams, []) == text.tokens.tolist()
    assert len(streams) == min(num_streams, text.num_tokens)
    sizes = [len(stream) for stream in streams]
    assert sizes == sorted(sizes, reverse=True) and sizes[0] - sizes[-1] <= 1
    assert [batch.continues for batch in batches] == [False] + [True] * (len(batches) - 1)
    for batch in batches:
        assert 1 <= batch.lengths.max() == batch.tokens.shape[1] <= segment
        assert segment == 1 or batch.lengths.min() > 0  # an exhausted row only where it cannot be helped
    for batch in batches[:-2]:
        assert (batch.lengths == segment).all()


@given(lengths=lengths_of_sentences, num_streams=st.integers(1, 12), segment=st.integers(1, 12), rule=rules)
def test_chains_restart_where_the_rule_says(lengths, num_streams, segment, rule):
    text = text_of(lengths)
    batches = stream_batches(text, num_streams, segment, EOS_ID, rule)
    for batch in batches:
        beyond = torch.arange(batch.tokens.shape[1]) >= batch.lengths[:, None]
        assert not batch.restart[beyond].any() and not batch.tokens[beyond].any()
    starts = streams_of([batch._replace(tokens=batch.restart) for batch in batches])
    cuts = set(np.cumsum([batch.tokens.shape[1] for batch in batches]).tolist())
    for stream, restart in zip(streams_of(batches), starts, strict=True):
        after_eos = [True] + [rule != "carry" and token == EOS_ID for token in stream[:-1]]
        if rule == "paper":  # a segment goes on where the last one ended, after an <eos> too
            after_eos = [start and (at == 0 or at not in cuts) for at, start in enumerate(after_eos)]
        assert restart == after_eos


def test_streams_by_hand():
    # 7 tokens: "1 2 <eos> | 4 <eos> | 6 <eos>" in two streams of 4 and 3, cut after 3 columns -> 2, 2.
    batches = stream_batches(text_of([3, 2, 2]), num_streams=2, segment_length=3, eos_id=EOS_ID, rule="reset")
    assert [batch.tokens.tolist() for batch in batches] == [[[1, 2], [0, 6]], [[0, 4], [0, 0]]]
    assert [batch.lengths.tolist() for batch in batches] == [[2, 2], [2, 1]]
    assert [batch.restart.int().tolist() for batch in batches] == [[[1, 0], [1, 1]], [[0, 1], [0, 0]]]
    # "1 2 <eos> 4 <eos> 6 <eos>" in one stream, cut after 3: the paper's rule goes on after the <eos> at the cut.
    batches = stream_batches(text_of([3, 2, 2]), num_streams=1, segment_length=3, eos_id=EOS_ID, rule="paper")
    assert [batch.restart.int().tolist() for batch in batches] == [[[1, 0, 0]], [[0, 0, 1]], [[0]]]


def test_shuffled_lines_are_the_same_lines_in_another_order():
    words = Vocabulary(["<unk>", "<eos>", "a", "b", "c"])
    text = encode([["a"], ["b", "<unk>"], [], ["c", "zebra", "<unk>", "a"]], words)
    order = np.array([3, 1, 0, 2])
    mixed = shuffled(text, order)
    assert [mixed.tokens[a:b].tolist() for a, b in zip(mixed.offsets, mixed.offsets[1:], strict=False)] == [
        [4, 0, 0, 2, 1], [3, 0, 1], [2, 1], [1]
    ]  # fmt: skip
    assert (mixed.num_oov, mixed.num_unk, mixed.num_bytes) == (text.num_oov, text.num_unk, text.num_bytes)
    assert mixed.literal_unk.tolist() == [2, 6]


def test_batches_refuse_what_makes_no_sense():
    text = text_of([3])
    with pytest.raises(ConfigError, match="tokens_per_batch is 0, expected at least 1"):
        sentence_batches(text, 0)
    with pytest.raises(ConfigError, match="num_streams is 0 and segment_length is 5"):
        stream_batches(text, 0, 5, EOS_ID, "reset")
    with pytest.raises(ConfigError, match="unknown context rule 'rest', expected one of reset, carry"):
        stream_batches(text, 1, 5, EOS_ID, "rest")
