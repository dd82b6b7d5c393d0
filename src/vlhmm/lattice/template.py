"""A text with gaps -> a plan of the messages to compute. Input: items and an automaton. Output:
`InfillTemplate`.

A gap of `low` to `high` words is walked by how many words *remain* in it: the message "r more words here,
then the rest" serves every length of the gap. An automaton state is kept at a place only if it can be there
and can still end well; what memory the messages take follows, and is refused where it is too much.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from vlhmm.constraints.automaton import Automaton
from vlhmm.data.user_text import gibibytes, given_words
from vlhmm.data.vocabulary import Vocabulary
from vlhmm.distributions import HMMDistributions
from vlhmm.errors import QueryError
from vlhmm.limits import digits, shortened

MASK = re.compile(r"\[MASK(?::(\d+)(?:-(\d+))?)?\]")
MAX_GAP = 10_000


class Fixed(NamedTuple):
    """A word that is given."""

    word: int
    read: bool = True  # whether the constraint sees it


class Gap(NamedTuple):
    """`low` to `high` words that are not given."""

    low: int
    high: int


Item = Fixed | Gap


def parse_template(vocabulary: Vocabulary, text: str | Sequence[str]) -> tuple[list[Item], list[str]]:
    """Return (items, words as written) of a text with [MASK], [MASK:n] and [MASK:a-b]; no <eos> is added."""
    words = vocabulary.split_around(text, MASK) if isinstance(text, str) else given_words(text)
    return [_item(vocabulary, word) for word in words], words


def _item(vocabulary: Vocabulary, word: str) -> Item:
    if not word.startswith("[MASK"):
        return Fixed(vocabulary.id_of.get(word, vocabulary.unk))
    match = MASK.fullmatch(word)
    if not match:
        raise QueryError(f"malformed mask {shortened(word)}, expected [MASK], [MASK:n] or [MASK:a-b]")
    first, last = match.groups()
    if first is None:
        return Gap(1, 1)
    low, high = digits(first), digits(first if last is None else last)
    if low is None or high is None:
        raise QueryError(f"{shortened(word)} is no number of words, expected 1 to {MAX_GAP}")
    gap = Gap(low, high)
    if gap.high < gap.low:
        raise QueryError(f"{word} counts downwards, expected [MASK:{gap.high}-{gap.low}]")
    if gap.high < 1 or gap.high > MAX_GAP:
        raise QueryError(f"{word} asks for {gap.high} words, expected 1 to {MAX_GAP}")
    return gap


class MessageSupport(NamedTuple):
    """Where a message is needed: on one block's states, on all states, and/or for a fresh start."""

    block: int | None
    every: bool
    fresh: bool


@dataclass(frozen=True, eq=False)
class InfillTemplate:
    """Which messages are needed, for which automaton states."""

    items: tuple[Item, ...]
    automaton: Automaton
    classes: tuple[int, ...]  # of the words a gap may hold
    allow_eos: bool
    starts: tuple[int, ...]  # automaton states before the first word
    supports: tuple[MessageSupport, ...]  # of the message before item i
    entry: tuple[np.ndarray, ...]  # (Q,) bool before item i, and after the last one
    remaining: dict[int, tuple[np.ndarray, ...]]  # gap i: (Q,) bool for r = 0 .. high words remaining

    def possible(self, start: int) -> bool:
        """Return whether the automaton can end well from `start`, whatever the model says."""
        return bool(self.entry[0][start])

    def step(self, states: np.ndarray, item: Fixed) -> np.ndarray:
        """Return the automaton states after a given word."""
        if not item.read:
            return states
        return np.asarray(self.automaton.delta[states, self.automaton.class_of_word[item.word]])

    def num_bytes(self, num_states: int) -> int:
        """Return what the messages take: 8 bytes a (words remaining, automaton state, state of the model)."""
        rows = sum(int(states.sum()) for masks in self.remaining.values() for states in masks[:-1])
        widest = max((int(states.sum()) for masks in self.remaining.values() for states in masks), default=0)
        return 8 * num_states * (rows + 3 * widest + len(self.classes))


