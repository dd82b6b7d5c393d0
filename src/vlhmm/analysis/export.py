"""The model as plain matrices, for other programs. Input: a model. Output: files, and what is in them.

| kind | what is written |
| --- | --- |
| npz, safetensors | `start` (S,), `transition` (S, S), `emission` (S, V), float32 probabilities |
| ctrl-g | a folder that Ctrl-G's HMM class loads: `model.safetensors` and `config.json`, see below |
| hmmlearn | .npz with `startprob_`, `transmat_`, `emissionprob_`, float64, for small models |

Ctrl-G's arrays are `alpha_exp` (S, S), probabilities, and `beta` (S, V) and `gamma` (S,), their logarithms;
its configuration has `hidden_states`, `vocab_size` and `eos_token_id`.

A and O are written a few rows at a time: only the file is large. The matrices are those of one sentence or
stream: what the context rule "reset" does after an <eos> is not in them.
"""

import json
import os
import struct
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, Literal, NamedTuple

import numpy as np
import torch

from vlhmm.data.atomic_io import replace_atomically
from vlhmm.data.user_text import gibibytes
from vlhmm.data.vocabulary import Vocabulary
from vlhmm.errors import DataError, QueryError
from vlhmm.process import Process, process_of

Kind = Literal["npz", "safetensors", "ctrl-g", "hmmlearn"]
KINDS: tuple[Kind, ...] = ("npz", "safetensors", "ctrl-g", "hmmlearn")
HMMLEARN_MAX_STATES = 8192
LOG_ZERO = -1e30  # Ctrl-G multiplies log-probabilities by a mask: minus infinity times zero would be no number


class Exported(NamedTuple):
    """What was written."""

    path: Path
    kind: Kind
    num_bytes: int


class Matrices(NamedTuple):
    """What a file holds, as probabilities."""

    start: np.ndarray  # (S,)
    transition: np.ndarray  # (S, S)
    emission: np.ndarray  # (S, V)
    vocabulary: Vocabulary | None


class _Array(NamedTuple):
    """An array to be written: its shape, and its rows a chunk at a time."""

    dtype: np.dtype
    shape: tuple[int, ...]
    chunks: Callable[[], Iterator[np.ndarray]]

    @property
    def num_bytes(self) -> int:
        return self.dtype.itemsize * int(np.prod(self.shape))


def export_bytes(model: Any, kind: Kind) -> int:
    """How large an export would be."""
    process = process_of(model)
    size, vocab_size = process.num_states, process.vocab_size
    return (8 if kind == "hmmlearn" else 4) * size * (1 + size + vocab_size)


def export(model: Any, path: str | Path, kind: Kind | None = None) -> Exported:
    """The model's dense matrices in `path`, whole or not at all; the kind follows from the suffix unless
    given."""
    path = Path(path)
    chosen = kind or _kind_of(path)
    if chosen not in KINDS:
        raise QueryError(f"unknown kind of export {chosen!r}, expected one of {', '.join(KINDS)}")
    process = process_of(model)
    if chosen == "hmmlearn" and process.num_states > HMMLEARN_MAX_STATES:
        raise QueryError(
            f"hmmlearn holds A in memory in float64: {process.num_states:,} states are too many, expected at "
            f"most {HMMLEARN_MAX_STATES:,}; export npz or safetensors"
        )
    _check_room(path, export_bytes(model, chosen))
    arrays = _arrays(process, chosen)
    notes = {
        "format": "vlhmm export 1",
        "rule": model.rule,
        "words": json.dumps(list(model.vocabulary.words)),
    }
    if chosen == "ctrl-g":
        path.mkdir(parents=True, exist_ok=True)
        with _replacing(path / "model.safetensors") as stream:
            _write_safetensors(stream, arrays, {"format": "pt"})
        config = {
            "hidden_states": process.num_states,
            "vocab_size": process.vocab_size,
            "eos_token_id": process.eos,
        }
        with _replacing(path / "config.json") as stream:
            stream.write(f"{json.dumps(config, indent=2)}\n".encode())
        model.vocabulary.write(path / "vocabulary.txt")
        written = sum(part.stat().st_size for part in path.iterdir())
        return Exported(path, chosen, written)
    with _replacing(path) as stream:
        if chosen == "safetensors":
            _write_safetensors(stream, arrays, notes)
        else:
            _write_npz(stream, arrays, model.vocabulary)
    return Exported(path, chosen, path.stat().st_size)


def load_export(path: str | Path) -> Matrices:
    """The matrices that `export` wrote, as probabilities, whatever the kind."""
    from safetensors import SafetensorError, safe_open

    path = Path(path)
    try:
        if path.is_dir():
            with safe_open(path / "model.safetensors", framework="numpy") as file:
                alpha, beta, gamma = (file.get_tensor(name) for name in ("alpha_exp", "beta", "gamma"))
            return Matrices(np.exp(gamma), alpha, np.exp(beta), Vocabulary.read(path / "vocabulary.txt"))
        if path.suffix == ".npz":
            with np.load(path, allow_pickle=False) as file:
                names = ("start", "transition", "emission")
                if "startprob_" in file:
                    names = ("startprob_", "transmat_", "emissionprob_")
                start, transition, emission = (file[name] for name in names)
                return Matrices(start, transition, emission, Vocabulary(tuple(file["words"].tolist())))
        with safe_open(path, framework="numpy") as file:
            start, transition, emission = (file.get_tensor(n) for n in ("start", "transition", "emission"))
            return Matrices(start, transition, emission, Vocabulary(tuple(json.loads(file.metadata()["words"]))))
    except (OSError, KeyError, TypeError, ValueError, SafetensorError, zipfile.BadZipFile) as error:
        raise DataError(f"cannot read {path} as an export of this program: {error}") from None


