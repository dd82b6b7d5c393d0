"""Texts larger than memory: ids in shards on disk, memory-mapped, with checksums.

Input: text files, or `Text`s one after the other. Output: a folder, and `PreparedText` that reads it part by part.
docs/prepared.md has the layout, which any language can read. Knows nothing of models, and needs no torch.
"""

import hashlib
import json
import logging
import os
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain, islice
from pathlib import Path
from typing import IO, Any, NamedTuple, TypeVar

import numpy as np

from vlhmm.data.atomic_io import STDIN, display_name, owned_folder, sha256_of, write_atomically
from vlhmm.data.manifest import check_names, confined
from vlhmm.data.text import Text, encode, read_lines
from vlhmm.data.tokenizer import TokenVocabulary, encode_tokens, read_token_lines
from vlhmm.data.vocabulary import EOS, UNK, Vocabulary
from vlhmm.errors import ConfigError, DataError
from vlhmm.limits import shortened

FORMAT_VERSION = 1
SHARD_TOKENS = 1 << 25
MAX_TYPES = 1 << 22  # largest number of distinct words to count; later ones become <unk>
LINES_PER_CHUNK = 1 << 15
_ABOUT = "prepared.json"
_COUNTS = "counts.u64"
_SPOOL = ".spool.part"
logger = logging.getLogger(__name__)

_Line = TypeVar("_Line")
Progress = Callable[[str, int, int], None]  # (what is done, steps done, steps in all; 0: not known)


class Shard(NamedTuple):
    """One shard's part of the text, and the SHA-256 of its three files by their endings."""

    tokens: int
    sentences: int
    literal_unk: int
    sha256: dict[str, str]  # of NNNNN.ids, NNNNN.ends, NNNNN.unk


class Part(NamedTuple):
    """Consecutive lines of one shard."""

    shard: int
    first: int  # line of the shard
    last: int  # the line after the last one
    tokens: int


