"""A table's rows, and the runs behind them. A run is trained once; several rows may stand on it.

Knows nothing of what has been trained already (that is `results`) and imports no torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from paper.reported import Reported
from vlhmm.config import override, to_dict
from vlhmm.training.config import RunConfig
from vlhmm.training.presets import preset

if TYPE_CHECKING:
    from vlhmm.baselines.training import BaselineConfig


@dataclass(frozen=True, slots=True)
class Hmm:
    """An HMM by `vlhmm.training`: a preset and changes, as in `vlhmm train --preset NAME --set A.B=C`."""

    preset: str
    changes: tuple[str, ...] = ()
    teacher: Neural | None = None  # a baseline whose hidden vectors guide the E-steps

    def config(self, seed: int = 0) -> RunConfig:
        return override(preset(self.preset), [*self.changes, f"training.seed={seed}"])

    def settings(self, seed: int) -> dict[str, Any]:
        taught = {"teacher": self.teacher.settings(0)} if self.teacher else {}
        return {**to_dict(self.config(seed)), **taught}

    def epochs(self) -> float:
        return self.config().training.epochs

    def context(self) -> str:
        return self.config().training.evaluation_context

    def train_command(self, corpus: str, seed: int) -> str:
        """Return the same training by hand."""
        words = [
            "vlhmm train",
            corpus,
            "--preset",
            self.preset,
            *(f"--set {change}" for change in self.changes),
        ]
        if self.teacher is None:
            return " ".join([*words, f"--seed {seed}", "--out RUN"])
        teach = self.teacher.train_command(corpus, 0).replace("--out RUN", "--out TEACHER")
        return " ".join([f"{teach} && {words[0]}", *words[1:], f"--guide TEACHER --seed {seed}", "--out RUN"])


@dataclass(frozen=True, slots=True)
class Neural:
    """A feed-forward or LSTM model by `vlhmm.baselines`: that kind's own settings, and changes to them."""

    kind: str  # ff or lstm
    changes: tuple[str, ...] = ()
    called: str = ""  # tells it from another of its kind

    @property
    def name(self) -> str:
        """Of its row in table 1."""
        return f"{self.kind}-{self.called}" if self.called else self.kind

    def run_name(self, corpus: str) -> str:
        """The folder of the row's own run."""
        return f"{corpus}-{self.name}"

    def config(self, seed: int = 0) -> BaselineConfig:
        from vlhmm.baselines.training import default_config

        return override(default_config(self.kind), [*self.changes, f"seed={seed}"])

    def settings(self, seed: int) -> dict[str, Any]:
        return to_dict(self.config(seed))

    def epochs(self) -> float:
        return float(self.config().epochs)

    def context(self) -> str:
        return self.config().context

    def train_command(self, corpus: str, seed: int) -> str:
        words = [f"vlhmm baseline {self.kind} {corpus}", *(f"--set {change}" for change in self.changes)]
        return " ".join([*words, f"--seed {seed}", "--out RUN"])


@dataclass(frozen=True, slots=True)
class KneserNey:
    """An n-gram model, estimated in one pass."""

    order: int = 5

    def settings(self, seed: int) -> dict[str, Any]:
        return {"order": self.order}

    def epochs(self) -> float:
        return 1.0

    def context(self) -> str:
        return "reset"  # a line's first word has no other context, whatever the rule

    def train_command(self, corpus: str, seed: int) -> str:
        return f"vlhmm baseline kn {corpus} --order {self.order} --out RUN"


Recipe = Hmm | Neural | KneserNey


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One training: what, on which corpus, and about how long."""

    name: str  # of its folder and its results, e.g. ptb-lstm
    corpus: str
    recipe: Recipe
    seconds_per_epoch: float  # an estimate for two cores, validations included
    priority: int  # runs are started in this order, least first
    note: str = ""  # how its training differs from the paper's
    retired: str = ""  # why it cannot be trained any more: its record is all that is shown
    is_ablation: bool = False  # train perplexity and the time of a batch are measured too

    def estimated_seconds(self) -> float:
        return self.seconds_per_epoch * self.recipe.epochs()

    def folder_name(self, seed: int) -> str:
        return f"{self.name}-seed{seed}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One line of a table: ours and the paper's number for it, or a number the paper cites."""

    table: str
    corpus: str
    name: str  # for --only; one a table and corpus
    model: str  # for people
    run: Run | None = None  # None: cited, never trained here
    reported: Reported | None = None
    states: int | None = None  # |Z| of a cited row
    series: str = ""  # in a figure: the curve this point is of ...
    x: int | None = None  # ... and where
    seed: int = 0

    @property
    def full_name(self) -> str:
        return f"{self.corpus}/{self.name}"

    @property
    def num_states(self) -> int | None:
        return self.states or self._model("num_states")

    @property
    def num_blocks(self) -> int | None:
        return self._model("num_blocks")

    def _model(self, setting: str) -> int | None:
        if self.run is None or not isinstance(self.run.recipe, Hmm):
            return None
        return getattr(self.run.recipe.config().model, setting)

    def command(self, seed: int | None = None) -> str:
        """Return what to type for this row alone."""
        seed = self.seed if seed is None else seed
        return f"python -m paper {self.table} --only {self.full_name}" + (f" --seed {seed}" if seed else "")
