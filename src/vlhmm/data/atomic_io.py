"""Bytes from and to disk. Input: a path or "-". Output: a byte stream, or a file that is written atomically.

Knows nothing of words.
"""

import gzip
import hashlib
import io
import os
import sys
import tempfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, cast

from vlhmm.errors import CheckpointError, DataError

STDIN = "-"
_LEFTOVER = ".part"  # how names end that are written to before they are renamed
_GZIP_MAGIC = b"\x1f\x8b"
_ZSTD_MAGIC = b"\x28\xb5\x2f\xfd"


def display_name(path: str | Path) -> str:
    """Return what messages call `path`."""
    return "standard input" if str(path) == STDIN else str(path)


@contextmanager
def open_bytes(path: str | Path) -> Iterator[BinaryIO]:
    """Open a file or standard input ("-") as bytes, decompressed if it is gzip or Zstandard (by suffix or magic bytes)."""
    if str(path) == STDIN:
        if sys.stdin is None:
            raise DataError("standard input is closed, expected text")
        buffer = sys.stdin.buffer
        peekable = buffer if hasattr(buffer, "peek") else io.BufferedReader(cast(io.RawIOBase, buffer))
        with _read_errors(path):
            yield _unpacked(cast(io.BufferedReader, peekable), "")  # never closed: it is not ours
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
        yield _unpacked(stream, str(path))


@contextmanager
def _read_errors(path: str | Path) -> Iterator[None]:
    try:
        yield
    except (OSError, EOFError, zlib.error) as error:  # the last two: broken gzip
        raise DataError(f"cannot read {display_name(path)}: {getattr(error, 'strerror', None) or error}") from None


def _unpacked(stream: io.BufferedReader, name: str) -> BinaryIO:
    head = stream.peek(4)[:4]
    # An empty file named .gz or .zst is reported as empty, not as broken.
    if head[:2] == _GZIP_MAGIC or (name.endswith(".gz") and head):
        return cast(BinaryIO, gzip.GzipFile(fileobj=stream, mode="rb"))
    if head == _ZSTD_MAGIC or (name.endswith(".zst") and head):
        return _unpacked_zstd(stream, name)
    return stream


def _unpacked_zstd(stream: io.BufferedReader, name: str) -> BinaryIO:
    """Return the bytes of a Zstandard stream of one or more frames; read by Python itself from 3.14 on."""
    try:
        if sys.version_info >= (3, 14):
            from compression.zstd import ZstdFile

            return cast(BinaryIO, ZstdFile(stream, "rb"))
        import zstandard
    except ImportError:
        raise DataError(
            f"{name or 'standard input'} is packed with Zstandard, which needs the package zstandard: "
            "pip install 'vlhmm[zstd]', or unpack it with zstd -d"
        ) from None
    return cast(BinaryIO, io.BufferedReader(_ZstdReader(stream, zstandard), 1 << 20))


class _ZstdReader(io.RawIOBase):
    """Unpacks Zstandard frames one after the other; a frame that is cut off is an error, not an end."""

    def __init__(self, stream: io.BufferedReader, zstandard: Any) -> None:
        self.stream, self.zstandard = stream, zstandard
        self.frame: Any = None  # None between frames
        self.packed, self.ready = b"", b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self.ready:
            packed = self.packed or self.stream.read(1 << 16)
            self.packed = b""
            if not packed:
                if self.frame is not None:
                    raise EOFError("the Zstandard stream is cut off")
                return 0
            if self.frame is None:
                self.frame = self.zstandard.ZstdDecompressor().decompressobj()
            try:
                self.ready = self.frame.decompress(packed)
            except self.zstandard.ZstdError as error:
                raise OSError(str(error)) from None
            if self.frame.eof:
                self.packed, self.frame = self.frame.unused_data, None
        size = min(len(buffer), len(self.ready))
        buffer[:size] = self.ready[:size]
        self.ready = self.ready[size:]
        return size


def sha256_of(path: Path) -> str:
    """Return the SHA-256 checksum of a file."""
    with open(path, "rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def write_atomically(path: str | Path, content: bytes) -> None:
    """Replace the content of `path` atomically: after a kill or a full disk it has its old content."""
    try:
        with replace_atomically(path) as temporary:
            temporary.write_bytes(content)
    except OSError as error:
        raise DataError(f"cannot write {path}: {error.strerror or error}") from None


@contextmanager
def replace_atomically(path: str | Path) -> Iterator[Path]:
    """Yield a temporary name next to `path`. At the end the file is synced and renamed to `path`, or removed after an error."""
    path = Path(path)
    if path.exists() and not (path.is_file() or path.is_dir()):  # renaming would put a file in its place
        raise DataError(f"{path} is a device or a pipe, which a file would replace; name a file")
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=_LEFTOVER)
    os.close(handle)
    temporary = Path(name)
    try:
        yield temporary
        with open(temporary, "rb") as stream:
            os.fsync(stream.fileno())
        os.chmod(temporary, 0o666 & ~_umask())  # mkstemp makes files for the owner alone
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


@contextmanager
def owned_folder(path: Path) -> Iterator[None]:
    """Claim a run folder for this process, creating it if needed, and remove what a killed process left half written."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CheckpointError(f"cannot make {path}: {error.strerror}; choose another --out") from None
    try:
        with claimed(path) as ours:
            if not ours:
                raise CheckpointError(f"another process is training in {path}; wait for it, or choose another --out")
            for leftover in path.glob(f"**/.*{_LEFTOVER}"):
                leftover.unlink(missing_ok=True)
            yield
    finally:
        if not any(path.iterdir()):  # refused before anything was written
            path.rmdir()


@contextmanager
def claimed(path: Path) -> Iterator[bool]:
    """Lock a file (created if needed) or folder until the block ends; yield False if another process holds it."""
    try:
        import fcntl
    except ImportError:  # no such locks on this system
        yield True
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    handle = os.open(path, os.O_RDONLY) if path.is_dir() else os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        ours = True
    except BlockingIOError:
        ours = False
    except OSError:  # a file system without locks
        ours = True
    try:
        yield ours
    finally:
        os.close(handle)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
