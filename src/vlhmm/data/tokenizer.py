"""A Hugging Face tokenizer as a vocabulary: text -> subword ids -> text.

Input: the bytes of a `tokenizer.json`. Output: `TokenVocabulary`, whose ids are exactly the tokenizer's. The package
`tokenizers` (extra `llm`) is imported when a tokenizer is opened, and nowhere else.
"""

import hashlib
import json
import re
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from vlhmm.data.atomic_io import display_name, open_bytes
from vlhmm.data.text import Text, encode, read_lines
from vlhmm.data.vocabulary import Vocabulary
from vlhmm.errors import ConfigError, DataError
from vlhmm.limits import MAX_STATES

if TYPE_CHECKING:
    from tokenizers import Tokenizer

# Names under which tokenizers keep their end of text, most specific first: chat models end a turn with the first ones.
END_TOKENS = (
    "<|im_end|>", "<|eot_id|>", "<end_of_turn>", "<|end|>", "<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "[SEP]",
)  # fmt: skip
_BYTE_PIECE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_LINES_AT_ONCE = 1024  # of a text file, encoded in one call


@dataclass(frozen=True)
class TokenVocabulary(Vocabulary):
    """The V ids of a tokenizer. `words[i]` is the piece of id i; a text is split into pieces by the tokenizer.

    There is no id for unknown words unless the tokenizer has one: `unk` is -1, which no token equals.
    """

    content: bytes = field(default=b"", repr=False, compare=False)  # of tokenizer.json
    end: int = 0  # id of the end of text, counted after every finished line
    special: frozenset[int] = field(default=frozenset(), repr=False, compare=False)  # ids that are no text

    def __post_init__(self) -> None:
        words = tuple(self.words)
        if not 0 <= self.end < len(words):
            raise DataError(f"the end of text has id {self.end}, expected 0 to {len(words) - 1}")
        id_of = {word: i for i, word in enumerate(words)}
        if len(id_of) != len(words):
            raise DataError("the tokenizer has two ids with one name, expected every name once")
        object.__setattr__(self, "words", words)
        object.__setattr__(self, "id_of", id_of)
        object.__setattr__(self, "eos", self.end)
        object.__setattr__(self, "unk", -1)

    @classmethod
    def from_bytes(cls, content: bytes, end: int | str | None = None, name: str = "the tokenizer") -> "TokenVocabulary":
        """Return the vocabulary of a tokenizer.json.

        Args:
            content: the file's bytes.
            end: id or name of the end-of-text token; by default the first of `END_TOKENS` that the tokenizer has.
            name: what messages call it.
        """
        tokenizer = _open(content, name)
        pieces = tokenizer.get_vocab(with_added_tokens=True)
        size = 1 + max(pieces.values(), default=-1)
        if not size:
            raise DataError(f"{name} has no tokens")
        if size > MAX_STATES:
            raise DataError(f"{name} has the id {size - 1:,}, expected ids below {MAX_STATES:,}; it is damaged")
        words = [f"<unused:{i}>" for i in range(size)]
        for piece, i in pieces.items():
            words[i] = _without_blanks(piece)
        special = frozenset(i for i, token in tokenizer.get_added_tokens_decoder().items() if token.special)
        found = _end_of(pieces, end, name, size)
        return cls(tuple(_distinct(words)), content=content, end=found, special=special | {found})

    @classmethod
    def read(cls, path: str | Path, end: int | str | None = None) -> "TokenVocabulary":  # type: ignore[override]
        """Return the vocabulary of a tokenizer.json, or of a folder that holds one."""
        path = Path(path)
        if path.is_dir():
            if not (path / "tokenizer.json").exists():
                raise DataError(f"{path} has no tokenizer.json; save it with AutoTokenizer.save_pretrained")
            path = path / "tokenizer.json"
        with open_bytes(path) as stream:
            content = stream.read()
        return cls.from_bytes(content, end, str(path))

    @cached_property
    def tokenizer(self) -> "Tokenizer":
        """The `tokenizers.Tokenizer` itself."""
        return _open(self.content, "the tokenizer")

    @property
    def sha256(self) -> str:
        """The checksum of tokenizer.json."""
        return hashlib.sha256(self.content).hexdigest()

    def __repr__(self) -> str:
        return f"TokenVocabulary({len(self):,} tokens, ends with {self.words[self.eos]!r})"

    # ---- text <-> ids

    def ids(self, text: str) -> list[int]:
        """Return the ids of a text; no special token is added to it."""
        return self.tokenizer.encode(text, add_special_tokens=False).ids

    def text(self, ids: Iterable[int]) -> str:
        """Return the text of some ids, without special tokens."""
        return self.tokenizer.decode(list(ids), skip_special_tokens=True)

    def split(self, text: str) -> list[str]:
        """Return the pieces of a text, by the tokenizer."""
        return [self.words[i] for i in self.ids(text)]

    def split_around(self, text: str, marker: re.Pattern[str]) -> list[str]:
        """Return the pieces of a text and the markers in it.

        A piece carries the blank before its word, so the blank before a marker belongs to the words in its place.
        """
        words: list[str] = []
        start = 0
        for match in marker.finditer(text):
            words += [*self.split(text[start : match.start()].removesuffix(" ")), match[0]]
            start = match.end()
        return words + self.split(text[start:])

    def join(self, words: Sequence[str]) -> str:
        """Return the text of some pieces; a name that is not a piece (a mask) is not changed."""
        parts: list[str] = []
        run: list[int] = []
        for word in words:
            found = self.id_of.get(word)
            if found is None:
                parts += [self.text(run), word]
                run = []
            else:
                run.append(found)
        return "".join([*parts, self.text(run)])

    @cached_property
    def token_bytes(self) -> tuple[bytes, ...]:
        """The bytes that each id adds to the text; empty for special tokens.

        Byte-level pieces are spelled with one character per byte, SentencePiece ones with "▁" for a blank and
        "<0x0A>" for single bytes.
        """
        return tuple(b"" if i in self.special else self._bytes_of(i) for i in range(len(self)))

    @cached_property
    def _byte_level(self) -> bool:
        described = json.loads(self.content)
        kinds = [described.get("pre_tokenizer"), described.get("decoder")]
        return any('"ByteLevel"' in json.dumps(kind) for kind in kinds)

    @cached_property
    def _added(self) -> dict[int, str]:
        return {i: token.content for i, token in self.tokenizer.get_added_tokens_decoder().items()}

    def _bytes_of(self, i: int) -> bytes:
        if i in self._added:
            return self._added[i].encode()
        piece = self.tokenizer.id_to_token(i)
        if piece is None:
            return b""
        if self._byte_level:
            table = byte_of_character()
            return bytes(table[c] for c in piece) if all(c in table for c in piece) else piece.encode()
        if match := _BYTE_PIECE.fullmatch(piece):
            return bytes([int(match[1], 16)])
        return piece.replace("▁", " ").encode()


