"""A run's folder: config.json, vocabulary.txt, blocks.tsv, model.safetensors, calibration.json, journal.jsonl, checkpoint/;
teacher.txt.gz, what a teacher wrote for it; tokenizer.json, where the model is over subword ids; and samples/, which a
language model wrote.

Every file is written to a temporary name, synced and renamed: a kill at any moment leaves the old
one or the new one. Nothing is pickled; loading runs no code from the files.
"""

import hashlib
import json
import os
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from vlhmm.clustering.blocks import Blocks
from vlhmm.config import from_dict, to_dict, to_json
from vlhmm.data.atomic_io import replace_atomically, write_atomically
from vlhmm.data.tokenizer import TokenVocabulary
from vlhmm.data.vocabulary import Vocabulary
from vlhmm.errors import CheckpointError
from vlhmm.training.calibration import Factors
from vlhmm.training.config import FORMAT_VERSION, RunConfig
from vlhmm.training.migration import migrated


class RunFolder:
    """Reading and writing one run's files."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.config_path, self.vocabulary_path = self.path / "config.json", self.path / "vocabulary.txt"
        self.blocks_path, self.model_path = self.path / "blocks.tsv", self.path / "model.safetensors"
        self.journal_path, self.checkpoint_path = self.path / "journal.jsonl", self.path / "checkpoint"
        self.tokenizer_path, self.samples_path = self.path / "tokenizer.json", self.path / "samples"
        self.calibration_path, self.text_path = self.path / "calibration.json", self.path / "teacher.txt.gz"

    # ---- what a run is

    def exists(self) -> bool:
        return self.config_path.exists()

    def create(self, config: RunConfig, vocabulary: Vocabulary, corpus: dict[str, Any]) -> None:
        """Writes what never changes; config.json last, so that a folder with one is whole."""
        self.path.mkdir(parents=True, exist_ok=True)
        vocabulary.write(self.vocabulary_path)
        if isinstance(vocabulary, TokenVocabulary):
            write_atomically(self.tokenizer_path, vocabulary.content)
            corpus = {**corpus, "tokenizer": {"sha256": vocabulary.sha256, "end": vocabulary.end}}
        content = {**to_dict(config), "corpus": corpus}
        write_atomically(self.config_path, (json.dumps(content, indent=2) + "\n").encode())

    def config(self) -> tuple[RunConfig, dict[str, Any]]:
        """(settings, what the corpus was)."""
        content = self._json(self.config_path)
        version = content.get("format_version")
        if version != FORMAT_VERSION:
            raise CheckpointError(
                f"{self.config_path} has format version {version!r}, this vlhmm reads {FORMAT_VERSION}; "
                "train again, or use the vlhmm that wrote it"
            )
        corpus = content.pop("corpus", {})
        content, removed = migrated(content)
        if removed:
            corpus["removed_settings"] = removed
        try:
            return from_dict(RunConfig, content), corpus
        except Exception as error:
            raise CheckpointError(f"{self.config_path} does not describe a vlhmm run: {error}") from None

    def _json(self, path: Path) -> dict[str, Any]:
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise CheckpointError(
                f"{self.path} is no finished or started run: it has no {path.name}; make one with vlhmm train --out {self.path}"
            ) from None
        except (json.JSONDecodeError, UnicodeDecodeError) as error:
            raise CheckpointError(f"{path} is damaged ({error}); restore it or train again") from None
        except OSError as error:
            raise CheckpointError(f"cannot read {path}: {error.strerror}") from None
        if not isinstance(content, dict):
            raise CheckpointError(f"{path} is damaged: expected a JSON object; restore it or train again")
        return content

    def vocabulary(self) -> Vocabulary:
        """The words of the run, or the ids of its tokenizer, which must be the one it was trained with."""
        about = self._json(self.config_path).get("corpus", {}).get("tokenizer")
        if about is None:
            return Vocabulary.read(self.vocabulary_path)
        try:
            content = self.tokenizer_path.read_bytes()
        except OSError:
            raise CheckpointError(
                f"{self.path} has no {self.tokenizer_path.name}, which its ids belong to; put it back, or train again"
            ) from None
        if hashlib.sha256(content).hexdigest() != about.get("sha256"):
            raise CheckpointError(
                f"{self.tokenizer_path} is not the tokenizer this run was trained with (its checksum differs); restore it"
            )
        return TokenVocabulary.from_bytes(content, about["end"], str(self.tokenizer_path))

    def blocks(self, vocabulary: Vocabulary) -> Blocks:
        return Blocks.read(self.blocks_path, vocabulary.words)

    # ---- weights

    def save_model(self, weights: dict[str, Tensor]) -> None:
        self.forget_calibration()  # its factors are those of the model before
        save_tensors(weights, self.model_path)

    def load_model(self) -> dict[str, Tensor]:
        if not self.model_path.exists():
            raise CheckpointError(
                f"{self.path} has no model.safetensors yet: its run has not been validated once; go on with vlhmm train"
            )
        return load_tensors(self.model_path)

    def save_calibration(self, factors: Factors) -> None:
        write_atomically(self.calibration_path, (json.dumps(asdict(factors)) + "\n").encode())

    def forget_calibration(self) -> None:
        self.calibration_path.unlink(missing_ok=True)

    def calibration(self) -> Factors | None:
        """The factors on the model's logits; None if it was not calibrated."""
        if not self.calibration_path.exists():
            return None
        content = self._json(self.calibration_path)
        try:
            return from_dict(Factors, content)
        except Exception as error:
            raise CheckpointError(
                f"{self.calibration_path} is damaged ({error}); remove it to use the model as it was trained"
            ) from None

    # ---- checkpoint: everything needed to go on bit for bit

    def save_checkpoint(self, state: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        self.checkpoint_path.mkdir(parents=True, exist_ok=True)
        name = f"step-{state['step']:08d}.safetensors"
        save_tensors(tensors, self.checkpoint_path / name)
        state = {**state, "tensors": name}
        write_atomically(self.checkpoint_path / "state.json", (json.dumps(state) + "\n").encode())
        for old in self.checkpoint_path.glob("*.safetensors*"):
            if old.name != name:
                old.unlink(missing_ok=True)

    def load_checkpoint(self) -> tuple[dict[str, Any], dict[str, Tensor]] | None:
        """(state, tensors) of the last checkpoint, or None before the first."""
        path = self.checkpoint_path / "state.json"
        if not path.exists():
            return None
        state = self._json(path)
        if not {"step", "tensors"} <= state.keys():
            raise CheckpointError(f"{path} is no vlhmm checkpoint; remove {self.checkpoint_path} to start afresh")
        return state, load_tensors(self.checkpoint_path / state["tensors"])

    # ---- journal

    def journal(self, event: dict[str, Any]) -> None:
        with open(self.journal_path, "a", encoding="utf-8") as stream:
            stream.write(to_json(event) + "\n")

    def journal_size(self) -> int:
        return self.journal_path.stat().st_size if self.journal_path.exists() else 0

    def truncate_journal(self, size: int) -> None:
        """Forgets what was written after the checkpoint: it will happen again."""
        if self.journal_size() > size:
            os.truncate(self.journal_path, size)

    def events(self) -> Iterator[dict[str, Any]]:
        if self.journal_path.exists():
            for line in self.journal_path.read_text(encoding="utf-8").splitlines():
                yield json.loads(line)


def save_tensors(tensors: dict[str, Tensor], path: Path) -> None:
    """Writes tensors atomically; a full disk leaves the old file."""
    try:
        with replace_atomically(path) as temporary:
            save_file({name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}, temporary)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"cannot write {path}: {error}; free some space or choose another --out") from None


def load_tensors(path: Path) -> dict[str, Tensor]:
    try:
        return load_file(path)
    except FileNotFoundError:
        raise CheckpointError(f"{path} is missing; the run cannot go on from it") from None
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path} is damaged ({error}); restore it or train again") from None


def load_into(module: torch.nn.Module, weights: dict[str, Tensor], path: Path) -> None:
    """Copies weights into a module; names or shapes that differ are refused."""
    expected = module.state_dict()
    wrong = sorted(expected.keys() ^ weights.keys())
    wrong += [name for name in expected.keys() & weights.keys() if expected[name].shape != weights[name].shape]
    if wrong:
        raise CheckpointError(
            f"{path} does not fit config.json and blocks.tsv beside it ({wrong[0]} differs); the files are of different runs"
        )
    module.load_state_dict(weights)
