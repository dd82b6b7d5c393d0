"""Training a neural baseline. Input: a `Corpus` and a `BaselineConfig`. Output: the best model on its valid
split.

AdamW, clipped gradients, a few validations an epoch, and a rate that is divided when they stop improving, or
follows a cosine to zero. A run with a folder can be stopped at any moment and resumes, when called again, as if
it had not been: after the same number of steps its weights are the same to the last bit (on the same machine with
as many threads).
"""

import dataclasses
import math
import os
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, get_args, get_type_hints

import torch
from torch import Tensor

from vlhmm.baselines import kneser_ney
from vlhmm.baselines.feed_forward import FeedForward
from vlhmm.baselines.lstm import LSTM
from vlhmm.baselines.neural import NeuralLanguageModel
from vlhmm.baselines.runs import Run, read_run, read_tensors, write_run, write_tensors
from vlhmm.config import from_dict, setting, to_dict, to_json
from vlhmm.data.atomic_io import owned_folder
from vlhmm.data.batches import Batch, sentence_batches, stream_batches
from vlhmm.data.checked import check_finite, check_keys, check_tensors, number_in
from vlhmm.data.corpora import Corpus, digest
from vlhmm.data.manifest import CHECKPOINT_FILES, check_manifest
from vlhmm.data.vocabulary import Vocabulary
from vlhmm.errors import CheckpointError, ConfigError, TrainingError
from vlhmm.evaluation.perplexity import evaluate, perplexity
from vlhmm.evaluation.protocol import LanguageModel
from vlhmm.limits import MAX_COUNT, MAX_SEED, check_ranges, shortened
from vlhmm.malloc import kept_memory
from vlhmm.products import fast_products

Event = dict[str, Any]
Progress = Callable[[Event], None]
_CHECKPOINT_SECONDS = 60.0
_STEP_EVENT_SECONDS = 1.0


