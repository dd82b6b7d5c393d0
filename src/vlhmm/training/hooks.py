"""What may take part in a run without the training loop knowing what it is."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from vlhmm.data.batches import Batch
from vlhmm.data.corpora import Corpus
from vlhmm.hmm import DropoutMask
from vlhmm.training.e_step import TokenEvidence
from vlhmm.training.run_folder import RunFolder

if TYPE_CHECKING:
    from vlhmm.training.trainer import Trainer


@runtime_checkable
class TrainingHook(Protocol):
    """Called by a run in this order: describe or check_resumed, add_text, begin, then evidence in every step."""

    def describe(self, corpus: Corpus) -> dict[str, Any]:
        """Return what config.json stores, to check on resuming that the hook is the same."""

    def check_resumed(self, folder: RunFolder, described: dict[str, Any], corpus: Corpus) -> None:
        """Raise ConfigError if the run in the folder was begun with another hook."""

    def add_text(self, corpus: Corpus, folder: RunFolder, log: Callable[[str], None]) -> Corpus:
        """Return the corpus, perhaps with an extra text."""

    def begin(self, trainer: Trainer) -> None:
        """Take what is needed of a run before its first step."""

    def evidence(self, batches: Sequence[Batch], mask: DropoutMask, step: int) -> TokenEvidence | None:
        """Return the evidence about the states of the batches' tokens in this step, or None."""

    def is_active_at(self, step: int) -> bool:
        """Return whether the step has evidence: its likelihood is then not that of the text alone."""
