"""Which states may emit which words.

Input: a block per word (or a number of states per word). Output: `Blocks`, index tables every model reads.
Knows nothing of texts, of how blocks are found, or of tensors.

A *block* is a set of words that share their emitting states, and the states they share. In the paper's
model the blocks partition the words and the states, and state id = block * K + slot. Under uniform constraints
every word is its own block and blocks share states.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from jaxtyping import Int64

from vlhmm.clustering._files import numbered_lines, parse_integers
from vlhmm.data.atomic_io import write_atomically
from vlhmm.errors import ConfigError, DataError
from vlhmm.limits import digits, shortened

FORMAT_VERSION = 1


@dataclass(frozen=True, eq=False)
class Blocks:
    """The emission constraint: the states `states_of_block[block_of_word[x]]` may emit word x, no others."""

    # The arrays stay writeable: torch.from_numpy warns about any that are not. Nobody writes to them.
    block_of_word: Int64[np.ndarray, " word"]
    states_of_block: Int64[np.ndarray, "block slot"]
    num_states: int  # ids, padding included: G * K for a partition
    partition: bool  # no state in two blocks, and state id = block * K + slot
    num_alive: Int64[np.ndarray, " block"]  # a block's slots 0 .. num_alive - 1 exist, the others are padding

    @staticmethod
    def partition_of(
        block_of_word: Sequence[int] | np.ndarray,
        num_blocks: int,
        states_per_block: int,
        num_alive: Sequence[int] | np.ndarray | None = None,
    ) -> Blocks:
        """Return blocks with the states m * K .. m * K + K-1; the first num_alive[m] exist (all K by default)."""
        words = _integers(block_of_word, "block_of_word")
        _positive(num_blocks=num_blocks, states_per_block=states_per_block)
        if num_blocks > len(words):
            raise ConfigError(
                f"num_blocks={num_blocks} is more than the {len(words)} words there are; every block needs "
                f"a word, ask for at most {len(words)} blocks"
            )
        if words.min() < 0 or words.max() >= num_blocks:
            wrong = int(np.flatnonzero((words < 0) | (words >= num_blocks))[0])
            raise ConfigError(f"word {wrong} has block {words[wrong]}, expected 0 to {num_blocks - 1}")
        empty = np.flatnonzero(np.bincount(words, minlength=num_blocks) == 0)
        if len(empty):
            raise ConfigError(
                f"block {empty[0]} has no words ({len(empty)} of {num_blocks} blocks have none) and its "
                f"states could emit nothing; ask for fewer blocks"
            )
        if num_alive is None:
            alive = np.full(num_blocks, states_per_block, dtype=np.int64)
        else:
            alive = _integers(num_alive, "num_alive")
            if len(alive) != num_blocks:
                raise ConfigError(f"num_alive has {len(alive)} entries, expected one per block: {num_blocks}")
            if alive.min() < 1 or alive.max() > states_per_block:
                wrong = int(np.flatnonzero((alive < 1) | (alive > states_per_block))[0])
                raise ConfigError(
                    f"num_alive[{wrong}]={alive[wrong]}, expected 1 to states_per_block={states_per_block}"
                )
        num_states = num_blocks * states_per_block
        states = np.arange(num_states, dtype=np.int64).reshape(num_blocks, states_per_block)
        return Blocks(words, states, num_states, True, alive)

    @staticmethod
    def uniform(vocab_size: int, num_states: int, states_per_word: int, seed: int) -> Blocks:
        """Return a set of `states_per_word` states for every word, drawn uniformly; every state has a word.

        A state no word drew takes the place, in a random word, of a state that other words have too.
        """
        _positive(vocab_size=vocab_size, num_states=num_states, states_per_word=states_per_word)
        if states_per_word > num_states:
            raise ConfigError(
                f"states_per_word={states_per_word} is more than num_states={num_states}; ask for at most {num_states}"
            )
        if vocab_size * states_per_word < num_states:
            raise ConfigError(
                f"{vocab_size} words of {states_per_word} states each cannot use num_states={num_states}; "
                f"ask for at most {vocab_size * states_per_word} states, or for more states per word"
            )
        generator = np.random.default_rng(seed)
        states = np.empty((vocab_size, states_per_word), dtype=np.int64)
        for row in states:
            row[:] = generator.choice(num_states, states_per_word, replace=False, shuffle=False)
        uses = np.bincount(states.ravel(), minlength=num_states)
        for state in np.flatnonzero(uses == 0):
            spare = np.flatnonzero(uses[states.ravel()] > 1)  # never empty: V * n >= S, and a state is unused
            place = spare[generator.integers(len(spare))]
            uses[states.flat[place]] -= 1
            uses[state] += 1
            states.flat[place] = state
        states.sort(axis=1)
        alive = np.full(vocab_size, states_per_word, dtype=np.int64)
        return Blocks(np.arange(vocab_size, dtype=np.int64), states, num_states, False, alive)

    @staticmethod
    def none(vocab_size: int, num_states: int) -> Blocks:
        """Return blocks without a constraint: one block with all words and all states."""
        _positive(vocab_size=vocab_size, num_states=num_states)
        return Blocks.partition_of(np.zeros(vocab_size, dtype=np.int64), 1, num_states)

    @property
    def vocab_size(self) -> int:
        """V."""
        return len(self.block_of_word)

    @property
    def num_blocks(self) -> int:
        """G: M for a partition, V under uniform constraints."""
        return len(self.states_of_block)

    @property
    def states_per_block(self) -> int:
        """K, padding included."""
        return int(self.states_of_block.shape[1])

    @property
    def num_real_states(self) -> int:
        """Number of states without the padding of uneven blocks."""
        return int(self.num_alive.sum()) if self.partition else self.num_states

    @property
    def alive(self) -> np.ndarray:
        """Which slots exist, (G, K) bool; others are padding."""
        return np.arange(self.states_per_block) < self.num_alive[:, None]

    def size_classes(self, number: int) -> list[tuple[np.ndarray, int]]:
        """Return the blocks in at most `number` classes of similar size: (block ids, most states that one of them has).

        For products that should not be spent on padding. A class's blocks lack at most a `number`th of the largest size.
        """
        step = -(-self.states_per_block // number)
        class_of_block = -(-self.num_alive // step)
        members = [np.flatnonzero(class_of_block == size) for size in np.unique(class_of_block)]
        return [(blocks, int(self.num_alive[blocks].max())) for blocks in members]

    @property
    def words_by_block(self) -> tuple[np.ndarray, np.ndarray]:
        """Word ids sorted by block, then by id, and the number of words of each block."""
        order = np.argsort(self.block_of_word, kind="stable")
        return order, np.bincount(self.block_of_word, minlength=self.num_blocks)

    def words_of_block(self, block: int) -> np.ndarray:
        """Return the ids of one block's words, ascending."""
        return np.flatnonzero(self.block_of_word == block)

    def equals(self, other: Blocks) -> bool:
        """Return whether both constrain the same words to the same states."""
        return (
            self.num_states == other.num_states
            and self.partition == other.partition
            and np.array_equal(self.block_of_word, other.block_of_word)
            and np.array_equal(self.states_of_block, other.states_of_block)
            and np.array_equal(self.num_alive, other.num_alive)
        )

    def write(self, path: str | Path, words: Sequence[str], counts: Sequence[int] | np.ndarray | None = None) -> None:
        """Write one line per word to `path`: `word TAB block TAB count`, or `word TAB states`."""
        if len(words) != self.vocab_size:
            raise ConfigError(f"the blocks are of {self.vocab_size} words, got a vocabulary of {len(words)}")
        if counts is not None and len(counts) != self.vocab_size:
            raise ConfigError(f"got counts of {len(counts)} words, expected {self.vocab_size}")
        write_atomically(path, "".join(f"{line}\n" for line in self._lines(words, counts)).encode())

    def _lines(self, words: Sequence[str], counts: Sequence[int] | np.ndarray | None) -> Iterator[str]:
        yield f"# vlhmm blocks {FORMAT_VERSION}"
        yield f"# kind {'partition' if self.partition else 'uniform'}"
        yield f"# num_states {self.num_states}"
        yield f"# states_per_group {self.states_per_block}"
        blocks = self.block_of_word.tolist()
        if self.partition:
            yield f"# num_alive {','.join(map(str, self.num_alive.tolist()))}"
            tallies = [0] * self.vocab_size if counts is None else [int(count) for count in counts]
            for word, block, count in zip(words, blocks, tallies, strict=True):
                yield f"{word}\t{block}\t{count}"
        else:
            for word, block in zip(words, blocks, strict=True):
                yield f"{word}\t{','.join(map(str, self.states_of_block[block].tolist()))}"

    @staticmethod
    def read(path: str | Path, words: Sequence[str]) -> Blocks:
        """Return the blocks in the file at `path`, for exactly the words of the vocabulary `words`, in its order."""
        header, rows = _header_and_rows(path)
        partition = header["kind"] == "partition"
        num_states = _header_integers(path, header, "num_states")[0]
        states_per_block = _header_integers(path, header, "states_per_group")[0]
        id_of = {word: index for index, word in enumerate(words)}
        found: dict[int, list[int]] = {}
        for number, row in rows:
            where = f"{path}, line {number}"
            fields = row.split("\t")
            if len(fields) != (3 if partition else 2):
                wanted = "word TAB block TAB count" if partition else "word TAB comma separated states"
                raise DataError(f"{where}: got {len(fields)} fields, expected {wanted}")
            word = fields[0]
            if partition and digits(fields[2]) is None:
                raise DataError(f"{where}: the count is {shortened(fields[2])}, expected a whole number")
            if word not in id_of:
                raise DataError(
                    f"{where}: the word {shortened(word)} is not in the vocabulary; the two files belong to different models"
                )
            if id_of[word] in found:
                raise DataError(f"{where}: the word {word!r} is there twice; remove one")
            found[id_of[word]] = parse_integers(where, fields[1])
        for index, word in enumerate(words):
            if index not in found:
                raise DataError(f"{path}: the word {word!r} has no block; cluster the words again")
        table = [found[index] for index in range(len(words))]
        try:
            if not partition:
                return _uniform_from(table, num_states, states_per_block)
            if any(len(blocks) != 1 for blocks in table):
                raise ConfigError("a word has several blocks, expected one")
            if states_per_block < 1 or num_states % states_per_block:
                raise ConfigError(f"num_states={num_states} is not a multiple of {states_per_block}")
            return Blocks.partition_of(
                [blocks[0] for blocks in table],
                num_states // states_per_block,
                states_per_block,
                _header_integers(path, header, "num_alive"),
            )
        except ConfigError as error:  # here the file is at fault, so it is named
            raise DataError(f"{path}: {error}") from None


