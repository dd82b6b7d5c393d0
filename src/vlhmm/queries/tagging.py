"""States against gold tags. Input: two equally long sequences. Output: many-to-one accuracy and V-measure."""

import math
from collections import Counter
from collections.abc import Hashable, Iterable
from typing import Any, NamedTuple


class TagScores(NamedTuple):
    """How well hidden states stand for tags."""

    num_tokens: int
    num_states: int  # that occur
    num_tags: int  # that occur
    many_to_one: float  # accuracy when every state stands for the tag it is most often with
    homogeneity: float  # 1: a state has one tag
    completeness: float  # 1: a tag has one state
    v_measure: float  # their harmonic mean


class TagCounts:
    """Joint counts of states and tags, gathered sentence by sentence."""

    def __init__(self) -> None:
        self.joint: Counter[tuple[Hashable, Hashable]] = Counter()

    def add(self, states: Iterable[Hashable], tags: Iterable[Hashable]) -> None:
        """Count the pairs."""
        self.joint.update(zip(states, tags, strict=True))

    def scores(self) -> TagScores:
        """The measures of everything counted."""
        states, tags, best = Counter(), Counter(), Counter()  # type: ignore[var-annotated]
        for (state, tag), n in self.joint.items():
            states[state] += n
            tags[tag] += n
            best[state] = max(best[state], n)
        total = sum(states.values())
        if not total:
            return TagScores(0, 0, 0, *[float("nan")] * 4)
        tags_given_states = _entropy(self.joint, total) - _entropy(states, total)
        states_given_tags = _entropy(self.joint, total) - _entropy(tags, total)
        homogeneity = 1 - tags_given_states / _entropy(tags, total) if len(tags) > 1 else 1.0
        completeness = 1 - states_given_tags / _entropy(states, total) if len(states) > 1 else 1.0
        both = homogeneity + completeness
        return TagScores(
            num_tokens=total,
            num_states=len(states),
            num_tags=len(tags),
            many_to_one=sum(best.values()) / total,
            homogeneity=homogeneity,
            completeness=completeness,
            v_measure=2 * homogeneity * completeness / both if both > 0 else 0.0,
        )


def _entropy(counts: Counter[Any], total: int) -> float:
    return -math.fsum(n / total * math.log(n / total) for n in counts.values())
