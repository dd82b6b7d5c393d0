"""The oracle of the queries: answers by writing out every string and every path. Imports nothing of the
package.

A model is (start (S,), A (S, S), O (S, V), id of <eos>, rule), in NumPy.
"""

import itertools
import re

import numpy as np


def joint(model, ids):
    """p(words, path) of every path: an array with one axis of S a word."""
    start, transition, emission, eos, rule = model
    table = np.ones(())
    for t, word in enumerate(ids):
        if t == 0 or (rule == "reset" and ids[t - 1] == eos):
            table = table[..., None] * start
        else:
            table = table[..., None] * transition
        table = table * emission[:, word]
    return table


def string_probability(model, ids):
    """p(words): the sum over every path, by one matrix product a word (`joint` says the same, and is
    checked)."""
    start, transition, emission, eos, rule = model
    ahead, weight = start, 1.0
    for word in ids:
        alpha = weight * ahead * emission[:, word]
        if rule == "reset" and word == eos:
            ahead, weight = start, alpha.sum()
        else:
            ahead, weight = alpha @ transition, 1.0
    return float(weight * ahead.sum()) if len(ids) else 1.0


def path_maximum(model, ids):
    """max over paths of p(words, path)."""
    return float(joint(model, ids).max())


def gap_strings(num_words, low, high, eos, allow_eos):
    """Every way to fill a gap."""
    allowed = [word for word in range(num_words) if allow_eos or word != eos]
    for length in range(low, high + 1):
        yield from itertools.product(allowed, repeat=length)


def fills(model, items, allow_eos=False, accepts=None, scope="text", unread_end=False):
    """{fill: p(text with this fill)} over every fill of the template; items are ids or (low, high) gaps.

    `accepts` reads the ids of the text (without its last item, if `unread_end`), or of the gaps one after
    another.
    """
    num_words, eos = model[2].shape[1], model[3]
    choices = [
        list(gap_strings(num_words, *item, eos, allow_eos)) if isinstance(item, tuple) else [(item,)] for item in items
    ]
    table = {}
    for parts in itertools.product(*choices):
        ids = [word for part in parts for word in part]
        fill = tuple(part for part, item in zip(parts, items, strict=True) if isinstance(item, tuple))
        if accepts is not None:
            judged = [word for part in fill for word in part] if scope == "gaps" else ids
            if unread_end and scope == "text":
                judged = judged[:-1]
            if not accepts(judged):
                continue
        probability = string_probability(model, ids)
        if probability > 0:
            table[fill] = probability
    return table


def best_joint(model, items, allow_eos=False, accepts=None):
    """max over fills and paths of p(words, path)."""
    num_words, eos = model[2].shape[1], model[3]
    choices = [
        list(gap_strings(num_words, *item, eos, allow_eos)) if isinstance(item, tuple) else [(item,)] for item in items
    ]
    best = 0.0
    for parts in itertools.product(*choices):
        ids = [word for part in parts for word in part]
        if accepts is None or accepts(ids):
            best = max(best, path_maximum(model, ids))
    return best


def next_word(model, ids):
    """(V,) p(x | ids)."""
    total = string_probability(model, ids)
    words = range(model[2].shape[1])
    return np.array([string_probability(model, [*ids, word]) for word in words]) / total


def contains(ids, phrase):
    """Whether the phrase stands somewhere in the text."""
    return any(list(ids[i : i + len(phrase)]) == list(phrase) for i in range(len(ids) - len(phrase) + 1))


def contains_in_order(ids, phrases):
    """Whether the phrases stand in the text in this order, without overlap."""
    place = 0
    for phrase in phrases:
        found = next(
            (i for i in range(place, len(ids) - len(phrase) + 1) if list(ids[i : i + len(phrase)]) == list(phrase)),
            None,
        )
        if found is None:
            return False
        place = found + len(phrase)
    return True


def letters(ids):
    """A text as a string of one letter a word, for Python's own `re`."""
    return "".join(chr(ord("A") + word) for word in ids)


def matches(pattern, ids):
    """Whether Python's `re` matches the whole text; the pattern has a letter for each word."""
    return re.fullmatch(pattern, letters(ids), re.DOTALL) is not None


def chi_square(counts, probabilities):
    """(statistic, degrees of freedom) of observed counts; cells expected less than five times are pooled."""
    total = sum(counts.values())
    keys = set(counts) | set(probabilities)
    pooled_observed = pooled_expected = statistic = 0.0
    cells = 0
    for key in keys:
        observed, expected = counts.get(key, 0), total * probabilities.get(key, 0.0)
        if expected < 5:
            pooled_observed += observed
            pooled_expected += expected
        else:
            statistic += (observed - expected) ** 2 / expected
            cells += 1
    if pooled_expected > 1:
        statistic += (pooled_observed - pooled_expected) ** 2 / pooled_expected
        cells += 1
    elif pooled_observed > 20 * max(pooled_expected, 0.2):
        statistic = np.inf
    return statistic, max(1, cells - 1)


def chi_square_limit(degrees):
    """About the 99.99% point of the chi-square distribution (Wilson and Hilferty's approximation)."""
    return degrees * (1 - 2 / (9 * degrees) + 3.719 * np.sqrt(2 / (9 * degrees))) ** 3
