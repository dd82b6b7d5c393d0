"""The model as plain matrices, for other programs. Input: a model. Output: files, and what is in them.

| kind | what is written |
| --- | --- |
| npz, safetensors | `start` (S,), `transition` (S, S), `emission` (S, V), float32 probabilities; `state_ids` (S,) |
| ctrl-g | a folder that Ctrl-G's HMM class loads: `model.safetensors` and `config.json`, see below |
| hmmlearn | .npz with `startprob_`, `transmat_`, `emissionprob_`, float64, for small models; `state_ids` |

S counts the states that can be entered: ids that only pad a smaller block (`allocation=tokens`) are left out, and
`state_ids` gives each exported state's number in the model.

Ctrl-G's arrays are `alpha_exp` (S, S), probabilities, and `beta` (S, V) and `gamma` (S,), their logarithms;
its configuration has `hidden_states`, `vocab_size` and `eos_token_id`. Ctrl-G fills texts up with <eos>, so its <eos> must
be absorbing: it gets a last state E of its own, which emits nothing else and is never left. With e(z) = p(<eos> | z),

    A'(i, z) = A(i, z) (1 - e(z))    A'(i, E) = sum_z A(i, z) e(z)    O'(z, x) = O(z, x) / (1 - e(z))

(the start likewise), so that p(words <eos> ... <eos>) is the model's p(words <eos>), exactly, whatever their number.

A and O are written a few rows at a time: only the file is large. The other matrices are those of one sentence or
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
from torch import Tensor

from vlhmm.data.atomic_io import replace_atomically
from vlhmm.data.user_text import gibibytes
from vlhmm.data.vocabulary import Vocabulary
from vlhmm.distributions import HMMDistributions
from vlhmm.errors import DataError, QueryError

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
    state_ids: np.ndarray | None = None  # (S,) each state's number in the model; not in Ctrl-G's folder


class _Array(NamedTuple):
    """An array to be written: its shape, and its rows a chunk at a time."""

    dtype: np.dtype
    shape: tuple[int, ...]
    chunks: Callable[[], Iterator[np.ndarray]]

    @property
    def num_bytes(self) -> int:
        return self.dtype.itemsize * int(np.prod(self.shape))


def export_bytes(model: Any, kind: Kind) -> int:
    """Return how large an export would be."""
    distributions = model.distributions
    size, vocab_size = _Dense(distributions, absorbing=kind == "ctrl-g").num_states, distributions.vocab_size
    return (8 if kind == "hmmlearn" else 4) * size * (1 + size + vocab_size)


def export(model: Any, path: str | Path, kind: Kind | None = None) -> Exported:
    """Write the model's dense matrices to `path` atomically; the kind follows from the suffix unless given."""
    path = Path(path)
    chosen = kind or kind_of(path)
    if chosen not in KINDS:
        raise QueryError(f"unknown kind of export {chosen!r}, expected one of {', '.join(KINDS)}")
    distributions = model.distributions
    dense = _Dense(distributions, absorbing=chosen == "ctrl-g")
    if chosen == "hmmlearn" and dense.num_states > HMMLEARN_MAX_STATES:
        raise QueryError(
            f"hmmlearn holds A in memory in float64: {dense.num_states:,} states are too many, expected at "
            f"most {HMMLEARN_MAX_STATES:,}; export npz or safetensors"
        )
    _check_room(path, export_bytes(model, chosen))
    arrays = _arrays(dense, chosen)
    notes = {
        "format": "vlhmm export 1",
        "rule": model.rule,
        "words": json.dumps(list(model.vocabulary.words)),
    }
    if chosen == "ctrl-g":
        path.mkdir(parents=True, exist_ok=True)
        with _replacing(path / "model.safetensors") as stream:
            _write_safetensors(stream, arrays, {"format": "pt"})
        vocab_size, eos = distributions.vocab_size, distributions.eos
        config = {"hidden_states": dense.num_states, "vocab_size": vocab_size, "eos_token_id": eos}
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
    """Return the matrices that `export` wrote, as probabilities, whatever the kind."""
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
                words, state_ids = Vocabulary(tuple(file["words"].tolist())), file["state_ids"]
                return Matrices(start, transition, emission, words, state_ids)
        with safe_open(path, framework="numpy") as file:
            start, transition, emission = (file.get_tensor(n) for n in ("start", "transition", "emission"))
            words = Vocabulary(tuple(json.loads(file.metadata()["words"])))
            return Matrices(start, transition, emission, words, file.get_tensor("state_ids"))
    except (OSError, KeyError, TypeError, ValueError, SafetensorError, zipfile.BadZipFile) as error:
        raise DataError(f"cannot read {path} as an export of this program: {error}") from None


