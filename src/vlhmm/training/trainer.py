"""Training: step, validate now and then, write a checkpoint now and then. One loop for gradient training and EM.

A step draws a dropout mask, takes the expected counts of its batches under the reduced model (E-step), and moves the
parameters toward the maximum of the expected log-likelihood (M-step) once (gradient) or a few times (generalized EM). All
randomness is a function of (seed, step), so a killed run resumes from its last checkpoint with the same bits.
"""

import logging
import math
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from vlhmm.clustering.blocks import Blocks
from vlhmm.data.atomic_io import owned_folder
from vlhmm.data.batches import Batch
from vlhmm.data.corpora import Corpus
from vlhmm.errors import CheckpointError, TrainingError
from vlhmm.evaluation.perplexity import perplexity
from vlhmm.hmm import DropoutMask
from vlhmm.malloc import kept_memory
from vlhmm.products import fast_products
from vlhmm.training.calibration import calibrate
from vlhmm.training.checkpoint import Progress, restore_checkpoint, save_checkpoint
from vlhmm.training.config import RunConfig
from vlhmm.training.distillation import Teacher, distillation_for
from vlhmm.training.distributed import OtherRunFolder, Ranks, check_settings
from vlhmm.training.e_step import Buffers, PreparedBatches, expectation
from vlhmm.training.hooks import TrainingHook
from vlhmm.training.m_step import MStep, NotFinite
from vlhmm.training.masks import expand_carry, reduce_carry, sample_mask
from vlhmm.training.model import build_hmm
from vlhmm.training.open_run import open_run
from vlhmm.training.plan import make_plan
from vlhmm.training.run_folder import RunFolder
from vlhmm.training.schedules import rate_at
from vlhmm.training.shares import check_shares
from vlhmm.training.status import Status, Stopwatch
from vlhmm.training.unknown_words import UnknownWords
from vlhmm.training.unseen_tokens import unseen_tokens
from vlhmm.training.validation import Validation

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainResult:
    """How a call of `train` ended."""

    finished: bool
    stopped_by: str | None  # "time limit", "interrupt" or None
    step: int
    total_steps: int
    best_valid: float
    calibrated: bool  # the best validation perplexity is that of the calibrated model
    seconds: float  # over all sessions
    num_parameters: int


@kept_memory()
@fast_products()
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
    log: Callable[[str], None] = logger.info,
    blocks: Blocks | None = None,
    described: dict[str, Any] | None = None,
    teacher: Teacher | None = None,
) -> TrainResult:
    """Train the run in folder `out`, or resume it. The model with the best validation perplexity is kept there.

    Stops with a checkpoint after `time_limit` seconds of this session, or when `should_stop` returns True; the same call
    resumes. With distillation.weight > 0 a `teacher` gives evidence about the states.
    """
    hook = distillation_for(corpus, config, teacher)
    check_shares(corpus.train, config.training)
    began, ranks = time.monotonic(), Ranks()
    check_settings(config, ranks)

    def stop() -> str | None:
        late = time_limit is not None and time.monotonic() - began > time_limit
        return (None, "time limit", "interrupt")[ranks.agreed(2 if should_stop() else int(late))]

    folder = RunFolder(out) if ranks.is_first else OtherRunFolder(out)
    with owned_folder(folder.path) if ranks.is_first else nullcontext():
        with ranks.first_before_others():
            blocks = open_run(folder, corpus, config, blocks, described or {}, log, hook)
        sitting = time.monotonic()
        if hook is not None:
            with ranks.first_before_others():
                corpus = hook.add_text(corpus, folder, log)
        trainer = Trainer(corpus, config, folder, blocks, device, memory, hook, log)
        trainer.restore()
        stopped_by = trainer.run(stop, progress, sitting)
        best_valid, seconds, calibrated = trainer.at.plateau.best, trainer.at.seconds, False
        if stopped_by is None and config.training.calibrate:
            event = trainer.calibrate(stop)
            if event is None:
                stopped_by = stop() or "interrupt"
            else:
                best_valid, seconds, calibrated = event["valid"], seconds + event["seconds"], True
    return TrainResult(
        finished=stopped_by is None,
        stopped_by=stopped_by,
        step=trainer.at.step,
        total_steps=trainer.total_steps,
        best_valid=best_valid,
        calibrated=calibrated,
        seconds=seconds,
        num_parameters=trainer.num_parameters,
    )


