"""The loop: mask, E-step, optimizer steps, checks on valid, checkpoints. One loop for gradient and EM.

A step draws a state-dropout mask, takes the expected counts of its batches under the reduced model, and pushes
them through the parameterization once (gradient) or a few times (generalized EM). All randomness is a function
of (seed, step), so a run that was killed goes on from its last checkpoint to the same bits.
"""

import logging
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vlhmm.clustering.blocks import Blocks
from vlhmm.components.chain_inputs import Carry
from vlhmm.components.dropout import sample_columns, sample_features, sample_kept, slots_of_columns
from vlhmm.config import to_dict
from vlhmm.data.atomic_io import owned_folder
from vlhmm.data.batches import Batch
from vlhmm.data.corpora import Corpus, digest
from vlhmm.data.text import Text, encode, read_lines, write_text
from vlhmm.data.vocabulary import Vocabulary
from vlhmm.distributions import HMMDistributions
from vlhmm.errors import CheckpointError, ConfigError, TrainingError
from vlhmm.evaluation.perplexity import evaluate, perplexity
from vlhmm.hmm import HMM, Kept
from vlhmm.inference import Counts
from vlhmm.language_model import DEFAULT_MEMORY, HMMLanguageModel
from vlhmm.malloc import kept_memory
from vlhmm.training.calibration import last_layers, scaled, search
from vlhmm.training.closed_form import maximize
from vlhmm.training.config import RunConfig, TrainingConfig
from vlhmm.training.e_step import Buffers, PreparedBatches, expectation, expected_log_likelihood
from vlhmm.training.guide import Clusters, Evidence, Guided, Teacher, evidence_about, make_evidence
from vlhmm.training.make_blocks import make_blocks
from vlhmm.training.plan import generator_for, make_plan
from vlhmm.training.run_folder import RunFolder
from vlhmm.training.schedules import Plateau, guide_weight_at, rate_at
from vlhmm.training.shares import check_shares
from vlhmm.training.unknown_words import UnknownWords
from vlhmm.training.unseen_tokens import unseen_tokens

logger = logging.getLogger(__name__)
NOTE_SECONDS = 20.0  # between two words about something long


@dataclass(frozen=True, slots=True, kw_only=True)
class Status:
    """Where a run stands, for whoever shows it."""

    step: int
    total_steps: int
    epoch: float
    epochs: float
    train: float | None  # perplexity of the training text since the last check ...
    train_name: str  # ... which may be under dropout or a teacher's evidence: then not the model's perplexity
    valid: float | None
    best: float
    is_best: bool
    tokens_per_second: float
    seconds: float
    eta: float
    checked: bool  # this status closes a validation


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainResult:
    """How a call of `train` ended."""

    finished: bool
    stopped_by: str | None  # "time limit", "interrupt" or None
    step: int
    total_steps: int
    best_valid: float
    calibrated: bool  # the best validation perplexity is that of the calibrated model
    seconds: float  # over all sittings
    num_parameters: int


def build_hmm(
    config: RunConfig, blocks: Blocks, text: Text | None = None, counts: np.ndarray | None = None
) -> HMM:
    """The untrained model of a run; with the training text its first biases are log frequencies.

    `counts` of words, (V,), stand in for those of the text where words are held out.
    """
    starts = None
    if text is not None:
        if counts is None:
            counts = text.word_counts(blocks.vocab_size).astype(np.float64)
        starts = text.start_counts(blocks.vocab_size).astype(np.float64)
    return HMM(config.model, blocks, config.training.seed, counts, starts)


def load_hmm(path: str | Path) -> tuple[HMM, RunFolder, RunConfig]:
    """The trained model of a run folder (best on valid)."""
    folder = RunFolder(path)
    hmm, _, _, config = folder.load()
    return hmm, folder, config


