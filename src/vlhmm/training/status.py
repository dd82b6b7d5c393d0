"""How a run is doing: what a progress bar shows and the journal keeps."""

import time
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Status:
    """The status of a run, for progress displays."""

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

    def event(self, context: str) -> dict[str, Any]:
        """Return the journal's line about a validation."""
        return {
            "event": "check",
            "step": self.step,
            "epoch": round(self.epoch, 4),
            self.train_name: self.train,
            "valid": self.valid,
            "best": self.is_best,
            "context": context,
            "tokens_per_second": round(self.tokens_per_second, 1),
            "seconds": round(self.seconds, 2),
        }


class Stopwatch:
    """Seconds of a run over all sittings, speed of its steps since the last validation, and when it will end."""

    def __init__(self, seconds_before: float, sitting: float) -> None:
        self._seconds_before, self._sitting = seconds_before, sitting
        self._began = self._mark = self._saved = time.monotonic()
        self._shown = 0.0
        self._steps = self._tokens = 0
        self.tokens_per_second = 0.0

    def count(self, tokens: int) -> None:
        """Count one step that has just ended."""
        self._steps += 1
        self._tokens += tokens
        self.tokens_per_second = self._tokens / max(1e-9, time.monotonic() - self._mark)

    def restart_speed(self) -> None:
        """Measure the speed from now on, which excludes validations."""
        self._mark, self._tokens = time.monotonic(), 0

    def seconds(self) -> float:
        """Training time of all sessions so far."""
        return self._seconds_before + time.monotonic() - self._sitting

    def eta(self, steps_left: int) -> float:
        """Return seconds that the steps left will take, at the pace of this sitting, validations included."""
        return (time.monotonic() - self._began) / max(1, self._steps) * steps_left

    def is_due_to_show(self, interval: float = 0.2) -> bool:
        """Return whether the last status was shown a while ago; if so, this one counts as shown."""
        if time.monotonic() - self._shown <= interval:
            return False
        self._shown = time.monotonic()
        return True

    def is_due_to_save(self, interval: float) -> bool:
        """Return whether this many seconds have passed since the last checkpoint."""
        return time.monotonic() - self._saved > interval

    def saved(self) -> None:
        """Record that a checkpoint was written."""
        self._saved = time.monotonic()