def kind_of(path: Path) -> Kind:
    """Return the kind of export that a file's suffix stands for."""
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


class _Dense:
    """The rows of the matrices over the states that can be entered; with an absorbing state for <eos> if asked for."""

    def __init__(self, distributions: HMMDistributions, absorbing: bool) -> None:
        self.process, self.absorbing = distributions, absorbing
        words = torch.arange(distributions.vocab_size, device=distributions.device)
        emits = distributions.class_emission(words[words != distributions.eos] if absorbing else words)
        into = distributions.forward_step(
            torch.ones(1, distributions.num_states, dtype=torch.float64, device=distributions.device)
        )[0]
        self.states = torch.nonzero(((distributions.start > 0) | (into > 0)) & (emits > 0))[:, 0]
        self.rest = emits[self.states]  # 1 - e(z), summed directly to avoid cancellation
        self.ends = distributions.class_emission(torch.tensor([distributions.eos], device=distributions.device))
        self.num_states = len(self.states) + absorbing

    def state_ids(self) -> Iterator[np.ndarray]:
        yield self.states.cpu().numpy()

    def start(self) -> Iterator[np.ndarray]:
        yield self._into(self.process.start[None])[0]

    def transition(self) -> Iterator[np.ndarray]:
        for chunk in self.process.row_slices(len(self.states)):
            yield self._into(self.process.rows(self.states[chunk]))
        if self.absorbing:
            yield np.eye(1, self.num_states, self.num_states - 1)

    def emission(self) -> Iterator[np.ndarray]:
        distributions, emitted, states = self.process, self.process.emitted, self.states.tolist()
        for chunk in distributions.row_slices(len(states)):
            rows = np.zeros((chunk.stop - chunk.start, distributions.vocab_size))
            for row, state in zip(rows, states[chunk], strict=True):
                words, probability = emitted.words(state)
                row[words.cpu().numpy()] = probability.cpu().numpy()
            if self.absorbing:
                rows[:, distributions.eos] = 0
                rows /= self.rest[chunk].cpu().numpy()[:, None]
            yield rows
        if self.absorbing:
            yield np.eye(1, distributions.vocab_size, distributions.eos)

    def _into(self, rows: Tensor) -> np.ndarray:
        """Return (n, num_states) probabilities of the next state from rows over all S."""
        kept = rows[:, self.states]
        if not self.absorbing:
            return kept.cpu().numpy()
        return torch.cat([kept * self.rest, (rows @ self.ends)[:, None]], dim=1).cpu().numpy()


def _arrays(dense: _Dense, kind: Kind) -> dict[str, _Array]:
    size, vocab_size = dense.num_states, dense.process.vocab_size
    dtype = np.dtype(np.float64 if kind == "hmmlearn" else np.float32)
    state_ids = _Array(np.dtype(np.int64), (size,), dense.state_ids)

    def logs(rows: np.ndarray) -> np.ndarray:
        return np.where(rows > 0, np.log(np.where(rows > 0, rows, 1)), LOG_ZERO)

    def normalized(rows: np.ndarray) -> np.ndarray:
        return rows / rows.sum(-1, keepdims=True)

    if kind == "ctrl-g":
        return {
            "alpha_exp": _Array(dtype, (size, size), dense.transition),
            "beta": _Array(dtype, (size, vocab_size), lambda: map(logs, dense.emission())),
            "gamma": _Array(dtype, (size,), lambda: map(logs, dense.start())),
        }
    if kind == "hmmlearn":
        return {
            "startprob_": _Array(dtype, (size,), lambda: map(normalized, dense.start())),
            "transmat_": _Array(dtype, (size, size), lambda: map(normalized, dense.transition())),
            "emissionprob_": _Array(dtype, (size, vocab_size), lambda: map(normalized, dense.emission())),
            "state_ids": state_ids,
        }
    return {
        "start": _Array(dtype, (size,), dense.start),
        "transition": _Array(dtype, (size, size), dense.transition),
        "emission": _Array(dtype, (size, vocab_size), dense.emission),
        "state_ids": state_ids,
    }


def _write_safetensors(stream: BinaryIO, arrays: dict[str, _Array], notes: dict[str, str]) -> None:
    """Write the safetensors format directly, because the library needs every array in memory at once."""
    header: dict[str, Any] = {"__metadata__": notes}
    place = 0
    for name, array in arrays.items():
        header[name] = {
            "dtype": {"float32": "F32", "int64": "I64"}[array.dtype.name],
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
    """Open a stream that replaces `path` once everything is written."""
    try:
        with replace_atomically(path) as temporary, open(temporary, "wb") as stream:
            yield stream
            stream.flush()
    except OSError as error:
        raise DataError(f"cannot write {path}: {error.strerror or error}") from None