class Trainer:
    """One run in progress: a model, its E-step and M-step, and the position of training (`at`)."""

    def __init__(
        self,
        corpus: Corpus,
        config: RunConfig,
        folder: RunFolder,
        blocks: Blocks,
        device: str,
        memory: int | None,
        hook: TrainingHook | None = None,
        log: Callable[[str], None] = logger.info,
    ) -> None:
        self.corpus, self.config, self.folder, self.blocks = corpus, config, folder, blocks
        self.settings, self.memory, self.hook, self.log = config.training, memory, hook, log
        self.ranks = Ranks()
        unknown = UnknownWords(corpus.train, corpus.vocabulary, self.settings)
        counts = unknown.expected_counts() if unknown.any else None
        self.hmm = build_hmm(config, blocks, corpus.train, counts).to(torch.device(device))
        self.num_parameters = sum(p.numel() for p in self.hmm.parameters())
        word_counts = corpus.train.word_counts(len(corpus.vocabulary))
        unseen = unseen_tokens(corpus.vocabulary, word_counts, blocks, config.model)
        if unseen is not None:
            unseen = unseen.to(torch.device(device))
            unseen.copy_parameters(self.hmm)
        self.m_step = MStep(self.hmm, self.settings, unseen, self.ranks)
        self.validation = Validation(self.hmm, blocks, corpus, self.settings.evaluation_context, memory, self.ranks)
        self.block_of_word = torch.from_numpy(blocks.block_of_word).to(torch.device(device))
        self.prepared, self.buffers = PreparedBatches(self.block_of_word, blocks.num_blocks), Buffers()
        self.plan = make_plan(corpus.train, self.settings, corpus.vocabulary.eos, corpus.extra, unknown)
        self._epoch: tuple[int, Sequence[list[Batch]]] = (0, self.plan(0))
        self.steps_per_epoch = len(self._epoch[1])
        self.total_steps = max(1, round(self.settings.epochs * self.steps_per_epoch))
        self.check_every = max(1, round(self.steps_per_epoch / self.settings.checks_per_epoch))
        self.at = Progress()
        if hook is not None:
            hook.begin(self)

    def run(self, stop: Callable[[], str | None], show: Callable[[Status], None] | None, sitting: float) -> str | None:
        """Take all remaining steps. Returns what stopped them, or None at the end."""
        at, first_step = self.at, self.at.step
        watch = Stopwatch(at.seconds, sitting)
        while at.step < self.total_steps:
            if stopped_by := stop():
                self.save()
                return stopped_by
            watch.count(self.train_step(self.batches()))
            checked = at.step % self.check_every == 0 or at.step == self.total_steps
            is_best = self.validate() if checked else False
            at.seconds = watch.seconds()
            status = self.status(watch, checked, is_best)
            if checked:
                self.folder.journal(status.event(self.settings.evaluation_context))
                at.log_likelihood, at.tokens = 0.0, 0
                watch.restart_speed()
            if show is not None and (watch.is_due_to_show() or checked):
                show(status)
            if self.ranks.of_first(watch.is_due_to_save(self.settings.checkpoint_seconds)):
                self.save()
                watch.saved()
        if at.step > first_step:
            event = {"event": "finished", "step": at.step, "best_valid": at.plateau.best, "seconds": at.seconds}
            self.folder.journal(event)
            self.save()
        return None

    def whole_batches(self) -> list[Batch]:
        """Return the batches of the next step, of all ranks together."""
        epoch, index = divmod(self.at.step, self.steps_per_epoch)
        if self._epoch[0] != epoch:
            self._epoch = (epoch, self.plan(epoch))
        return self._epoch[1][index]

    def batches(self) -> list[Batch]:
        """Return the batches of the next step: this rank's rows of them."""
        return self.ranks.share(self.whole_batches())

    def mask(self) -> DropoutMask:
        """Return the dropout mask of the next step."""
        return sample_mask(self.hmm, self.blocks, self.settings, self.at.step)

    def train_step(self, batches: list[Batch]) -> int:
        """Draw the dropout mask, run the E-step and the M-step, and return the number of tokens, summed over ranks."""
        at, settings = self.at, self.settings
        mask = self.mask()
        evidence = self.hook.evidence(self.whole_batches(), mask, at.step) if self.hook is not None else None
        carry = reduce_carry(at.carry, mask) if batches[0].continues else None
        prepared = self.prepared.get(batches, carry.block if carry is not None else None)
        potentials = self.hmm.potentials(mask)
        expected = self.ranks.add_up(expectation(potentials, prepared, carry, self.buffers, self.memory, evidence))
        if not math.isfinite(expected.log_likelihood):
            raise self.not_finite("the loss")
        try:
            rate = rate_at(settings, at.step, self.total_steps, at.plateau)
            self.m_step.take(potentials, mask, expected, at.step, rate)
        except NotFinite as what:
            raise self.not_finite(str(what)) from None
        at.carry = expand_carry(expected.carry, mask, self.blocks.states_per_block)
        at.log_likelihood += expected.log_likelihood
        at.tokens += expected.tokens
        at.step += 1
        return expected.tokens

    def validate(self) -> bool:
        """Validate, and keep the model if it is the best so far. Returns whether it is."""
        at, weights = self.at, self.m_step.weights()
        at.valid = self.validation.perplexity(weights)
        is_best = at.valid < at.plateau.best
        at.plateau = at.plateau.after_check(at.valid, self.settings.patience)
        if is_best:
            self.folder.save_model(weights)
        return is_best

    def calibrate(self, stop: Callable[[], str | None]) -> dict[str, Any] | None:
        """Calibrate a finished run once. Return its journal line, or None if training was stopped before its end."""
        events = [event for event in self.folder.events() if event["event"] == "calibrated"]
        calibrated = bool(events) and self.folder.calibration() is not None
        self.ranks.wait()  # all ranks have checked, and the best model is written
        if calibrated:
            if not all(type(events[0].get(name)) in (int, float) for name in ("valid", "seconds")):
                raise CheckpointError(
                    f"{self.folder.journal_path} is damaged: its line on the calibration has no numbers; restore it, or "
                    "remove that line to calibrate again"
                )
            return events[0]
        self.log("calibrating on the validation text")
        device = next(self.hmm.parameters()).device
        event = calibrate(self.folder, self.config.model, self.validation.perplexity, device, stop)
        if event is not None:
            self.save()  # a restored run truncates the journal to its checkpoint
        return event

    def save(self) -> None:
        """Write a checkpoint."""
        try:
            carry = self.ranks.whole_carry(self.at.carry, self.settings.batch == "streams")
            save_checkpoint(self.folder, replace(self.at, carry=carry), self.m_step)
        except NotFinite as what:
            raise self.not_finite(str(what)) from None

    def restore(self) -> None:
        """Restore the last checkpoint, or begin the journal of a new run."""
        restored = restore_checkpoint(self.folder, self.m_step, self.total_steps)
        if restored is None:
            self.folder.journal({"event": "start", "parameters": self.num_parameters, "steps": self.total_steps})
            return
        self.at = replace(restored, carry=self.ranks.own_carry(restored.carry))
        self.log(f"continuing {self.folder.path} at step {self.at.step} of {self.total_steps}")

    def status(self, watch: Stopwatch, checked: bool, is_best: bool) -> Status:
        """Return the status after a step."""
        at = self.at
        return Status(
            step=at.step,
            total_steps=self.total_steps,
            epoch=at.step / self.steps_per_epoch,
            epochs=self.settings.epochs,
            train=perplexity(at.log_likelihood, at.tokens),
            train_name=self.name_of_train(),
            valid=at.valid,
            best=at.plateau.best,
            is_best=is_best,
            tokens_per_second=watch.tokens_per_second,
            seconds=at.seconds,
            eta=watch.eta(self.total_steps - at.step),
            checked=checked,
        )

    def name_of_train(self) -> str:
        """Return the name of the training perplexity since the last check: whether it is under dropout or with evidence."""
        first = (self.at.step - 1) // self.check_every * self.check_every
        if self.hook is not None and self.hook.is_active_at(first):
            return "train_under_guide"  # unlikely evidence counts against it
        return "train_under_dropout" if self.settings.state_dropout else "train"

    def not_finite(self, what: str) -> TrainingError:
        """Return the error for a loss, a gradient or a parameter that is not finite."""
        step, steps = self.at.step, self.steps_per_epoch
        return TrainingError(
            f"{what} is not finite at step {step} (epoch {step / steps:.2f}, batch {step % steps} of {steps}); the last "
            "good checkpoint is kept: lower training.rate and start another run"
        )
