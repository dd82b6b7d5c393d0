"""Words <-> integers. Input: word counts, or a file with one word a line. Output: a frozen `Vocabulary`.

Knows nothing of files of text, of blocks or of models.
"""

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import repeat
from pathlib import Path

import numpy as np

from vlhmm.data.atomic_io import display_name, open_bytes, write_atomically
from vlhmm.errors import ConfigError, DataError

EOS = "<eos>"
UNK = "<unk>"


@dataclass(frozen=True)
class Vocabulary:
    """The words a model knows; `words[i]` has id i, and <eos> and <unk> are always among them."""

    words: tuple[str, ...]
    id_of: dict[str, int] = field(init=False, repr=False, compare=False)
    eos: int = field(init=False, repr=False, compare=False)
    unk: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        words = tuple(self.words)
        id_of = {word: i for i, word in enumerate(words)}
        if len(id_of) != len(words):
            word, count = Counter(words).most_common(1)[0]
            raise DataError(f"vocabulary holds {word!r} {count} times, expected every word once")
        for i, word in enumerate(words):
            if word.split() != [word]:
                raise DataError(f"vocabulary entry {i} is {word!r}, expected one word without blanks")
        for special in (EOS, UNK):
            if special not in id_of:
                raise DataError(f"vocabulary has no {special}, expected both {EOS} and {UNK}; add it")
        object.__setattr__(self, "words", words)
        object.__setattr__(self, "id_of", id_of)
        object.__setattr__(self, "eos", id_of[EOS])
        object.__setattr__(self, "unk", id_of[UNK])

    def __len__(self) -> int:
        return len(self.words)

    def __contains__(self, word: str) -> bool:
        return word in self.id_of

    def __repr__(self) -> str:
        return f"Vocabulary({len(self):,} words)"

    def split(self, text: str) -> list[str]:
        """The words of a text, as this vocabulary cuts it: at blanks."""
        return text.split()

    def split_around(self, text: str, marker: re.Pattern[str]) -> list[str]:
        """The words of a text in which markers such as [MASK] stand for words: a marker is one word."""
        return text.split()

    def join(self, words: Sequence[str]) -> str:
        """The text of some words: with blanks between them."""
        return " ".join(words)

    def encode(self, words: Iterable[str]) -> np.ndarray:
        """Ids of `words`, int32; what is not in the vocabulary becomes <unk>. No <eos> is added."""
        return np.fromiter(map(self.id_of.get, words, repeat(self.unk)), dtype=np.int32)

    def decode(self, ids: Iterable[int]) -> list[str]:
        """The words of `ids`."""
        return [self.words[i] for i in ids]

    @classmethod
    def build(cls, counts: Counter[str], max_size: int | None = None, min_count: int = 1) -> "Vocabulary":
        """The words seen at least `min_count` times, most frequent first (ties by word), `max_size` at most.

        <eos> and <unk> are counted in `max_size` and always kept, at the end if unseen.
        """
        if max_size is not None and max_size < 2:
            raise ConfigError(f"vocabulary size is {max_size}, expected at least 2 ({EOS} and {UNK})")
        if min_count < 1:
            raise ConfigError(f"min_count is {min_count}, expected at least 1 (1 keeps every word)")

        def rank(word: str) -> tuple[int, str]:
            return -counts[word], word

        ordinary = [word for word, n in counts.items() if n >= min_count and word not in (EOS, UNK)]
        ordinary.sort(key=rank)
        if max_size is not None:
            del ordinary[max_size - 2 :]
        return cls(tuple(sorted([*ordinary, EOS, UNK], key=rank)))

    @classmethod
    def read(cls, path: str | Path) -> "Vocabulary":
        """The vocabulary in `path`, one word a line in order of id; a missing <eos> or <unk> is appended."""
        line_of: dict[str, int] = {}
        name = display_name(path)
        with open_bytes(path) as stream:
            content = stream.read()
        if not content:
            raise DataError(f"vocabulary {name} is empty, expected one word a line")
        for number, raw in enumerate(content.removesuffix(b"\n").split(b"\n"), start=1):
            try:
                words = raw.decode("utf-8-sig" if number == 1 else "utf-8").split()
            except UnicodeDecodeError:
                raise DataError(f"{name}, line {number}: not UTF-8; convert the file to UTF-8") from None
            if len(words) != 1:
                got = "an empty line" if not words else f"{len(words)} words"
                raise DataError(f"{name}, line {number}: {got}, expected one word a line (line number = id)")
            first = line_of.setdefault(words[0], number)
            if first != number:
                raise DataError(f"{name}, line {number}: {words[0]!r} stands in line {first} too; remove one")
        words = list(line_of)
        return cls(tuple(words + [special for special in (EOS, UNK) if special not in line_of]))

    def write(self, path: str | Path) -> None:
        """Write one word per line, in order of id, whole or not at all."""
        write_atomically(path, "".join(f"{word}\n" for word in self.words).encode())
