"""Text -> tensors. Input: a `Text`. Output: a list of `Batch`, padded with id 0, every token in it once.

Two ways to cut: one row per sentence (`sentence_batches`), or streams cut in segments (`stream_batches`).
Knows nothing of models.
"""

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from vlhmm.data.text import Text
from vlhmm.errors import ConfigError

RULES = ("reset", "carry", "paper")


class Batch(NamedTuple):
    """Rows of tokens to score at once."""

    tokens: Tensor  # (B, T) int64, id 0 beyond `lengths`
    lengths: Tensor  # (B,) int64, may be 0 for a stream that has ended
    restart: Tensor  # (B, T) bool, True where the chain restarts from p(z1 | z0)
    continues: bool  # True if row b continues row b of the previous batch


def sentence_groups(text: Text, tokens_per_batch: int, generator: torch.Generator | None = None) -> list[np.ndarray]:
    """Return which sentences go into which batch: arrays of line numbers of much the same length, longest first.

    A group's padded size, rows times longest, is at most `tokens_per_batch`, unless one sentence alone is
    longer. With a generator, sentences of equal length change places and the groups come in random order.
    """
    if tokens_per_batch < 1:
        raise ConfigError(f"tokens_per_batch is {tokens_per_batch}, expected at least 1")
    lengths = np.diff(text.offsets)
    order = np.arange(len(lengths)) if generator is None else _permutation(len(lengths), generator)
    order = order[np.argsort(-lengths[order], kind="stable")]
    groups = []
    first = 0
    while first < len(order):
        num_rows = max(1, tokens_per_batch // max(1, int(lengths[order[first]])))
        groups.append(order[first : first + num_rows])
        first += num_rows
    if generator is not None:
        groups = [groups[i] for i in _permutation(len(groups), generator)]
    return groups


def sentence_batches(text: Text, tokens_per_batch: int, generator: torch.Generator | None = None) -> list[Batch]:
    """Return batches of whole sentences, a row each, every row from a fresh start; `sentence_groups` says which."""
    return [_sentences(text, rows) for rows in sentence_groups(text, tokens_per_batch, generator)]


def stream_batches(text: Text, num_streams: int, segment_length: int, eos_id: int, rule: str) -> list[Batch]:
    """Return the text in `num_streams` contiguous streams (rows), side by side, cut in time into segments.

    The streams' lengths differ by one at most, the longer ones first. The chain restarts at a stream's
    start and, under the rule "reset", after every <eos>; under "carry" nowhere else. Under "paper" it restarts
    after an <eos> inside a segment, and is carried over every segment cut, also after an <eos>: the rule
    that the paper's released code trains by. A text of fewer tokens than `num_streams` has as many streams as tokens.
    """
    if num_streams < 1 or segment_length < 1:
        raise ConfigError(
            f"num_streams is {num_streams} and segment_length is {segment_length}, expected at least 1 each"
        )
    if rule not in RULES:
        raise ConfigError(f"unknown context rule {rule!r}, expected one of {', '.join(RULES)}")
    num_tokens = text.num_tokens
    if not num_tokens:
        return []
    num_streams = min(num_streams, num_tokens)
    short, num_longer = divmod(num_tokens, num_streams)
    lengths = np.full(num_streams, short, dtype=np.int64)
    lengths[:num_longer] += 1
    tokens = _gather(text.tokens, np.cumsum(lengths) - lengths, lengths)
    restart = np.zeros(tokens.shape, dtype=bool)
    restart[:, 0] = True
    if rule != "carry":
        restart[:, 1:] = tokens[:, :-1] == eos_id
        restart[:, -1] &= lengths == tokens.shape[1]  # padding starts nothing

    cuts = [*range(0, tokens.shape[1], segment_length), tokens.shape[1]]
    if num_longer and segment_length > 1 and len(cuts) > 2 and cuts[-1] - cuts[-2] == 1:
        cuts[-2] -= 1  # a last segment of one column would be empty for the shorter streams: make it two
    if rule == "paper":
        restart[:, cuts[1:-1]] = False
    return [
        Batch(
            torch.from_numpy(np.ascontiguousarray(tokens[:, a:b])),
            torch.from_numpy(np.clip(lengths - a, 0, b - a)),
            torch.from_numpy(np.ascontiguousarray(restart[:, a:b])),
            continues=a > 0,
        )
        for a, b in zip(cuts, cuts[1:], strict=False)
    ]


def _sentences(text: Text, rows: np.ndarray) -> Batch:
    starts = text.offsets[rows]
    lengths = text.offsets[rows + 1] - starts
    tokens = _gather(text.tokens, starts, lengths)
    restart = np.zeros(tokens.shape, dtype=bool)
    restart[:, 0] = True
    return Batch(torch.from_numpy(tokens), torch.from_numpy(lengths), torch.from_numpy(restart), continues=False)


def _gather(flat: np.ndarray, starts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Return (B, T) int64: row b holds flat[starts[b] : starts[b] + lengths[b]], then zeros."""
    time = np.arange(int(lengths.max()))
    inside = time < lengths[:, None]
    position = np.where(inside, starts[:, None] + time, 0)
    return np.where(inside, flat[position], 0).astype(np.int64)


def _permutation(n: int, generator: torch.Generator) -> np.ndarray:
    return torch.randperm(n, generator=generator).numpy()
