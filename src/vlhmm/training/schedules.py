"""Learning rates: the paper's division on a plateau, cosine, constant; as values that go into a checkpoint."""

import math
from dataclasses import dataclass, replace

from vlhmm.training.config import TrainingConfig


@dataclass(frozen=True, slots=True)
class Plateau:
    """How validation has gone: the best so far, checks since then, and how often the rate was divided."""

    best: float = math.inf
    checks_since_best: int = 0
    divisions: int = 0

    def after_check(self, valid: float, patience: int) -> "Plateau":
        """Return the state after one more validation; `patience` checks without improvement divide the rate once more."""
        if valid < self.best:
            return replace(self, best=valid, checks_since_best=0)
        if self.checks_since_best + 1 >= patience:
            return Plateau(self.best, 0, self.divisions + 1)
        return replace(self, checks_since_best=self.checks_since_best + 1)


def rate_at(config: TrainingConfig, step: int, total_steps: int, plateau: Plateau) -> float:
    """Return the learning rate of a step: warm-up, times the schedule."""
    warm = min(1.0, (step + 1) / config.warmup_steps) if config.warmup_steps else 1.0
    if config.schedule == "cosine":
        return config.rate * warm * 0.5 * (1 + math.cos(math.pi * min(1.0, step / total_steps)))
    if config.schedule == "plateau":
        return config.rate * warm / config.decay**plateau.divisions
    return config.rate * warm
