"""Text -> integers. Input: whitespace-tokenized UTF-8, one sentence per line. Output: `Text`, <eos> after each.

Knows nothing of corpora by name, and needs no torch.
"""

import gzip
from array import array
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import count, repeat
from pathlib import Path

import numpy as np

from vlhmm.data.atomic_io import display_name, open_bytes, write_atomically
from vlhmm.data.vocabulary import EOS, UNK, Vocabulary
from vlhmm.errors import DataError


@dataclass(frozen=True, eq=False)
class Text:
    """A text as ids, and what was counted on the way."""

    tokens: np.ndarray  # (N,) int32, <eos> after every line
    offsets: np.ndarray  # (num_sentences + 1,) int64: line i is tokens[offsets[i] : offsets[i + 1]]
    num_oov: int  # words that became <unk>
    num_unk: int  # words that were <unk> in the text already
    num_bytes: int  # UTF-8 bytes of the words, one blank between two, and one newline a line
    literal_unk: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))  # where the text itself says <unk>

    @property
    def num_sentences(self) -> int:
        return len(self.offsets) - 1

    @property
    def num_tokens(self) -> int:
        """Words plus one <eos> per line, the divisor of perplexity."""
        return len(self.tokens)

    @property
    def num_words(self) -> int:
        return self.num_tokens - self.num_sentences

    def sentence(self, i: int) -> np.ndarray:
        """Return ids of line i, its <eos> included."""
        if not -self.num_sentences <= i < self.num_sentences:
            raise IndexError(f"sentence {i} of {self.num_sentences}")
        i %= self.num_sentences
        return self.tokens[self.offsets[i] : self.offsets[i + 1]]

    def token_arrays(self) -> Iterator[np.ndarray]:
        """Yield the ids in consecutive arrays: all at once for a text in memory, shard by shard for a prepared one."""
        yield self.tokens

    def word_counts(self, vocab_size: int) -> np.ndarray:
        """Return how often each word occurs."""
        return np.bincount(self.tokens, minlength=vocab_size)

    def start_counts(self, vocab_size: int) -> np.ndarray:
        """Return how often each word begins a line."""
        return np.bincount(self.tokens[self.offsets[:-1]], minlength=vocab_size)

    def __repr__(self) -> str:
        return f"Text({self.num_sentences:,} sentences, {self.num_tokens:,} tokens, {self.num_oov:,} OOV)"


def shards(text: Text, num_tokens: int) -> list[Text]:
    """Return the text in consecutive parts of whole lines, much the same size, about `num_tokens` tokens each."""
    number = max(1, round(text.num_tokens / num_tokens))
    cuts = np.searchsorted(text.offsets, np.linspace(0, text.num_tokens, number + 1))
    return [lines(text, int(a), int(b)) for a, b in zip(cuts, cuts[1:], strict=False) if b > a]


def shuffled(text: Text, order: np.ndarray) -> Text:
    """Return the same lines in another order: line order[0] first. Its bytes are the same."""
    lengths = np.diff(text.offsets)[order]
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    where = np.arange(text.num_tokens) - np.repeat(offsets[:-1] - text.offsets[:-1][order], lengths)
    is_literal = np.zeros(text.num_tokens, dtype=bool)
    is_literal[text.literal_unk] = True
    unk = np.flatnonzero(is_literal[where])
    return Text(text.tokens[where], offsets, text.num_oov, text.num_unk, text.num_bytes, unk)


def lines(text: Text, first: int, last: int) -> Text:
    """Return lines first .. last - 1 as a text of their own. Its bytes are not counted: 0."""
    start, end = int(text.offsets[first]), int(text.offsets[last])
    unk = text.literal_unk[(text.literal_unk >= start) & (text.literal_unk < end)] - start
    return Text(text.tokens[start:end], text.offsets[first : last + 1] - start, 0, len(unk), 0, unk)


