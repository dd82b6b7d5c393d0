"""Several contestants timed in turn, one step each a round, so that all of them meet the same machine."""

import time
from collections.abc import Callable
from statistics import median
from typing import Any

from benchmarks.errors import WorkerError
from benchmarks.hosts import Host, Launch
from benchmarks.worker import summary

Entries = dict[str, tuple[str, dict[str, Any]]]  # label -> (contestant's name, its settings)
Figures = dict[str, Any]


class Timer:
    """How much of the benchmark's time is left."""

    def __init__(self, seconds: float) -> None:
        self.began = time.monotonic()
        self.deadline = self.began + seconds

    @property
    def spent(self) -> float:
        return time.monotonic() - self.began

    @property
    def left(self) -> float:
        return self.deadline - time.monotonic()


def contest(entries: Entries, rounds: int, launch: Launch, timer: Timer) -> dict[str, Figures]:
    """By label: what each said when it was ready, its rounds and their medians, and its peak memory.

    At least one round; another is begun only if it would end in time.
    """
    hosts: dict[str, Host] = {}
    try:
        for label, (name, settings) in entries.items():
            hosts[label] = launch(name, settings)
        ready = {label: host.ready(timer.deadline) for label, host in hosts.items()}
        found: dict[str, list[Figures]] = {label: [] for label in hosts}
        longest = 0.0
        while len(next(iter(found.values()))) < rounds and timer.left > 1.5 * longest:
            began = time.monotonic()
            answers = {label: host.step(timer.deadline) for label, host in hosts.items()}
            for label, answer in answers.items():
                found[label].append(answer)
            longest = max(longest, time.monotonic() - began)
        if not longest:
            raise WorkerError(f"{', '.join(entries)}: the benchmark's time was up before a step was timed")
        return {
            label: {
                **ready[label],
                **summary(found[label]),
                **host.finish(timer.deadline),
                "rounds": found[label],
            }
            for label, host in hosts.items()
        }
    finally:
        for host in hosts.values():
            host.close()


def climb(entry: tuple[str, dict[str, Any]], seconds: float, launch: Launch, timer: Timer) -> Figures:
    """Return what a contestant reported when it was ready, its steps within `seconds`, and why it ended."""
    until = min(timer.deadline, time.monotonic() + seconds)
    host = launch(*entry)
    steps: list[Figures] = []
    try:
        ready = host.ready(until)
        ended = ""
        while not ended:
            try:
                answer = host.step(until)
            except WorkerError as error:
                if not steps:
                    raise
                answer = {"ended": str(error)}  # what it reached before stands
            ended = answer.get("ended", "")
            if not ended:
                steps.append(answer)
        return {**ready, "sizes": steps, "ended": ended}
    finally:
        host.close()


def paired_ratio(
    ours: Figures, theirs: Figures, value: Callable[[Figures], float] = lambda r: r["tokens"] / r["seconds"]
) -> float:
    """Return the median over rounds of our value by theirs in the same round."""
    return median(value(a) / value(b) for a, b in zip(ours["rounds"], theirs["rounds"], strict=True))