def allocate_states(
    tokens_of_block: Sequence[int] | np.ndarray,
    num_states: int,
    multiple_of: int = 8,
    minimum: int = 8,
    maximum: int | None = None,
    power: float = 0.5,
) -> np.ndarray:
    """Return num_alive (M,): num_states states, divided in proportion to (tokens of the block)^power.

    Every share is a multiple of `multiple_of` within minimum .. maximum. Shares beyond these bounds are cut
    to them and the others scaled to fit; what rounding down leaves goes to the largest remainders, ties to
    the lower block. About a hundred passes over M numbers.
    """
    tokens = np.asarray(tokens_of_block, dtype=np.float64)
    _positive(num_states=num_states, multiple_of=multiple_of, minimum=minimum)
    if tokens.ndim != 1 or not len(tokens) or not np.isfinite(tokens).all() or tokens.min() < 0:
        raise ConfigError("tokens_of_block must be a non-empty list of counts, one per block")
    if not np.isfinite(power) or power < 0:
        raise ConfigError(f"power={power} must be 0 (equal shares) or more")
    if num_states % multiple_of:
        raise ConfigError(
            f"num_states={num_states} is not a multiple of {multiple_of}, and every block's share is; ask "
            f"for {num_states - num_states % multiple_of or multiple_of}"
        )
    units = num_states // multiple_of
    low = -(-minimum // multiple_of)
    high = units if maximum is None else min(units, maximum // multiple_of)
    if low * len(tokens) > units:
        raise ConfigError(
            f"num_states={num_states} is too few for {len(tokens)} blocks of at least {low * multiple_of}; "
            f"ask for at least {low * multiple_of * len(tokens)}"
        )
    if high * len(tokens) < units:
        raise ConfigError(
            f"num_states={num_states} is too many for {len(tokens)} blocks of at most {maximum}; ask for at "
            f"most {high * multiple_of * len(tokens)}, or raise the maximum"
        )
    weight = np.maximum(tokens, 1e-9 * max(tokens.max(), 1.0)) ** power  # no zero, whose logarithm is taken
    weight /= weight.sum()

    def shares(log_scale: float) -> np.ndarray:
        return np.asarray(np.clip(weight * np.exp(log_scale), low, high))

    below = np.log(low / weight.max())  # everything at `low`: at most units in all
    above = np.log(high / weight.min())  # everything at `high`: at least units in all
    for _ in range(100):
        middle = (below + above) / 2
        below, above = (middle, above) if shares(middle).sum() <= units else (below, middle)
    ideal = shares(below)
    given = np.floor(ideal + 1e-9).astype(np.int64)  # a whole share may have come out a hair below itself
    left = units - int(given.sum())
    while left > 0:
        room = np.flatnonzero(given < high)
        first = room[np.argsort(-(ideal - given)[room], kind="stable")][:left]
        given[first] += 1
        left -= len(first)
    return given * multiple_of


def _positive(**values: int) -> None:
    for name, value in values.items():
        if value < 1:
            raise ConfigError(f"{name}={value} must be at least 1")


def _integers(values: Sequence[int] | np.ndarray, name: str) -> np.ndarray:
    array = np.array(values)
    if array.ndim != 1 or not array.size:
        raise ConfigError(f"{name} must be a non-empty list of integers, got shape {array.shape}")
    if not np.issubdtype(array.dtype, np.integer):
        raise ConfigError(f"{name} must hold integers, got {array.dtype}")
    return array.astype(np.int64)


def _uniform_from(table: list[list[int]], num_states: int, states_per_block: int) -> Blocks:
    for word, states in enumerate(table):
        if len(states) != states_per_block or len(set(states)) != states_per_block:
            raise ConfigError(f"word {word} has {len(set(states))} different states, expected {states_per_block}")
        if min(states) < 0 or max(states) >= num_states:
            raise ConfigError(f"word {word} has a state outside 0 to {num_states - 1}")
    states_of_block = np.sort(np.array(table, dtype=np.int64), axis=1)
    uses = np.bincount(states_of_block.ravel(), minlength=num_states)
    if not uses.all():
        raise ConfigError(f"state {np.flatnonzero(uses == 0)[0]} has no words and could emit nothing")
    alive = np.full(len(table), states_per_block, dtype=np.int64)
    return Blocks(np.arange(len(table), dtype=np.int64), states_of_block, num_states, False, alive)


_HEADER = ("vlhmm", "kind", "num_states", "states_per_group", "num_alive")


def _header_and_rows(path: str | Path) -> tuple[dict[str, str], list[tuple[int, str]]]:
    # A header line starts with hash and blank. No word holds a blank, so the word "#" is not taken for one.
    lines = numbered_lines(path)
    header: dict[str, str] = {}
    while lines and lines[0][1].startswith("# "):
        name, _, value = lines.pop(0)[1].removeprefix("# ").partition(" ")
        if name not in _HEADER or name in header:
            raise DataError(f"{path}: header line {shortened(name)}, expected each of {', '.join(_HEADER)} once")
        header[name] = value
    if header.get("vlhmm") != f"blocks {FORMAT_VERSION}":
        raise DataError(
            f"{path} is no blocks file of format {FORMAT_VERSION}, expected "
            f"'# vlhmm blocks {FORMAT_VERSION}' in its first line"
        )
    if header.get("kind") not in ("partition", "uniform"):
        raise DataError(f"{path}: kind is {header.get('kind')!r}, expected partition or uniform")
    return header, lines


def _header_integers(path: str | Path, header: dict[str, str], name: str) -> list[int]:
    if name not in header:
        raise DataError(f"{path}: the header line '# {name} ...' is missing")
    return parse_integers(f"{path}, header line {name}", header[name])
