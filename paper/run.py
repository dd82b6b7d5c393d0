"""Runs what is missing of a list of rows, in the order of priority, and records it. Prints nothing.

Input: rows and a store of records. Output: records. A finished run is never trained again; one that was
stopped goes on. Test is looked at once, when the run is finished, with the model best on valid; both context
rules are recorded.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from fnmatch import fnmatch
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from paper.records import Record, Store, differences
from paper.rows import Hmm, KneserNey, Neural, Row, Run
from vlhmm.config import unknown
from vlhmm.data.atomic_io import claimed
from vlhmm.data.corpora import Corpus
from vlhmm.errors import ConfigError, VlhmmError

if TYPE_CHECKING:
    from vlhmm.training.distillation import Teacher


class Task(NamedTuple):
    """A run that is not finished, and the first row that asks for it."""

    run: Run
    row: Row
    seed: int


class Tick(NamedTuple):
    """How a run stood at a validation."""

    run: str
    epoch: float
    epochs: float
    valid: float | None
    best: float | None
    seconds: float
    progress: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where and how runs are trained."""

    runs: Path
    store: Store
    device: str = "cpu"
    memory: int | None = None
    threads: int | None = None
    note: Callable[[str], None] = lambda line: None
    tick: Callable[[Tick], None] = lambda tick: None
    should_stop: Callable[[], bool] = lambda: False


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How a call of `reproduce` ended."""

    finished: tuple[str, ...] = ()
    unfinished: tuple[str, ...] = ()
    failed: tuple[tuple[str, VlhmmError], ...] = ()
    stopped_by: str | None = None  # "time limit", "interrupt" or None


def selected(rows: list[Row], only: list[str]) -> list[Row]:
    """Return the rows that `only` names: a corpus, a row, corpus/row, or any of them with *; all rows without it."""
    if not only:
        return rows
    chosen: set[str] = set()
    for pattern in only:
        found = {
            row.full_name
            for row in rows
            if any(fnmatch(name, pattern) for name in (row.corpus, row.name, row.full_name))
        }
        if not found:
            names = sorted({row.full_name for row in rows} | {row.name for row in rows} | {row.corpus for row in rows})
            raise unknown("row", pattern, names)
        chosen |= found
    return [row for row in rows if row.full_name in chosen]


def missing(rows: list[Row], store: Store, seed: int) -> list[Task]:
    """Return the runs that rows still need, most worthy first, each once."""
    tasks: dict[str, Task] = {}
    for row in rows:
        if row.run is None:
            continue
        known = tasks.get(row.run.name)
        if known is not None:
            if row.run.priority < known.run.priority:
                tasks[row.run.name] = known._replace(run=row.run)
            continue
        record = store.get(row.run.name, seed)
        if record is None or not record.is_finished:
            tasks[row.run.name] = Task(row.run, row, seed)
    return sorted(tasks.values(), key=lambda task: task.run.priority)  # stable: a table's order among equals


def reproduce(tasks: list[Task], corpora: dict[str, Corpus], place: Place, time_limit: float | None = None) -> Outcome:
    """Train each task's run until time is up or a stop is requested; a failed task does not stop the others."""
    began = time.monotonic()
    finished: list[str] = []
    failed: list[tuple[str, VlhmmError]] = []
    stopped_by = None
    for task in tasks:
        left = None if time_limit is None else time_limit - (time.monotonic() - began)
        stopped_by = "interrupt" if place.should_stop() else "time limit" if left is not None and left <= 0 else None
        if stopped_by:
            break
        try:
            with claimed(place.runs / f"{task.run.folder_name(task.seed)}.lock") as is_mine:
                if not is_mine:
                    place.note(f"{task.row.full_name}: another process is training {task.run.name}; left to it")
                    continue
                record = place.store.get(task.run.name, task.seed)
                if record is None or not record.is_finished:  # it may have been, in the meantime
                    record, stopped_by = carry_out(task, corpora[task.run.corpus], place, left)
        except VlhmmError as error:
            failed.append((task.row.full_name, error))
            place.note(f"{task.row.full_name}: {' '.join(str(error).split())}")
            continue
        if record.is_finished:
            finished.append(task.row.full_name)
        if stopped_by:
            break
    done = {*finished, *(name for name, _ in failed)}
    unfinished = tuple(task.row.full_name for task in tasks if task.row.full_name not in done)
    return Outcome(finished=tuple(finished), unfinished=unfinished, failed=tuple(failed), stopped_by=stopped_by)


