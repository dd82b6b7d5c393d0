"""Which part of a prepared text each step reads: rotating shares, so that memory does not depend on the text's length.

The text is cut into pieces of consecutive lines. Every epoch shuffles the pieces and deals them out, so that each step
reads pieces from all over the text, and each piece is read once. A step's share is read when the step comes.
"""

import math
from collections.abc import Callable, Sequence
from typing import overload

import numpy as np

from vlhmm.data.batches import Batch, sentence_batches
from vlhmm.data.prepared import Part, PreparedText
from vlhmm.data.text import Text
from vlhmm.errors import ConfigError
from vlhmm.training.config import TrainingConfig
from vlhmm.training.unknown_words import UnknownWords

PIECES_PER_SHARE = 16
LEAST_PIECE = 256  # tokens; shorter pieces would cost more to find than to read


class Shares(Sequence[list[Batch]]):
    """The steps of one epoch, each a list of batches that are read when they are asked for."""

    def __init__(self, text: PreparedText, shares: list[list[Part]], batch_tokens: int) -> None:
        self.text, self.shares, self.batch_tokens = text, shares, batch_tokens

    def __len__(self) -> int:
        return len(self.shares)

    @overload
    def __getitem__(self, index: int) -> list[Batch]: ...
    @overload
    def __getitem__(self, index: slice) -> list[list[Batch]]: ...
    def __getitem__(self, index: int | slice) -> list[Batch] | list[list[Batch]]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        return sentence_batches(self.text.read(self.shares[index]), self.batch_tokens)


class SharePlan:
    """epoch -> its steps, over a prepared text; a pure function of the text, the seed and the epoch's number."""

    def __init__(self, text: PreparedText, share_tokens: int, batch_tokens: int, seed: int) -> None:
        self.text, self.batch_tokens, self.seed = text, batch_tokens, seed
        self.num_shares = max(1, math.ceil(text.num_tokens / share_tokens))
        self.pieces = text.parts(max(LEAST_PIECE, share_tokens // PIECES_PER_SHARE))
        self.num_shares = min(self.num_shares, len(self.pieces))

    def __call__(self, epoch: int) -> Shares:
        order = np.random.default_rng((self.seed, epoch)).permutation(len(self.pieces))
        # pieces of a share come in the order of the text: neighbours on disk, and one share is the text itself
        dealt = [np.sort(part).tolist() for part in np.array_split(order, self.num_shares)]
        return Shares(self.text, [[self.pieces[i] for i in share] for share in dealt], self.batch_tokens)


def check_shares(text: Text, config: TrainingConfig) -> None:
    """Refuse settings under which a step would need the whole of a prepared text at once."""
    if not isinstance(text, PreparedText):
        return
    if config.batch != "sentences":
        raise ConfigError(
            f"training.batch={config.batch}: a prepared text is read by whole lines; set training.batch=sentences and "
            "training.context=reset"
        )
    if config.unknown_words == "held-out":
        raise ConfigError(
            "training.unknown_words=held-out reads the whole text at once; prepare it with --max-vocab or --min-count, so "
            "that <unk> occurs in it, and set training.unknown_words=as-is"
        )
    if config.method == "em" and config.em_tokens is None:
        raise ConfigError(
            f"training.em_tokens is none, so every E-step would hold all {text.num_tokens:,} tokens of the prepared text; "
            "set the tokens per E-step, e.g. --set training.em_tokens=1000000"
        )


def share_plan(text: PreparedText, config: TrainingConfig) -> SharePlan:
    """Return the plan of a run over a prepared text."""
    check_shares(text, config)
    share = config.em_tokens if config.method == "em" else config.batch_tokens
    assert share is not None
    return SharePlan(text, share, config.batch_tokens, config.seed)


def extra_plan(
    extra: PreparedText, text: Text, config: TrainingConfig, unknown: UnknownWords | None
) -> Callable[[int], list[list[Batch]]]:
    """Return epoch -> one step: the training text and the next share of an extra one. The shares come in a new order each time."""
    shares = SharePlan(extra, config.extra_tokens or text.num_tokens, config.batch_tokens, config.seed)
    read = whole_text(text, config, unknown)

    def steps(epoch: int) -> list[list[Batch]]:
        turn, index = divmod(epoch, shares.num_shares)
        return [[*read(epoch), *shares(turn)[index]]]

    return steps


def whole_text(text: Text, config: TrainingConfig, unknown: UnknownWords | None) -> Callable[[int], list[Batch]]:
    """Return epoch -> batches of all sentences: the same ones in every epoch, unless words are held out."""
    if unknown is not None and unknown.any:
        return lambda epoch: sentence_batches(unknown.at(epoch), config.batch_tokens)
    whole = sentence_batches(text, config.batch_tokens)
    return lambda epoch: whole