def make_template(
    distributions: HMMDistributions, items: Sequence[Item], automaton: Automaton, allow_eos: bool, starts: Sequence[int]
) -> InfillTemplate:
    """Return the template for `items` under `automaton`, read from each of its states `starts`."""
    num_q = automaton.num_states
    used = (
        np.unique(np.delete(automaton.class_of_word, distributions.eos)).tolist()
        if distributions.vocab_size > 1
        else []
    )
    classes = tuple(sorted({*used, automaton.eos_class} if allow_eos else {*used} - {automaton.eos_class}))
    moves = automaton.delta[:, list(classes)]
    first = np.zeros(num_q, dtype=bool)
    first[list(starts)] = True

    can = [automaton.accept]  # backwards: can[-1] is "before the item looked at"
    can_remaining: dict[int, list[np.ndarray]] = {}
    for i in range(len(items) - 1, -1, -1):
        item = items[i]
        if isinstance(item, Gap):
            levels = [can[-1]]
            for _ in range(item.high):
                levels.append(levels[-1][moves].any(axis=1))
            can_remaining[i] = levels
            can.append(np.any(levels[item.low :], axis=0))
        elif item.read:
            can.append(can[-1][automaton.delta[:, automaton.class_of_word[item.word]]])
        else:
            can.append(can[-1])
    can.reverse()

    reach, entry, remaining = first, [], {}
    supports: list[MessageSupport] = []
    support = MessageSupport(None, False, True)
    resets = distributions.rule == "reset"
    for i, item in enumerate(items):
        entry.append(reach & can[i])
        supports.append(support)
        if isinstance(item, Gap):
            used_words = [reach]
            for _ in range(item.high):
                following = np.zeros(num_q, dtype=bool)
                following[moves[used_words[-1]].reshape(-1)] = True
                used_words.append(following)
            # With r words to come, between low - r and high - r have been used: running counts say which
            # automaton states that leaves.
            seen = np.concatenate([np.zeros((1, num_q), np.int32), np.cumsum(used_words, axis=0, dtype=np.int32)])
            remaining[i] = tuple(
                can_remaining[i][r] & (seen[item.high - r + 1] > seen[max(0, item.low - r)])
                for r in range(item.high + 1)
            )
            reach = np.any(used_words[item.low :], axis=0)
            support = MessageSupport(None, True, support.fresh or (allow_eos and resets))
        else:
            following = np.zeros(num_q, dtype=bool)
            states = np.flatnonzero(reach)
            if item.read:
                states = automaton.delta[states, automaton.class_of_word[item.word]]
            following[states] = True
            reach = following
            fresh = distributions.restarts(item.word)
            support = MessageSupport(None if fresh else distributions.block(item.word), False, fresh)
    entry.append(reach & can[-1])
    supports.append(support)
    return InfillTemplate(
        tuple(items), automaton, classes, allow_eos, tuple(starts), tuple(supports), tuple(entry), remaining
    )


def check_memory(template: InfillTemplate, num_states: int, budget: float) -> None:
    """Raise a QueryError if the messages would take more than `budget` bytes."""
    needed = template.num_bytes(num_states)
    if needed > budget:
        gap = max((item.high for item in template.items if isinstance(item, Gap)), default=0)
        raise QueryError(
            f"gaps of up to {gap:,} words under an automaton of {template.automaton.num_states:,} states over "
            f"{num_states:,} model states would take {gibibytes(needed)}, the limit is "
            f"{gibibytes(budget)}; shorten the gaps or the constraint, or raise the limit (--memory)"
        )


def with_end(items: list[Item], words: list[str], vocabulary: Vocabulary, eos: bool) -> tuple[list[Item], list[str]]:
    """Return the items, followed by an <eos> that no constraint reads, if `eos` and the text does not end in one."""
    if not eos or (words and words[-1] == vocabulary.words[vocabulary.eos]):
        return items, words
    return [*items, Fixed(vocabulary.eos, read=False)], [*words, vocabulary.words[vocabulary.eos]]
