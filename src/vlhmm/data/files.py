"""Bytes from and to disk. Input: a path or "-". Output: a byte stream, or a file that is whole or not there.

Knows nothing of words.
"""

import gzip
import io
import os
import sys
import tempfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, cast

from vlhmm.errors import DataError

STDIN = "-"
_GZIP_MAGIC = b"\x1f\x8b"


def display_name(path: str | Path) -> str:
    """What messages call `path`."""
    return "standard input" if str(path) == STDIN else str(path)


@contextmanager
def open_bytes(path: str | Path) -> Iterator[BinaryIO]:
    """The bytes of a file or of standard input ("-"), unpacked if they are gzip (by suffix or by magic)."""
    if str(path) == STDIN:
        if sys.stdin is None:
            raise DataError("standard input is closed, expected text")
        buffer = sys.stdin.buffer
        peekable = buffer if hasattr(buffer, "peek") else io.BufferedReader(cast(io.RawIOBase, buffer))
        with _read_errors(path):
            yield _unpacked(cast(io.BufferedReader, peekable), packed=False)  # never closed: it is not ours
        return
    try:
        stream = open(path, "rb")
    except FileNotFoundError:
        raise DataError(f"no such file: {path}") from None
    except IsADirectoryError:
        raise DataError(f"{path} is a directory, expected a file") from None
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror or error}") from None
    with stream, _read_errors(path):
        yield _unpacked(stream, packed=str(path).endswith(".gz"))


@contextmanager
def _read_errors(path: str | Path) -> Iterator[None]:
    try:
        yield
    except (OSError, EOFError, zlib.error) as error:  # the last two: broken gzip
        raise DataError(f"cannot read {display_name(path)}: {getattr(error, 'strerror', None) or error}") from None


def _unpacked(stream: io.BufferedReader, packed: bool) -> BinaryIO:
    head = stream.peek(2)[:2]
    # An empty file named .gz is reported as empty, not as broken gzip.
    if head == _GZIP_MAGIC or (packed and head):
        return cast(BinaryIO, gzip.GzipFile(fileobj=stream, mode="rb"))
    return stream


def write_atomically(path: str | Path, content: bytes) -> None:
    """Nothing; afterwards `path` holds `content`, or, after a kill or a full disk, what it held before."""
    path = Path(path)
    temporary = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        with open(handle, "wb") as stream:
            stream.write(content)
            stream.flush()
            os.fsync(stream.fileno())
        os.chmod(temporary, 0o666 & ~_umask())  # mkstemp makes files for the owner alone
        os.replace(temporary, path)
    except OSError as error:
        raise DataError(f"cannot write {path}: {error.strerror or error}") from None
    finally:
        if temporary is not None and os.path.exists(temporary):
            os.unlink(temporary)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