# What each number may be, read from a file or given by a user
RANGES: dict[str, tuple[float, float]] = {
    "hidden_size": (1, 1 << 16),
    "num_layers": (1, 1000),
    "order": (0, 1000),
    "num_streams": (1, 1 << 20),
    "segment_length": (1, 1 << 20),
    "epochs": (1, 1_000_000),
    "rate": (0, 1e100),
    "weight_decay": (0, 1e6),
    "clip": (0, 1e30),
    "checks_per_epoch": (1, 1_000_000),
    "patience": (0, MAX_COUNT),
    "decay": (0, 1e6),
    "min_rate": (0, 1e6),
    "seed": (0, MAX_SEED),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class BaselineConfig:
    """How a neural baseline is built and trained: by default the paper's LSTM; see `default_config`."""

    hidden_size: int = setting(256, "Width of embeddings and hidden layers.", "model")
    num_layers: int = setting(2, "Number of hidden layers.", "model")
    order: int = setting(5, "The feed-forward model predicts from order - 1 words; the LSTM does not use it.", "model")
    dropout: float = setting(0.3, "Probability that a unit is dropped.", "dropout")
    dropout_mask: Literal["token", "segment"] = setting(
        "token",
        "Whether units are drawn for every token (token), or once for a stream's whole segment (segment).",
        "dropout",
    )
    context: Literal["reset", "carry"] = setting(
        "carry",
        "Whether the model is trained and validated line by line (reset) or on running text (carry).",
        "data of a step",
    )
    num_streams: int = setting(16, "Streams read side by side.", "data of a step")
    segment_length: int = setting(32, "Tokens between two cuts of the gradient.", "data of a step")
    epochs: int = setting(50, "Passes over the training text.", "run")
    optimizer: Literal["adamw", "sgd"] = setting(
        "adamw", "adamw or sgd; sgd works with a rate of about 20 and a clip of 0.25.", "optimizer"
    )
    rate: float = setting(1e-3, "Peak learning rate.", "optimizer")
    weight_decay: float = setting(
        0.0,
        "Weight decay of matrices; biases do not decay. It is decoupled in adamw and added to the gradient in sgd.",
        "optimizer",
    )
    clip: float = setting(5.0, "Largest norm of the gradient; longer ones are scaled down.", "optimizer")
    checks_per_epoch: int = setting(4, "Validations per epoch.", "schedule and validation")
    schedule: Literal["plateau", "cosine"] = setting(
        "plateau",
        "Learning rate over time: divided when validation stops improving (plateau), or a cosine from rate to 0 (cosine).",
        "schedule and validation",
    )
    patience: int = setting(
        8,
        "Validations without improvement before the rate is divided, with schedule=plateau.",
        "schedule and validation",
    )
    decay: float = setting(
        4.0, "What the learning rate is divided by, with schedule=plateau.", "schedule and validation"
    )
    min_rate: float = setting(
        1e-6, "Learning rate below which training ends, with schedule=plateau.", "schedule and validation"
    )
    seed: int = setting(0, "Seed of the weights and of dropout.", "run")

    def __post_init__(self) -> None:
        for name in ("hidden_size", "num_layers", "num_streams", "segment_length", "epochs", "checks_per_epoch"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}, expected at least 1")
        check_ranges(self, RANGES)
        for name in ("rate", "clip", "patience"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name} is {getattr(self, name)}, expected more than 0")
        if self.order < 2:
            raise ConfigError(f"order is {self.order}, expected at least 2: one word of context")
        if not 0 <= self.dropout < 1:
            raise ConfigError(f"dropout is {self.dropout}, expected 0 or more and less than 1")
        if not self.decay > 1:
            raise ConfigError(f"decay is {self.decay}, expected more than 1, as the rate is divided by it")
        for name, hint in get_type_hints(type(self)).items():
            choices = get_args(hint)  # of a Literal
            if choices and getattr(self, name) not in choices:
                raise ConfigError(f"{name} is {getattr(self, name)!r}, expected {' or '.join(choices)}")


def default_config(kind: str) -> BaselineConfig:
    """Return the paper's settings for kind ff or lstm."""
    if kind == "lstm":
        return BaselineConfig()
    if kind == "ff":
        return BaselineConfig(num_layers=1, num_streams=128, segment_length=64, epochs=100)
    raise ConfigError(f"unknown neural baseline {kind!r}, expected ff or lstm")


@dataclass(frozen=True, eq=False)
class TrainingResult:
    """The best model and how it was come by."""

    model: NeuralLanguageModel
    valid_perplexity: float  # under config.context
    epochs: float  # trained in all, earlier calls included
    steps: int
    seconds: float
    finished: bool  # False: the time limit came first; call again to resume


def build_model(kind: str, vocabulary: Vocabulary, config: BaselineConfig) -> NeuralLanguageModel:
    """Return an untrained model, its weights drawn with config.seed."""
    generator = torch.Generator().manual_seed(config.seed)
    if kind == "ff":
        if config.dropout_mask != "token":
            raise ConfigError("dropout_mask=segment is for the LSTM; ff predicts every word by itself")
        return FeedForward(vocabulary, generator, config.hidden_size, config.dropout, config.num_layers, config.order)
    if kind == "lstm":
        segment = config.dropout_mask == "segment"
        return LSTM(vocabulary, generator, config.hidden_size, config.dropout, config.num_layers, segment)
    raise ConfigError(f"unknown neural baseline {kind!r}, expected ff or lstm")


def load_baseline(run_dir: str | Path) -> LanguageModel:
    """Return the (best) model in a baseline's run folder, of whichever kind."""
    run = read_run(run_dir)
    if run.kind == "kn":
        return kneser_ney.load(run_dir, run)
    path = Path(run_dir) / "model.safetensors"
    if not path.exists():
        raise CheckpointError(f"{run_dir} has no model.safetensors yet: training stopped before the first validation")
    try:
        config = from_dict(BaselineConfig, run.settings)
        least = 4 * config.hidden_size * (len(run.vocabulary) + config.hidden_size * config.num_layers)
        if least > 2 * path.stat().st_size:
            raise ConfigError(f"hidden_size={config.hidden_size} is more than model.safetensors holds")
        model = build_model(run.kind, run.vocabulary, config)
    except ConfigError as error:
        raise CheckpointError(f"{Path(run_dir) / 'config.json'} does not describe a baseline: {error}") from None
    _put(model, read_tensors(path)[0], path)
    model.rule = run.settings.get("context", BaselineConfig().context)
    return model


@kept_memory()
@fast_products()
def train_baseline(
    kind: str,
    corpus: Corpus,
    out_dir: str | Path | None,
    config: BaselineConfig | None = None,
    time_limit: float | None = None,
    progress: Progress | None = None,
    should_stop: Callable[[], bool] = lambda: False,
) -> TrainingResult:
    """Return the model of kind ff or lstm that is best on corpus.valid; `out_dir`, if any, becomes its run folder.

    Called again with the same folder, training resumes; more epochs may then be requested,
    but nothing else may change. `time_limit` is in seconds, for this call. `progress` gets what goes to
    journal.jsonl, and a step event a second. When `should_stop` says so, a checkpoint is written and
    KeyboardInterrupt raised.
    """
    config, folder = config or default_config(kind), None if out_dir is None else Path(out_dir)
    with nullcontext() if folder is None else owned_folder(folder):
        trainer = _Trainer(kind, corpus, folder, config, progress)
        return trainer.run(math.inf if time_limit is None else time_limit, should_stop)


@dataclass
class _Position:
    """The position of training, without tensors."""

    rate: float
    epoch: int = 0
    batch: int = 0  # the next one, within the epoch
    step: int = 0
    best: float = math.inf  # perplexity on valid
    waited: int = 0  # checks since the best one, or since the rate was last divided
    nats: float = 0.0  # training loss since the last check ...
    tokens: int = 0  # ... over this many tokens ...
    step_seconds: float = 0.0  # ... in so much time
    seconds: float = 0.0  # in all, validation included


class _Trainer:
    """A model, its optimizer, randomness, carry and position: together, what a checkpoint holds."""

    def __init__(
        self, kind: str, corpus: Corpus, folder: Path | None, config: BaselineConfig, progress: Progress | None
    ) -> None:
        self.corpus, self.folder, self.config, self.progress = corpus, folder, config, progress
        self.model = build_model(kind, corpus.vocabulary, config)
        groups: list[dict[str, Any]] = [
            {"params": [p for p in self.model.parameters() if p.ndim > 1], "weight_decay": config.weight_decay},
            {"params": [p for p in self.model.parameters() if p.ndim <= 1], "weight_decay": 0.0},
        ]
        make = {"adamw": torch.optim.AdamW, "sgd": torch.optim.SGD}[config.optimizer]
        self.optimizer = make(groups, lr=config.rate, fused=True)
        self.generator = torch.Generator().manual_seed(config.seed + 1)  # of the dropout
        self.position = _Position(rate=config.rate)
        self.carry: Any = None
        self.best_weights: dict[str, Tensor] = {}
        self._batches_of: tuple[int, list[Batch]] = (-1, [])
        if folder is not None:
            self._open_folder(kind, folder)

    def run(self, time_limit: float, should_stop: Callable[[], bool]) -> TrainingResult:
        """Return the result, after the last epoch or at the time limit."""
        if self._is_done():
            return self._result()
        began = saved = shown = time.monotonic()
        seconds_before = self.position.seconds
        self._record("start", parameters=self.model.num_parameters, **self._state())
        while not self._is_done():
            check_due = self._step()
            if check_due:
                self._check()
            now = time.monotonic()
            self.position.seconds = seconds_before + now - began
            if should_stop():
                self._save()
                raise KeyboardInterrupt
            if now - began >= time_limit:
                break
            if check_due or now - saved >= _CHECKPOINT_SECONDS:
                self._save()
                saved = now
            if self.progress is not None and now - shown >= _STEP_EVENT_SECONDS:
                self.progress({"event": "step", **self._state()})
                shown = now
        self._record("end", finished=self._is_done(), **self._state())
        self._save()
        return self._result()

    def _is_done(self) -> bool:
        settled = self.config.schedule == "plateau" and self.position.rate < self.config.min_rate
        return self.position.epoch >= self.config.epochs or settled

    def _epochs(self) -> float:
        return self.position.epoch + self.position.batch / len(self._batches())

    def _state(self) -> Event:
        at = self.position
        return {
            "epoch": round(self._epochs(), 4),
            "step": at.step,
            "train_perplexity": perplexity(-at.nats, at.tokens) if at.tokens else None,  # under dropout
            "best_valid_perplexity": at.best if at.best < math.inf else None,
            "rate": at.rate,
            "tokens_per_second": round(at.tokens / at.step_seconds) if at.tokens else None,
            "seconds": round(at.seconds, 1),
        }

    def _batches(self) -> list[Batch]:
        """Return the epoch's batches: fixed streams, or sentences in an order drawn for the epoch."""
        epoch, batches = self._batches_of
        config = self.config
        if config.context == "carry" and not batches:
            eos = self.corpus.vocabulary.eos
            batches = stream_batches(self.corpus.train, config.num_streams, config.segment_length, eos, config.context)
        elif config.context == "reset" and epoch != self.position.epoch:
            order = torch.Generator().manual_seed(config.seed * 1_000_003 + self.position.epoch)
            batches = sentence_batches(self.corpus.train, config.num_streams * config.segment_length, order)
        self._batches_of = self.position.epoch, batches
        return batches

    def _step(self) -> bool:
        """Return whether a check is due, after one batch's step along the gradient."""
        began = time.monotonic()
        at, batches = self.position, self._batches()
        batch = batches[at.batch]
        if not batch.continues:
            self.carry = self.model.start(len(batch.lengths))
        loss, self.carry = self.model.loss(batch.tokens, batch.lengths, self.carry, self.generator)
        self.optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.config.clip)
        if not math.isfinite(loss.item()) or not math.isfinite(norm.item()):
            raise TrainingError(
                f"the loss or its gradient is not finite at epoch {at.epoch + 1}, batch {at.batch + 1} of "
                f"{len(batches)} (step {at.step + 1}); the last checkpoint is kept: try a smaller rate than "
                f"{at.rate:g}"
            )
        if self.config.schedule == "cosine":
            at.rate = self.config.rate * 0.5 * (1 + math.cos(math.pi * self._epochs() / self.config.epochs))
        for group in self.optimizer.param_groups:
            group["lr"] = at.rate
        self.optimizer.step()
        num_tokens = int(batch.lengths.sum())
        at.nats += loss.item() * num_tokens
        at.tokens += num_tokens
        at.step += 1
        at.batch += 1
        checks = self.config.checks_per_epoch
        check_due = at.batch in {round(len(batches) * i / checks) for i in range(1, checks + 1)}
        if at.batch == len(batches):
            at.epoch, at.batch = at.epoch + 1, 0
        at.step_seconds += time.monotonic() - began
        return check_due

    def _check(self) -> None:
        """Keep the weights if they are the best so far; divide the rate after several checks without improvement."""
        at = self.position
        valid_perplexity = self._validate()
        is_best = valid_perplexity < at.best
        if is_best:
            self._keep()
            at.best, at.waited = valid_perplexity, 0
        else:
            at.waited += 1
        self._record("check", valid_perplexity=valid_perplexity, is_best=is_best, **self._state())
        at.nats, at.tokens, at.step_seconds = 0.0, 0, 0.0
        if self.config.schedule == "plateau" and at.waited == self.config.patience:
            at.rate, at.waited = at.rate / self.config.decay, 0

    def _validate(self) -> float:
        return evaluate(self.model, self.corpus.valid, rule=self.config.context).perplexity

    def _keep(self) -> None:
        self.best_weights = {name: tensor.clone() for name, tensor in self.model.state_dict().items()}
        if self.folder is not None:
            write_tensors(self.folder / "model.safetensors", self.best_weights)

    def _result(self) -> TrainingResult:
        at = self.position
        best = at.best
        if not self.best_weights:  # the time limit came before the first check; the position does not change
            best = self._validate()
            self._keep()
        self.model.load_state_dict(self.best_weights)
        return TrainingResult(self.model, best, self._epochs(), at.step, at.seconds, self._is_done())

    def _record(self, event: str, **fields: Any) -> None:
        """Write the event to the journal and pass it to the progress callback."""
        line = {"event": event, "time": round(time.time(), 1), **fields}
        if self.folder is not None:
            with open(self.folder / "journal.jsonl", "a", encoding="utf-8") as file:
                file.write(to_json(line) + "\n")
        if self.progress is not None:
            self.progress(line)

    # The run folder

    def _open_folder(self, kind: str, folder: Path) -> None:
        """Claim the run folder and restore the latest checkpoint, if any."""
        run = Run(kind, to_dict(self.config), self.corpus.vocabulary)
        self.digest = digest(self.corpus)
        if (folder / "config.json").exists():
            _check_same_run(folder, read_run(folder), run)
        if (folder / "checkpoint" / "state.safetensors").exists():
            self._restore(folder)
        else:
            # A run that died before its first checkpoint may have left one.
            (folder / "journal.jsonl").unlink(missing_ok=True)
        write_run(folder, run)

    def _save(self) -> None:
        """Write a checkpoint: one file, replaced atomically, with everything needed to resume."""
        if self.folder is None:
            return
        tensors = {f"model.{name}": tensor for name, tensor in self.model.state_dict().items()}
        for name, parameter in self.model.named_parameters():
            for slot, tensor in self.optimizer.state[parameter].items():
                tensors[f"optimizer.{name}.{slot}"] = tensor
        carry = self.carry if isinstance(self.carry, tuple) else (self.carry,)
        tensors |= {f"carry.{i}": tensor for i, tensor in enumerate(carry)}
        tensors["generator"] = self.generator.get_state()
        journal = self.folder / "journal.jsonl"
        about = asdict(self.position) | {"corpus": self.digest, "journal_bytes": os.path.getsize(journal)}
        if self.position.best == math.inf:
            about["best"] = None  # which JSON can say
        write_tensors(self.folder / "checkpoint" / "state.safetensors", tensors, about)

    def _check_carry(self, carry: list[Tensor], start: tuple[Tensor, ...]) -> None:
        """Raise a TypeError unless the tensors are a carry of this model."""
        batch = self._batches()[self.position.batch] if self.position.batch < len(self._batches()) else None
        rows = None if batch is None or not batch.continues else len(batch.lengths)
        two = self.model.start(2)
        for found, one, pair in zip(carry, start, two if isinstance(two, tuple) else (two,), strict=True):
            same = found.ndim == one.ndim and found.dtype == one.dtype
            axis = [i for i in range(one.ndim) if one.shape[i] != pair.shape[i]][0]
            if not same or any(found.shape[i] != one.shape[i] for i in range(one.ndim) if i != axis):
                raise TypeError(f"the carry is of shape {tuple(found.shape)}")
            if rows is not None and found.shape[axis] != rows:
                raise TypeError(f"the carry has {found.shape[axis]} rows, expected {rows}")
            if not found.is_floating_point() and found.numel() and not 0 <= found.min() <= found.max() <= len(self.corpus.vocabulary):
                raise TypeError("the carry holds words beyond the vocabulary")

    def _restore(self, folder: Path) -> None:
        path = folder / "checkpoint" / "state.safetensors"
        check_manifest(folder, CHECKPOINT_FILES)
        tensors, about = read_tensors(path)
        if about.pop("corpus", None) != self.digest:
            raise CheckpointError(
                f"{folder} was trained on another text than {self.corpus.name}; choose another folder"
            )
        try:
            journal_bytes = about.pop("journal_bytes")
            about["best"] = math.inf if about["best"] is None else about["best"]
            self.position = _position(path, about)
            if type(journal_bytes) is not int or not 0 <= journal_bytes < 1 << 60:
                raise TypeError(f"journal_bytes is {shortened(journal_bytes)}")
            _put(self.model, _under("model.", tensors), path)
            for name, parameter in self.model.named_parameters():
                self.optimizer.state[parameter] = _under(f"optimizer.{name}.", tensors)
                for slot, tensor in self.optimizer.state[parameter].items():
                    if tensor.shape not in ((), parameter.shape):
                        raise TypeError(f"optimizer.{name}.{slot} is of shape {tuple(tensor.shape)}")
            for name, tensor in tensors.items():
                check_finite(path, name, tensor)
            self.generator.set_state(tensors["generator"])
            start = self.model.start(1)
            carry = list(_under("carry.", tensors).values())
            self._check_carry(carry, start if isinstance(start, tuple) else (start,))
            self.carry = type(start)(*carry) if isinstance(start, tuple) else carry[0]
        except (KeyError, TypeError, ValueError, IndexError, RuntimeError) as error:
            raise CheckpointError(f"{path} is not a whole checkpoint of this run: {error}") from None
        if self.position.best < math.inf:
            self.best_weights = read_tensors(folder / "model.safetensors")[0]
        journal = folder / "journal.jsonl"
        if journal.exists() and journal.stat().st_size > journal_bytes:
            os.truncate(journal, journal_bytes)  # what came later is done again


