r"""N-gram tables <-> ARPA files. Input and output: a vocabulary and the `Level`s of `vlhmm.baselines.ngrams`.

    \data\
    ngram 1=4

    \1-grams:
    -0.5<tab>the<tab>-0.3      log10 p, the words, log10 of the back-off weight (0 where it is missing)
    \end\

In the file the sentence end is </s> (here <eos>) and the sentence start <s>; <s> is never predicted, which
the format spells -99. Numbers are written in full, so that nothing but the change of base (a unit in the
last place) is lost.
"""

import gzip
import math
from array import array
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from vlhmm.baselines.ngrams import Level, find
from vlhmm.data.atomic_io import display_name, open_bytes, write_atomically
from vlhmm.data.vocabulary import EOS, UNK, Vocabulary
from vlhmm.errors import DataError
from vlhmm.limits import digits

SENTENCE_START, SENTENCE_END = "<s>", "</s>"
_NEVER = -99.0  # what the format writes for log10 of zero
_LN10 = math.log(10.0)


def write(path: str | Path, vocabulary: Vocabulary, levels: tuple[Level, ...]) -> None:
    """Write the tables, whole or not at all, packed if `path` ends in .gz."""
    for word in (SENTENCE_START, SENTENCE_END):
        if word in vocabulary:
            raise DataError(f"the vocabulary has a word {word}, which ARPA keeps for itself; rename it in the text")
    content = "".join(_lines(vocabulary, levels)).encode()
    if str(path).endswith(".gz"):
        content = gzip.compress(content, compresslevel=6, mtime=0)
    write_atomically(path, content)


def _lines(vocabulary: Vocabulary, levels: tuple[Level, ...]) -> Iterator[str]:
    yield "\\data\\\n"
    yield from (f"ngram {n}={len(level.keys)}\n" for n, level in enumerate(levels, start=1))
    words = [SENTENCE_END if word == EOS else word for word in vocabulary.words] + [SENTENCE_START]
    names = words  # of the n-grams of the level at hand, then contexts of the next
    for n, level in enumerate(levels, start=1):
        if n > 1:
            contexts, last = np.divmod(level.keys, len(words))
            names = [f"{names[c]} {words[w]}" for c, w in zip(contexts.tolist(), last.tolist(), strict=True)]
        yield f"\n\\{n}-grams:\n"
        log_prob = np.maximum(level.log_prob / _LN10, _NEVER).tolist()
        log_backoff = (level.log_backoff / _LN10).tolist()
        if n < len(levels):
            rows = zip(log_prob, names, log_backoff, strict=True)
            yield "".join([f"{p}\t{name}\t{b}\n" for p, name, b in rows])
        else:
            yield "".join([f"{p}\t{name}\n" for p, name in zip(log_prob, names, strict=True)])
    yield "\n\\end\\\n"


def read(path: str | Path) -> tuple[Vocabulary, tuple[Level, ...]]:
    """The vocabulary, in the order of the file's unigrams, and the tables.

    A missing <unk> or </s> is added with probability zero. The header must agree with what follows.
    """
    file = _File(path)
    sizes = _read_header(file)
    vocabulary, id_of, unigrams = _read_unigrams(file, sizes[0], highest=len(sizes) == 1)
    levels = [unigrams]
    for n, size in enumerate(sizes[1:], start=2):
        levels.append(_read_level(file, levels, id_of, n, size, highest=n == len(sizes)))
    file.expect("\\end\\")
    return vocabulary, tuple(levels)


class _File:
    """The lines of a file that are not blank, one at a time, and the number of the one last seen."""

    def __init__(self, path: str | Path) -> None:
        self.name = display_name(path)
        self.number = 0
        self._lines = self._read(path)
        self._pushed_back: str | None = None

    def _read(self, path: str | Path) -> Iterator[str]:
        with open_bytes(path) as stream:
            try:
                for self.number, raw in enumerate(stream, start=1):
                    line = raw.decode().strip()
                    if line:
                        yield line
            except UnicodeDecodeError:
                raise self.error("not UTF-8; convert the file to UTF-8") from None

    def error(self, message: str, line: int | None = None) -> DataError:
        return DataError(f"{self.name}, line {line or max(1, self.number)}: {message}")

    def next(self, expected: str) -> str:
        """The next line; `expected` is what the error says if there is none."""
        if self._pushed_back is not None:
            pushed_back, self._pushed_back = self._pushed_back, None
            return pushed_back
        for line in self._lines:
            return line
        raise self.error(f"the file ends here, expected {expected}; it looks truncated")

    def push_back(self, line: str) -> None:
        self._pushed_back = line

    def expect(self, wanted: str) -> None:
        line = self.next(wanted)
        if line != wanted:
            raise self.error(f"{_shown(line)}, expected {wanted}")


def _shown(line: str) -> str:
    return repr(line if len(line) <= 40 else line[:37] + "...")


