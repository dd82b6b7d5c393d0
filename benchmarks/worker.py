"""One contestant in a process of its own, so that its peak memory is its own.

    python -m benchmarks.worker NAME JSON-SETTINGS

says a JSON line when it is checked and warmed up, then one for every line it reads, which is one timed step,
and a last one with its peak memory when its input ends. With "rounds": n among the settings it reads nothing,
and says one line in all.
"""

import json
import sys
from collections.abc import Callable
from contextlib import nullcontext
from statistics import median
from typing import Any, Protocol


class Contestant(Protocol):
    """Something that is checked and warmed up once, then timed a step at a time."""

    def prepare(self) -> dict[str, Any]: ...

    def step(self) -> dict[str, Any]: ...


class Machine:
    """The machine's own matrix-product rate, beside whom others run."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self.size, self.seconds = settings.get("matmul_size", 2_048), settings.get("matmul_seconds", 1.0)
        self.megabytes = settings.get("megabytes", 256)

    def prepare(self) -> dict[str, Any]:
        from benchmarks.machine import copy_gb_per_s, matmul_gflops

        matmul_gflops(self.size, 0.1)
        return copy_gb_per_s(self.megabytes, self.seconds / 2)

    def step(self) -> dict[str, Any]:
        from benchmarks.machine import matmul_gflops

        return {"matmul_gflops": matmul_gflops(self.size, self.seconds)}


def contestant(name: str, settings: dict[str, Any]) -> Contestant:
    """Return the contestant of that name, built but not yet checked."""
    if name == "machine":
        return Machine(settings)
    if name == "scoring":
        from benchmarks.scoring_speed import Scoring

        return Scoring(settings)
    if name == "naive":
        from benchmarks.naive import Naive

        return Naive(settings)
    from benchmarks import training_speed

    kinds: dict[str, Callable[[dict[str, Any]], Contestant]] = {
        "block-factored": training_speed.HMMTraining,
        "softmax": training_speed.SoftmaxTraining,
        "em": training_speed.EMTraining,
        "lstm": training_speed.LSTMTraining,
        "package-lstm": training_speed.PackageLSTM,
    }
    return kinds[name](settings)


def summary(rounds: list[dict[str, Any]]) -> dict[str, float]:
    """Return the median of every number of the rounds, and of tokens per second."""
    found = {
        key: median(float(r[key]) for r in rounds)
        for key in (rounds[0] if rounds else {})
        if all(isinstance(r.get(key), int | float) for r in rounds)
    }
    if "tokens" in found and "seconds" in found:
        found["tokens_per_s"] = median(r["tokens"] / r["seconds"] for r in rounds)
    return found


def main(arguments: list[str]) -> int:
    """Answer requests; return 0 at the end of the input, 1 with an error as the last line."""
    from benchmarks.errors import ExactnessError
    from benchmarks.machine import peak_gb
    from vlhmm.errors import VlhmmError
    from vlhmm.malloc import kept_memory
    from vlhmm.products import use_fast_products

    out = sys.stdout
    sys.stdout = sys.stderr  # the lines below are all that is said to the parent

    def say(line: dict[str, Any]) -> None:
        print(json.dumps(line), file=out, flush=True)

    try:
        name, settings = arguments[0], json.loads(arguments[1])
        if settings.get("threads"):
            import torch

            torch.set_num_threads(settings["threads"])
        # as the command line does, but for the naive program, which is what one would write
        if name != "naive":
            use_fast_products()
        with nullcontext() if name in ("machine", "scoring", "naive") else kept_memory():
            runner = contestant(name, {"seed": 0, **settings, "own_process": True})
            ready = runner.prepare()
            if "rounds" in settings:
                rounds = [runner.step() for _ in range(settings["rounds"])]
                say({**ready, **summary(rounds), "peak_gb": peak_gb()})
                return 0
            say(ready)
            for _ in sys.stdin:
                say(runner.step())
            say({"peak_gb": peak_gb()})
            return 0
    except VlhmmError as error:
        say({"error": str(error), "inexact": isinstance(error, ExactnessError), "exit_code": error.exit_code})
    except (MemoryError, RuntimeError, KeyError, ValueError, OSError) as error:
        say({"error": f"{type(error).__name__}: {error}"})
    return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
