"""What the machine is and can do. Knows nothing of models; torch is loaded when it is needed."""

import os
import platform
import subprocess
import time
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from statistics import median
from typing import Any


def describe(threads: int | None = None) -> dict[str, Any]:
    """Processor, cores, memory, load and the versions of what computes."""
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else None
    return {
        "processor": _processor(),
        "system": f"{platform.system()} {platform.release()}",
        "cores": num_cores(),
        "threads": threads or num_cores(),
        "memory_gb": _meminfo("MemTotal"),
        "load_at_start": load,
        "python": platform.python_version(),
        **{name: _version(name) for name in ("torch", "numba", "numpy", "vlhmm")},
    }


def num_cores() -> int:
    """The cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def commit() -> str | None:
    """The checkout's commit, with a + if files differ from it; None outside a checkout of this package."""
    here = Path(__file__).resolve().parent

    def git(*words: str) -> str | None:
        command = ["git", "--no-optional-locks", "-C", str(here), *words]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
        except (OSError, subprocess.SubprocessError):
            return None
        return done.stdout

    if not git("ls-files", "--", "../src/vlhmm/errors.py"):  # some other repository's folder, or none
        return None
    head = git("rev-parse", "--short=12", "HEAD")
    if head is None:
        return None
    return head.strip() + ("+" if git("status", "--porcelain", "--", "../src") else "")


def peak_gb() -> float | None:
    """The largest resident memory of this process so far, in 10^9 bytes."""
    # not getrusage: its maximum is handed down from the parent at exec
    try:
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024 / 1e9
    except OSError:
        pass
    try:
        import resource
    except ImportError:
        return None
    unit = 1 if platform.system() == "Darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 1e9


def available_gb() -> float | None:
    """Memory that could be had now, in 10^9 bytes; None where the system does not say."""
    return _meminfo("MemAvailable")


def limit_memory(gigabytes: float) -> None:
    """Make allocations of more than that fail with an error, before the system kills."""
    try:
        import resource
    except ImportError:
        return
    mapped = next((n for n in [_status_kb("VmSize")] if n is not None), 0) * 1024
    limit = mapped + int(gigabytes * 1e9)
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    if hard == resource.RLIM_INFINITY or limit < hard:
        resource.setrlimit(resource.RLIMIT_AS, (limit, hard))


def matmul_gflops(size: int = 2_048, seconds: float = 1.0) -> float:
    """Median rate of float32 products of two square matrices, 2 n^3 operations each, in 10^9 a second."""
    import torch

    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(size, size, generator=generator) for _ in range(2))
    out = torch.empty(size, size)
    return 2 * size**3 / 1e9 / _median_seconds(lambda: torch.mm(a, b, out=out), seconds)


def copy_gb_per_s(megabytes: int = 256, seconds: float = 0.5) -> dict[str, float]:
    """Rates of copying into memory already touched, and into memory fresh from the system."""
    import numpy as np

    source = np.ones(megabytes << 20, dtype=np.uint8)
    target = np.ones_like(source)
    touched = _median_seconds(lambda: np.copyto(target, source), seconds)

    def into_fresh() -> None:
        import mmap

        with mmap.mmap(-1, source.nbytes) as pages:
            pages.write(source.data)

    fresh = _median_seconds(into_fresh, seconds)
    return {
        "copy_gb_per_s": source.nbytes / 1e9 / touched,
        "fresh_copy_gb_per_s": source.nbytes / 1e9 / fresh,
    }


def _median_seconds(run: Callable[[], Any], seconds: float) -> float:
    run()
    times: list[float] = []
    while len(times) < 3 or sum(times) < seconds:
        began = time.perf_counter()
        run()
        times.append(time.perf_counter() - began)
    return median(times)


def _processor() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _meminfo(name: str) -> float | None:
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith(f"{name}:"):
                return round(int(line.split()[1]) * 1024 / 1e9, 1)
    except OSError:
        pass
    return None


def _status_kb(name: str) -> int | None:
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) for line in lines if line.startswith(f"{name}:")), None)


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None
