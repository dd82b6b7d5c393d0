"""Read and write the HMM checkpoints of Ctrl-G and TRACE.

| | Ctrl-G | TRACE |
| --- | --- | --- |
| transition (S, S) | `alpha_exp`, probabilities | `alpha_exp`, probabilities |
| emission (S, V) | `beta`, logarithms | `beta`, logarithms |
| start | `gamma` (S,), logarithms | `gamma_exp` (1, S), probabilities |
| config.json | `hidden_states`, `vocab_size`, `eos_token_id` | `hidden_size`, `vocab_size`, `eos_token_id`, `sep_token_id` |

In both formats the last state is absorbing and stands for the end of the text. Only safetensors files are read: a .bin
file is a pickle, and loading it can run code.
"""

import json
import tempfile
from pathlib import Path
from typing import Literal

from torch import Tensor

from vlhmm.analysis.export import LOG_ZERO, export
from vlhmm.data.atomic_io import replace_atomically, write_atomically
from vlhmm.errors import DataError, QueryError
from vlhmm.language_model import HMMLanguageModel
from vlhmm.steering.hmm import DEFAULT_MEMORY, SteeringHMM

Dialect = Literal["ctrl-g", "trace"]
_ROW_SUM_ERROR = 0.01  # after float16 training, rows sum to one only approximately


def is_checkpoint(path: str | Path) -> bool:
    """Return whether a folder holds an HMM of Ctrl-G or TRACE, judging by its config.json."""
    try:
        config = json.loads((Path(path) / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(config, dict) and "vocab_size" in config and ("hidden_states" in config or "hidden_size" in config)


def read_checkpoint(path: str | Path, memory: int = DEFAULT_MEMORY) -> SteeringHMM:
    """Read an HMM of Ctrl-G or TRACE, for `guide_for` and `generate`.

    Args:
        path: The folder with `config.json` and `model.safetensors`.
        memory: The most bytes that lookahead tables may take. It does not limit the matrices.

    Returns:
        A dense `SteeringHMM`.

    Raises:
        DataError: A file is missing or invalid.
    """
    from safetensors import SafetensorError, safe_open

    folder = Path(path)
    config, file = folder / "config.json", folder / "model.safetensors"
    if not folder.is_dir():
        raise DataError(f"no such folder: {folder}; expected an HMM of Ctrl-G or TRACE, with config.json")
    try:
        described = json.loads(config.read_text(encoding="utf-8"))
        states = int(described["hidden_states"] if "hidden_states" in described else described["hidden_size"])
        vocab_size = int(described["vocab_size"])
    except (OSError, ValueError, KeyError, TypeError):
        raise DataError(f"{config} does not describe an HMM: expected hidden_states and vocab_size") from None
    if not file.exists():
        others = [*folder.glob("*.bin"), *folder.glob("*.th"), *folder.glob("*.pt")]
        remedy = f"{others[0].name} is a pickle; save it with safetensors" if others else "the folder is incomplete"
        raise DataError(f"{folder} has no model.safetensors: {remedy}")
    try:
        with safe_open(str(file), framework="pt") as stream:
            names = set(stream.keys())
            start = _probabilities(stream, names, "gamma", file).flatten()
            transition = _probabilities(stream, names, "alpha", file)
            emission = _probabilities(stream, names, "beta", file)
    except (OSError, SafetensorError) as error:
        raise DataError(f"cannot read {file}: {' '.join(str(error).split())}") from None
    shapes = {"start": (states,), "transition": (states, states), "emission": (states, vocab_size)}
    for name, found in {"start": start, "transition": transition, "emission": emission}.items():
        if tuple(found.shape) != shapes[name]:
            raise DataError(f"{file}: {name} has shape {tuple(found.shape)}, expected {shapes[name]} by config.json")
        total = found.sum(-1, keepdim=True)
        if not bool(((total - 1).abs() < _ROW_SUM_ERROR).all()):
            raise DataError(f"{file}: {name} does not sum to one in every row; the checkpoint is damaged or unfinished")
        found /= total
    return SteeringHMM.dense(start, transition, emission, memory)


def _probabilities(stream, names: set[str], name: str, file: Path) -> Tensor:  # type: ignore[no-untyped-def]
    """Return the array `name` as probabilities; it is stored as probabilities (`name`_exp) or as logarithms."""
    if f"{name}_exp" in names:
        return stream.get_tensor(f"{name}_exp").float()
    if name in names:
        return stream.get_tensor(name).float().exp_()
    raise DataError(f"{file} has neither {name} nor {name}_exp; expected the arrays of Ctrl-G or TRACE")


def write_checkpoint(model: HMMLanguageModel | SteeringHMM, path: str | Path, dialect: Dialect, eos: int | None = None) -> Path:
    """Write an HMM as a checkpoint of Ctrl-G or TRACE.

    Args:
        model: A trained model, which gets an additional absorbing state for the end of the text, or a dense HMM.
        path: The folder.
        dialect: "ctrl-g" or "trace".
        eos: The end token; needed for a dense HMM only.

    Returns:
        The folder.

    Raises:
        QueryError: The dialect is unknown, or the end token of a dense HMM is not given.
    """
    if dialect not in ("ctrl-g", "trace"):
        raise QueryError(f"unknown dialect {dialect!r}, expected ctrl-g or trace")
    folder = Path(path)
    if isinstance(model, HMMLanguageModel):
        if dialect == "ctrl-g":
            export(model, folder, "ctrl-g")
            return folder
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as temporary:
            export(model, temporary, "ctrl-g")
            dense = read_checkpoint(temporary)
        return write_checkpoint(dense, folder, dialect, model.vocabulary.eos)
    if eos is None or not 0 <= eos < model.vocab_size:
        raise QueryError(f"the end token is {eos}, expected an id from 0 to {model.vocab_size - 1}: give eos")
    if model.num_blocks != 1:
        raise QueryError(f"the HMM has {model.num_blocks} blocks; expected a dense HMM or a trained model")
    from safetensors.torch import save_file

    emission = model.emission.t().log().clamp(min=LOG_ZERO).contiguous()
    arrays = {"alpha_exp": model.rows(0).contiguous(), "beta": emission}
    config = {"vocab_size": model.vocab_size, "eos_token_id": eos}
    if dialect == "ctrl-g":
        arrays["gamma"] = model.start.log().clamp(min=LOG_ZERO)
        config["hidden_states"] = model.num_states
    else:
        arrays["gamma_exp"] = model.start[None].contiguous()
        config["hidden_size"] = model.num_states
    described = config | ({"sep_token_id": None} if dialect == "trace" else {})
    folder.mkdir(parents=True, exist_ok=True)
    with replace_atomically(folder / "model.safetensors") as temporary_file:
        save_file(arrays, str(temporary_file), {"format": "pt"})
    write_atomically(folder / "config.json", (json.dumps(described, indent=2) + "\n").encode())
    return folder