def _kind_of(path: Path) -> Kind:
    if path.suffix in (".npz", ".safetensors"):
        return "npz" if path.suffix == ".npz" else "safetensors"
    raise QueryError(
        f"{path} has neither the suffix .npz nor .safetensors; name the kind of export: {', '.join(KINDS)}"
    )


def _check_room(path: Path, num_bytes: int) -> None:
    folder = next((parent for parent in (path, *path.absolute().parents) if parent.is_dir()), Path("."))
    usage = os.statvfs(folder)
    free = usage.f_bavail * usage.f_frsize
    if num_bytes > free:
        raise QueryError(
            f"the export takes {gibibytes(num_bytes)}, {folder} has {gibibytes(free)} left; free some space"
        )


def _arrays(process: Process, kind: Kind) -> dict[str, _Array]:
    size, vocab_size = process.num_states, process.vocab_size
    dtype = np.dtype(np.float64 if kind == "hmmlearn" else np.float32)

    def start() -> Iterator[np.ndarray]:
        yield process.start.cpu().numpy()

    def transition() -> Iterator[np.ndarray]:
        for chunk in process.row_chunks(size):
            yield process.rows(torch.arange(chunk.start, chunk.stop, device=process.device)).cpu().numpy()

    def emission() -> Iterator[np.ndarray]:
        emitted = process.emitted
        for chunk in process.row_chunks(size):
            rows = np.zeros((chunk.stop - chunk.start, vocab_size))
            for state in range(chunk.start, chunk.stop):
                words, probability = emitted.words(state)
                rows[state - chunk.start, words.cpu().numpy()] = probability.cpu().numpy()
            yield rows

    def logs(chunks: Callable[[], Iterator[np.ndarray]]) -> Callable[[], Iterator[np.ndarray]]:
        def generate() -> Iterator[np.ndarray]:
            for rows in chunks():
                yield np.where(rows > 0, np.log(np.where(rows > 0, rows, 1)), LOG_ZERO)

        return generate

    def normalized(chunks: Callable[[], Iterator[np.ndarray]]) -> Callable[[], Iterator[np.ndarray]]:
        def generate() -> Iterator[np.ndarray]:
            for rows in chunks():
                total = rows.sum(-1, keepdims=True)
                # A state that is never entered emits nothing; hmmlearn wants a distribution there too.
                yield np.where(total > 0, rows / np.where(total > 0, total, 1), 1 / rows.shape[-1])

        return generate

    if kind == "ctrl-g":
        return {
            "alpha_exp": _Array(dtype, (size, size), transition),
            "beta": _Array(dtype, (size, vocab_size), logs(emission)),
            "gamma": _Array(dtype, (size,), logs(start)),
        }
    if kind == "hmmlearn":
        return {
            "startprob_": _Array(dtype, (size,), normalized(start)),
            "transmat_": _Array(dtype, (size, size), normalized(transition)),
            "emissionprob_": _Array(dtype, (size, vocab_size), normalized(emission)),
        }
    return {
        "start": _Array(dtype, (size,), start),
        "transition": _Array(dtype, (size, size), transition),
        "emission": _Array(dtype, (size, vocab_size), emission),
    }


def _write_safetensors(stream: BinaryIO, arrays: dict[str, _Array], notes: dict[str, str]) -> None:
    """The safetensors format by hand, because the library wants every array in memory at once."""
    header: dict[str, Any] = {"__metadata__": notes}
    place = 0
    for name, array in arrays.items():
        header[name] = {
            "dtype": "F32",
            "shape": list(array.shape),
            "data_offsets": [place, place + array.num_bytes],
        }
        place += array.num_bytes
    encoded = json.dumps(header).encode()
    encoded += b" " * (-len(encoded) % 8)
    stream.write(struct.pack("<Q", len(encoded)) + encoded)
    for array in arrays.values():
        for rows in array.chunks():
            stream.write(np.ascontiguousarray(rows, dtype=array.dtype).tobytes())


def _write_npz(stream: BinaryIO, arrays: dict[str, _Array], vocabulary: Vocabulary) -> None:
    with zipfile.ZipFile(stream, "w", zipfile.ZIP_STORED, allowZip64=True) as archive:
        for name, array in arrays.items():
            with archive.open(f"{name}.npy", "w", force_zip64=True) as member:
                head = {"descr": array.dtype.str, "fortran_order": False, "shape": array.shape}
                np.lib.format.write_array_header_1_0(member, head)
                for rows in array.chunks():
                    member.write(np.ascontiguousarray(rows, dtype=array.dtype).tobytes())
        with archive.open("words.npy", "w") as member:
            np.lib.format.write_array(member, np.array(vocabulary.words), allow_pickle=False)


@contextmanager
def _replacing(path: Path) -> Iterator[BinaryIO]:
    """A stream whose content becomes `path` when all of it is written, and not before."""
    try:
        with replace_atomically(path) as temporary, open(temporary, "wb") as stream:
            yield stream
            stream.flush()
    except OSError as error:
        raise DataError(f"cannot write {path}: {error.strerror or error}") from None