def carry_out(task: Task, corpus: Corpus, place: Place, time_limit: float | None) -> tuple[Record, str | None]:
    """Trains, or goes on training, one run; its record, and what stopped it before its end."""
    run, seed = task.run, task.seed
    if run.retired:
        raise ConfigError(f"{run.name} can no longer be trained, its record is kept: {run.retired}")
    folder = place.runs / run.folder_name(seed)
    record = opening(task, corpus, place)
    place.note(f"{task.row.full_name}: {run.name}, seed {seed}, in {folder}")

    def keep(changed: Record) -> None:
        nonlocal record
        record = changed
        place.store.put(record)
        place.store.put_journal(record, folder / "journal.jsonl")

    def tick(seen: Tick, parameters: int | None = None) -> None:
        keep(
            replace(
                record,
                epochs=round(seen.epoch, 4),
                best_valid=seen.best,
                wall_s=round(seen.seconds, 6),
                progress=seen.progress,
                parameters=parameters or record.parameters,
            )
        )
        place.tick(seen)

    keep(record)
    trained = train(run, seed, corpus, folder, place, time_limit, tick)
    keep(
        replace(
            record,
            parameters=trained.parameters,
            epochs=round(trained.epochs, 4),
            wall_s=round(trained.seconds, 6),
            best_valid=trained.best_valid,
            progress=trained.progress,
            ended=now(),
        )
    )
    if trained.stopped_by:
        return record, trained.stopped_by
    place.note(f"{task.row.full_name}: trained; measuring valid and test")
    clock = time.perf_counter()
    scores, extras = measure(run, corpus, folder, place.memory)
    keep(
        replace(
            record,
            status="finished",
            progress=1.0,
            scores=scores,
            extras=extras,
            ended=now(),
            best_valid=record.best_valid or scores["valid"][record.context],
            evaluation_s=round(time.perf_counter() - clock, 2),
        )
    )
    return record, None


def opening(task: Task, corpus: Corpus, place: Place) -> Record:
    """Return the record of a sitting's start: what was known before, on this machine and commit."""
    from benchmarks.machine import commit, describe

    run, seed = task.run, task.seed
    before = place.store.get(run.name, seed)
    texts = {"train": corpus.train, "valid": corpus.valid, "test": corpus.test}
    return Record(
        run=run.name,
        corpus=run.corpus,
        seed=seed,
        status="unfinished",
        command=task.row.command(seed),
        train_command=run.recipe.train_command(run.corpus, seed),
        note=run.note,
        settings=run.recipe.settings(seed),
        context=run.recipe.context(),
        epochs=before.epochs if before else 0.0,
        epochs_planned=run.recipe.epochs(),
        progress=before.progress if before else 0.0,
        wall_s=before.wall_s if before else 0.0,
        parameters=before.parameters if before else None,
        best_valid=before.best_valid if before else None,
        tokens={split: text.num_tokens for split, text in texts.items() if text is not None},
        commit=commit(),
        machine=describe(place.threads),
        began=before.began if before else now(),
        ended=now(),
    )


# ---- training, one way a recipe


class Trained(NamedTuple):
    """How far training came."""

    parameters: int
    epochs: float
    seconds: float
    best_valid: float | None
    progress: float
    stopped_by: str | None


OnTick = Callable[[Tick, int | None], None]


def train(
    run: Run, seed: int, corpus: Corpus, folder: Path, place: Place, time_limit: float | None, tick: OnTick
) -> Trained:
    """Train the run in its folder, from its last checkpoint if there is one."""
    match run.recipe:
        case Hmm():
            return train_hmm(run, run.recipe, seed, corpus, folder, place, time_limit, tick)
        case Neural():
            return train_neural(run, run.recipe, seed, corpus, folder, place, time_limit, tick)
        case KneserNey():
            return estimate_kneser_ney(run.recipe, corpus, folder)


def train_hmm(
    run: Run,
    recipe: Hmm,
    seed: int,
    corpus: Corpus,
    folder: Path,
    place: Place,
    time_limit: float | None,
    tick: OnTick,
) -> Trained:
    from vlhmm.training import trainer

    config = recipe.config(seed)
    teacher, before = (None, 0.0) if recipe.teacher is None else taught(recipe, corpus, place)

    def seen(status: trainer.Status) -> None:
        if status.checked:
            best, share = finite(status.best), status.step / status.total_steps
            tick(Tick(run.name, status.epoch, status.epochs, status.valid, best, status.seconds, share), None)

    result = trainer.train(
        corpus,
        config,
        folder,
        time_limit=time_limit,
        device=place.device,
        memory=place.memory,
        progress=seen,
        should_stop=place.should_stop,
        log=place.note,
        described={"train": corpus.name, "valid": None},
        teacher=teacher,
    )
    progress = result.step / result.total_steps
    epochs, best = config.training.epochs * progress, finite(result.best_valid)
    seconds = result.seconds + (before if result.finished else 0.0)  # what is left is told by its own pace
    return Trained(result.num_parameters, epochs, seconds, best, progress, result.stopped_by)