def byte_of_character() -> dict[str, int]:
    """Return the byte of each character of a byte-level piece (GPT-2's table).

    Printable Latin-1 characters are themselves; all other bytes, in order, are the characters from 256 on.
    """
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(b): b for b in printable} | {chr(256 + n): b for n, b in enumerate(others)}


def _open(content: bytes, name: str) -> "Tokenizer":
    try:
        from tokenizers import Tokenizer
    except ImportError:
        raise ConfigError("tokenizers is not installed; pip install 'vlhmm[llm]'") from None
    try:
        return Tokenizer.from_str(content.decode("utf-8"))
    except Exception as error:  # the library raises bare Exception
        raise DataError(f"{name} is no tokenizer.json that tokenizers can read: {error}") from None


def _end_of(pieces: dict[str, int], end: int | str | None, name: str, size: int) -> int:
    if isinstance(end, int):
        if not 0 <= end < size:
            raise ConfigError(f"{name} has {size:,} ids, got {end} for the end of text")
        return end
    if end is not None:
        if end not in pieces:
            raise ConfigError(f"{name} has no token {end!r}; name its end of text with --end-of-text")
        return pieces[end]
    for candidate in END_TOKENS:
        if candidate in pieces:
            return pieces[candidate]
    raise ConfigError(f"{name} has none of the usual end-of-text tokens; name one with --end-of-text")


def _without_blanks(piece: str) -> str:
    """Return the piece as a name: blanks are spelled out, as vocabulary files have one name per line."""
    if piece and piece.split() == [piece]:
        return piece
    return "".join(c if not c.isspace() else f"\\u{ord(c):04x}" for c in piece) or "<empty>"


def _distinct(words: list[str]) -> list[str]:
    seen: set[str] = set()
    result = []
    for i, word in enumerate(words):
        word = word if word not in seen else f"{word}<id:{i}>"
        seen.add(word)
        result.append(word)
    return result


# ---- files of texts or ids


class TokenLine(NamedTuple):
    """One line of a text over ids, without its end-of-text token."""

    ids: list[int]
    finished: bool  # the end of text came next; else the line was cut
    num_bytes: int
    prompt: str | None = None  # what it answers, where a record says so


def is_jsonl(path: str | Path) -> bool:
    """Return whether a file is taken for JSON lines, by its name."""
    return str(path).removesuffix(".gz").removesuffix(".zst").endswith((".jsonl", ".ndjson"))


