"""What missing runs would cost: from what was recorded, else an estimate, else (when asked) measured."""

import time
from typing import NamedTuple

from paper.records import Store
from paper.rows import Hmm, KneserNey, Neural, Run
from vlhmm.data.corpora import Corpus


class Cost(NamedTuple):
    """Seconds still to go, and how that is known."""

    seconds: float
    basis: str


def expected_cost(run: Run, store: Store, seed: int) -> Cost:
    """From the run's own pace, from the same run with another seed, or the estimate that stands with it."""
    record = store.get(run.name, seed)
    if record is not None and record.is_finished:
        return Cost(0.0, "finished")
    if record is not None and record.progress > 0:
        return Cost(record.wall_s * (1 - record.progress) / record.progress, "at its pace so far")
    for other in store.all_seeds(run.name):
        if other.is_finished:
            return Cost(other.wall_s - teacher_seconds(run, store), f"as recorded with seed {other.seed}")
    return Cost(run.estimated_seconds(), "an estimate for two cores")


def teacher_seconds(run: Run, store: Store) -> float:
    """Return how long the run's teacher was trained, which a finished record counts in."""
    if not isinstance(run.recipe, Hmm) or run.recipe.teacher is None:
        return 0.0
    record = store.get(run.recipe.teacher.run_name(run.corpus), 0)
    return record.wall_s if record is not None else 0.0


def measured_cost(run: Run, seed: int, corpus: Corpus, device: str, memory: int | None) -> Cost:
    """From a few real steps and one validation, which leave nothing behind; a run with a teacher is estimated."""
    match run.recipe:
        case Hmm(teacher=Neural()):
            return Cost(run.estimated_seconds(), "an estimate for two cores")
        case Hmm():
            from vlhmm.training.dry_run import dry_run

            told = dry_run(corpus, run.recipe.config(seed), None, device, memory)
            return Cost(told["seconds_total"], f"measured here, {told['memory_gb']:.1f} GB of memory")
        case Neural():
            return Cost(neural_seconds(run.recipe, seed, corpus), "measured here")
        case KneserNey():
            from vlhmm.baselines.kneser_ney import estimate

            began = time.perf_counter()
            estimate(corpus.train, corpus.vocabulary, run.recipe.order)
            return Cost(time.perf_counter() - began, "measured here")


def neural_seconds(recipe: Neural, seed: int, corpus: Corpus, sample: float = 8.0) -> float:
    """Estimate the seconds of all epochs from a step of `sample` seconds and one validation."""
    from vlhmm.baselines.training import train_baseline

    config = recipe.config(seed)
    began = time.perf_counter()
    # a run without a folder that is stopped before its first check validates once on its way out
    result = train_baseline(recipe.kind, corpus, None, config, time_limit=sample)
    after = time.perf_counter() - began - result.seconds
    checks = config.epochs * config.checks_per_epoch
    return result.seconds / max(result.epochs, 1e-9) * config.epochs + after * checks
