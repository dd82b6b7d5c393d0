"""Perplexity of a text under any `LanguageModel`."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from jaxtyping import Float64

from vlhmm.data.batches import sentence_batches, sentence_groups, stream_batches
from vlhmm.data.prepared import PreparedText
from vlhmm.data.text import Text
from vlhmm.errors import ConfigError, DataError
from vlhmm.evaluation.protocol import LanguageModel
from vlhmm.results import Result

Rule = Literal["reset", "carry"]
Progress = Callable[[int, int], None]  # tokens done, tokens in all
PREPARED_TOKENS = 1 << 21  # of a prepared text that are read at once


def perplexity(log_likelihood: float, tokens: int) -> float:
    """Return exp(-log p / tokens); infinite for a text of probability zero."""
    try:
        return math.exp(-log_likelihood / tokens)
    except OverflowError:
        return math.inf


@dataclass(frozen=True, slots=True, kw_only=True)
class Report(Result):
    """A perplexity with every count that it depends on."""

    perplexity: float
    log_likelihood: float  # nats
    context: Rule
    streams: int | None  # parallel streams under `carry`
    sentences: int
    words: int
    tokens: int  # words + one <eos> a line
    oov: int
    literal_unk: int
    perplexity_without_oov: float
    bits_per_token: float
    bits_per_byte: float
    vocabulary_size: int


def token_log_probs(
    model: LanguageModel,
    text: Text,
    rule: Rule = "reset",
    num_streams: int = 16,
    batch_tokens: int = 16_384,
    progress: Progress | None = None,
) -> Float64[np.ndarray, " token"]:
    """Return log p(x_t | x_<t) of every token of a text, in the text's order.

    Each line from the start (`reset`), or streams with carried state (`carry`).
    """
    if rule == "reset":
        batches = sentence_batches(text, batch_tokens)
        starts = [text.offsets[lines] for lines in sentence_groups(text, batch_tokens)]
    else:
        segment = max(1, batch_tokens // num_streams)
        batches = stream_batches(text, num_streams, segment, model.vocabulary.eos, "carry")
        lengths = np.stack([batch.lengths.numpy() for batch in batches])  # (segments, streams)
        before = np.cumsum(lengths, axis=0) - lengths  # tokens of the same stream in earlier segments
        starts = list(before + (np.cumsum(lengths.sum(0)) - lengths.sum(0)))
    result = np.zeros(text.num_tokens)
    done, carry = 0, None
    for batch, start in zip(batches, starts, strict=True):
        if not batch.continues or carry is None:
            carry = model.start(len(batch.lengths))
        log_prob, carry = model.score_batch(batch.tokens, batch.lengths, carry)
        time = np.arange(batch.tokens.shape[1])
        live = time[None] < batch.lengths.numpy()[:, None]
        result[(start[:, None] + time)[live]] = log_prob.cpu().numpy()[live]
        done += int(live.sum())
        if progress is not None:
            progress(done, text.num_tokens)
    return result


def _sums(model: LanguageModel, text: Text, log_probs: Float64[np.ndarray, " token"]) -> tuple[float, float]:
    """Return log p of all tokens, and of those that are no OOV."""
    oov = text.tokens == model.vocabulary.unk
    oov[text.literal_unk] = False
    return float(log_probs.sum()), float(log_probs[~oov].sum())


def _sums_of_prepared(
    model: LanguageModel,
    text: PreparedText,
    rule: Rule,
    num_streams: int,
    batch_tokens: int,
    progress: Progress | None,
) -> tuple[float, float]:
    """Return the same sums for a prepared text, of which only a part is in memory at any time."""
    total = known = 0.0
    done = 0
    if rule == "reset":
        for part in text.parts(PREPARED_TOKENS):
            lines = text.read([part])
            sums = _sums(model, lines, token_log_probs(model, lines, rule, batch_tokens=batch_tokens))
            total, known, done = total + sums[0], known + sums[1], done + part.tokens
            if progress is not None:
                progress(done, text.num_tokens)
        return total, known
    # the streams of `stream_batches`, a segment of each at a time
    short, num_longer = divmod(text.num_tokens, num_streams)
    lengths = np.array([short + (stream < num_longer) for stream in range(num_streams)])
    starts = np.cumsum(lengths) - lengths
    segment, carry = max(1, batch_tokens // num_streams), model.start(num_streams)
    for first in range(0, int(lengths.max()), segment):
        sizes = np.clip(lengths - first, 0, segment)
        tokens = np.zeros((num_streams, int(sizes.max())), dtype=np.int64)
        oov = np.zeros(tokens.shape, dtype=bool)
        for stream, size in enumerate(sizes.tolist()):
            start = int(starts[stream]) + first
            ids, literal = text.token_range(start, start + size)
            tokens[stream, :size] = ids
            oov[stream, :size] = ids == model.vocabulary.unk
            oov[stream, literal] = False
        log_prob, carry = model.score_batch(torch.from_numpy(tokens), torch.from_numpy(sizes), carry)
        scores = log_prob.cpu().numpy().astype(np.float64)
        live = np.arange(tokens.shape[1])[None] < sizes[:, None]
        total += float(scores[live].sum())
        known += float(scores[live & ~oov].sum())
        done += int(sizes.sum())
        if progress is not None:
            progress(done, text.num_tokens)
    return total, known


def evaluate(
    model: LanguageModel,
    text: Text,
    rule: Rule = "reset",
    num_streams: int = 16,
    batch_tokens: int = 16_384,
    progress: Progress | None = None,
) -> Report:
    """Return the perplexity of a text: each line from the start (`reset`), or streams with carried state (`carry`)."""
    if not text.num_tokens:
        raise DataError("there is no token to score; expected text, one sentence per line")
    if rule not in ("reset", "carry"):
        raise ConfigError(f"context rule {rule!r} is not known; take reset or carry")
    num_streams = min(num_streams, text.num_tokens)
    if isinstance(text, PreparedText):
        total, known = _sums_of_prepared(model, text, rule, num_streams, batch_tokens, progress)
    else:
        total, known = _sums(model, text, token_log_probs(model, text, rule, num_streams, batch_tokens, progress))
    return Report(
        perplexity=perplexity(total, text.num_tokens),
        log_likelihood=total,
        context=rule,
        streams=num_streams if rule == "carry" else None,
        sentences=text.num_sentences,
        words=text.num_words,
        tokens=text.num_tokens,
        oov=text.num_oov,
        literal_unk=text.num_unk,
        perplexity_without_oov=perplexity(known, max(1, text.num_tokens - text.num_oov)),
        bits_per_token=-total / math.log(2) / text.num_tokens,
        bits_per_byte=-total / math.log(2) / text.num_bytes if text.num_bytes else math.nan,  # ids may come without text
        vocabulary_size=len(model.vocabulary),
    )