class Trainer:
    """One run in progress. `train` below is the way in."""

    def __init__(
        self,
        corpus: Corpus,
        config: RunConfig,
        folder: RunFolder,
        blocks: Blocks,
        device: str,
        memory: int | None,
        teacher: Teacher | None = None,
        note: Callable[[str], None] = logger.info,
    ) -> None:
        self.note = note
        self.corpus, self.config, self.folder, self.blocks = corpus, config, folder, blocks
        self.settings, self.memory = config.training, memory
        self.teacher = teacher
        self.clusters: Clusters | None = None
        self.evidence: dict[int, Evidence] = {}  # by the identity of a batch, which the plan keeps
        self.device = torch.device(device)
        unknown = UnknownWords(corpus.train, corpus.vocabulary, self.settings)
        counts = unknown.expected_counts() if unknown.any else None
        self.hmm = build_hmm(config, blocks, corpus.train, counts).to(self.device)
        word_counts = corpus.train.word_counts(len(corpus.vocabulary))
        self.unseen = unseen_tokens(corpus.vocabulary, word_counts, blocks, config.model)
        if self.unseen is not None:
            self.unseen = self.unseen.to(self.device)
            self.unseen.copy_parameters(self.hmm)
        self.average = (
            {name: p.detach().clone() for name, p in self.hmm.named_parameters()} if self.settings.average else None
        )
        # one fused update over all parameters: the same arithmetic in a tenth of the time
        self.optimizer = torch.optim.AdamW(
            decay_groups(self.hmm, self.settings),
            lr=self.settings.rate,
            betas=(0.9, self.settings.beta2),
            fused=True,
        )
        self.plan = make_plan(corpus.train, self.settings, corpus.vocabulary.eos, corpus.extra, unknown)
        self.group_of_word = torch.from_numpy(blocks.group_of_word).to(self.device)
        first_epoch = self.plan(0)
        self.steps_per_epoch = len(first_epoch)
        self.total_steps = max(1, round(self.settings.epochs * self.steps_per_epoch))
        self.check_every = max(1, round(self.steps_per_epoch / self.settings.checks_per_epoch))
        self.step, self.updates, self.elapsed = 0, 0, 0.0
        self.plateau, self.carry, self.valid = Plateau(), None, None  # type: tuple[Plateau, Carry | None, float | None]
        self.log_likelihood, self.tokens = 0.0, 0  # since the last check
        self.buffers, self.tile_cache = Buffers(), None  # type: tuple[Buffers, TileCache | None]
        self._epoch: tuple[int, Sequence[list[Batch]]] = (0, first_epoch)
        self.prepared = PreparedBatches(self.group_of_word, blocks.num_groups)

    # ---- one step

    def batches(self) -> list[Batch]:
        epoch, index = divmod(self.step, self.steps_per_epoch)
        if self._epoch[0] != epoch:
            self._epoch = (epoch, self.plan(epoch))
        return self._epoch[1][index]

    def kept(self) -> Kept:
        """The states this step keeps, and the coordinates of their embeddings."""
        kept, dropout = Kept(), self.settings.state_dropout
        generator = generator_for(self.settings.seed, "dropout", self.step)
        if dropout and not self.blocks.partition:
            columns = sample_columns(self.hmm.states_of_group, self.blocks.num_states, dropout, generator)
            columns = columns.to(self.device)
            kept = Kept(*slots_of_columns(self.hmm.states_of_group, columns), columns=columns)
        elif dropout:
            slots, alive = sample_kept(self.hmm.num_alive, self.blocks.states_per_group, dropout, generator)
            kept = Kept(slots=slots, num_alive=alive)
        if self.settings.embedding_dropout:
            blocks, states = self.hmm.embedding.state.shape[:2]
            if kept.slots is not None and self.blocks.partition:
                states = kept.slots.shape[1]
            shape = (blocks, states, self.config.model.hidden_size)
            features = sample_features(shape, self.settings.embedding_dropout, generator)
            kept = kept._replace(features=features.to(self.device))
        return kept

    def teach(self, batches: list[Batch]) -> None:
        """Has the teacher read the text, and say what it would have said after every token."""
        assert self.teacher is not None
        generator = generator_for(self.settings.seed, "guide", 0)
        num_slots = self.blocks.states_per_group
        self.refuse_large_evidence()
        self.note("the teacher reads the training text and its vectors are clustered: a minute or so a million tokens")
        evidence, self.clusters = make_evidence(
            self.teacher, batches, self.group_of_word, self.hmm.num_alive, num_slots, generator
        )
        self.evidence = {id(batch): each for batch, each in zip(batches, evidence, strict=True)}

    def refuse_large_evidence(self) -> None:
        """An error if what is kept of the teacher, two bytes a token and state of its block, is beyond the budget."""
        extra, settings = self.corpus.extra, self.settings
        of_extra = settings.guide_text or (extra.num_tokens if extra is not None else 0)
        tokens = self.corpus.train.num_tokens + of_extra
        needed = 2 * tokens * self.blocks.states_per_group
        if self.memory is not None and needed > self.memory:
            raise ConfigError(
                f"a guide's evidence about {tokens:,} tokens needs {needed / 1e9:.1f} GB, the memory budget is "
                f"{self.memory / 1e9:.1f} GB; raise --memory, or take less text or fewer states per block"
            )

    def guided(self, batches: list[Batch], kept: Kept) -> Guided | None:
        """What the teacher gives to this step; None without a teacher, and when its time is over."""
        weight = guide_weight_at(self.settings, self.step, self.total_steps)
        if not weight:
            self.evidence = {}  # large tables
            return None
        if self.clusters is None:
            self.teach(self.plan(0)[0])  # the first step's, wherever this sitting began
        self.read_more(batches)
        return Guided([self.evidence[id(batch)] for batch in batches], kept, weight)

    def read_more(self, batches: list[Batch]) -> None:
        """Has the teacher read those batches that are new to it: another part of an extra text."""
        assert self.teacher is not None and self.clusters is not None
        num_slots = self.blocks.states_per_group
        for batch in batches:
            if id(batch) not in self.evidence:
                self.evidence[id(batch)] = evidence_about(
                    self.teacher, batch, self.clusters, self.group_of_word, num_slots
                )

    def run_step(self) -> None:
        """Mask, E-step, optimizer steps."""
        kept, batches = self.kept(), self.batches()
        guided = self.guided(batches, kept)
        carry = reduce_carry(self.carry, kept) if batches[0].continues else None
        prepared = self.prepared.get(batches, carry.group if carry is not None else None)
        potentials = self.hmm.potentials(kept)
        expected = expectation(potentials, prepared, carry, self.buffers, self.memory, guided)
        if not math.isfinite(expected.log_likelihood):
            raise self.spoiled("the loss")
        self.carry = expand_carry(expected.carry, kept, self.blocks.states_per_group)
        self.log_likelihood += expected.log_likelihood
        self.tokens += expected.tokens
        if self.settings.optimizer == "closed-form":
            assert isinstance(expected.counts, Counts)  # low-rank transitions are never scalar
            maximize(self.hmm, expected.counts, expected.pairs, self.settings.smoothing)
        else:
            rate = rate_at(self.settings, self.step, self.total_steps, self.plateau)
            for group in self.optimizer.param_groups:
                group["lr"] = rate
            m_steps, parts = (self.settings.m_steps, self.settings.m_parts) if self.settings.method == "em" else (1, 1)
            for m_step in range(m_steps):
                if m_step:
                    potentials = self.hmm.potentials(kept)
                tiles = expected.tiles if m_step == 0 else None  # later steps have moved the parameters
                gained = expected_log_likelihood(
                    potentials,
                    expected.counts,
                    expected.pairs,
                    value=False,
                    tiles=tiles,
                    part=self.step * m_steps + m_step,
                    parts=parts,
                )
                loss = -gained / expected.tokens
                self.optimizer.zero_grad(set_to_none=True)
                loss.backward()
                if self.unseen is not None:
                    self.unseen.share_gradients(self.hmm)
                norm = torch.nn.utils.clip_grad_norm_(self.hmm.parameters(), self.settings.clip)
                if not torch.isfinite(norm):
                    raise self.spoiled("the gradient")
                self.optimizer.step()
                if self.unseen is not None:
                    self.unseen.copy_parameters(self.hmm)
                self.updates += 1
                self.update_average()
        self.step += 1

    def spoiled(self, what: str) -> TrainingError:
        return TrainingError(
            f"{what} is not finite at step {self.step} (epoch {self.step / self.steps_per_epoch:.2f}, batch "
            f"{self.step % self.steps_per_epoch} of {self.steps_per_epoch}); the last good checkpoint is kept: "
            "lower training.rate and start another run"
        )

    def name_of_train(self) -> str:
        """What the training perplexity since the last check is called: the model's own, or what it is under."""
        first = (self.step - 1) // self.check_every * self.check_every
        if guide_weight_at(self.settings, first, self.total_steps):
            return "train_under_guide"  # unlikely evidence counts against it
        return "train_under_dropout" if self.settings.state_dropout else "train"

    @torch.no_grad()
    def update_average(self) -> None:
        if self.average is None:
            return
        decay = min(self.settings.average, (1 + self.updates) / (10 + self.updates))  # young averages forget faster
        for name, parameter in self.hmm.named_parameters():
            self.average[name].lerp_(parameter, 1 - decay)

    # ---- validation

    def weights(self) -> dict[str, Tensor]:
        """What is evaluated and saved: the averaged weights if there are any."""
        return self.average if self.average is not None else dict(self.hmm.named_parameters())

    @torch.no_grad()
    def language_model(self, weights: dict[str, Tensor]) -> HMMLanguageModel:
        weights = {name: tensor.detach() for name, tensor in weights.items()}
        potentials = torch.func.functional_call(self.hmm, weights, ())
        tables = HMMDistributions(potentials, self.blocks)
        model = HMMLanguageModel(
            self.corpus.vocabulary, tables, self.settings.evaluation_context, self.memory or DEFAULT_MEMORY
        )
        if self.tile_cache is not None:
            model.cache.take_room_of(self.tile_cache)
        self.tile_cache = model.cache
        return model

    def perplexity(self, weights: dict[str, Tensor]) -> float:
        """On the validation text, by the rule of training and in as many streams as every evaluation has."""
        return evaluate(self.language_model(weights), self.corpus.valid, self.settings.evaluation_context).perplexity

    def check(self) -> bool:
        """Validates; keeps the model if it is the best so far. True if it was."""
        self.valid = self.perplexity(self.weights())
        is_best = self.valid < self.plateau.best
        self.plateau = self.plateau.after_check(self.valid, self.settings.patience)
        if is_best:
            self.folder.save_model(self.weights())
        return is_best

    def calibrate(self, should_stop: Callable[[], Any]) -> dict[str, Any] | None:
        """Finds the factors that suit the best model and writes them beside it; what it then says in the journal.

        None if it was stopped before the end: then nothing is written, and it begins anew the next time.
        """
        began = time.monotonic()
        model, weights = self.config.model, {n: t.to(self.device) for n, t in self.folder.load_model().items()}
        kinds = tuple(last_layers(model))
        found = search(lambda tried: self.perplexity(scaled(weights, model, tried)), kinds, should_stop)
        if found is None:
            return None
        factors, valid = found
        self.folder.save_calibration(factors)
        by_kind = {kind: getattr(factors, kind) for kind in kinds}
        seconds = round(time.monotonic() - began, 2)
        event = {"event": "calibrated", "valid": valid, **by_kind, "seconds": seconds}
        self.folder.journal(event)
        return event

    # ---- checkpoint

    def save(self) -> None:
        if not all(torch.isfinite(p).all() for p in self.hmm.parameters()):
            raise self.spoiled("a parameter")
        tensors: dict[str, Tensor] = {f"model.{name}": p for name, p in self.hmm.named_parameters()}
        if self.average is not None:
            tensors |= {f"average.{name}": p for name, p in self.average.items()}
        for name, parameter in self.hmm.named_parameters():
            held = self.optimizer.state.get(parameter, {})
            tensors |= {f"optimizer.{key}.{name}": torch.as_tensor(value) for key, value in held.items()}
        if self.carry is not None:
            tensors |= {"carry.group": self.carry.group, "carry.alpha": self.carry.alpha}
        self.folder.save_checkpoint(
            {
                "step": self.step,
                "updates": self.updates,
                "seconds": self.elapsed,
                "plateau": asdict(self.plateau) | {"best": finite_or_none(self.plateau.best)},
                "valid": self.valid,
                "log_likelihood": self.log_likelihood,
                "tokens": self.tokens,
                "journal_bytes": self.folder.journal_size(),
            },
            tensors,
        )

    def restore(self) -> bool:
        """Goes back to the last checkpoint; False if there is none."""
        loaded = self.folder.load_checkpoint()
        if loaded is None:
            self.folder.truncate_journal(0)
            self.folder.forget_calibration()  # of a run that was here before
            return False
        state, tensors = loaded
        if state["step"] > self.total_steps:
            raise CheckpointError(
                f"{self.folder.checkpoint_path} is at step {state['step']:,}, the run has {self.total_steps:,}; remove it to "
                "start over"
            )
        if state["plateau"]["best"] is not None:
            self.folder.check_best_model()
        try:
            plateau = state["plateau"]
            self.plateau = Plateau(**(plateau | {"best": math.inf if plateau["best"] is None else plateau["best"]}))
            self.step, self.updates, self.elapsed = state["step"], state["updates"], state["seconds"]
            self.valid, self.log_likelihood, self.tokens = (
                state["valid"],
                state["log_likelihood"],
                state["tokens"],
            )
            self.folder.truncate_journal(state["journal_bytes"])
            with torch.no_grad():
                for name, parameter in self.hmm.named_parameters():
                    parameter.copy_(tensors[f"model.{name}"])
                    if self.average is not None:
                        self.average[name].copy_(tensors[f"average.{name}"])
            for name, parameter in self.hmm.named_parameters():
                if f"optimizer.step.{name}" in tensors:
                    self.optimizer.state[parameter] = {
                        key: tensors[f"optimizer.{key}.{name}"].to(self.device)
                        for key in ("step", "exp_avg", "exp_avg_sq")
                    }
            if "carry.group" in tensors:
                self.carry = Carry(tensors["carry.group"].to(self.device), tensors["carry.alpha"].to(self.device))
        except (KeyError, TypeError, RuntimeError) as error:
            raise CheckpointError(
                f"{self.folder.checkpoint_path} does not fit this run ({error}); remove it to start afresh"
            ) from None
        return True


