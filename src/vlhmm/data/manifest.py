"""The manifest of a run folder: a checksum of every file of the model, checked when the model is loaded.

`manifest.json` lists, for each file, the contents it may have. That is one content at rest. While a file is being
replaced it is two, the old and the new one, so that a kill at any moment leaves a folder whose files all match:

    1. the new content is written to a temporary name and synced
    2. the manifest is replaced: it lists the old and the new content
    3. the file is renamed to its place
    4. the manifest is replaced: it lists the new content alone

BLAKE2b with 32 bytes, read in pieces of 1 MiB: about one second per GB. A checksum finds damage, not forgery: who can
write the files can write the manifest.
"""

import hashlib
import json
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

from vlhmm.data.atomic_io import replace_atomically, write_atomically
from vlhmm.errors import CheckpointError, DataError

MANIFEST = "manifest.json"
FORMAT_VERSION = 1
MODEL_FILES = (
    "config.json",
    "vocabulary.txt",
    "tokenizer.json",
    "blocks.tsv",
    "model.safetensors",
    "calibration.json",
)
CHECKPOINT_FILES = ("checkpoint/state.safetensors",)  # of a baseline; that of an HMM has its own checksums
_PIECE = 1 << 20
logger = logging.getLogger(__name__)


class Content(NamedTuple):
    """Size and checksum of a file."""

    size: int
    blake2b: str


Allowed = tuple[Content | None, ...]  # None: the file may be missing


def content_of(path: Path) -> Content | None:
    """Return size and BLAKE2b-256 checksum of a file, read as a stream; None if there is no such file."""
    state, size = hashlib.blake2b(digest_size=32), 0
    try:
        with open(path, "rb", buffering=0) as stream:
            while piece := stream.read(_PIECE):
                state.update(piece)
                size += len(piece)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror or error}") from None
    return Content(size, state.hexdigest())


def confined(folder: Path, name: str) -> Path:
    """Return the path of a file of the folder; a name or a link that leads out of the folder is refused."""
    pure = PurePosixPath(name)
    if not name or pure.is_absolute() or ".." in pure.parts or "\\" in name or "\0" in name or len(name) > 255:
        raise CheckpointError(f"{folder} names the file {name[:80]!r}, expected a name inside the folder")
    path = folder / pure
    try:
        target, root = path.resolve(), folder.resolve()
    except (OSError, RuntimeError):  # links in a circle
        raise CheckpointError(f"{path} is a link that leads nowhere; copy the file into the folder") from None
    if not target.is_relative_to(root):
        raise CheckpointError(f"{path} is a link to {target}, outside the folder; copy the file into the folder")
    if target.exists() and not (target.is_file() or target.is_dir()):  # reading a pipe would wait for ever
        raise CheckpointError(f"{path} is a pipe or a device, expected a file; copy the file into the folder")
    return path


def read_manifest(folder: Path) -> dict[str, Allowed] | None:
    """Return the contents each file may have; None without a manifest, an error for a damaged one."""
    path = confined(folder, MANIFEST)
    remedy = f"restore the folder from a copy, or accept its files as they are with vlhmm manifest {folder} --accept"
    try:
        whole = json.loads(path.read_bytes())
    except FileNotFoundError:
        return None
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror or error}") from None
    except (ValueError, RecursionError):  # no JSON, no UTF-8, a number of thousands of digits, nested too deeply
        raise CheckpointError(f"{path} is damaged: not JSON; {remedy}") from None
    if not isinstance(whole, dict) or whole.get("format_version") != FORMAT_VERSION:
        version = whole.get("format_version") if isinstance(whole, dict) else None
        raise CheckpointError(f"{path} has format version {str(version)[:40]}, expected {FORMAT_VERSION}; {remedy}")
    files: Any = whole.get("files")
    if whole.get("checksum") != checksum_of(files):
        raise CheckpointError(f"{path} is damaged: it does not match its own checksum; {remedy}")
    try:
        return {
            str(name): tuple(None if each is None else Content(int(each["size"]), str(each["blake2b"])) for each in listed)
            for name, listed in files.items()
        }
    except (AttributeError, TypeError, KeyError, ValueError):
        raise CheckpointError(f"{path} is damaged: it lists no contents of files; {remedy}") from None


def checksum_of(value: object) -> str:
    """Return the BLAKE2b-256 checksum of a JSON value."""
    return hashlib.blake2b(json.dumps(value, sort_keys=True).encode(), digest_size=32).hexdigest()


def _write_manifest(folder: Path, allowed: dict[str, Allowed]) -> None:
    files = {
        name: [None if each is None else each._asdict() for each in contents]
        for name, contents in sorted(allowed.items())
        if contents != (None,)
    }
    whole = {"format_version": FORMAT_VERSION, "checksum": checksum_of(files), "files": files}
    write_atomically(folder / MANIFEST, (json.dumps(whole, indent=2) + "\n").encode())


def check_manifest(folder: Path, names: tuple[str, ...] = MODEL_FILES, except_for: tuple[str, ...] = ()) -> bool:
    """Check the folder's files: `check_names`, then `check_contents`."""
    check_names(folder, names)
    return check_contents(folder, names, except_for)


