"""wcluster's `paths` files: one line a word, `bit string TAB word TAB count`.

Input: such a file. Output: a block per word; and back. Knows nothing of how blocks are found.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from vlhmm.clustering._files import numbered_lines
from vlhmm.data.atomic_io import write_atomically
from vlhmm.errors import ConfigError, DataError
from vlhmm.limits import digits


class WordPaths(NamedTuple):
    """What a `paths` file says about a vocabulary."""

    block_of_word: np.ndarray  # (V,)
    paths: tuple[str, ...]  # (M,) bit string of each block
    word_count: np.ndarray  # (V,)

    @property
    def num_blocks(self) -> int:
        """M."""
        return len(self.paths)


def paths_lines(
    words: Sequence[str], block_of_word: np.ndarray, paths: Sequence[str], word_count: np.ndarray
) -> Iterator[str]:
    """The lines of a `paths` file: blocks by bit string, words by falling count, ties by id."""
    if not len(words) == len(block_of_word) == len(word_count):
        raise ConfigError(
            f"got {len(words)} words, blocks of {len(block_of_word)} and counts of {len(word_count)}, "
            f"expected one number"
        )
    if len(set(paths)) != len(paths):
        raise ConfigError("two blocks have the same path; every block needs its own")
    blocks, counts = np.asarray(block_of_word).tolist(), np.asarray(word_count).tolist()
    order = sorted(range(len(words)), key=lambda index: (paths[blocks[index]], -counts[index], index))
    return (f"{paths[blocks[index]]}\t{words[index]}\t{counts[index]}" for index in order)


def write_paths(
    path: str | Path,
    words: Sequence[str],
    block_of_word: np.ndarray,
    paths: Sequence[str],
    word_count: np.ndarray,
) -> None:
    """Write a `paths` file, whole or not at all."""
    lines = paths_lines(words, block_of_word, paths, word_count)
    write_atomically(path, "".join(f"{line}\n" for line in lines).encode())


def read_paths(path: str | Path, words: Sequence[str], own_block: Sequence[str] = ()) -> WordPaths:
    """The blocks of the words of a vocabulary, numbered by falling token count, ties by bit string.

    A word without a line is refused by name, unless it is in `own_block`: then it gets a block to itself
    (wcluster knows no <eos>). Lines of other words are passed over, and so are blocks with none but those.
    """
    id_of = {word: index for index, word in enumerate(words)}
    path_of_word: list[str | None] = [None] * len(words)
    word_count = np.zeros(len(words), dtype=np.int64)
    for number, line in numbered_lines(path):
        fields = line.split("\t")
        if len(fields) != 3 or not fields[0] or set(fields[0]) - {"0", "1"} or digits(fields[2]) is None:
            raise DataError(f"{path}, line {number}: got {line[:60]!r}, expected bit string TAB word TAB count")
        index = id_of.get(fields[1])
        if index is None:
            continue
        if path_of_word[index] is not None:
            raise DataError(f"{path}, line {number}: the word {fields[1]!r} is there twice; remove one")
        path_of_word[index] = fields[0]
        word_count[index] = digits(fields[2]) or 0
    for word in own_block:
        if word in id_of and path_of_word[id_of[word]] is None:
            path_of_word[id_of[word]] = _free_path(path_of_word)
    tokens_of_path: dict[str, int] = {}
    placed = []
    for index, bits in enumerate(path_of_word):
        if bits is None:
            raise DataError(
                f"{path}: the word {words[index]!r} has no block; cluster a text that holds it, or map it to <unk>"
            )
        placed.append(bits)
        tokens_of_path[bits] = tokens_of_path.get(bits, 0) + int(word_count[index])
    paths = tuple(sorted(tokens_of_path, key=lambda bits: (-tokens_of_path[bits], bits)))
    block_of_path = {bits: block for block, bits in enumerate(paths)}
    return WordPaths(np.array([block_of_path[bits] for bits in placed], dtype=np.int64), paths, word_count)


def _free_path(path_of_word: list[str | None]) -> str:
    """A bit string longer than any in use, and so none of them."""
    return "1" * (1 + max((len(bits) for bits in path_of_word if bits is not None), default=0))