def decay_groups(hmm: HMM, settings: TrainingConfig) -> list[dict[str, Any]]:
    """The parameters by how fast they decay: matrices, and the rest not at all."""
    groups: dict[float, list[Tensor]] = {}
    for parameter in hmm.parameters():
        decay = settings.weight_decay if parameter.ndim > 1 else 0.0
        groups.setdefault(decay, []).append(parameter)
    return [{"params": parameters, "weight_decay": decay} for decay, parameters in groups.items()]


def finite_or_none(value: float) -> float | None:
    return value if math.isfinite(value) else None


def expand_carry(carry: Carry | None, kept: Kept, states_per_block: int) -> Carry | None:
    """A carried posterior on all slots of its group, zero on those that were dropped."""
    if carry is None or kept.slots is None:
        return carry
    alpha = carry.alpha.new_zeros(len(carry.group), states_per_block)
    return Carry(carry.group, alpha.scatter_(1, kept.slots[carry.group.clamp(min=0)], carry.alpha))


def reduce_carry(carry: Carry | None, kept: Kept) -> Carry | None:
    """The carried posterior given that it lies on states kept now; uniform where none of its states was.

    Masks differ from step to step, so a segment of a stream begins in states its predecessor may not have had.
    """
    if carry is None or kept.slots is None:
        return carry
    alpha = carry.alpha.gather(1, kept.slots[carry.group.clamp(min=0)])
    total = alpha.sum(1, keepdim=True)
    uniform = torch.full_like(alpha, 1 / alpha.shape[1])
    return Carry(carry.group, torch.where(total > 1e-6, alpha / total.clamp(min=1e-30), uniform))


