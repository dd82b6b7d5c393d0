"""What a language model knows about its samples, as evidence about the HMM's states.

Input: a language model and the samples to train on. Output: `HiddenVectors`, a `Teacher` for `training.distillation`: the
model's last hidden vector after each token, given the prompt, projected to a few dimensions. The vectors are stored part by
part, so an interrupted reading goes on, and training needs no language model.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from vlhmm.data.atomic_io import replace_atomically
from vlhmm.data.text import Text
from vlhmm.data.tokenizer import TokenLine
from vlhmm.errors import ConfigError
from vlhmm.steering.distill import batches_to_read, tokens_of
from vlhmm.steering.llm import left_padded

if TYPE_CHECKING:
    from vlhmm.steering.llm import LLM

WIDTH = 64  # of a projected vector: 128 bytes a token
LINES_AT_ONCE = 1024  # of a part that is stored as a whole
BATCH = 32  # samples that are read together
Progress = Callable[[int, int], None]


class HiddenVectors:
    """The vectors after the tokens of some lines, found by what a line says."""

    def __init__(self, lines: Sequence[TokenLine], vectors: np.ndarray, eos: int) -> None:
        self._eos, self._vectors = eos, vectors
        self._first: dict[bytes, tuple[int, int]] = {}
        first = 0
        for line in lines:
            ids = tokens_of(line, eos)
            self._first.setdefault(self._key(np.array(ids), line.finished), (first, len(ids)))
            first += len(ids)

    @staticmethod
    def _key(ids: np.ndarray, finished: bool) -> bytes:
        """Return a name for a line. In a batch a line that has no end is followed by padding, zeros."""
        return np.asarray(ids if finished else np.trim_zeros(ids, "b"), dtype=np.int32).tobytes()

    def vectors_after(self, tokens: Tensor) -> Tensor:
        """Return the vector after each token of rows of lines, (row, time, WIDTH); 0 for what is no whole line."""
        found = torch.zeros(*tokens.shape, self._vectors.shape[1])
        for row, ids in enumerate(tokens.numpy()):
            first = 0
            for end in [*(np.flatnonzero(ids == self._eos) + 1).tolist(), len(ids)]:
                piece = ids[first:end]
                known = self._first.get(self._key(piece, len(piece) > 0 and piece[-1] == self._eos))
                if known is not None:
                    start, length = known
                    length = min(length, len(piece))
                    found[row, first : first + length] = torch.from_numpy(self._vectors[start : start + length]).float()
                first = end
        return found

    def sample(self, num_tokens: int, generator: torch.Generator, *, progress: Progress) -> Text:
        """Refuse: a language model's text is drawn by `vlhmm distill --tokens`."""
        raise ConfigError(f"distillation.text={num_tokens}: draw more samples instead, with --tokens")


def read_hidden_vectors(
    llm: LLM,
    lines: Sequence[TokenLine],
    folder: str | Path,
    template: str | None = None,
    progress: Progress | None = None,
    should_stop: Callable[[], bool] = lambda: False,
) -> HiddenVectors | None:
    """Return the vectors of all samples, read by the language model or from `folder`; None if stopped before the end.

    Cost: one pass of the language model over prompts and samples, and 128 bytes of disk per token.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    parts: list[np.ndarray] = []
    for number, first in enumerate(range(0, len(lines), LINES_AT_ONCE)):
        if should_stop():
            return None
        some = lines[first : first + LINES_AT_ONCE]
        path = folder / f"{number:05d}.vectors.safetensors"
        name = _digest(llm, some, template)
        num_tokens = sum(len(line.ids) + line.finished for line in some)
        stored = _stored(path, name, num_tokens)
        if stored is None:
            stored = np.concatenate(list(_read(llm, some, template)))
            _store(path, stored, name)
        parts.append(stored)
        if progress is not None:
            progress(min(first + LINES_AT_ONCE, len(lines)), len(lines))
    return HiddenVectors(lines, np.concatenate(parts), llm.end_ids[0])


def _read(llm: LLM, lines: Sequence[TokenLine], template: str | None) -> Iterator[np.ndarray]:
    """Yield the projected vectors after the tokens of each sample, in order."""
    bodies = [tokens_of(line, llm.end_ids[0]) for line in lines]
    found: dict[int, np.ndarray] = {}
    for some in batches_to_read([len(body) for body in bodies], BATCH):
        heads = [llm.prompt_ids(lines[i].prompt or "", template) for i in some]
        ids, mask = left_padded([head + bodies[i] for head, i in zip(heads, some, strict=True)], llm.end_ids[0])
        with torch.inference_mode():
            out = llm.model(
                input_ids=ids.to(llm.model.device), attention_mask=mask.to(llm.model.device), output_hidden_states=True,
                logits_to_keep=1, use_cache=False,
            )  # fmt: skip
            hidden = out.hidden_states[-1].float().cpu()
        projected = hidden @ projection(hidden.shape[2])
        for row, i in enumerate(some):
            found[i] = projected[row, ids.shape[1] - len(bodies[i]) :].half().numpy()
    yield from (found[i] for i in range(len(lines)))


def projection(width: int) -> Tensor:
    """Return a random matrix (width, WIDTH) that keeps distances, nearly: N(0, 1 / WIDTH). The identity for few dimensions."""
    if width <= WIDTH:
        return torch.eye(width)
    return torch.randn(width, WIDTH, generator=torch.Generator().manual_seed(0)) / WIDTH**0.5


def _digest(llm: LLM, lines: Sequence[TokenLine], template: str | None) -> str:
    """Return a checksum of everything that a part's vectors depend on."""
    content = repr((llm.name, template, WIDTH, [(line.prompt, line.ids, line.finished) for line in lines]))
    return hashlib.sha256(content.encode()).hexdigest()


def _store(path: Path, vectors: np.ndarray, digest: str) -> None:
    from safetensors.numpy import save_file

    with replace_atomically(path) as temporary:
        save_file({"vectors": vectors}, temporary, {"samples": digest})


def _stored(path: Path, digest: str, num_tokens: int) -> np.ndarray | None:
    """Return the vectors of a part; None if the file is missing, damaged or of other samples: they are read again."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, "np") as stored:
            if (stored.metadata() or {}).get("samples") != digest:
                return None
            vectors: np.ndarray = stored.get_tensor("vectors")
    except (OSError, SafetensorError):
        return None
    return vectors if vectors.ndim == 2 and len(vectors) == num_tokens and np.isfinite(vectors).all() else None
