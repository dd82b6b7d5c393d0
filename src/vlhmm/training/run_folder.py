"""A run's folder: config.json, vocabulary.txt, blocks.tsv, model.safetensors, calibration.json, journal.jsonl, checkpoint/;
teacher.txt.gz, what a teacher wrote for it; tokenizer.json, where the model is over subword ids; and samples/, which a
language model wrote.

Every file is written to a temporary name, synced and renamed: a kill at any moment leaves the old
one or the new one. manifest.json has a checksum of every file that makes the model (`vlhmm.data.manifest`), the
checkpoint has its own. Nothing is pickled; loading runs no code from the files.
"""

import hashlib
import json
import logging
import math
import os
import shutil
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from vlhmm.clustering.blocks import Blocks
from vlhmm.config import from_dict, to_dict, to_json
from vlhmm.data.atomic_io import replace_atomically, write_atomically
from vlhmm.data.checked import check_tensors, read_object
from vlhmm.data.manifest import (
    accept_files,
    check_contents,
    check_manifest,
    check_names,
    checksum_of,
    confined,
    content_of,
    read_manifest,
    remove_listed,
    replace_listed,
    write_listed,
)
from vlhmm.data.tokenizer import TokenVocabulary
from vlhmm.data.vocabulary import Vocabulary
from vlhmm.errors import CheckpointError, ConfigError, VlhmmError
from vlhmm.hmm import HMM
from vlhmm.limits import shortened
from vlhmm.training.calibration import Factors, scaled
from vlhmm.training.config import FORMAT_VERSION, RunConfig
from vlhmm.training.migration import migrated

BEST_COPY = "best.safetensors"  # in checkpoint/: the best model again, as the checkpoint has only the last weights
logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointState:
    """Contents of checkpoint/state.json: the position of a run, without tensors."""

    step: int
    updates: int
    seconds: float
    plateau: dict  # type: ignore[type-arg]  # as `schedules.Plateau`, an infinite best as none
    valid: float | None
    log_likelihood: float
    tokens: int
    journal_bytes: int
    tensors_file: str

    def __post_init__(self) -> None:
        for name in ("step", "updates", "tokens", "journal_bytes"):
            if not 0 <= getattr(self, name) < 1 << 62:
                raise ConfigError(f"{name} is {shortened(getattr(self, name))}, expected a whole number from 0")
        if not 0 <= self.seconds < math.inf:
            raise ConfigError(f"seconds is {self.seconds}, expected 0 or more")
        for name in ("log_likelihood", "valid"):
            value = getattr(self, name)
            if value is not None and math.isnan(value):
                raise ConfigError(f"{name} is no number")
        if self.valid is not None and self.valid < 1:
            raise ConfigError(f"valid is {self.valid}, expected a perplexity: 1 or more")
        if self.plateau.keys() != {"best", "checks_since_best", "divisions"}:
            raise ConfigError("plateau has other fields than best, checks_since_best and divisions")
        best = self.plateau["best"]
        if best is not None and not (type(best) in (int, float) and 0 < best < math.inf):
            raise ConfigError(f"plateau.best is {shortened(best)}, expected a perplexity")
        for name in ("checks_since_best", "divisions"):
            count = self.plateau[name]
            if type(count) is not int or not 0 <= count < 1 << 31:
                raise ConfigError(f"plateau.{name} is {shortened(count)}, expected a whole number from 0")
        if self.tensors_file != f"step-{self.step:08d}.safetensors":
            raise ConfigError(f"tensors is {shortened(self.tensors_file)}, expected step-{self.step:08d}.safetensors")