def now_and_then(note: Callable[[str], None], what: str) -> Callable[[int, int], None]:
    """Says how far something long is, if the last word about it was a while ago."""
    said = time.monotonic()

    def progress(done: int, total: int) -> None:
        nonlocal said
        if time.monotonic() - said > NOTE_SECONDS:
            note(f"{what} {done / total:.0%}")
            said = time.monotonic()

    return progress


@kept_memory()
def train(
    corpus: Corpus,
    config: RunConfig,
    out: str | Path,
    *,
    time_limit: float | None = None,
    device: str = "cpu",
    memory: int | None = None,
    progress: Callable[[Status], None] | None = None,
    should_stop: Callable[[], bool] = lambda: False,
    note: Callable[[str], None] = logger.info,
    blocks: Blocks | None = None,
    described: dict[str, Any] | None = None,
    teacher: Teacher | None = None,
) -> TrainResult:
    """Trains, or goes on training, the run in folder `out`; the model best on valid is kept there.

    Stops cleanly, with a checkpoint, after `time_limit` seconds of this sitting or when `should_stop` says so;
    the same call goes on from there. With training.guide_weight a `teacher` gives evidence about the states.
    """
    refuse_guide(corpus, config, teacher)
    check_shares(corpus.train, config.training)
    began = time.monotonic()

    def stop() -> str | None:
        if should_stop():
            return "interrupt"
        return "time limit" if time_limit is not None and time.monotonic() - began > time_limit else None

    folder = RunFolder(out)
    with owned_folder(folder.path):
        blocks = open_run(folder, corpus, config, blocks, described or {}, note, teacher)
        sitting = time.monotonic()
        if config.training.guide_text:
            assert teacher is not None
            corpus = corpus._replace(extra=text_of(teacher, config.training, folder, corpus.vocabulary, note))
        trainer = Trainer(corpus, config, folder, blocks, device, memory, teacher, note)
        num_parameters = sum(p.numel() for p in trainer.hmm.parameters())
        if trainer.restore():
            note(f"continuing {folder.path} at step {trainer.step} of {trainer.total_steps}")
        else:
            folder.journal({"event": "start", "parameters": num_parameters, "steps": trainer.total_steps})
        stopped_by = take_steps(trainer, sitting, stop, progress)
        best_valid, seconds, calibrated = trainer.plateau.best, trainer.elapsed, False
        if stopped_by is None and config.training.calibrate:
            event = calibration_of(trainer, stop, note)
            if event is None:
                stopped_by = stop() or "interrupt"
            else:
                best_valid, seconds, calibrated = event["valid"], seconds + event["seconds"], True
    return TrainResult(
        finished=stopped_by is None,
        stopped_by=stopped_by,
        step=trainer.step,
        total_steps=trainer.total_steps,
        best_valid=best_valid,
        calibrated=calibrated,
        seconds=seconds,
        num_parameters=num_parameters,
    )


