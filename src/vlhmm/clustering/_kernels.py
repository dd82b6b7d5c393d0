"""The inner loops of Brown clustering and of the exchange algorithm, compiled.

All in one file because numba's cache does not see a change in a function another file defines.

Everything is measured in F(n) = n ln n of integer counts, in fixed point (units of 2^-24): with n(i, j) the
counts of adjacent classes and a(i), b(j) their sums over rows and columns,

    pairs * AMI = sum_ij F(n_ij) - sum_i F(a_i) - sum_j F(b_j) + F(pairs).

Integers add up without rounding, so a table kept up to date through ten thousand merges equals one computed
again, and the result does not depend on the order of summation.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, NamedTuple

import numba
import numpy as np

log = logging.getLogger(__name__)

UNIT = 1 << 24  # F(10^10) still fits 63 bits
TABLE_SIZE = 1 << 21  # larger counts are rare: their logarithm is taken when needed


class Window(NamedTuple):
    """Classes in slots 0 .. S-1 that may be merged, and possibly one more that is context only, in slot S."""

    pairs: np.ndarray  # (T, T) n_ij, T = S or S + 1
    first: np.ndarray  # (T,) a_i
    second: np.ndarray  # (T,) b_j
    gain: np.ndarray  # (S, S) symmetric: what merging i and j adds to pairs * AMI (never above zero)


class Members(NamedTuple):
    """The words of each slot, as linked lists."""

    slot_of_word: np.ndarray  # (V,)
    head: np.ndarray  # (T,) the slot's latest word, -1 if it is empty
    following: np.ndarray  # (V,) the next word of the same slot, -1 at the end
    leader: np.ndarray  # (T,) the slot's most frequent word, by its place in the order of words


def kernel(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return `function` compiled, and kept on disk where a folder can be written."""
    try:
        return numba.njit(nogil=True, cache=True)(function)
    except (RuntimeError, OSError):  # numba found no folder it may write to
        log.debug("%s is compiled in every process: set NUMBA_CACHE_DIR", function.__name__)
        return numba.njit(nogil=True)(function)


def xlogx_table(largest: int) -> np.ndarray:
    """Return F(0 .. largest) in fixed point, cut off at TABLE_SIZE entries."""
    n = np.arange(min(largest + 1, TABLE_SIZE), dtype=np.float64)
    return np.rint(n * np.log(np.maximum(n, 1.0)) * UNIT).astype(np.int64)


def empty_window(num_slots: int, num_context: int) -> Window:
    """Return a window without counts."""
    size = num_slots + num_context
    return Window(
        np.zeros((size, size), dtype=np.int64),
        np.zeros(size, dtype=np.int64),
        np.zeros(size, dtype=np.int64),
        np.zeros((num_slots, num_slots), dtype=np.int64),
    )


@kernel
def _xlogx(table, n):
    if n < table.shape[0]:
        return table[n]
    return np.int64(np.rint(n * np.log(n) * UNIT))


@kernel
def _square(table, pairs, i, j):
    """Return what the four counts among i and j change by when the two become one."""
    a, b, c, d = pairs[i, i], pairs[i, j], pairs[j, i], pairs[j, j]
    return _xlogx(table, a + b + c + d) - _xlogx(table, a) - _xlogx(table, b) - _xlogx(table, c) - _xlogx(table, d)


@kernel
def _set_pair(table, window, i, j, new, num_slots):
    """Set n_ij to `new` and update the gains, in O(S): only merges of i or j have n_ij in their gain."""
    pairs, gain = window.pairs, window.gain
    old = pairs[i, j]
    if old == new:
        return
    alone = _xlogx(table, new) - _xlogx(table, old)
    if i == j:
        if i < num_slots:
            for k in range(num_slots):
                if k != i:
                    others = pairs[i, k] + pairs[k, i] + pairs[k, k]
                    change = _xlogx(table, new + others) - _xlogx(table, old + others) - alone
                    gain[i, k] += change
                    gain[k, i] += change
        pairs[i, i] = new
        return
    if i < num_slots:  # merging i with k adds n_kj to n_ij
        for k in range(num_slots):
            other = pairs[k, j]
            if other != 0 and k != i and k != j:
                change = _xlogx(table, new + other) - _xlogx(table, old + other) - alone
                gain[i, k] += change
                gain[k, i] += change
    if j < num_slots:  # merging j with k adds n_ik to n_ij
        for k in range(num_slots):
            other = pairs[i, k]
            if other != 0 and k != i and k != j:
                change = _xlogx(table, new + other) - _xlogx(table, old + other) - alone
                gain[j, k] += change
                gain[k, j] += change
    if i < num_slots and j < num_slots:
        gain[i, j] -= _square(table, pairs, i, j)
        pairs[i, j] = new
        gain[i, j] += _square(table, pairs, i, j)
        gain[j, i] = gain[i, j]
    else:
        pairs[i, j] = new