def check_names(folder: Path, names: tuple[str, ...] = MODEL_FILES) -> None:
    """Refuse a file that is a link out of the folder, a pipe or a device. Nothing is read: reading a pipe would not end."""
    for name in names:
        confined(folder, name)


def check_contents(folder: Path, names: tuple[str, ...] = MODEL_FILES, except_for: tuple[str, ...] = ()) -> bool:
    """Check files that passed `check_names` against the manifest; False, with a warning, if the folder has none.

    Raises a CheckpointError that names the first file that is damaged, missing or unlisted. Cost: one read of every file.
    """
    while True:
        listed = read_manifest(folder)
        try:
            return _check_all(folder, names, except_for, listed)
        except CheckpointError:
            if listed == read_manifest(folder):
                raise
            # another process has replaced a file meanwhile: look again


def _check_all(folder: Path, names: tuple[str, ...], except_for: tuple[str, ...], listed: dict[str, Allowed] | None) -> bool:
    if listed is None:
        if any((folder / name).exists() for name in names):
            logger.warning(
                f"{folder} has no {MANIFEST}: its files cannot be checked for damage; "
                f"record them as they are with vlhmm manifest {folder} --accept"
            )
        return False
    check_names(folder, tuple(listed.keys() - set(names)))  # the manifest's own names
    for name in names:
        path = folder / name
        if name in except_for or (name not in listed and not path.exists()):
            continue
        _check(folder, path, name, listed.get(name, (None,)))
    return True


def _check(folder: Path, path: Path, name: str, contents: Allowed) -> None:
    sizes = {None if each is None else each.size for each in contents}
    size = path.stat().st_size if path.is_file() else None
    if size is None and None not in sizes:
        advice = (
            f"restore it, or use the model without it: vlhmm manifest {folder} --remove-calibration"
            if name == "calibration.json"
            else _remedy(folder, name, contents)
        )
        raise CheckpointError(f"{path} is missing, and {MANIFEST} lists it; {advice}")
    if contents == (None,):
        raise CheckpointError(
            f"{path} is not listed in {MANIFEST}: it was added after the model was written; remove it, or accept it "
            f"with vlhmm manifest {folder} --accept"
        )
    if size is None:
        return
    found = f"{size:,} bytes" if size not in sizes else "other bytes"
    if size not in sizes or content_of(path) not in contents:
        expected = next(each for each in contents if each is not None)
        wanted = f"{expected.size:,} bytes with the checksum {expected.blake2b[:12]}"
        raise CheckpointError(f"{path} is damaged or was changed: got {found}, {MANIFEST} lists {wanted}; {_remedy(folder, name, contents)}")


def _remedy(folder: Path, name: str, contents: Allowed) -> str:
    """Say how a file can be restored: by training, where the checkpoint has a copy of what the manifest lists."""
    copy = folder / "checkpoint" / "best.safetensors"
    if name == "model.safetensors" and copy.is_file() and content_of(copy) in contents:
        return "run the same vlhmm train command again: it restores the file from checkpoint/"
    return f"restore it from a copy, or train again into another folder (vlhmm manifest {folder} --help explains more)"


@contextmanager
def replace_listed(folder: Path, name: str) -> Iterator[Path]:
    """Yield a temporary name; at the end replace `name` and update the manifest.

    A kill at any moment leaves the old or the new file, and a manifest that accepts it. An error leaves the old ones.
    """
    path = confined(folder, name)
    listed = read_manifest(folder) or {}
    with replace_atomically(path) as temporary:
        yield temporary
        new = content_of(temporary)
        before = listed.get(name, (None,))
        if before != (new,):
            _write_manifest(folder, listed | {name: tuple(dict.fromkeys((*before, new)))})
    _write_manifest(folder, listed | {name: (new,)})


def write_listed(folder: Path, name: str, content: bytes) -> None:
    """Replace a small file and its entry in the manifest."""
    try:
        with replace_listed(folder, name) as temporary:
            temporary.write_bytes(content)
    except OSError as error:
        raise DataError(f"cannot write {folder / name}: {error.strerror or error}") from None


def remove_listed(folder: Path, name: str) -> None:
    """Remove a file and its entry in the manifest."""
    path, listed = confined(folder, name), read_manifest(folder)
    if listed is None or name not in listed:
        path.unlink(missing_ok=True)
        return
    _write_manifest(folder, listed | {name: tuple(dict.fromkeys((*listed[name], None)))})
    path.unlink(missing_ok=True)
    _sync(folder)
    _write_manifest(folder, {other: contents for other, contents in listed.items() if other != name})


def accept_files(folder: Path, names: tuple[str, ...] = (*MODEL_FILES, *CHECKPOINT_FILES)) -> list[str]:
    """List the folder's files as they are, whatever the manifest says; the names come back."""
    found = {name: content_of(confined(folder, name)) for name in names}
    present = {name: (content,) for name, content in found.items() if content is not None}
    _write_manifest(folder, dict(present))
    return list(present)


def _sync(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError:  # a file system whose folders cannot be synced
        pass
    finally:
        os.close(handle)