def take_steps(
    trainer: Trainer, sitting: float, stop: Callable[[], str | None], progress: Callable[[Status], None] | None
) -> str | None:
    """All steps that are left, with checks, journal and checkpoints; what stopped it, or None at the end."""
    folder, settings = trainer.folder, trainer.settings
    before, first_step = trainer.elapsed, trainer.step
    stepping = mark_time = saved = time.monotonic()
    shown, mark_tokens, tokens, stopped_by = 0.0, 0, 0, None
    while trainer.step < trainer.total_steps:
        stopped_by = stop()
        if stopped_by:
            break
        tokens_before = trainer.tokens
        trainer.run_step()
        tokens += trainer.tokens - tokens_before
        now = time.monotonic()
        trainer.elapsed = before + now - sitting
        speed = (tokens - mark_tokens) / max(1e-9, now - mark_time)
        checked = trainer.step % trainer.check_every == 0 or trainer.step == trainer.total_steps
        is_best = trainer.check() if checked else False
        per_step = (time.monotonic() - stepping) / (trainer.step - first_step)
        status = Status(
            step=trainer.step,
            total_steps=trainer.total_steps,
            epoch=trainer.step / trainer.steps_per_epoch,
            epochs=settings.epochs,
            train=perplexity(trainer.log_likelihood, trainer.tokens),
            train_name=trainer.name_of_train(),
            valid=trainer.valid,
            best=trainer.plateau.best,
            is_best=is_best,
            tokens_per_second=speed,
            seconds=trainer.elapsed,
            eta=per_step * (trainer.total_steps - trainer.step),
            checked=checked,
        )
        if checked:
            trainer.elapsed = before + time.monotonic() - sitting
            folder.journal(check_event(replace(status, seconds=trainer.elapsed), settings.evaluation_context))
            trainer.log_likelihood, trainer.tokens = 0.0, 0
            mark_time, mark_tokens = time.monotonic(), tokens
        if progress is not None and (checked or now - shown > 0.2):
            shown = now
            progress(status)
        if time.monotonic() - saved > settings.checkpoint_seconds:
            trainer.save()
            saved = time.monotonic()
    if stopped_by is None and trainer.step > first_step:
        best, seconds = trainer.plateau.best, trainer.elapsed
        folder.journal({"event": "finished", "step": trainer.step, "best_valid": best, "seconds": seconds})
    if stopped_by or trainer.step > first_step:
        trainer.save()
    return stopped_by