@kernel
def _set_margin(table, margin, gain, i, new, num_slots):
    """Return a_i (or b_i) becomes `new`, and gain follows; O(S)."""
    old = margin[i]
    if i < num_slots and old != new:
        alone = _xlogx(table, new) - _xlogx(table, old)
        for k in range(num_slots):
            if k != i:
                change = _xlogx(table, new + margin[k]) - _xlogx(table, old + margin[k]) - alone
                gain[i, k] -= change
                gain[k, i] -= change
    margin[i] = new


@kernel
def _best_pair(gain, num_slots):
    """Return the i < j whose merge gains most, the first of equals; O(S^2)."""
    best_i, best_j, best = -1, -1, gain[0, 1]
    for i in range(num_slots - 1):
        row_best = gain[i, i + 1]
        for j in range(i + 2, num_slots):
            row_best = max(row_best, gain[i, j])  # a plain maximum runs several numbers at a time
        if best_i < 0 or row_best > best:
            best, best_i, best_j = row_best, i, i + 1
            while gain[i, best_j] != best:
                best_j += 1
    return best_i, best_j


@kernel
def _merge(table, window, kept, absorbed, num_slots):
    """Merge `absorbed` into `kept` and leave it empty, in O(S) per class adjacent to `absorbed`."""
    pairs, first, second, gain = window.pairs, window.first, window.second, window.gain
    s, t = kept, absorbed
    inside = pairs[s, s] + pairs[s, t] + pairs[t, s] + pairs[t, t]
    for k in range(pairs.shape[0]):
        if k != s and k != t:
            count = pairs[t, k]
            if count != 0:
                _set_pair(table, window, t, k, 0, num_slots)
                _set_pair(table, window, s, k, pairs[s, k] + count, num_slots)
            count = pairs[k, t]
            if count != 0:
                _set_pair(table, window, k, t, 0, num_slots)
                _set_pair(table, window, k, s, pairs[k, s] + count, num_slots)
    _set_pair(table, window, s, t, 0, num_slots)
    _set_pair(table, window, t, s, 0, num_slots)
    _set_pair(table, window, t, t, 0, num_slots)
    _set_pair(table, window, s, s, inside, num_slots)
    count = first[t]
    _set_margin(table, first, gain, t, 0, num_slots)
    _set_margin(table, first, gain, s, first[s] + count, num_slots)
    count = second[t]
    _set_margin(table, second, gain, t, 0, num_slots)
    _set_margin(table, second, gain, s, second[s] + count, num_slots)


@kernel
def _neighbours(word, start, neighbour, count, slot_of_word, total, slots):
    """Return how many slots `word`'s neighbours are in, itself left out; their counts are added to `total`."""
    found = 0
    for p in range(start[word], start[word + 1]):
        other = neighbour[p]
        if other != word:
            slot = slot_of_word[other]
            if total[slot] == 0:
                slots[found] = slot
                found += 1
            total[slot] += count[p]
    return found


@kernel
def _place(table, window, members, bigrams, rank, word, slot, total, slots):
    """Return `word` leaves the context class, slot S, and becomes the only word of the empty `slot`."""
    pairs, first, second, gain = window.pairs, window.first, window.second, window.gain
    rest = gain.shape[0]
    found = _neighbours(
        word, bigrams.before_start, bigrams.before_word, bigrams.before_count, members.slot_of_word, total, slots
    )
    for q in range(found):
        k = slots[q]
        _set_pair(table, window, k, rest, pairs[k, rest] - total[k], rest)
        _set_pair(table, window, k, slot, total[k], rest)
        total[k] = 0
    found = _neighbours(
        word, bigrams.after_start, bigrams.after_word, bigrams.after_count, members.slot_of_word, total, slots
    )
    for q in range(found):
        k = slots[q]
        _set_pair(table, window, rest, k, pairs[rest, k] - total[k], rest)
        _set_pair(table, window, slot, k, total[k], rest)
        total[k] = 0
    _set_pair(table, window, rest, rest, pairs[rest, rest] - bigrams.twice_count[word], rest)
    _set_pair(table, window, slot, slot, bigrams.twice_count[word], rest)
    _set_margin(table, first, gain, rest, first[rest] - bigrams.first_count[word], rest)
    _set_margin(table, first, gain, slot, bigrams.first_count[word], rest)
    _set_margin(table, second, gain, rest, second[rest] - bigrams.second_count[word], rest)
    _set_margin(table, second, gain, slot, bigrams.second_count[word], rest)
    members.slot_of_word[word] = slot
    members.head[slot] = word
    members.following[word] = -1
    members.leader[slot] = rank


