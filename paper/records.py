"""What has been trained: one JSON file a run and seed, and its journal beside it.

A record is written at every validation (`unfinished`) and once at the end (`finished`), whole or not at all.
It holds all that tables show, so they can be rendered where the models themselves are not.
"""

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from paper.rows import Recipe, Run
from vlhmm.config import flattened
from vlhmm.data.atomic_io import write_atomically
from vlhmm.errors import DataError
from vlhmm.training.migration import migrated

FORMAT_VERSION = 1
UNTOLD = ("training.seed", "seed", "training.checkpoint_seconds")  # settings that make no other model


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """One run with one seed, finished or on its way."""

    format_version: int = FORMAT_VERSION
    run: str
    corpus: str
    seed: int
    status: str  # finished or unfinished
    command: str
    train_command: str  # the same training without `python -m paper`
    note: str
    settings: dict[str, Any]
    context: str  # the rule of training and of choosing the best model
    epochs: float
    epochs_planned: float
    progress: float  # 0 to 1
    wall_s: float  # training with its validations, over all sittings
    parameters: int | None = None
    best_valid: float | None = None  # under `context`
    scores: dict[str, dict[str, float]] = field(default_factory=dict)  # split -> rule -> perplexity, when finished
    tokens: dict[str, int] = field(default_factory=dict)  # split -> words and one <eos> a line
    extras: dict[str, float] = field(default_factory=dict)
    evaluation_s: float | None = None
    commit: str | None = None
    machine: dict[str, Any] = field(default_factory=dict)
    began: str = ""
    ended: str = ""

    @property
    def is_finished(self) -> bool:
        return self.status == "finished"

    def score(self, split: str, rule: str) -> float | None:
        """Return the perplexity of a split under a rule; for an unfinished run, its best on valid so far."""
        if not self.is_finished and (split, rule) == ("valid", self.context):
            return self.best_valid
        return self.scores.get(split, {}).get(rule)


class Store:
    """The folder of records."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)

    def path(self, run: str, seed: int) -> Path:
        return self.folder / f"{run}-seed{seed}.json"

    def journal_path(self, run: str, seed: int) -> Path:
        return self.folder / f"{run}-seed{seed}.jsonl"

    def get(self, run: str, seed: int) -> Record | None:
        """Return the record of a run with that seed, or None before it began."""
        path = self.path(run, seed)
        if not path.exists():
            return None
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
            version = content["format_version"]
            record = Record(**{name: content[name] for name in content if name in KNOWN})
        except (ValueError, TypeError, KeyError) as error:
            raise DataError(
                f"{path} is no record of a run ({error}); restore it, or remove it to train again"
            ) from None
        except OSError as error:
            raise DataError(f"cannot read {path}: {error.strerror}") from None
        if version != FORMAT_VERSION:
            raise DataError(f"{path} has format version {version!r}, this vlhmm reads {FORMAT_VERSION}")
        return record

    def all_seeds(self, run: str) -> Iterator[Record]:
        """Yield the records of a run, by seed."""
        seeds = []
        for path in self.folder.glob(f"{run}-seed*.json"):
            number = path.stem.removeprefix(f"{run}-seed")
            if number.isdecimal():
                seeds.append(int(number))
        for seed in sorted(seeds):
            record = self.get(run, seed)
            if record is not None:
                yield record

    def put(self, record: Record) -> None:
        content = json.dumps(asdict(record), indent=2, ensure_ascii=False) + "\n"
        write_atomically(self.path(record.run, record.seed), content.encode())

    def put_journal(self, record: Record, journal: Path) -> None:
        """Keeps a copy of the run's journal beside its record."""
        if journal.exists():
            write_atomically(self.journal_path(record.run, record.seed), journal.read_bytes())

    def uncalibrated_valid(self, record: Record) -> float | None:
        """Return the validation perplexity of a finished run before calibration, from its journal; None if it was not calibrated."""
        path = self.journal_path(record.run, record.seed)
        if not record.is_finished or not path.exists():
            return None
        events = {event["event"]: event for event in map(json.loads, path.read_text(encoding="utf-8").splitlines())}
        return events["finished"]["best_valid"] if {"finished", "calibrated"} <= events.keys() else None


KNOWN = {f.name for f in fields(Record)}


def changed_settings(record: Record, run: Run) -> list[str]:
    """Return 'training.epochs 400, now 300' for every setting in which a run of today would differ."""
    return [f"{name} {before}, now {now}" for name, before, now in differences(record, run.recipe)]


def differences(record: Record, recipe: Recipe) -> list[tuple[str, Any, Any]]:
    """Return (name, value in the record, value in the recipe) of every setting in which they differ."""
    before, now = dict(flattened(migrated(record.settings)[0])), dict(flattened(recipe.settings(record.seed)))
    return [
        (name, before[name], now[name])
        for name in before
        if name in now and name not in UNTOLD and before[name] != now[name]
    ]