def calibration_of(
    trainer: Trainer, stop: Callable[[], str | None], note: Callable[[str], None]
) -> dict[str, Any] | None:
    """What the journal says of the finished run's calibration, which is made if it was not; None if that was stopped."""
    events = [event for event in trainer.folder.events() if event["event"] == "calibrated"]
    if events and trainer.folder.calibration() is not None:
        return events[0]
    note("calibrating on the validation text")
    event = trainer.calibrate(stop)
    if event is not None:
        trainer.save()  # a restored run forgets what the journal says after its checkpoint
    return event


def check_event(status: Status, context: str) -> dict[str, Any]:
    return {
        "event": "check",
        "step": status.step,
        "epoch": round(status.epoch, 4),
        status.train_name: status.train,
        "valid": status.valid,
        "best": status.is_best,
        "context": context,
        "tokens_per_second": round(status.tokens_per_second, 1),
        "seconds": round(status.seconds, 2),
    }


def refuse_guide(corpus: Corpus, config: RunConfig, teacher: Teacher | None) -> None:
    """An error if there is a teacher and no use for it, or the other way round, or what it cannot be used with."""
    weight = config.training.guide_weight
    if weight and teacher is None:
        raise ConfigError(f"training.guide_weight={weight} needs a teacher: --guide RUN, a trained LSTM's folder")
    if teacher is not None and not weight:
        raise ConfigError("a teacher without training.guide_weight has no say; set it above 0")
    if weight and config.model.constraint == "uniform":
        raise ConfigError("a guide cannot be used with model.constraint=uniform")
    if config.training.guide_text and corpus.extra is not None:
        raise ConfigError("training.guide_text cannot be used with an extra text: leave one of them out")


