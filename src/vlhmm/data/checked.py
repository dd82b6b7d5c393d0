"""Checks of everything that is read from files: JSON objects by key, type and range; tensors by name, shape and dtype.

Every reader of a run folder goes through these. Errors are `CheckpointError`s that name the file and the remedy.
"""

import json
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vlhmm.config import unknown
from vlhmm.data.manifest import confined
from vlhmm.errors import CheckpointError
from vlhmm.limits import shortened

MAX_JSON = 64 << 20  # bytes: config.json and its kin have thousands


def read_object(folder: Path, name: str, remedy: str = "restore it or train again") -> dict[str, Any]:
    """Return the JSON object in a file of a folder.

    Raises:
        CheckpointError: It is missing, outside the folder, not UTF-8, not JSON, not an object, or nested too deeply.
    """
    path = confined(folder, name)
    try:
        if path.stat().st_size > MAX_JSON:
            raise CheckpointError(f"{path} is damaged: larger than {MAX_JSON >> 20} MiB; {remedy}")
        content = json.loads(path.read_bytes().decode("utf-8"))
    except FileNotFoundError:
        raise CheckpointError(
            f"{folder} is no finished or started run: it has no {name}; make one with vlhmm train --out {folder}"
        ) from None
    except (ValueError, RecursionError) as error:  # no JSON, no UTF-8, a number of thousands of digits
        raise CheckpointError(f"{path} is damaged ({shortened(error, 80)}); {remedy}") from None
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror or error}") from None
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} is damaged: expected a JSON object; {remedy}")
    return content


def kind_of_run(folder: str | Path) -> str | None:
    """Return the kind of model that config.json names; None for an HMM and for a damaged file, which its reader reports."""
    try:
        return str(json.loads(confined(Path(folder), "config.json").read_bytes())["kind"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None


def check_keys(path: Path, content: Mapping[str, Any], known: Collection[str], where: str = "") -> None:
    """Raise a CheckpointError for an unknown key, naming the nearest known one."""
    for key in content:
        if key not in known:
            raise CheckpointError(f"{path}: {unknown('field', where + key[:60], [where + name for name in known])}")


def number_in(
    path: Path, content: Mapping[str, Any], key: str, low: float, high: float, whole: bool = False, where: str = ""
) -> float:
    """Return a number of a JSON object, from `low` to `high`; a CheckpointError if it is missing or anything else."""
    value = content.get(key)
    fits = type(value) is int or (type(value) is float and not whole)
    if not fits or not low <= value <= high:  # type: ignore[operator]  # which what is no number fails too
        kind = "a whole number" if whole else "a number"
        raise CheckpointError(f"{path}: {where}{key} is {shortened(value)}, expected {kind} from {low:,} to {high:,}")
    return value  # type: ignore[return-value]


def text_in(path: Path, content: Mapping[str, Any], key: str, choices: Collection[str] = (), where: str = "") -> str:
    """Return a text of a JSON object, one of `choices` if there are any."""
    value = content.get(key)
    if not isinstance(value, str) or (choices and value not in choices):
        wanted = " or ".join(choices) if choices else "a text"
        raise CheckpointError(f"{path}: {where}{key} is {shortened(value)}, expected {wanted}")
    return value


def check_tensors(path: Path, found: Mapping[str, Tensor], expected: Mapping[str, Tensor], fits: str) -> None:
    """Raise a CheckpointError unless the tensors have the names, shapes and dtypes of `expected`, and are finite.

    `fits` names the files that the tensors belong to. Cost: one pass over the numbers.
    """
    for name in sorted(expected.keys() ^ found.keys()):
        here = "is missing" if name in expected else "is unknown"
        raise CheckpointError(f"{path} does not fit {fits} ({name[:60]} {here}); the files are of different runs")
    for name in sorted(expected):
        was, wanted = found[name], expected[name]
        if was.shape != wanted.shape or was.dtype != wanted.dtype:
            shown, expects = (f"{tuple(t.shape)} {str(t.dtype).removeprefix('torch.')}" for t in (was, wanted))
            raise CheckpointError(
                f"{path} does not fit {fits} ({name} is {shown}, expected {expects}); the files are of different runs"
            )
    for name, tensor in found.items():
        check_finite(path, name, tensor)


def check_finite(path: Path, name: str, tensor: Tensor) -> None:
    """Raise a CheckpointError if a tensor holds NaN or infinities."""
    # A sum is finite only if its terms are: half the cost of looking at each. It may overflow, so look again.
    if tensor.is_floating_point() and not (bool(tensor.sum().isfinite()) or bool(torch.isfinite(tensor).all())):
        raise CheckpointError(f"{path} is damaged: {name} holds numbers that are not finite; restore it or train again")