@kernel
def add_words(table, window, members, bigrams, order, start, stop, empty_slot, merges, losses):
    """Place order[start:stop], merging the best two whenever no slot is free; return the slot left empty.

    Row r of `merges` and `losses` is filled when the word of rank r made a merge necessary: the ranks of
    the kept and of the absorbed class's most frequent words, and what the merge cost.
    """
    num_slots = window.gain.shape[0]
    total = np.zeros(num_slots + 1, dtype=np.int64)
    slots = np.zeros(num_slots + 1, dtype=np.int64)
    for rank in range(start, stop):
        _place(table, window, members, bigrams, rank, order[rank], empty_slot, total, slots)
        if rank < num_slots - 1:
            empty_slot = rank + 1
            continue
        s, t = _best_pair(window.gain, num_slots)
        if window.first[s] + window.second[s] < window.first[t] + window.second[t]:
            s, t = t, s  # the lighter class has fewer neighbours to move
        a, b = members.leader[s], members.leader[t]
        merges[rank, 0], merges[rank, 1] = min(a, b), max(a, b)
        losses[rank] = -window.gain[s, t]
        _merge(table, window, s, t, num_slots)
        members.leader[s] = min(a, b)
        word = members.head[t]
        last = word
        while word >= 0:
            members.slot_of_word[word] = s
            last = word
            word = members.following[word]
        members.following[last] = members.head[s]
        members.head[s] = members.head[t]
        members.head[t] = -1
        empty_slot = t
    return empty_slot


@kernel
def merge_all(table, window, pairs, merges, losses):
    """Merge classes with counts `pairs` (M, M) until one is left. O(M^3).

    Row r of `merges` is the r-th merge: (kept, absorbed), each class named by the smallest of its numbers.
    """
    num_slots = pairs.shape[0]
    for i in range(num_slots):
        for j in range(num_slots):
            _set_pair(table, window, i, j, pairs[i, j], num_slots)
            window.second[j] += pairs[i, j]
        window.first[i] = pairs[i].sum()
    for margin in (window.first, window.second):
        for i in range(num_slots):
            for j in range(num_slots):
                if i != j:
                    both = _xlogx(table, margin[i] + margin[j])
                    window.gain[i, j] -= both - _xlogx(table, margin[i]) - _xlogx(table, margin[j])
    name = np.arange(num_slots)
    for step in range(pairs.shape[0] - 1):
        s, t = _best_pair(window.gain, num_slots)  # s < t, so the slot moved below is never s
        merges[step, 0], merges[step, 1] = min(name[s], name[t]), max(name[s], name[t])
        losses[step] = -window.gain[s, t]
        _merge(table, window, s, t, num_slots)
        name[s] = min(name[s], name[t])
        last = num_slots - 1
        if t != last:  # the last slot fills the hole, so that loops shrink with the classes
            name[t] = name[last]
            window.first[t], window.second[t] = window.first[last], window.second[last]
            window.pairs[t, t] = window.pairs[last, last]
            for k in range(last):
                if k != t:
                    window.pairs[t, k], window.pairs[k, t] = window.pairs[last, k], window.pairs[k, last]
                    window.gain[t, k], window.gain[k, t] = window.gain[last, k], window.gain[k, last]
        window.pairs[last, :] = 0
        window.pairs[:, last] = 0
        num_slots = last


