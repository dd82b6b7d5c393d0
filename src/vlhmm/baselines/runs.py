"""A baseline's run folder. Input: tensors, settings, a vocabulary. Output: files; and back.

    config.json         format_version, kind (kn, ff or lstm), settings
    model.safetensors   the best weights, or the n-gram tables
    vocabulary.txt      one word per line, line number = id
    journal.jsonl       one object per event           (ff and lstm)
    checkpoint/         everything needed to resume    (ff and lstm; see vlhmm.baselines.training)
    manifest.json       checksums of the others, but for the journal

Nothing is pickled.
"""

import json
from pathlib import Path
from typing import Any, NamedTuple

import safetensors
import safetensors.torch
from torch import Tensor

from vlhmm.data.checked import check_keys, read_object
from vlhmm.data.manifest import check_manifest, confined, write_listed
from vlhmm.data.vocabulary import Vocabulary
from vlhmm.errors import CheckpointError, DataError
from vlhmm.limits import shortened

FORMAT_VERSION = 1
KINDS = ("kn", "ff", "lstm")


class Run(NamedTuple):
    """What a run folder says of itself, without its arrays."""

    kind: str
    settings: dict[str, Any]
    vocabulary: Vocabulary


def write_run(folder: str | Path, run: Run) -> None:
    """Write config.json and vocabulary.txt to `folder`."""
    folder = Path(folder)
    config = {"format_version": FORMAT_VERSION, "kind": run.kind, "settings": run.settings}
    write_listed(folder, "vocabulary.txt", "".join(f"{word}\n" for word in run.vocabulary.words).encode())
    write_listed(folder, "config.json", (json.dumps(config, indent=2) + "\n").encode())


def read_run(folder: str | Path) -> Run:
    """Read config.json and vocabulary.txt."""
    folder = Path(folder)
    path = folder / "config.json"
    config = read_object(folder, "config.json")
    check_manifest(folder)
    version = config.get("format_version")
    if version != FORMAT_VERSION:
        raise CheckpointError(f"{path} has format_version {shortened(version)}, expected {FORMAT_VERSION}")
    kind = config.get("kind")
    if not isinstance(kind, str) or kind not in KINDS or not isinstance(config.get("settings"), dict):
        raise CheckpointError(f"{path} has kind {shortened(kind)}, expected a baseline's: {', '.join(KINDS)}")
    check_keys(path, config, ("format_version", "kind", "settings"))
    try:
        vocabulary = Vocabulary.read(confined(folder, "vocabulary.txt"))
    except DataError as error:
        raise CheckpointError(f"{folder} is not a whole run: {error}") from None
    return Run(config["kind"], config["settings"], vocabulary)


def write_tensors(path: str | Path, tensors: dict[str, Tensor], about: dict[str, Any] | None = None) -> None:
    """Write the tensors to `path`, and `about` as JSON in the file's header."""
    metadata = None if about is None else {"about": json.dumps(about)}
    contiguous = {name: tensor.detach().contiguous() for name, tensor in tensors.items()}
    path = Path(path)
    folder = path.parent.parent if path.parent.name == "checkpoint" else path.parent
    write_listed(folder, path.relative_to(folder).as_posix(), safetensors.torch.save(contiguous, metadata))


def read_tensors(path: str | Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return the tensors of a file, and what its header says about them."""
    try:
        with safetensors.safe_open(path, framework="pt") as file:
            about = json.loads((file.metadata() or {}).get("about", "{}"))
            if not isinstance(about, dict):
                raise ValueError("its header is no JSON object")
            return {name: file.get_tensor(name) for name in file.keys()}, about
    except FileNotFoundError:
        raise CheckpointError(f"no such file: {path}") from None
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror or error}") from None
    except (safetensors.SafetensorError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is damaged or no safetensors file: {shortened(error, 80)}") from None
