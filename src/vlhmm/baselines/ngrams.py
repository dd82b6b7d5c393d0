"""A back-off n-gram model as sorted arrays. Input: tables, tokens. Output: log p(word | context), for all.

The n-grams of each order form a `Level`, and the levels a trie: an n-gram's key is
(index of its first n-1 words in the level below) * width + (its last word), sorted within its level, where
width = V + 1. Looking up every token of a text is then one binary search per order, for all of them together.
The sentence start <s> has id V; it occurs in contexts only. This module does not know how the tables were estimated.
"""

from typing import NamedTuple

import numpy as np


class Level(NamedTuple):
    """All n-grams of one order, by key. Of order one there are exactly V + 1, with key = word."""

    keys: np.ndarray  # (n,) int64, sorted
    log_prob: np.ndarray  # (n,) float64: log p(last word | the words before)
    log_backoff: np.ndarray  # (n,) float64: log weight of the shorter context, for words not seen after this


def find(keys: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """Return the index of each wanted key in the sorted `keys`, -1 where it is not there."""
    if not len(keys):
        return np.full(wanted.shape, -1, dtype=np.int64)
    index = np.searchsorted(keys, wanted)
    index[index == len(keys)] = 0
    return np.where(keys[index] == wanted, index, -1)


def look_up(levels: tuple[Level, ...], words: np.ndarray, eos: int) -> np.ndarray:
    """Return log p(words[:, t] | words[:, :t]), (B, T), contexts cut to order-1 words; in O(order log n) a token.

    An <eos> among the words is scored as such, and is the sentence start to the words that follow it.
    """
    width = len(levels[0].keys)  # V + 1
    is_end = words == eos
    log_prob = levels[0].log_prob[words]
    context = np.where(is_end, width - 1, words)  # index of the n-gram ending here, as a context
    for below, level in zip(levels, levels[1:], strict=False):
        before = np.full_like(context, -1)
        before[:, 1:] = context[:, :-1]
        index = find(level.keys, before * width + words)  # a missing context, -1, makes a key below zero
        backed_off = log_prob
        if len(below.keys):  # not where all lines are shorter than the order
            backed_off = log_prob + np.where(before >= 0, below.log_backoff[before], 0.0)
        log_prob = np.where(index >= 0, level.log_prob[index], backed_off) if len(level.keys) else backed_off
        context = np.where(is_end, -1, index)  # no n-gram has <s> but in front
    return log_prob


def distribution(levels: tuple[Level, ...], context: np.ndarray) -> np.ndarray:
    """Return p(. | context), (V,), for one context of order-1 words at most, <s> being V; in O(V + order log n)."""
    width = len(levels[0].keys)
    prob = np.exp(levels[0].log_prob[: width - 1])
    for length in range(1, min(len(levels) - 1, len(context)) + 1):
        node = index_of(levels, context[len(context) - length :])
        if node < 0:
            continue  # a longer context may still be there, in tables that are not our own
        keys = levels[length].keys
        first, last = np.searchsorted(keys, [node * width, (node + 1) * width])
        prob *= np.exp(levels[length - 1].log_backoff[node])
        prob[keys[first:last] - node * width] = np.exp(levels[length].log_prob[first:last])
    return prob


def index_of(levels: tuple[Level, ...], words: np.ndarray) -> int:
    """Return the index of one n-gram in its level, -1 if it is not there."""
    width = len(levels[0].keys)
    index = int(words[0])
    for level, word in zip(levels[1:], words[1:], strict=False):
        index = int(find(level.keys, np.array(index * width + int(word))[None])[0])
        if index < 0:
            return -1
    return index