@kernel
def exchange_words(table, bigrams, order, class_of_word, pairs, transposed, first, second, sizes):
    """Move each word, in order, to the class that makes AMI largest; returns (words moved, what was gained).

    A word alone in its class stays: classes are never emptied. O(M) for each class among a word's
    neighbours. `pairs`, its transpose (so that either side is read row by row), the margins and `sizes` are
    kept up to date.
    """
    num_classes = pairs.shape[0]
    before = np.zeros(num_classes, dtype=np.int64)
    after = np.zeros(num_classes, dtype=np.int64)
    before_slots = np.zeros(num_classes, dtype=np.int64)
    after_slots = np.zeros(num_classes, dtype=np.int64)
    gain = np.zeros(num_classes, dtype=np.int64)
    moved, gained = 0, 0
    for word in order:
        home = class_of_word[word]
        if sizes[home] == 1:
            continue
        num_before = _neighbours(
            word, bigrams.before_start, bigrams.before_word, bigrams.before_count, class_of_word, before, before_slots
        )
        num_after = _neighbours(
            word, bigrams.after_start, bigrams.after_word, bigrams.after_count, class_of_word, after, after_slots
        )
        twice, a, b = bigrams.twice_count[word], bigrams.first_count[word], bigrams.second_count[word]
        for q in range(num_before):
            k = before_slots[q]
            pairs[k, home] -= before[k]
            transposed[home, k] -= before[k]
        for q in range(num_after):
            k = after_slots[q]
            pairs[home, k] -= after[k]
            transposed[k, home] -= after[k]
        pairs[home, home] -= twice
        transposed[home, home] -= twice
        first[home] -= a
        second[home] -= b
        for d in range(num_classes):  # what the word adds if it goes to d: margins and the square of d itself
            own = pairs[d, d]
            gain[d] = (
                _xlogx(table, own + before[d] + after[d] + twice)
                - _xlogx(table, own)
                + _xlogx(table, first[d])
                - _xlogx(table, first[d] + a)
                + _xlogx(table, second[d])
                - _xlogx(table, second[d] + b)
            )
        for q in range(num_before):
            k = before_slots[q]
            row = pairs[k]
            for d in range(num_classes):
                gain[d] += _xlogx(table, row[d] + before[k]) - _xlogx(table, row[d])
            gain[k] -= _xlogx(table, row[k] + before[k]) - _xlogx(table, row[k])  # counted in the square
        for q in range(num_after):
            k = after_slots[q]
            row = transposed[k]
            for d in range(num_classes):
                gain[d] += _xlogx(table, row[d] + after[k]) - _xlogx(table, row[d])
            gain[k] -= _xlogx(table, row[k] + after[k]) - _xlogx(table, row[k])
        best = home
        for d in range(num_classes):
            if gain[d] > gain[best]:
                best = d
        for q in range(num_before):
            k = before_slots[q]
            pairs[k, best] += before[k]
            transposed[best, k] += before[k]
            before[k] = 0
        for q in range(num_after):
            k = after_slots[q]
            pairs[best, k] += after[k]
            transposed[k, best] += after[k]
            after[k] = 0
        pairs[best, best] += twice
        transposed[best, best] += twice
        first[best] += a
        second[best] += b
        if best != home:
            moved += 1
            gained += gain[best] - gain[home]
            sizes[home] -= 1
            sizes[best] += 1
            class_of_word[word] = best
    return moved, gained


@kernel
def merged_size(codes, others):
    """Return how many different numbers two sorted arrays of different numbers hold together."""
    i, j, found = 0, 0, 0
    while i < len(codes) and j < len(others):
        a, b = codes[i], others[j]
        i += a <= b
        j += b <= a
        found += 1
    return found + len(codes) - i + len(others) - j


@kernel
def merge_counts(codes, counts, others, other_counts, merged, merged_counts):
    """Merge two sorted arrays into `merged`, adding the counts of equal numbers."""
    i, j, place = 0, 0, 0
    while i < len(codes) or j < len(others):
        if j == len(others) or (i < len(codes) and codes[i] < others[j]):
            merged[place], merged_counts[place] = codes[i], counts[i]
            i += 1
        elif i == len(codes) or others[j] < codes[i]:
            merged[place], merged_counts[place] = others[j], other_counts[j]
            j += 1
        else:
            merged[place], merged_counts[place] = codes[i], counts[i] + other_counts[j]
            i += 1
            j += 1
        place += 1


@kernel
def transpose_counts(start, word, count, other_start, other_word, other_count):
    """Transpose rows by the first word into rows by the second, in order; `other_start` are the rows' starts."""
    place = other_start.copy()
    for first in range(len(start) - 1):
        for p in range(start[first], start[first + 1]):
            second = word[p]
            other_word[place[second]] = first
            other_count[place[second]] = count[p]
            place[second] += 1


@kernel
def add_class_pairs(start, word, count, class_of_word, pairs):
    """Add n(v, w) to the counts of the classes of v and w."""
    for first in range(len(start) - 1):
        row = class_of_word[first]
        for p in range(start[first], start[first + 1]):
            pairs[row, class_of_word[word[p]]] += count[p]
