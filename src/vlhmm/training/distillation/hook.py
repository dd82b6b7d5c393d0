"""Distillation as a training hook."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from vlhmm.data.batches import Batch
from vlhmm.data.corpora import Corpus
from vlhmm.data.user_text import gibibytes
from vlhmm.errors import ConfigError
from vlhmm.hmm import DropoutMask
from vlhmm.training.config import RunConfig
from vlhmm.training.distillation.evidence import (
    LEAST,
    Clusters,
    DistillationTargets,
    Evidence,
    evidence_about,
    make_evidence,
)
from vlhmm.training.distillation.teacher import Teacher, sum_of_vectors, teacher_text
from vlhmm.training.plan import generator_for
from vlhmm.training.run_folder import RunFolder

if TYPE_CHECKING:
    from vlhmm.training.trainer import Trainer


def distillation_for(corpus: Corpus, config: RunConfig, teacher: Teacher | None) -> Distillation | None:
    """Make the hook of a run; ConfigError if a teacher is missing, has nothing to do, or fits no setting of the run."""
    weight = config.distillation.weight
    if weight and teacher is None:
        raise ConfigError(f"distillation.weight={weight} needs a teacher: --guide RUN, a trained LSTM's folder")
    if teacher is not None and not weight:
        raise ConfigError("--guide has no effect unless distillation.weight > 0; set it")
    if weight and config.model.constraint == "uniform":
        raise ConfigError("a guide cannot be used with model.constraint=uniform")
    if config.distillation.text and corpus.extra is not None:
        raise ConfigError("distillation.text cannot be used with an extra text: leave one of them out")
    return None if teacher is None else Distillation(teacher, config)


class Distillation:
    """A teacher's part in a run: a `TrainingHook`."""

    def __init__(self, teacher: Teacher, config: RunConfig) -> None:
        self.teacher, self.config, self.settings = teacher, config, config.distillation
        self.clusters: Clusters | None = None
        # by a batch's identity; the batch is held, so that its id is no other's
        self._evidence: dict[int, tuple[Batch, Evidence | None]] = {}

    def describe(self, corpus: Corpus) -> dict[str, Any]:
        """Return a number that identifies the teacher."""
        return {"guide_sum": sum_of_vectors(corpus, self.teacher)}

    def check_resumed(self, folder: RunFolder, described: dict[str, Any], corpus: Corpus) -> None:
        """Raise ConfigError if another teacher began the run; last digits may differ with the number of threads."""
        if not math.isclose(described.get("guide_sum", math.nan), sum_of_vectors(corpus, self.teacher), abs_tol=1e-2):
            raise ConfigError(
                f"{folder.path} was started with another teacher, or this one has learned since; choose another --out"
            )

    def add_text(self, corpus: Corpus, folder: RunFolder, log: Callable[[str], None]) -> Corpus:
        """Add the text that the teacher writes, if it is to write any, as an extra text."""
        if not self.settings.text:
            return corpus
        return corpus._replace(extra=teacher_text(self.teacher, self.config, folder, corpus.vocabulary, log))

    def begin(self, trainer: Trainer) -> None:
        """Store the run. The clusters are computed from its first step."""
        self.trainer = trainer

    def is_active_at(self, step: int) -> bool:
        """Return whether the teacher's evidence has any weight in that step."""
        return self.settings.weight_at(step, self.trainer.total_steps) > 0

    def evidence(self, batches: list[Batch], mask: DropoutMask, step: int) -> DistillationTargets | None:
        """Return what the teacher says about this rank's tokens of the batches; None when its time is over."""
        weight = self.settings.weight_at(step, self.trainer.total_steps)
        if not weight:
            self._evidence = {}  # large tables
            return None
        if self.clusters is None:
            self._read(self.trainer.plan(0)[0])  # the first step's, wherever this sitting began
        if self.config.training.em_tokens is not None:  # an epoch's batches are new ones: none of them comes back
            current = {id(batch) for batch in batches}
            self._evidence = {key: kept for key, kept in self._evidence.items() if key in current}
        found = [self._about(number, batches) for number in range(len(batches))]
        num_slots = self.trainer.blocks.states_per_block
        nothing = torch.full((1, num_slots), LEAST, dtype=torch.float16)  # of a rank without rows
        return DistillationTargets([each for each in found if each is not None] or [nothing], mask, weight)

    def _read(self, batches: list[Batch]) -> None:
        """Have the teacher read the first step's text, and cluster its vectors: every rank finds the same clusters."""
        run = self.trainer
        self._check_memory()
        run.log("the teacher reads the training text and its vectors are clustered: a minute or so per million tokens")
        generator = generator_for(self.config.training.seed, "guide", 0)
        evidence, self.clusters = make_evidence(
            self.teacher, batches, run.block_of_word, run.hmm.num_alive, run.blocks.states_per_block, generator
        )
        for number, each in enumerate(evidence):
            self._keep(each, number, batches)

    def _about(self, number: int, batches: list[Batch]) -> Evidence | None:
        """Return the evidence about this rank's part of a batch; a new one, of an extra text, is read by the teacher first."""
        batch = batches[number]
        if id(batch) not in self._evidence:
            assert self.clusters is not None
            run = self.trainer
            num_slots = run.blocks.states_per_block
            found = evidence_about(self.teacher, batch, self.clusters, run.block_of_word, num_slots)
            self._keep(found, number, batches)
        return self._evidence[id(batch)][1]

    def _keep(self, evidence: Evidence, number: int, batches: list[Batch]) -> None:
        """Keep this rank's part of the evidence about a batch."""
        batch = batches[number]
        self._evidence[id(batch)] = batch, self.trainer.ranks.share_of_tokens(evidence, number, batches)

    def _check_memory(self) -> None:
        """Raise ConfigError if the evidence, two bytes per token and state of its block, is beyond the budget."""
        run, extra = self.trainer, self.trainer.corpus.extra
        of_extra = self.settings.text or (extra.num_tokens if extra is not None else 0)
        tokens = run.corpus.train.num_tokens + of_extra
        needed = 2 * tokens * run.blocks.states_per_block
        if run.memory is not None and needed > run.memory:
            raise ConfigError(
                f"a guide's evidence about {tokens:,} tokens needs {gibibytes(needed)}, the limit is "
                f"{gibibytes(run.memory)}; raise --memory, or take less text or fewer states per block"
            )