def open_run(
    folder: RunFolder,
    corpus: Corpus,
    config: RunConfig,
    blocks: Blocks | None,
    described: dict[str, Any],
    note: Callable[[str], None],
    teacher: Teacher | None = None,
) -> Blocks:
    """The run's blocks: made and written for a new folder, read back from one that exists, which must be the same run."""
    if folder.exists():
        folder.check_to_continue()
        stored, about = folder.config()
        if removed := about.get("removed_settings"):
            name, value = next(iter(removed.items()))
            raise ConfigError(
                f"{folder.path} was started with {name}={value}, a setting that no longer exists: the model can be used, "
                "training cannot be resumed; choose another --out"
            )
        refuse_other_run(folder, stored, config)
        if folder.vocabulary().words != corpus.vocabulary.words:
            raise ConfigError(f"{folder.path} was started with another vocabulary; choose another --out")
        if about.get("digest") not in (None, digest(corpus)):  # older runs have none
            raise ConfigError(
                f"{folder.path} was started with another training or validation text; choose another --out"
            )
        if {name: value for name, value in about.items() if name.startswith("extra_")} != about_extra(corpus):
            raise ConfigError(f"{folder.path} was started with another extra text; choose another --out")
        refuse_other_teacher(folder, about, corpus, teacher)
    elif any(path != folder.samples_path for path in folder.path.iterdir()) and not folder.blocks_path.exists():
        raise CheckpointError(f"{folder.path} is not empty and holds no run; choose another --out")
    if folder.exists() and folder.blocks_path.exists():
        stored_blocks = folder.blocks(corpus.vocabulary)
        if blocks is not None and not blocks.equals(stored_blocks):
            raise ConfigError(f"{folder.path} was started with other blocks; choose another --out")
        return stored_blocks
    if blocks is None:
        tokens = UnknownWords(corpus.train, corpus.vocabulary, config.training).for_clustering()
        blocks = make_blocks(config.model, tokens, corpus.vocabulary, config.training.seed, note)
    counts = corpus.train.word_counts(len(corpus.vocabulary))
    blocks.write(folder.blocks_path, corpus.vocabulary.words, counts)
    folder.create(
        config,
        corpus.vocabulary,
        {
            "name": corpus.name,
            "train_tokens": corpus.train.num_tokens,
            "digest": digest(corpus),
            **about_extra(corpus),
            **({} if teacher is None else {"guide_sum": sum_of_vectors(corpus, teacher)}),
            **described,
        },
    )
    return blocks