class PreparedText(Text):
    """A text on disk. `read` and `token_arrays` bring parts of it to memory; `tokens` and `offsets` all of it."""

    path: Path
    vocabulary: Vocabulary
    shards: tuple[Shard, ...]

    def __init__(self, path: str | Path) -> None:
        path = Path(path)
        check_names(path, (_ABOUT, _COUNTS, "vocabulary.txt", "tokenizer.json"))
        about = _read_about(path)
        vocabulary = _read_vocabulary(path, about)
        if _vocabulary_checksum(vocabulary) != about["vocabulary_sha256"]:
            raise DataError(f"{path / 'vocabulary.txt'} is not the vocabulary that {path} was prepared with; {_AGAIN}")
        fields = dict(
            path=path,
            vocabulary=vocabulary,
            shards=tuple(Shard(**shard) for shard in about["shards"]),
            num_oov=about["oov"],
            num_unk=about["literal_unk"],
            num_bytes=about["bytes"],
            digest=_digest(about),
            _id_type=np.dtype(about["id_type"]).newbyteorder("<"),
            _sentences=about["sentences"],
            _tokens=about["tokens"],
            _checked=set(),
            _counts_sha256=about.get("counts_sha256"),
        )
        for name, value in fields.items():
            object.__setattr__(self, name, value)  # frozen, as every Text
        self._check_sizes()

    digest: str  # of all ids and of the vocabulary
    _id_type: np.dtype
    _sentences: int
    _tokens: int
    _checked: set[tuple[int, str]]
    _counts_sha256: str | None

    @property
    def num_sentences(self) -> int:
        return self._sentences

    @property
    def num_tokens(self) -> int:
        return self._tokens

    @property
    def tokens(self) -> np.ndarray:  # type: ignore[override]
        """All ids, copied to memory, for callers that cannot read a text in parts."""
        return np.concatenate([np.zeros(0, np.int32), *(ids.astype(np.int32) for ids in self.token_arrays())])

    @property
    def offsets(self) -> np.ndarray:  # type: ignore[override]
        """All line ends, copied to memory."""
        before = np.cumsum([0, *(shard.tokens for shard in self.shards)])
        ends = [self._ends(i).astype(np.int64) + before[i] for i in range(len(self.shards))]
        return np.concatenate([np.zeros(1, np.int64), *ends])

    @property
    def literal_unk(self) -> np.ndarray:  # type: ignore[override]
        """Positions of literal <unk> tokens."""
        before = np.cumsum([0, *(shard.tokens for shard in self.shards)])
        places = [self._array(i, "unk", "<u8").astype(np.int64) + before[i] for i in range(len(self.shards))]
        return np.concatenate([np.zeros(0, np.int64), *places])

    def token_arrays(self) -> Iterator[np.ndarray]:
        """Yield the ids of one shard after the other, memory-mapped."""
        for number in range(len(self.shards)):
            yield self._array(number, "ids", self._id_type)

    def word_counts(self, vocab_size: int) -> np.ndarray:
        return self._counts()[0]

    def start_counts(self, vocab_size: int) -> np.ndarray:
        return self._counts()[1]

    def parts(self, num_tokens: int) -> list[Part]:
        """Return the text in consecutive parts of whole lines, none across shards, about `num_tokens` tokens each."""
        found = []
        for number, shard in enumerate(self.shards):
            many = max(1, round(shard.tokens / num_tokens))
            ends = self._ends(number)
            cuts = [0, *np.unique(np.searchsorted(ends, np.linspace(0, shard.tokens, many + 1)[1:]) + 1).tolist()]
            starts = np.concatenate([[0], ends[np.array(cuts[1:]) - 1]]).astype(np.int64)
            found += [
                Part(number, first, last, int(size))
                for first, last, size in zip(cuts, cuts[1:], np.diff(starts), strict=False)
            ]
        return found

    def read(self, parts: Sequence[Part]) -> Text:
        """Return those parts as one text in memory. Its bytes and the words beyond the vocabulary are not counted: 0."""
        tokens, offsets, unk, before = [], [np.zeros(1, np.int64)], [], 0
        for part in parts:
            ends = self._ends(part.shard)
            start = int(ends[part.first - 1]) if part.first else 0
            line_ends = ends[part.first : part.last].astype(np.int64)
            tokens.append(self._array(part.shard, "ids", self._id_type)[start : line_ends[-1]].astype(np.int32))
            offsets.append(line_ends - start + before)
            places = self._array(part.shard, "unk", "<u8")
            low, high = np.searchsorted(places, [start, line_ends[-1]])
            unk.append(places[low:high].astype(np.int64) - start + before)
            before += int(line_ends[-1]) - start
        if not parts:
            return Text(np.zeros(0, np.int32), offsets[0], 0, 0, 0)
        literal = np.concatenate(unk)
        return Text(np.concatenate(tokens), np.concatenate(offsets), 0, len(literal), 0, literal)

    def token_range(self, start: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
        """Return tokens start .. stop - 1 of the text, and where among them the text itself says <unk>."""
        ids, unk, before, done = [], [], 0, 0
        for number, shard in enumerate(self.shards):
            low, high = max(start - before, 0), min(stop - before, shard.tokens)
            if low < high:
                ids.append(self._array(number, "ids", self._id_type)[low:high].astype(np.int32))
                places = self._array(number, "unk", "<u8")
                first, last = np.searchsorted(places, [low, high])
                unk.append(places[first:last].astype(np.int64) - low + done)
                done += high - low
            before += shard.tokens
        return np.concatenate([np.zeros(0, np.int32), *ids]), np.concatenate([np.zeros(0, np.int64), *unk])

    def _counts(self) -> np.ndarray:
        path = self.path / _COUNTS
        try:
            counts = np.fromfile(path, dtype="<u8").astype(np.int64)
        except OSError as error:
            raise DataError(f"cannot read {path}: {error.strerror}; {_AGAIN}") from None
        if self._counts_sha256 is not None and sha256_of(path) != self._counts_sha256:
            raise DataError(f"{path} is damaged: it does not match its checksum; {_AGAIN}")
        if len(counts) != 2 * len(self.vocabulary) or counts[: len(self.vocabulary)].sum() != self.num_tokens:
            raise DataError(f"{path} is damaged: its counts do not add up to {self.num_tokens:,} tokens; {_AGAIN}")
        return counts.reshape(2, -1)

    def _ends(self, number: int) -> np.ndarray:
        return self._array(number, "ends", "<u8")

    def _array(self, number: int, ending: str, dtype: Any) -> np.ndarray:
        """Return one file of a shard, memory-mapped; its checksum is compared the first time."""
        path = self.path / f"{number:05d}.{ending}"
        if not path.stat().st_size:
            return np.zeros(0, dtype)
        if (number, ending) not in self._checked:
            got, expected = sha256_of(path), self.shards[number].sha256[ending]
            if got != expected:
                raise DataError(f"{path} is damaged: SHA-256 {got[:12]}…, expected {expected[:12]}…; {_AGAIN}")
            self._checked.add((number, ending))
        return np.memmap(path, dtype=dtype, mode="r")

    def _check_sizes(self) -> None:
        tokens, sentences = sum(s.tokens for s in self.shards), sum(s.sentences for s in self.shards)
        unk = sum(s.literal_unk for s in self.shards)
        if (tokens, sentences, unk) != (self._tokens, self._sentences, self.num_unk):
            raise DataError(f"{self.path / _ABOUT} is damaged: its shards do not add up to the text; {_AGAIN}")
        for number, shard in enumerate(self.shards):
            sizes = {"ids": shard.tokens * self._id_type.itemsize, "ends": shard.sentences * 8}
            for ending, expected in (sizes | {"unk": shard.literal_unk * 8}).items():
                path = confined(self.path, f"{number:05d}.{ending}")
                got = path.stat().st_size if path.exists() else None
                if got != expected:
                    state = "is missing" if got is None else f"has {got:,} bytes"
                    raise DataError(f"{path} {state}, expected {expected:,} bytes; {_AGAIN}")


class PreparedWriter:
    """Writes a prepared text, `Text` by `Text`; the folder is whole when the `with` block has ended without an error."""

    def __init__(
        self, path: str | Path, vocabulary: Vocabulary, shard_tokens: int = SHARD_TOKENS, sources: Sequence[str] = ()
    ) -> None:
        if shard_tokens < 1:
            raise ConfigError(f"shard_tokens is {shard_tokens}, expected at least 1")
        self.path, self.vocabulary, self.shard_tokens, self.sources = Path(path), vocabulary, shard_tokens, sources
        self.id_type = np.dtype("<u2" if len(vocabulary) <= 1 << 16 else "<u4")
        self.shards: list[Shard] = []
        self.counts = np.zeros((2, len(vocabulary)), dtype=np.int64)
        self.totals = {"oov": 0, "bytes": 0}
        self.files: dict[str, IO[bytes]] = {}
        self.hashes: dict[str, Any] = {}
        self.here = {"ids": 0, "ends": 0, "unk": 0}  # entries of the shard under way

    def __enter__(self) -> "PreparedWriter":
        check_new_folder(self.path)
        self.path.mkdir(parents=True, exist_ok=True)
        self.vocabulary.write(self.path / "vocabulary.txt")
        if isinstance(self.vocabulary, TokenVocabulary):
            write_atomically(self.path / "tokenizer.json", self.vocabulary.content)
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        for file in self.files.values() if kind is not None else ():
            file.close()
        if kind is None:
            self._finish()

    def add(self, text: Text) -> None:
        """Append the lines of a text whose ids are those of the vocabulary."""
        self.totals["oov"] += text.num_oov
        self.totals["bytes"] += text.num_bytes
        if not text.num_tokens:
            return
        offsets, ids, size = text.offsets, text.tokens, len(self.vocabulary)
        if ids.min() < 0 or ids.max() >= size:
            raise DataError(f"ids run from {ids.min()} to {ids.max()}, expected 0 to {size - 1}: another vocabulary's")
        self.counts[0] += np.bincount(ids, minlength=size)
        self.counts[1] += np.bincount(ids[offsets[:-1]], minlength=size)
        first = 0
        while first < text.num_sentences:
            if not self.files:
                self._open_shard()
            start = int(offsets[first])
            room = self.shard_tokens - self.here["ids"]
            last = min(int(np.searchsorted(offsets, start + room, side="left")), text.num_sentences)
            end = int(offsets[last])
            low, high = np.searchsorted(text.literal_unk, [start, end])
            before = self.here["ids"]
            self._append("ends", (offsets[first + 1 : last + 1] - start + before).astype("<u8"))
            self._append("unk", (text.literal_unk[low:high] - start + before).astype("<u8"))
            self._append("ids", ids[start:end].astype(self.id_type))
            if self.here["ids"] >= self.shard_tokens:
                self._close_shard()
            first = last

    def _open_shard(self) -> None:
        for ending in self.here:
            self.files[ending] = open(self.path / f"{len(self.shards):05d}.{ending}", "wb")
            self.hashes[ending] = hashlib.sha256()
            self.here[ending] = 0

    def _append(self, ending: str, values: np.ndarray) -> None:
        content = values.tobytes()
        self.files[ending].write(content)
        self.hashes[ending].update(content)
        self.here[ending] += len(values)

    def _close_shard(self) -> None:
        for file in self.files.values():
            file.flush()
            os.fsync(file.fileno())
            file.close()
        sums = {ending: each.hexdigest() for ending, each in self.hashes.items()}
        self.shards.append(Shard(self.here["ids"], self.here["ends"], self.here["unk"], sums))
        self.files = {}
        self.here = dict.fromkeys(self.here, 0)

    def _finish(self) -> None:
        if self.files:
            self._close_shard()
        if self.counts[0].sum() == self.counts[0, self.vocabulary.eos]:
            raise DataError(f"{', '.join(self.sources) or 'the text'} holds nothing but empty lines, expected words")
        counts = self.counts.astype("<u8").tobytes()
        write_atomically(self.path / _COUNTS, counts)
        about = {
            "format_version": FORMAT_VERSION,
            "id_type": f"uint{8 * self.id_type.itemsize}",
            "vocabulary_size": len(self.vocabulary),
            "vocabulary_sha256": _vocabulary_checksum(self.vocabulary),
            "tokenizer": self.vocabulary.sha256 if isinstance(self.vocabulary, TokenVocabulary) else None,
            "eos": self.vocabulary.eos,
            "unk": self.vocabulary.unk,
            "tokens": sum(shard.tokens for shard in self.shards),
            "sentences": sum(shard.sentences for shard in self.shards),
            "oov": self.totals["oov"],
            "literal_unk": sum(shard.literal_unk for shard in self.shards),
            "bytes": self.totals["bytes"],
            "sources": list(self.sources),
            "counts_sha256": hashlib.sha256(counts).hexdigest(),
            "shards": [shard._asdict() for shard in self.shards],
        }
        about["checksum"] = _about_checksum(about)
        # last, so that a folder with one is whole
        write_atomically(self.path / _ABOUT, (json.dumps(about, indent=1) + "\n").encode())


def token_stream(tokens: np.ndarray | Text) -> np.ndarray | Iterator[np.ndarray]:
    """Return all ids of a text in memory, or the arrays of a prepared one in turn: what `cluster_words` reads."""
    if isinstance(tokens, PreparedText):
        return tokens.token_arrays()
    return tokens.tokens if isinstance(tokens, Text) else tokens


def word_counts_of(tokens: np.ndarray | Text, vocab_size: int) -> np.ndarray:
    """Return how often each word occurs in a text, or in an array of ids."""
    return tokens.word_counts(vocab_size) if isinstance(tokens, Text) else np.bincount(tokens, minlength=vocab_size)


def is_prepared(path: str | Path) -> bool:
    """Return whether a path is the folder of a prepared text."""
    return (Path(path) / _ABOUT).is_file()


def prepare(
    paths: Sequence[str | Path],
    out: str | Path,
    vocabulary: Vocabulary | None = None,
    max_vocab: int | None = None,
    min_count: int = 1,
    shard_tokens: int = SHARD_TOKENS,
    max_types: int = MAX_TYPES,
    log: Callable[[str], None] = lambda _: None,
    progress: Progress | None = None,
) -> PreparedText:
    """Read text files once and write them as one prepared text.

    The vocabulary is that of all files together (see `Vocabulary.build`) unless given. Memory does not depend on the
    length of the text: ids go to disk as they come. Of words, the first `max_types` distinct ones are counted; words
    first met after those become <unk>, and a note says so.
    """
    if vocabulary is not None and (max_vocab is not None or min_count != 1):
        raise ConfigError("got a vocabulary and max_vocab or min_count, expected one or the other; drop one")
    if not paths:
        raise ConfigError("there is no text to prepare, expected at least one file")
    if [str(path) for path in paths].count(STDIN) > 1:
        raise ConfigError('got standard input ("-") several times, expected once at most')
    out = Path(out)
    check_new_folder(out)
    with owned_folder(out):
        sources = [display_name(path) for path in paths]
        if vocabulary is None:
            try:
                lines = chain.from_iterable(map(read_lines, paths))
                _learn(lines, out, max_vocab, min_count, max_types, shard_tokens, sources, log, progress)
            finally:
                (out / _SPOOL).unlink(missing_ok=True)
        else:
            with PreparedWriter(out, vocabulary, shard_tokens, sources) as writer:
                done = 0
                for text in _encoded(paths, vocabulary):
                    writer.add(text)
                    done += text.num_tokens
                    if progress:
                        progress("reading", done, 0)
    return PreparedText(out)


def check_new_folder(path: Path) -> None:
    """Refuse a folder that holds anything but what an unfinished preparation has left."""
    if is_prepared(path):
        raise DataError(f"{path} holds a prepared text already; choose another --out, or remove it")
    known = {"vocabulary.txt", "tokenizer.json", _COUNTS, _SPOOL}
    for file in path.iterdir() if path.is_dir() else ():
        if file.name not in known and file.suffix not in (".ids", ".ends", ".unk", ".part"):
            raise DataError(f"{path} is not empty ({file.name}); choose another --out")


def _learn(
    lines: Iterable[list[str]],
    out: Path,
    max_vocab: int | None,
    min_count: int,
    max_types: int,
    shard_tokens: int,
    sources: Sequence[str],
    log: Callable[[str], None],
    progress: Progress | None,
) -> None:
    """Write ids in order of first appearance to a spool file, and renumber them into shards once all words are counted."""
    ids = _Provisional(max_types)
    spool, num_bytes, done = out / _SPOOL, 0, 0
    counts = np.zeros(1 << 16, dtype=np.int64)
    with spool.open("wb") as file:
        for chunk in _chunks(lines):
            buffer = array("i")
            for words in chunk:
                buffer.extend(map(ids.__getitem__, words))
                buffer.append(_Provisional.EOS)
                joined = " ".join(words)
                num_bytes += (len(joined) if joined.isascii() else len(joined.encode())) + 1
            new = np.frombuffer(buffer, dtype=np.int32)
            if len(ids) > len(counts):
                counts = np.concatenate([counts, np.zeros(len(ids), dtype=np.int64)])
            counts += np.bincount(new, minlength=len(counts))
            file.write(new.astype("<i4").tobytes())
            done += len(new)
            if progress:
                progress("reading", done, 0)
    if ids.is_full:
        log(
            f"more than {max_types:,} distinct words: those first met later ({counts[_Provisional.BEYOND]:,} tokens) "
            "become <unk> without being counted; give --vocab or raise --max-types to have them"
        )
    words = list(ids)
    occurring = Counter({w: int(n) for w, n in zip(words, counts[: len(words)], strict=True) if w != _BEYOND_WORD})
    vocabulary = Vocabulary.build(occurring, max_vocab, min_count)
    new_of_old = vocabulary.encode(words)
    new_of_old[_Provisional.BEYOND] = vocabulary.unk
    del ids, words, occurring
    with PreparedWriter(out, vocabulary, shard_tokens, sources) as writer:
        for start, old in _spooled(spool):
            tokens, offsets = new_of_old[old], np.flatnonzero(old == _Provisional.EOS) + 1
            literal = np.flatnonzero(old == _Provisional.UNK)
            oov = int((tokens == vocabulary.unk).sum()) - len(literal)
            writer.add(Text(tokens, np.concatenate([[0], offsets]), oov, len(literal), 0, literal))
            if progress:
                progress("writing", start + len(old), done)
        writer.totals["bytes"] = num_bytes


_BEYOND_WORD = " "  # no word of a text: the reader splits at blanks


class _Provisional(dict[str, int]):
    """Ids in order of appearance, for a limited number of words; all further ones share an id."""

    EOS, UNK, BEYOND = 0, 1, 2

    def __init__(self, limit: int) -> None:
        super().__init__({EOS: self.EOS, UNK: self.UNK, _BEYOND_WORD: self.BEYOND})
        self.limit, self.is_full = limit + 3, False

    def __missing__(self, word: str) -> int:
        if len(self) >= self.limit:
            self.is_full = True
            return self.BEYOND
        number = self[word] = len(self)
        return number


def _spooled(path: Path, chunk: int = 1 << 22) -> Iterator[tuple[int, np.ndarray]]:
    """Yield (place, ids) of the spool in chunks of whole lines."""
    left, place = np.zeros(0, np.int32), 0
    with open(path, "rb") as file:
        while content := file.read(4 * chunk):
            ids = np.concatenate([left, np.frombuffer(content, dtype="<i4")])
            ends = np.flatnonzero(ids == _Provisional.EOS)
            cut = int(ends[-1]) + 1 if len(ends) else 0
            left = ids[cut:]
            if cut:
                yield place, ids[:cut]
            place += cut


def _encoded(paths: Sequence[str | Path], vocabulary: Vocabulary) -> Iterator[Text]:
    for path in paths:
        if isinstance(vocabulary, TokenVocabulary):
            for lines in _chunks(read_token_lines(path, vocabulary)):
                yield encode_tokens(lines, vocabulary)
        else:
            for words in _chunks(read_lines(path)):
                yield encode(words, vocabulary)


def _chunks(lines: Iterable[_Line]) -> Iterator[list[_Line]]:
    iterator = iter(lines)
    while chunk := list(islice(iterator, LINES_PER_CHUNK)):
        yield chunk


_AGAIN = "prepare the text again with vlhmm prepare"
_COUNT_FIELDS = ("vocabulary_size", "eos", "unk", "tokens", "sentences", "oov", "literal_unk", "bytes")
_SHARD_COUNTS = ("tokens", "sentences", "literal_unk")
_ENDINGS = ("ids", "ends", "unk")
_MAX_COUNT = 1 << 53


def _read_about(path: Path) -> dict[str, Any]:
    """Return the content of prepared.json, every field of the expected type and range."""
    file = path / _ABOUT
    try:
        about = json.loads(file.read_text(encoding="utf-8"))
        version = about["format_version"]
    except FileNotFoundError:
        raise DataError(f"{path} is no prepared text: it has no {_ABOUT}; make one with vlhmm prepare") from None
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise DataError(f"{file} is damaged ({shortened(error, 80)}); {_AGAIN}") from None
    if type(version) is not int or version != FORMAT_VERSION:
        raise DataError(f"{file} has format version {shortened(version)}, this vlhmm reads {FORMAT_VERSION}; {_AGAIN}")
    if "checksum" not in about:
        logger.warning(f"{file} has no checksum: it was written by an older vlhmm and cannot be checked for damage")
    elif about["checksum"] != _about_checksum(about):
        raise DataError(f"{file} is damaged: it does not match its own checksum; {_AGAIN}")
    if wrong := _wrong_field(about):
        raise DataError(f"{file} is damaged: {wrong} is missing, unknown or out of range; {_AGAIN}")
    return about


def _about_checksum(about: dict[str, Any]) -> str:
    rest = {name: value for name, value in about.items() if name != "checksum"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()


def _wrong_field(about: dict[str, Any]) -> str | None:
    """Return the name of a field that is not what it should be; None if all are."""

    def is_count(value: object) -> bool:
        return type(value) is int and 0 <= value < _MAX_COUNT

    def is_checksum(value: object) -> bool:
        return isinstance(value, str) and len(value) == 64 and value.isascii() and value.isalnum()

    for name in _COUNT_FIELDS:
        if not is_count(about.get(name)) and not (name == "unk" and about.get(name) == -1):  # ids have no <unk>
            return name
    if about.get("id_type") not in ("uint16", "uint32"):
        return "id_type"
    for name in ("vocabulary_sha256", "tokenizer", "counts_sha256"):
        if not is_checksum(about.get(name)) and not (name != "vocabulary_sha256" and about.get(name) is None):
            return name
    if not isinstance(about.get("shards"), list):
        return "shards"
    for number, shard in enumerate(about["shards"]):
        if not isinstance(shard, dict) or shard.keys() != {*_SHARD_COUNTS, "sha256"}:
            return f"shards[{number}]"
        sums = shard["sha256"]
        if not isinstance(sums, dict) or sums.keys() != {*_ENDINGS} or not all(map(is_checksum, sums.values())):
            return f"shards[{number}].sha256"
        for name in _SHARD_COUNTS:
            if not is_count(shard[name]):
                return f"shards[{number}].{name}"
    return None


def _digest(about: dict[str, Any]) -> str:
    content = hashlib.sha256(about["vocabulary_sha256"].encode())
    for shard in about["shards"]:
        content.update("".join(shard["sha256"][ending] for ending in _ENDINGS).encode())
    return content.hexdigest()


def _read_vocabulary(path: Path, about: dict[str, Any]) -> Vocabulary:
    if not about.get("tokenizer"):
        return Vocabulary.read(path / "vocabulary.txt")
    file = path / "tokenizer.json"
    if not file.exists() or sha256_of(file) != about["tokenizer"]:
        raise DataError(f"{file} is not the tokenizer that {path} was prepared with; {_AGAIN}")
    return TokenVocabulary.from_bytes(file.read_bytes(), about["eos"], str(file))


def _vocabulary_checksum(vocabulary: Vocabulary) -> str:
    return hashlib.sha256("".join(f"{word}\n" for word in vocabulary.words).encode()).hexdigest()
