"""A user's words -> ids. Input: a string or a sequence of words. Output: `Words`; unknown words have the id of <unk>."""

import difflib
import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
import torch

from vlhmm.data.vocabulary import Vocabulary
from vlhmm.errors import QueryError
from vlhmm.limits import shortened

Seed = int | np.random.Generator | torch.Generator


class Words(NamedTuple):
    """Words as written, and their ids; a word beyond the vocabulary has the id of <unk>."""

    words: list[str]
    ids: list[int]


def encode_words(vocabulary: Vocabulary, text: str | Sequence[str]) -> Words:
    """Return the words of `text` (split by the vocabulary, if it is a string); no <eos> is added."""
    words = vocabulary.split(text) if isinstance(text, str) else given_words(text)
    return Words(words, [vocabulary.id_of.get(word, vocabulary.unk) for word in words])


def given_words(text: Sequence[str]) -> list[str]:
    """Return the words of a sequence. Ids are no words: as words they would all be unknown."""
    words = list(text) if isinstance(text, Iterable) else [text]
    if not all(isinstance(word, str) for word in words) or not isinstance(text, Iterable):
        raise QueryError(f"{shortened(text)}: expected a string or a sequence of words")
    return words


def encode_sentence(vocabulary: Vocabulary, text: str | Sequence[str], eos: bool) -> Words:
    """Return the words of `text`, followed by <eos> if `eos`."""
    words, ids = encode_words(vocabulary, text)
    return Words([*words, vocabulary.words[vocabulary.eos]], [*ids, vocabulary.eos]) if eos else Words(words, ids)


def known_word(vocabulary: Vocabulary, word: str) -> int:
    """Return the id of a word that must be in the vocabulary: one named in a constraint means itself, not <unk>."""
    found = vocabulary.id_of.get(word)
    if found is None:
        near = nearest_words(vocabulary, word)
        remedy = f"nearest: {', '.join(near)}" if near else "nothing is near it"
        raise QueryError(f"no word {shortened(word)} in the vocabulary of {len(vocabulary):,} words; {remedy}")
    return found


def nearest_words(vocabulary: Vocabulary, word: str) -> list[str]:
    """Return three words most like `word`, its lowercase form first."""
    lower = [word.lower()] if word.lower() in vocabulary else []
    if len(word) > 100:
        return lower
    alike = (known for known in vocabulary.words if abs(len(known) - len(word)) < 3)
    return list(dict.fromkeys([*lower, *difflib.get_close_matches(word, alike, n=3)]))[:3]


def memory_check(what: str, num_bytes: float, budget: float, remedy: str, option: bool = True) -> None:
    """Raise a QueryError if `what` would take more than `budget` bytes; `option`: --memory raises the limit."""
    if num_bytes > budget:
        raise QueryError(
            f"{what} would take {gibibytes(num_bytes)}, the limit is {gibibytes(budget)}; {remedy}"
            + (", or raise the limit (--memory)" if option else "")
        )


def check_sample_memory(n: int, max_tokens: int, budget: float, vector: int = 0) -> None:
    """Raise a QueryError if `n` samples would take more than `budget` bytes.

    A lower bound: a sample's objects, a few of its words, and `vector` numbers while it is drawn.
    """
    num_bytes = float(n) * (500 + 100 * min(max_tokens, 10) + 24 * vector)
    memory_check(f"{n:,} samples", num_bytes, budget, "ask for fewer at once", option=False)


def gibibytes(num_bytes: float) -> str:
    """Format a size: '3.2 GiB', '40 MiB', '7 KiB'."""
    if num_bytes < 2**20:
        return f"{math.ceil(num_bytes / 2**10)} KiB"
    return f"{num_bytes / 2**30:.1f} GiB" if num_bytes >= 2**30 else f"{num_bytes / 2**20:.0f} MiB"


DEFAULT_MEMORY = 4 << 30


def generator_of(seed: Seed) -> torch.Generator:
    """Return the torch generator of a seed: itself, one seeded by an integer, or one seeded by a NumPy generator."""
    if isinstance(seed, torch.Generator):
        return seed
    if isinstance(seed, np.random.Generator):
        seed = int(seed.integers(2**63))
    if not isinstance(seed, int):
        raise QueryError(f"a seed is an integer or a random generator, got {type(seed).__name__}")
    return torch.Generator().manual_seed(seed)