def text_of(
    teacher: Teacher,
    settings: TrainingConfig,
    folder: RunFolder,
    vocabulary: Vocabulary,
    note: Callable[[str], None],
) -> Text:
    """The text that the teacher writes for a run, kept in its folder."""
    if not folder.text_path.exists():
        note(f"the teacher writes {settings.guide_text:,} tokens: a minute or two a million")
        progress = now_and_then(note, "the teacher has written")
        text = teacher.sample(settings.guide_text, generator_for(settings.seed, "text", 0), progress=progress)
        write_text(folder.text_path, text, vocabulary)
    return encode(read_lines(folder.text_path), vocabulary)


def sum_of_vectors(corpus: Corpus, teacher: Teacher) -> float:
    """A number that tells one teacher from another."""
    words = torch.from_numpy(corpus.train.tokens[:64].astype(np.int64))
    return teacher.vectors_after(words[None]).sum(dtype=torch.float64).item()


def refuse_other_teacher(folder: RunFolder, about: dict[str, Any], corpus: Corpus, teacher: Teacher | None) -> None:
    """An error if the run was begun with another teacher; the last digits may differ with the number of threads."""
    if teacher is None or math.isclose(about.get("guide_sum", math.nan), sum_of_vectors(corpus, teacher), abs_tol=1e-2):
        return
    raise ConfigError(
        f"{folder.path} was started with another teacher, or this one has learned since; choose another --out"
    )


def about_extra(corpus: Corpus) -> dict[str, Any]:
    """What the run folder keeps of an extra text: enough to refuse another one."""
    if corpus.extra is None:
        return {}
    total = sum(int(tokens.sum(dtype=np.int64)) for tokens in corpus.extra.token_arrays())
    return {"extra_tokens": corpus.extra.num_tokens, "extra_sum": total}


def refuse_other_run(folder: RunFolder, stored: RunConfig, config: RunConfig) -> None:
    """An error naming the first setting that differs from the run in the folder."""
    ours, theirs = to_dict(config), to_dict(stored)
    for part in ours:
        pairs = ours[part].items() if isinstance(ours[part], dict) else [("", ours[part])]
        for name, value in pairs:
            other = theirs[part][name] if name else theirs[part]
            if other != value and name not in ("checkpoint_seconds", "calibrate"):
                path = f"{part}.{name}" if name else part
                raise ConfigError(
                    f"{folder.path} holds a run with {path}={other}, asked for {value}; choose another --out, or remove that folder"
                )