class LoadedRun(NamedTuple):
    """What a run's files hold."""

    hmm: HMM
    vocabulary: Vocabulary
    blocks: Blocks
    config: RunConfig


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
        """Write what never changes; config.json last, so that a folder with one is whole."""
        self.path.mkdir(parents=True, exist_ok=True)
        vocabulary.write(self.vocabulary_path)
        written = ["vocabulary.txt", "blocks.tsv"]  # by this call of train
        if isinstance(vocabulary, TokenVocabulary):
            write_atomically(self.tokenizer_path, vocabulary.content)
            written.append("tokenizer.json")
            corpus = {**corpus, "tokenizer": {"sha256": vocabulary.sha256, "end": vocabulary.end}}
        accept_files(self.path, tuple(written))
        content = {**to_dict(config), "corpus": corpus}
        write_listed(self.path, "config.json", (json.dumps(content, indent=2) + "\n").encode())

    def check_to_continue(self) -> None:
        """Check a run that is resumed. One without a checkpoint starts over, so its model is not checked."""
        written = self.checkpoint_path.exists() and (self.checkpoint_path / "state.json").exists()
        again = () if written else ("model.safetensors", "calibration.json")
        try:
            listed = check_manifest(self.path, except_for=again)
        except CheckpointError:
            if not (written and self._restore_model()):
                raise
            listed = check_manifest(self.path)
        if not listed:  # a run of an older version: from now on it has one
            if written and not (self.model_path.exists() and self.model_path.stat().st_size):
                self._restore_model()
            accept_files(self.path)

    def _restore_model(self) -> bool:
        """Replace a missing or damaged model by the checkpoint's copy of the best one. Return whether that was done.

        With a manifest the copy must be what it lists.
        """
        copy = confined(self.path, f"checkpoint/{BEST_COPY}")
        allowed = (read_manifest(self.path) or {}).get("model.safetensors")
        found = content_of(copy)
        if found is None or (allowed is not None and (found not in allowed or content_of(self.model_path) in allowed)):
            return False
        logger.warning(f"{self.model_path} was missing or damaged; it is restored from {copy}")
        try:
            with replace_atomically(self.model_path) as temporary:
                shutil.copyfile(copy, temporary)
        except OSError as error:
            raise _cannot_write(self.model_path, error) from None
        return True

    def config(self) -> tuple[RunConfig, dict[str, Any]]:
        """Return (settings, what the corpus was)."""
        content = self._json(self.config_path)
        if isinstance(content.get("kind"), str):
            kind = shortened(content["kind"])
            raise CheckpointError(f"{self.path} holds a model of kind {kind}, expected an HMM's run; choose another folder")
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
            if not isinstance(corpus, dict):
                raise ConfigError(f"corpus is {shortened(corpus)}, expected an object")
            return from_dict(RunConfig, content), corpus
        except (VlhmmError, TypeError, ValueError, OverflowError) as error:
            raise CheckpointError(f"{self.config_path} does not describe a vlhmm run: {error}") from None

    def _json(self, path: Path) -> dict[str, Any]:
        return read_object(self.path, path.relative_to(self.path).as_posix())

    def vocabulary(self, corpus: Mapping[str, Any]) -> Vocabulary:
        """Return the words of the run, or the ids of its tokenizer; `corpus` is config.json's description of it.

        Raises:
            CheckpointError: The tokenizer is not the one that the run was trained with.
        """
        if "tokenizer" not in corpus:
            return Vocabulary.read(confined(self.path, "vocabulary.txt"))
        about = corpus["tokenizer"]
        if not isinstance(about, dict) or type(about.get("end")) is not int:
            raise CheckpointError(f"{self.config_path} names no end token of its tokenizer; restore it or train again")
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
        try:
            with replace_listed(self.path, "model.safetensors") as temporary:
                _save(weights, temporary)
            with replace_atomically(self.checkpoint_path / BEST_COPY) as temporary:
                shutil.copyfile(self.model_path, temporary)
        except (OSError, SafetensorError) as error:
            raise _cannot_write(self.model_path, error) from None

    def load_model(self) -> dict[str, Tensor]:
        if not self.model_path.exists():
            raise CheckpointError(
                f"{self.path} has no model.safetensors yet: its run has not been validated yet; resume it with vlhmm train"
            )
        return load_tensors(self.model_path)

    def load(self) -> LoadedRun:
        """Check and read every file that makes the model, each once, and build it.

        Raises:
            CheckpointError: A file is missing, damaged, outside the folder, or does not fit the others.
        """
        config, corpus = self.config()
        check_names(self.path)
        with ThreadPoolExecutor(1) as beside:  # checksums take no interpreter lock
            checked = beside.submit(check_contents, self.path)
            try:
                return self._read(config, corpus)
            finally:
                checked.result()  # a damaged file is named, whatever else went wrong because of it

    def _read(self, config: RunConfig, corpus: Mapping[str, Any]) -> LoadedRun:
        vocabulary = self.vocabulary(corpus)
        blocks = self.blocks(vocabulary)
        factors, weights = self.calibration(), self.load_model()
        self._check_size(config, blocks)
        hmm = HMM(config.model, blocks)
        load_into(hmm, scaled(weights, config.model, factors) if factors else weights, self.model_path)
        return LoadedRun(hmm, vocabulary, blocks, config)

    def _check_size(self, config: RunConfig, blocks: Blocks) -> None:
        """Raise an error before a model is built if config.json does not match blocks.tsv or the weights."""
        model = config.model
        # uneven blocks have padding in addition to their states; a hand-made configuration may count it
        if model.num_states not in (blocks.num_real_states, blocks.num_states):
            raise CheckpointError(
                f"{self.config_path} has {model.num_states:,} states, blocks.tsv {blocks.num_real_states:,}; "
                "the files are of different runs"
            )
        least = 0
        if model.parameterization == "neural":
            least = model.hidden_size * (1 if model.embedding == "factored" else model.num_states)
            width = model.tile_width if model.transition != "softmax" else 0
            least = max(least, model.hidden_size * max(model.hidden_size, width))
        if 4 * least > self.model_path.stat().st_size:
            raise CheckpointError(
                f"{self.config_path} describes at least {least:,} parameters, more than model.safetensors holds; "
                "the files are of different runs"
            )

    def save_calibration(self, factors: Factors) -> None:
        write_listed(self.path, "calibration.json", (json.dumps(asdict(factors)) + "\n").encode())

    def forget_calibration(self) -> None:
        remove_listed(self.path, "calibration.json")

    def calibration(self) -> Factors | None:
        """Return the factors on the model's logits; None if it was not calibrated."""
        if not self.calibration_path.exists():
            return None
        content = self._json(self.calibration_path)
        try:
            if missing := {"emission", "transition", "within"} - content.keys():
                raise ConfigError(f"it has no {min(missing)}")
            return from_dict(Factors, content)
        except (VlhmmError, OverflowError) as error:
            raise CheckpointError(
                f"{self.calibration_path} is damaged ({error}); restore it, or use the model as it was trained: "
                f"vlhmm manifest {self.path} --remove-calibration"
            ) from None

    # ---- checkpoint: everything needed to resume bit for bit

    def save_checkpoint(self, state: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        self.checkpoint_path.mkdir(parents=True, exist_ok=True)
        name = f"step-{state['step']:08d}.safetensors"
        save_tensors(tensors, self.checkpoint_path / name)
        content = content_of(self.checkpoint_path / name)
        assert content is not None
        state = {**state, "tensors": name, "tensors_blake2b": content.blake2b}
        state["checksum"] = checksum_of(state)
        write_atomically(self.checkpoint_path / "state.json", (json.dumps(state) + "\n").encode())
        for old in self.checkpoint_path.glob("*.safetensors*"):
            if old.name not in (name, BEST_COPY):
                old.unlink(missing_ok=True)

    def load_checkpoint(self) -> tuple[dict[str, Any], dict[str, Tensor]] | None:
        """Return (state, tensors) of the last checkpoint, or None before the first."""
        path = self.checkpoint_path / "state.json"
        if not path.exists():
            return None
        state = self._json(path)
        remedy = f"restore it, or remove {self.checkpoint_path} to start over"
        checksum, tensors_checksum = state.get("checksum"), state.get("tensors_blake2b")
        rest = {name: value for name, value in state.items() if name != "checksum"}
        if (checksum is not None or tensors_checksum is not None) and checksum != checksum_of(rest):
            raise CheckpointError(f"{path} is damaged: it does not match its own checksum; {remedy}")
        values = {name: value for name, value in rest.items() if name not in ("tensors", "tensors_blake2b")}
        try:
            if "tensors" not in state:
                raise ConfigError("it names no file of tensors")
            from_dict(CheckpointState, {**values, "tensors_file": state["tensors"]})
        except (VlhmmError, TypeError, OverflowError) as error:
            raise CheckpointError(f"{path} is no vlhmm checkpoint ({error}); {remedy}") from None
        tensors_path = confined(self.path, f"checkpoint/{state['tensors']}")
        if checksum is None:
            logger.warning(f"{path} has no checksum: it was written by an older vlhmm and cannot be checked for damage")
        elif tensors_path.exists() and (found := content_of(tensors_path)) and found.blake2b != tensors_checksum:
            raise CheckpointError(f"{tensors_path} is damaged: it does not match its checksum; {remedy}")
        return state, load_tensors(tensors_path)

    def check_best_model(self) -> None:
        """Raise an error if the best model of a checkpoint is missing or damaged: training would not write it again."""
        try:
            with safe_open(confined(self.path, "model.safetensors"), framework="pt"):
                return
        except (OSError, SafetensorError) as error:
            raise CheckpointError(
                f"{self.model_path} is missing or damaged ({shortened(error)}), and the checkpoint has only the last weights, "
                f"not the best; restore it, or remove {self.checkpoint_path} to train again from the start"
            ) from None

    # ---- journal

    def _journal_file(self) -> Path:
        path = confined(self.path, "journal.jsonl")
        if path.is_dir():
            raise CheckpointError(f"{path} is a directory, expected a file; remove it")
        return path

    def journal(self, event: dict[str, Any]) -> None:
        try:
            with open(self._journal_file(), "a", encoding="utf-8") as stream:
                stream.write(to_json(event) + "\n")
        except OSError as error:
            raise _cannot_write(self.journal_path, error) from None

    def journal_size(self) -> int:
        return self.journal_path.stat().st_size if self.journal_path.exists() else 0

    def truncate_journal(self, size: int) -> None:
        """Remove the journal's lines after the checkpoint; these steps are repeated."""
        if self.journal_size() > size:
            os.truncate(self._journal_file(), size)

    def events(self) -> Iterator[dict[str, Any]]:
        if self.journal_path.exists():
            try:
                lines = self._journal_file().read_bytes().splitlines()
            except OSError as error:
                raise CheckpointError(f"cannot read {self.journal_path}: {error.strerror or error}") from None
            for number, line in enumerate(lines, start=1):
                try:
                    event = json.loads(line)
                    if not isinstance(event, dict) or not isinstance(event.get("event"), str):
                        raise ValueError("no event")
                except (ValueError, RecursionError) as error:
                    raise CheckpointError(
                        f"{self.journal_path}, line {number}: damaged ({shortened(error)}); restore it, or remove that line"
                    ) from None
                yield event


def save_tensors(tensors: dict[str, Tensor], path: Path) -> None:
    """Write tensors atomically; a full disk leaves the old file."""
    try:
        with replace_atomically(path) as temporary:
            _save(tensors, temporary)
    except (OSError, SafetensorError) as error:
        raise _cannot_write(path, error) from None


def _save(tensors: dict[str, Tensor], path: Path) -> None:
    save_file({name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}, path)


def _cannot_write(path: Path, error: Exception) -> CheckpointError:
    return CheckpointError(f"cannot write {path}: {error}; free some space or choose another --out")


def load_tensors(path: Path) -> dict[str, Tensor]:
    try:
        return load_file(path)
    except FileNotFoundError:
        raise CheckpointError(f"{path} is missing; the run cannot be resumed") from None
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path} is damaged ({error}); restore it or train again") from None


def load_into(module: torch.nn.Module, weights: dict[str, Tensor], path: Path) -> None:
    """Copy weights into a module; names, shapes or dtypes that differ, and numbers that are not finite, are refused."""
    check_tensors(path, weights, module.state_dict(), "config.json and blocks.tsv of its folder")
    module.load_state_dict(weights)