def _position(path: Path, about: dict[str, Any]) -> _Position:
    """Return the position a checkpoint's header describes, every field of its type and range."""
    fields = {field.name for field in dataclasses.fields(_Position)}
    check_keys(path, about, fields)
    whole = ("epoch", "batch", "step", "waited", "tokens")
    for name in fields:
        if name == "best" and about.get(name) == math.inf:
            continue
        number_in(path, about, name, 0, 1e15, whole=name in whole)
    return _Position(**about)


def _put(model: NeuralLanguageModel, tensors: dict[str, Tensor], path: Path) -> None:
    """Copy the weights into the model."""
    check_tensors(path, tensors, model.state_dict(), "config.json and vocabulary.txt")
    model.load_state_dict(tensors)


def _under(prefix: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): t for name, t in sorted(tensors.items()) if name.startswith(prefix)}


def _check_same_run(folder: Path, old: Run, new: Run) -> None:
    """Refuse a folder that holds a run with other settings. Epochs may differ, except under the cosine schedule."""
    if old.kind != new.kind:
        raise ConfigError(f"{folder} holds a run of kind {old.kind}, got {new.kind}; choose another folder")
    settings = to_dict(from_dict(BaselineConfig, old.settings))  # an older run lacks newer settings: their defaults
    for name, value in new.settings.items():
        may_change = name == "epochs" and new.settings["schedule"] == "plateau"
        if not may_change and settings[name] != value:
            raise ConfigError(f"{folder} was trained with {name}={settings[name]}, got {value}; choose another folder")
    if old.vocabulary != new.vocabulary:
        raise ConfigError(f"{folder} was trained with another vocabulary; choose another folder")