def read_token_lines(path: str | Path, vocabulary: TokenVocabulary) -> Iterator[TokenLine]:
    """Yield the lines of a text file, or the records of a JSONL file, as ids.

    A record is a text, a list of ids, or an object with `text` or `ids`; `"finished": false` says that it was cut
    before its end of text. An end-of-text token that ends the ids is taken off and counts as finished.
    """
    name, number, waiting = display_name(path), 0, []  # type: str, int, list[str]
    with open_bytes(path) as stream:
        for number, raw in enumerate(stream, start=1):
            try:
                line = raw.decode("utf-8-sig" if number == 1 else "utf-8")
            except UnicodeDecodeError:
                raise DataError(f"{name}, line {number}: not UTF-8; convert the text to UTF-8") from None
            if is_jsonl(path):
                if line.strip():
                    yield _record(line, vocabulary, f"{name}, line {number}")
                continue
            waiting.append(line.rstrip("\r\n"))
            if len(waiting) >= _LINES_AT_ONCE:
                yield from _encoded(waiting, vocabulary)
                waiting = []
    if not number:
        raise DataError(f"{name} is empty, expected text")
    yield from _encoded(waiting, vocabulary)


def _encoded(lines: list[str], vocabulary: TokenVocabulary) -> Iterator[TokenLine]:
    found = vocabulary.tokenizer.encode_batch(lines, add_special_tokens=False)
    for line, encoding in zip(lines, found, strict=True):
        yield _line(encoding.ids, vocabulary, True, len(line.encode()) + 1, repr(line[:40]))


def _record(line: str, vocabulary: TokenVocabulary, where: str) -> TokenLine:
    try:
        found = json.loads(line)
    except ValueError:
        raise DataError(f"{where}: not JSON; expected a text, a list of ids, or an object with text or ids") from None
    finished, prompt = True, None
    if isinstance(found, dict):
        finished, prompt = bool(found.get("finished", True)), found.get("prompt")
        found = found.get("ids", found.get("text"))
    if prompt is not None and not isinstance(prompt, str):
        raise DataError(f"{where}: the prompt is a {type(prompt).__name__}, expected a text")
    if isinstance(found, str):
        return _line(vocabulary.ids(found), vocabulary, finished, len(found.encode()) + 1, where, prompt)
    if not isinstance(found, list) or not all(type(i) is int for i in found):
        raise DataError(f"{where}: expected a text, a list of ids, or an object with text or ids")
    if found and not 0 <= min(found) <= max(found) < len(vocabulary):
        raise DataError(
            f"{where}: ids run from {min(found)} to {max(found)}, the tokenizer has 0 to {len(vocabulary) - 1}; "
            "give the tokenizer that the ids were made with"
        )
    return _line(found, vocabulary, finished, len(vocabulary.text(found).encode()) + 1, where, prompt)


def _line(
    ids: list[int], vocabulary: TokenVocabulary, finished: bool, num_bytes: int, where: str, prompt: str | None = None
) -> TokenLine:
    if ids and ids[-1] == vocabulary.eos:
        ids, finished = ids[:-1], True
    if vocabulary.eos in ids:
        raise DataError(
            f"{where}: the end of text {vocabulary.words[vocabulary.eos]!r} occurs inside a line; one record is one text"
        )
    return TokenLine(ids, finished, num_bytes, prompt)


def encode_tokens(lines: Iterable[TokenLine], vocabulary: TokenVocabulary) -> Text:
    """Return lines of ids as a `Text`: the end of text after every finished line. Empty cut lines are left out."""
    tokens, ends = array("i"), array("q", [0])
    num_bytes = 0
    for line in lines:
        tokens.extend(line.ids)
        if line.finished:
            tokens.append(vocabulary.eos)
        if len(tokens) > ends[-1]:
            ends.append(len(tokens))
            num_bytes += line.num_bytes
    return Text(np.array(tokens, dtype=np.int32), np.array(ends, dtype=np.int64), 0, 0, num_bytes)


def encode_file(path: str | Path, vocabulary: Vocabulary) -> Text:
    """Return a file in the ids of a vocabulary: words of a text, or the tokens of a text or of JSON lines."""
    if isinstance(vocabulary, TokenVocabulary):
        return read_token_text(path, vocabulary)
    return encode(read_lines(path), vocabulary)


def read_token_text(path: str | Path, vocabulary: TokenVocabulary) -> Text:
    """Return a file of texts or ids as a `Text`."""
    return encode_tokens(read_token_lines(path, vocabulary), vocabulary)
