"""Where contestants run: each in its own process (`Process`), or in this one for tests (`Inline`)."""

import json
import os
import queue
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from typing import Any, Protocol

from benchmarks.errors import ExactnessError, WorkerError

# What `vlhmm` sets for itself before torch is loaded: idle threads sleep, freed memory is kept.
ENVIRONMENT = {
    "OMP_WAIT_POLICY": "passive",
    "GOMP_SPINCOUNT": "20000",
    "MALLOC_MMAP_MAX_": "0",
    "MALLOC_TRIM_THRESHOLD_": "-1",
}


class Host(Protocol):
    """A contestant somewhere. `ready` and `step` wait no longer than the given moment of `time.monotonic`."""

    def ready(self, until: float) -> dict[str, Any]: ...

    def step(self, until: float) -> dict[str, Any]: ...

    def finish(self, until: float) -> dict[str, Any]: ...

    def close(self) -> None: ...


Launch = Callable[[str, dict[str, Any]], Host]


class Process:
    """A worker process, spoken to in JSON lines."""

    def __init__(self, name: str, settings: dict[str, Any]) -> None:
        self.name = name
        # the naive program gets the machine as it is; all others what the command line gives itself
        tuned = {} if name == "naive" else ENVIRONMENT
        self.errors = tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")
        self.process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.worker", name, json.dumps(settings)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.errors, text=True,
            env={**os.environ, **tuned},
        )  # fmt: skip
        self.lines: queue.Queue[str | None] = queue.Queue()
        self.reader = threading.Thread(target=self._read, daemon=True)
        self.reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.put(line)
        self.lines.put(None)

    def ready(self, until: float) -> dict[str, Any]:
        """What the worker says when it is checked and warm."""
        return self._answer(until)

    def step(self, until: float) -> dict[str, Any]:
        """What one timed step gave."""
        assert self.process.stdin is not None
        try:
            print("step", file=self.process.stdin, flush=True)
        except BrokenPipeError:
            pass  # it died: the answer will say so
        return self._answer(until)

    def finish(self, until: float) -> dict[str, Any]:
        """Its peak memory; the process ends."""
        assert self.process.stdin is not None
        try:
            self.process.stdin.close()
        except BrokenPipeError:
            pass
        found = self._answer(until)
        self.close()
        return found

    def close(self) -> None:
        """End the process, by force if it must be."""
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        self.reader.join()  # its pipe has ended with the process
        for stream in (self.process.stdin, self.process.stdout, self.errors):
            if stream is not None and not stream.closed:
                try:
                    stream.close()
                except BrokenPipeError:
                    pass

    def _answer(self, until: float) -> dict[str, Any]:
        try:
            line = self.lines.get(timeout=max(0.0, until - time.monotonic()))
        except queue.Empty:
            raise WorkerError(f"{self.name}: its time was up before it was measured") from None
        if line is None:
            code = self.process.wait()
            ended = f"by signal {-code}" if code < 0 else f"with code {code}"
            hint = "; perhaps memory ran out" if code == -9 else ""
            raise WorkerError(f"{self.name}: its process ended {ended}{hint}{self._last_error()}")
        answer = json.loads(line)
        if "error" in answer:
            raise (ExactnessError if answer.get("inexact") else WorkerError)(f"{self.name}: {answer['error']}")
        return answer

    def _last_error(self) -> str:
        self.errors.seek(0)
        lines = self.errors.read().strip().splitlines()
        return f" ({lines[-1]})" if lines else ""


class Inline:
    """The same contestant in this process: for tests; its peak memory is everybody's."""

    def __init__(self, name: str, settings: dict[str, Any]) -> None:
        from benchmarks.worker import contestant

        self.contestant = contestant(name, settings)

    def ready(self, until: float) -> dict[str, Any]:
        return self.contestant.prepare()

    def step(self, until: float) -> dict[str, Any]:
        return self.contestant.step()

    def finish(self, until: float) -> dict[str, Any]:
        from benchmarks.machine import peak_gb

        return {"peak_gb": peak_gb()}

    def close(self) -> None:
        return None
