"""LanguageModel + text -> numbers: the only place that writes exp(-x / n)."""

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, Literal

import torch

from vlhmm.data.batches import sentence_batches, stream_batches
from vlhmm.data.text import Text
from vlhmm.errors import ConfigError, DataError
from vlhmm.evaluation.protocol import LanguageModel

Rule = Literal["reset", "carry"]
Progress = Callable[[int, int], None]  # tokens done, tokens in all


def perplexity(log_likelihood: float, tokens: int) -> float:
    """exp(-log p / tokens); infinite for a text of probability zero."""
    try:
        return math.exp(-log_likelihood / tokens)
    except OverflowError:
        return math.inf


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
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

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def evaluate(
    model: LanguageModel,
    text: Text,
    rule: Rule = "reset",
    num_streams: int = 16,
    batch_tokens: int = 16_384,
    progress: Progress | None = None,
) -> Report:
    """The perplexity of a text: each line from the start (`reset`), or streams with carried state (`carry`)."""
    if not text.num_tokens:
        raise DataError("there is no token to score; expected text, one sentence a line")
    if rule not in ("reset", "carry"):
        raise ConfigError(f"context rule {rule!r} is not known; take reset or carry")
    num_streams = min(num_streams, text.num_tokens)
    if rule == "reset":
        batches = sentence_batches(text, batch_tokens)
    else:
        segment = max(1, batch_tokens // num_streams)
        batches = stream_batches(text, num_streams, segment, model.vocabulary.eos, "carry")
    oov_id = model.vocabulary.unk if text.num_oov else None
    total, oov_total, done, carry = 0.0, 0.0, 0, None
    for batch in batches:
        if not batch.continues or carry is None:
            carry = model.start(len(batch.lengths))
        log_prob, carry = model.score(batch.tokens, batch.lengths, carry)
        total += log_prob.sum().item()
        if oov_id is not None:
            live = torch.arange(batch.tokens.shape[1])[None] < batch.lengths[:, None]
            oov_total += log_prob.cpu()[(batch.tokens == oov_id) & live].sum().item()
        done += int(batch.lengths.sum())
        if progress is not None:
            progress(done, text.num_tokens)
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
        perplexity_without_oov=perplexity(total - oov_total, max(1, text.num_tokens - text.num_oov)),
        bits_per_token=-total / math.log(2) / text.num_tokens,
        bits_per_byte=-total / math.log(2) / text.num_bytes,
        vocabulary_size=len(model.vocabulary),
    )
