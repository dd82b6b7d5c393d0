"""Which batches each step of an epoch reads. A pure function of the text, the settings and the epoch's number."""

import math
from collections.abc import Callable, Sequence

import torch

from vlhmm.data.batches import Batch, sentence_batches, stream_batches
from vlhmm.data.prepared import PreparedText
from vlhmm.data.text import Text, shards, shuffled
from vlhmm.errors import ConfigError
from vlhmm.training.config import TrainingConfig
from vlhmm.training.shares import extra_plan, share_plan, whole_text
from vlhmm.training.unknown_words import UnknownWords


def generator_for(seed: int, purpose: str, number: int) -> torch.Generator:
    """Return a generator that is a function of (seed, purpose, number), so that no random state needs to be stored."""
    salt = int.from_bytes(purpose.encode(), "big") % (1 << 31)
    mixed = (seed * 1_000_003 + salt) * 1_000_003 + number
    return torch.Generator().manual_seed(mixed % (1 << 63))


def make_plan(
    text: Text, config: TrainingConfig, eos: int, extra: Text | None = None, unknown: UnknownWords | None = None
) -> Callable[[int], Sequence[list[Batch]]]:
    """Return epoch -> steps, each a list of batches whose counts are added up; no token is left out.

    With words held out (`unknown`) the text of every epoch is another one, of the same lines.
    With an extra text, every E-step reads the whole text and the next `extra_tokens` of the extra one, over and over.
    The steps of a prepared text are read from disk one at a time.
    """
    if extra is not None:
        if config.method != "em" or config.em_tokens is not None or config.batch != "sentences":
            raise ConfigError(
                "an extra text needs training.method=em, training.batch=sentences and no training.em_tokens: "
                "every E-step reads the whole training text and a share of the extra one"
            )
        if isinstance(extra, PreparedText):
            return extra_plan(extra, text, config, unknown)
        shares = shards(extra, config.extra_tokens or text.num_tokens)
        parts = [sentence_batches(share, config.batch_tokens) for share in shares]
        read = whole_text(text, config, unknown)
        return lambda epoch: [[*read(epoch), *parts[epoch % len(parts)]]]
    if unknown is not None and unknown.any:
        return lambda epoch: make_plan(unknown.at(epoch), config, eos)(epoch)
    if isinstance(text, PreparedText):
        return share_plan(text, config)
    if config.context == "paper":
        return lambda epoch: grouped(_shuffled_streams(text, config, eos, epoch), config)
    if config.batch == "streams":
        stream = stream_batches(text, config.num_streams, config.segment_length, eos, config.context)
        return lambda epoch: grouped(stream, config)
    if config.method == "em" and config.em_tokens is None:
        whole = sentence_batches(text, config.batch_tokens)
        return lambda epoch: [whole]
    return lambda epoch: grouped(
        sentence_batches(text, config.batch_tokens, generator_for(config.seed, "batches", epoch)), config
    )


def _shuffled_streams(text: Text, config: TrainingConfig, eos: int, epoch: int) -> list[Batch]:
    """Return streams of the lines in a random order of this epoch, in a constant number of batches."""
    order = torch.randperm(text.num_sentences, generator=generator_for(config.seed, "lines", epoch)).numpy()
    return stream_batches(shuffled(text, order), config.num_streams, config.segment_length, eos, "paper")


def grouped(batches: list[Batch], config: TrainingConfig) -> list[list[Batch]]:
    """Return consecutive batches grouped into steps. The number of steps depends on the text, not on the order of batches."""
    many = 1
    if config.method == "em":
        tokens = sum(int(batch.lengths.sum()) for batch in batches)
        steps = 1 if config.em_tokens is None else math.ceil(tokens / config.em_tokens)
        many = math.ceil(len(batches) / max(1, steps))
    return [batches[first : first + many] for first in range(0, len(batches), many)]


def steps_per_epoch_of(tokens: int, config: TrainingConfig) -> int:
    """Return about how many E-steps of EM on sentences one pass over a text takes."""
    return 1 if config.em_tokens is None else max(1, math.ceil(tokens / config.em_tokens))