def _read_header(file: _File) -> list[int]:
    """How many n-grams the file says it holds, by order."""
    while file.next("\\data\\, as in every ARPA file") != "\\data\\":
        pass  # the format allows remarks in front
    sizes: list[int] = []
    while True:
        line = file.next("\\1-grams:")
        if not line.startswith("ngram"):
            file.push_back(line)
            break
        order, _, size = line.removeprefix("ngram").partition("=")
        if order.strip() != str(len(sizes) + 1) or digits(size.strip()) is None:
            raise file.error(f"{_shown(line)}, expected 'ngram {len(sizes) + 1}=' and a number")
        sizes.append(digits(size.strip()) or 0)
    if not sizes:
        raise file.error("no 'ngram 1=' line, expected the number of n-grams of each order")
    return sizes


def _rows(file: _File, n: int, size: int, highest: bool) -> Iterator[tuple[float, list[str], float]]:
    """log p, the words and the log back-off weight of each n-gram of order n, in the file's order."""
    file.expect(f"\\{n}-grams:")
    for seen in range(size):
        line = file.next(f"{size - seen} more {n}-grams")
        fields = line.split()
        if len(fields) not in (n + 1, n + 2):
            if line.startswith("\\"):
                raise file.error(f"{_shown(line)} after {seen} {n}-grams, expected {size} as the header says")
            raise file.error(f"{_shown(line)}, expected log10 p, {n} word(s) and perhaps a back-off weight")
        try:
            log_prob = float(fields[0])
            log_backoff = float(fields[n + 1]) if len(fields) == n + 2 else 0.0
        except ValueError:
            raise file.error(f"{_shown(line)}, expected numbers around {n} word(s)") from None
        if not log_prob <= 0 or not -math.inf < log_backoff < math.inf:  # which NaN fails too
            raise file.error(f"{_shown(line)}, expected log10 p at most 0 and a finite back-off weight")
        # Nothing longer than the highest order backs off to it.
        yield (
            log_prob * _LN10 if log_prob > _NEVER else -math.inf,
            fields[1 : n + 1],
            0.0 if highest else log_backoff * _LN10,
        )
    line = file.next("\\end\\")
    if not line.startswith("\\"):
        raise file.error(f"more {n}-grams than the header's {size}, expected a line that begins with '\\'")
    file.push_back(line)


def _read_unigrams(file: _File, size: int, highest: bool) -> tuple[Vocabulary, dict[str, int], Level]:
    """The vocabulary; the id of each of the file's words, <s> included; and the lowest level."""
    table: dict[str, tuple[float, float]] = {}
    for log_prob, (word,), log_backoff in _rows(file, 1, size, highest):
        word = EOS if word == SENTENCE_END else word
        if word in table:
            raise file.error(f"a second unigram {word!r}, expected each word once")
        table[word] = (log_prob, log_backoff)
    _, start_backoff = table.pop(SENTENCE_START, (0.0, 0.0))
    for special in (EOS, UNK):
        table.setdefault(special, (-math.inf, 0.0))
    vocabulary = Vocabulary(tuple(table))
    columns = np.array([*table.values(), (-math.inf, start_backoff)])
    level = Level(np.arange(len(columns)), columns[:, 0].copy(), columns[:, 1].copy())
    specials = {SENTENCE_END: vocabulary.eos, SENTENCE_START: len(vocabulary)}
    return vocabulary, vocabulary.id_of | specials, level


def _read_level(file: _File, below: list[Level], id_of: dict[str, int], n: int, size: int, highest: bool) -> Level:
    """The n-grams of order n, sorted by key."""
    ids, log_prob, log_backoff, lines = array("q"), array("d"), array("d"), array("q")
    for p, names, b in _rows(file, n, size, highest):
        try:
            ids.extend([id_of[name] for name in names])
        except KeyError as error:
            raise file.error(f"{error.args[0]!r} is no unigram of the file, expected every word there") from None
        log_prob.append(p)
        log_backoff.append(b)
        lines.append(file.number)
    width = len(below[0].keys)
    words = np.array(ids, dtype=np.int64).reshape(-1, n)
    context = words[:, 0]
    for m, level in enumerate(below[1:], start=1):
        context = find(level.keys, context * width + words[:, m])
        if (context < 0).any():
            line = lines[int(np.argmax(context < 0))]
            raise file.error(f"its first {m + 1} words are no {m + 1}-gram of the file, expected one", line)
    keys = context * width + words[:, -1]
    order = np.argsort(keys, kind="stable")
    keys = keys[order]
    twice = np.flatnonzero(keys[1:] == keys[:-1])
    if len(twice):
        raise file.error(f"the {n}-gram is there twice, expected once", lines[int(order[twice[0] + 1])])
    return Level(keys, np.array(log_prob)[order], np.array(log_backoff)[order])