def taught(recipe: Hmm, corpus: Corpus, place: Place) -> "tuple[Teacher, float]":
    """Return the recipe's teacher, and how long it was trained."""
    from vlhmm.baselines import load_baseline

    assert recipe.teacher is not None
    name = recipe.teacher.run_name(corpus.name)
    record, home = place.store.get(name, 0), place.runs / f"{name}-seed0"
    if record is None or not record.is_finished or not (home / "model.safetensors").exists():
        raise ConfigError(
            f"the teacher {name} is not trained in {home}; run python -m paper table1 --only "
            f"{corpus.name}/{recipe.teacher.name} first"
            + (f" (its record is kept, its model is gone: remove {place.store.path(name, 0)})" if record else "")
        )
    for setting, before, now in differences(record, recipe.teacher):
        raise ConfigError(
            f"the teacher {name} was trained with another {setting} ({before}, now {now}); remove "
            f"{place.store.path(name, 0)} and {home} to train it anew"
        )
    return cast("Teacher", load_baseline(home)), record.wall_s


def train_neural(
    run: Run,
    recipe: Neural,
    seed: int,
    corpus: Corpus,
    folder: Path,
    place: Place,
    time_limit: float | None,
    tick: OnTick,
) -> Trained:
    from vlhmm.baselines.training import train_baseline

    config = recipe.config(seed)
    last: dict[str, Any] = {"epoch": 0.0, "seconds": 0.0, "best_valid_perplexity": None}

    def seen(event: dict[str, Any]) -> None:
        last.update(event)
        if event["event"] == "check":
            share = min(1.0, event["epoch"] / config.epochs)
            best, valid = event["best_valid_perplexity"], event["valid_perplexity"]
            tick(
                Tick(run.name, event["epoch"], config.epochs, valid, best, event["seconds"], share),
                last["parameters"],
            )

    try:
        result = train_baseline(recipe.kind, corpus, folder, config, time_limit, seen, place.should_stop)
    except KeyboardInterrupt:  # the checkpoint is written
        share = min(1.0, last["epoch"] / config.epochs)
        parameters = last.get("parameters", 0)
        return Trained(parameters, last["epoch"], last["seconds"], last["best_valid_perplexity"], share, "interrupt")
    progress = 1.0 if result.finished else min(1.0, result.epochs / config.epochs)
    return Trained(
        result.model.num_parameters,
        result.epochs,
        result.seconds,
        finite(result.valid_perplexity),
        progress,
        None if result.finished else "time limit",
    )


def estimate_kneser_ney(recipe: KneserNey, corpus: Corpus, folder: Path) -> Trained:
    from vlhmm.baselines.kneser_ney import estimate, save

    began = time.perf_counter()
    model = estimate(corpus.train, corpus.vocabulary, recipe.order)
    seconds = time.perf_counter() - began
    save(model, folder)
    return Trained(model.num_parameters, 1.0, seconds, None, 1.0, None)


# ---- measuring, once


def measure(
    run: Run, corpus: Corpus, folder: Path, memory: int | None
) -> tuple[dict[str, dict[str, float]], dict[str, float]]:
    """Return perplexities of the model best on valid, by split and rule; for ablations train and batch times too."""
    from vlhmm.api import load_any
    from vlhmm.evaluation.perplexity import evaluate

    model = load_any(folder, memory=memory)
    texts = {"valid": corpus.valid} | ({} if corpus.test is None else {"test": corpus.test})
    scores = {
        split: {
            "reset": evaluate(model, text, "reset").perplexity,
            "carry": evaluate(model, text, "carry").perplexity,
        }
        for split, text in texts.items()
    }
    if not (run.is_ablation and isinstance(run.recipe, Hmm)):
        return scores, {}
    rule = run.recipe.context()
    scores["train"] = {rule: evaluate(model, corpus.train, rule).perplexity}  # type: ignore[arg-type]
    del model
    return scores, batch_milliseconds(folder, corpus, memory)


def batch_milliseconds(folder: Path, corpus: Corpus, memory: int | None, repeats: int = 3) -> dict[str, float]:
    """Time to score 16 x 32 tokens: with the parameters made anew, and with all of them at hand."""
    import torch

    from vlhmm.data.batches import stream_batches
    from vlhmm.distributions import HMMDistributions
    from vlhmm.language_model import DEFAULT_MEMORY, HMMLanguageModel
    from vlhmm.training.model import load_hmm

    hmm, run_folder, _ = load_hmm(folder)
    blocks = run_folder.blocks(corpus.vocabulary)
    batch = stream_batches(corpus.valid, min(16, corpus.valid.num_tokens), 32, corpus.vocabulary.eos, "carry")[0]
    fresh, cached = [], []
    for _ in range(repeats):
        began = time.perf_counter()
        with torch.no_grad():
            tables = HMMDistributions(hmm.potentials(), blocks)
        model = HMMLanguageModel(corpus.vocabulary, tables, "carry", memory or DEFAULT_MEMORY)
        model.score_batch(batch.tokens, batch.lengths, model.start(len(batch.lengths)))
        fresh.append(time.perf_counter() - began)
        began = time.perf_counter()
        model.score_batch(batch.tokens, batch.lengths, model.start(len(batch.lengths)))
        cached.append(time.perf_counter() - began)
    return {"ms_per_batch": round(1e3 * min(fresh), 2), "ms_per_batch_cached": round(1e3 * min(cached), 2)}


# ---- small things


def finite(value: float) -> float | None:
    return value if value < float("inf") else None


def now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
