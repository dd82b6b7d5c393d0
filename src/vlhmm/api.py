"""The front door: a run's folder in, a model to score and query out."""

import json
from pathlib import Path
from typing import Any

import torch

from vlhmm.data.text import encode, read_lines
from vlhmm.distributions import Tables
from vlhmm.errors import CheckpointError
from vlhmm.evaluation.perplexity import Report, evaluate
from vlhmm.language_model import DEFAULT_MEMORY, HMMLanguageModel
from vlhmm.queries.api import QueryMethods
from vlhmm.training.trainer import load_hmm


class Model(QueryMethods, HMMLanguageModel):
    """A trained HMM language model: scoring, queries, perplexity. Natural logarithms throughout."""

    def perplexity(self, path: str | Path, context: str | None = None, streams: int = 16) -> Report:
        """The perplexity of a text file (one sentence a line), with its counts."""
        text = encode(read_lines(path), self.vocabulary)
        return evaluate(self, text, context or self.rule, streams)  # type: ignore[arg-type]


def load(run: str | Path, memory: int | None = None, dtype: torch.dtype = torch.float32, device: str = "cpu") -> Any:
    """The model of a run folder: an HMM (`Model`) on that device, or a baseline, on the CPU, behind the same protocol."""
    path = Path(run)
    if not path.exists():
        raise CheckpointError(f"{path} does not exist; expected the folder of a run, made by vlhmm train --out {path}")
    if is_baseline(path):
        from vlhmm.baselines import load_baseline

        return load_baseline(path)
    hmm, folder, config = load_hmm(path)
    with torch.no_grad():
        potentials = hmm.to(device, dtype).potentials()
    tables = Tables(potentials, folder.blocks(folder.vocabulary()))
    return Model(folder.vocabulary(), tables, config.training.context, memory or DEFAULT_MEMORY)


def is_baseline(path: Path) -> bool:
    try:
        content = json.loads((path / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False  # the HMM's own reader says what is wrong
    return isinstance(content, dict) and "kind" in content
