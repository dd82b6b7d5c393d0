"""The oracle: an HMM's answers by writing out every path. Imports nothing of the package."""

import itertools
import math


def path_probabilities(start, emission, tiles, start_of, emit_of, edge_of, carry=None):
    """{path: p(path, x)} for one sequence, by the definition, in Python floats.

    A path lists a slot for every token; with a carry its first entry is the state before the text.
    """
    size, time = len(emission[0]), len(emit_of)
    table = {}
    before = range(size) if carry is not None else [None]
    for first in before:
        for path in itertools.product(range(size), repeat=time):
            probability, previous = (carry[first] if carry is not None else 1.0), first
            for t, slot in enumerate(path):
                if edge_of[t] < 0:
                    probability *= start[start_of[t]][slot]
                else:
                    probability *= tiles[edge_of[t]][previous][slot]
                probability *= emission[emit_of[t]][slot]
                previous = slot
            table[(first, *path)] = probability
    return table


def log_sum(values):
    total = math.fsum(values)
    return math.log(total) if total > 0 else -math.inf


def marginal(table, t):
    """{slot: p(z_t = slot | x)}; t counts tokens from 0, -1 is the carried state."""
    total = math.fsum(table.values())
    result = {}
    for path, probability in table.items():
        result[path[t + 1]] = result.get(path[t + 1], 0.0) + probability / total
    return result


def pair_marginal(table, t):
    """{(i, j): p(z_{t-1} = i, z_t = j | x)}."""
    total = math.fsum(table.values())
    result = {}
    for path, probability in table.items():
        key = (path[t], path[t + 1])
        result[key] = result.get(key, 0.0) + probability / total
    return result