def read_lines(path: str | Path, split: Callable[[str], list[str]] = str.split) -> Iterator[list[str]]:
    """Yield the words of each line of a file, plain or gzip, or of standard input ("-"); lazily, line by line.

    `split` cuts a line into words: at blanks, or as a tokenizer does (`Vocabulary.split`).
    """
    name = display_name(path)
    number = 0
    with open_bytes(path) as stream:
        try:
            for number, raw in enumerate(stream, start=1):
                # The first line may open with a byte order mark, which is no part of its first word.
                line = raw.decode("utf-8-sig" if number == 1 else "utf-8")
                words = split(line.rstrip("\r\n"))
                if EOS in line and EOS in words:
                    raise DataError(f"{name}, line {number}: {_LITERAL_EOS}")
                yield words
        except UnicodeDecodeError as error:
            raise DataError(
                f"{name}, line {number}: not UTF-8 (byte 0x{error.object[error.start]:02x} at byte "
                f"{error.start + 1} of the line); convert the text to UTF-8"
            ) from None
    if not number:
        raise DataError(f"{name} is empty, expected text, one sentence per line")


def write_text(path: str | Path, text: Text, vocabulary: Vocabulary) -> None:
    """Write a text as words, one sentence per line, atomically; compressed if the name ends in .gz."""
    words = np.array(vocabulary.words, dtype=object)
    sentences = (" ".join(words[text.sentence(i)[:-1]]) + "\n" for i in range(text.num_sentences))
    content = "".join(sentences).encode()
    write_atomically(Path(path), gzip.compress(content, 6, mtime=0) if str(path).endswith(".gz") else content)


_LITERAL_EOS = f"literal {EOS} in the text, expected none, as the reader adds one per line; remove or rename it"


def encode(lines: Iterable[list[str]], vocabulary: Vocabulary) -> Text:
    """Return `lines` as ids, <eos> after each; words beyond the vocabulary become <unk> and are counted as OOV."""
    get, unk = vocabulary.id_of.get, vocabulary.unk
    return _pack(lines, lambda words: map(get, words, repeat(unk)), vocabulary.eos, unk)


def learn(lines: Iterable[list[str]], max_vocab: int | None = None, min_count: int = 1) -> tuple[Vocabulary, Text]:
    """Return the vocabulary of `lines` (see `Vocabulary.build`) and `lines` in it; one pass, so pipes will do."""
    # Ids are given in order of appearance, and renumbered when the counts are known.
    id_of: defaultdict[str, int] = defaultdict(count().__next__)
    eos, unk = id_of[EOS], id_of[UNK]
    text = _pack(lines, lambda words: map(id_of.__getitem__, words), eos, unk)
    words = list(id_of)
    counts = Counter(dict(zip(words, np.bincount(text.tokens, minlength=len(words)).tolist(), strict=True)))
    vocabulary = Vocabulary.build(counts, max_vocab, min_count)
    tokens = vocabulary.encode(words)[text.tokens]
    num_oov = int((tokens == vocabulary.unk).sum()) - text.num_unk
    return vocabulary, Text(tokens, text.offsets, num_oov, text.num_unk, text.num_bytes, text.literal_unk)


def _pack(lines: Iterable[list[str]], ids_of: Callable[[list[str]], Iterable[int]], eos: int, unk: int) -> Text:
    tokens, ends, literal = array("i"), array("q", [0]), array("q")
    num_bytes = 0
    for words in lines:
        tokens.extend(ids_of(words))
        tokens.append(eos)
        ends.append(len(tokens))
        joined = " ".join(words)
        num_bytes += (len(joined) if joined.isascii() else len(joined.encode())) + 1
        if UNK in joined:
            literal.extend(ends[-2] + i for i, word in enumerate(words) if word == UNK)
    ids = np.array(tokens, dtype=np.int32)
    offsets = np.array(ends, dtype=np.int64)
    is_eos = ids == eos
    if is_eos.sum() != len(offsets) - 1:  # a caller's own lines; read_lines has refused a file's
        is_eos[offsets[1:] - 1] = False
        line = int(np.searchsorted(offsets, np.flatnonzero(is_eos)[0], side="right"))
        raise DataError(f"line {line}: {_LITERAL_EOS}")
    num_unk = int((ids == unk).sum())
    return Text(ids, offsets, num_unk - len(literal), len(literal), num_bytes, np.array(literal, dtype=np.int64))
