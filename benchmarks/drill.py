"""A drill: what happens to a run when the machine fails. Every part ends in the same bits, and says so in a record.

    python -m benchmarks.drill --kills 50 --record benchmarks/results/drill.json

kill -9 at random moments of training, calibration, clustering and exporting; SIGTERM and SIGINT; a disk that is full at
each write and a read-only one (small tmpfs, both need root); two processes on one folder; a clock that jumps. A part
passes if nothing was lost: files are whole or not there, the manifest fits, the same command goes on to the bits of a
run that nothing disturbed, and no process printed a traceback. Linux: parts are run in forked children.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import io
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from benchmarks import machine
from vlhmm.cli.main import main as command
from vlhmm.data.atomic_io import write_atomically
from vlhmm.data.manifest import check_manifest
from vlhmm.errors import ConfigError

TRAIN = ["--preset", "tiny", "--states", "32", "--blocks", "4", "--epochs", "3", "--quiet", "--set", "training.checkpoint_seconds=0.02"]
CALIBRATE = ["--set", "training.calibrate=true"]
ACTIVITIES = ("training", "calibration", "clustering", "exporting")
RESULTS = ("model.safetensors", "calibration.json", "config.json", "vocabulary.txt", "blocks.tsv")


class Child:
    """A command in a forked process, its output in a file."""

    def __init__(self, arguments: list[str], log: Path, before: Callable[[], None] | None = None) -> None:
        self.arguments, self.log = arguments, log
        self.pid = os.fork()
        if self.pid == 0:
            code = 99
            try:
                with open(log, "w") as stream, contextlib.redirect_stdout(io.StringIO()):
                    os.dup2(stream.fileno(), 2)
                    sys.stderr = stream
                    if before is not None:
                        before()
                    code = command(arguments)
                    stream.flush()
            except BaseException as error:  # a traceback is what the drill looks for
                with open(log, "a") as stream:
                    stream.write(f"Traceback: {type(error).__name__}: {error}\n")
            finally:
                os._exit(code)

    def kill(self, number: int = signal.SIGKILL) -> None:
        """Send a signal, if it is still there."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, number)

    def said(self) -> list[str]:
        """Its lines on standard error."""
        return [line for line in self.log.read_text().splitlines() if line.strip()]

    def let_run(self, seconds: float) -> None:
        """Come back after so many seconds, or when it has ended."""
        until = time.monotonic() + seconds
        while (left := until - time.monotonic()) > 0:
            if os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None:
                return
            time.sleep(min(left, 0.01))

    def wait(self) -> int:
        """Its exit code; minus the signal that ended it."""
        _, status = os.waitpid(self.pid, 0)
        check("Traceback" not in self.log.read_text(), f"{self.arguments}: {self.log.read_text()[-300:]}")
        return os.waitstatus_to_exitcode(status)


def check(holds: bool, what: str) -> None:
    """Raise an AssertionError with what was expected."""
    if not holds:
        raise AssertionError(what)


class Drill:
    """Texts, a run that nothing disturbed, and the parts."""

    def __init__(self, folder: Path, kills: int, seed: int) -> None:
        self.folder, self.kills, self.draw = folder, kills, random.Random(seed)
        self.count = 0
        words = ("big", "small"), ("cat", "dog"), ("here", "there")
        for name, count in (("train", 200), ("valid", 40)):
            lines = [" ".join(["the", *(self.draw.choice(pair) for pair in words), "runs ."]) for _ in range(count)]
            (folder / f"{name}.txt").write_text("\n".join(lines) + "\n")
        self.expected: dict[str, dict[str, bytes]] = {}
        self.seconds: dict[str, float] = {}
        self.model = folder / "reference-training"
        for what in ACTIVITIES:
            target = folder / f"reference-{what}"
            times = []
            for other in (target, folder / f"again-{what}"):
                began = time.monotonic()
                check(self.child(self.arguments(what, other)).wait() == 0, f"{what} that nothing disturbs")
                times.append(time.monotonic() - began)
            self.seconds[what] = min(times)
            self.expected[what] = self.content(what, target)

    def arguments(self, what: str, target: Path) -> list[str]:
        """Return the command of an activity that writes `target`."""
        text, valid = str(self.folder / "train.txt"), str(self.folder / "valid.txt")
        if what in ("training", "calibration"):
            more = CALIBRATE if what == "calibration" else []
            return ["train", text, "--valid", valid, "--out", str(target), *TRAIN, *more]
        if what == "clustering":
            return ["cluster", text, "--blocks", "4", "--quiet", "--out", str(target)]
        return ["export", str(self.model), f"{target}.npz", "--quiet"]

    def content(self, what: str, target: Path) -> dict[str, bytes]:
        """Return what an activity has written."""
        if what in ("training", "calibration"):
            return {name: (target / name).read_bytes() for name in RESULTS if (target / name).exists()}
        path = target if what == "clustering" else Path(f"{target}.npz")
        return {"file": path.read_bytes()} if path.exists() else {}

    def child(self, arguments: list[str], before: Callable[[], None] | None = None) -> Child:
        self.count += 1
        return Child(arguments, self.folder / f"log-{self.count}", before)

    def finish(self, what: str, target: Path) -> None:
        """Run the activity to its end and compare with the undisturbed one, bit for bit."""
        code = self.child(self.arguments(what, target)).wait()
        check(code == 0, f"{what} goes on after the failure, got exit code {code}")
        check(self.content(what, target) == self.expected[what], f"{what}: other bits than undisturbed")
        if what in ("training", "calibration"):
            check(check_manifest(target), f"{what}: the manifest fits")

    # ---- the parts; each says in a sentence what was done

    def kill(self, what: str) -> str:
        died = 0
        rounds = max(1, self.kills // 5)
        for number in range(rounds):
            target = self.folder / f"kill-{what}-{number}"
            for _ in range(5):
                child = self.child(self.arguments(what, target))
                child.let_run(self.draw.uniform(0, 1.1 * self.seconds[what]))
                child.kill()
                died += child.wait() == -signal.SIGKILL
                if what in ("training", "calibration"):
                    if (target / "config.json").exists():
                        check_manifest(target)  # raises unless every file is one that it lists
                else:
                    found = self.content(what, target)
                    check(not found or found == self.expected[what], f"{what}: a file that is not whole")
            self.finish(what, target)
        return f"{5 * rounds} kills at random moments ({died} before the end), {rounds} runs ended in the same bits"

    def signals(self) -> str:
        codes = []
        for what in ACTIVITIES:
            for number in (signal.SIGTERM, signal.SIGINT) * max(1, self.kills // 20):
                target = self.folder / f"signal-{len(codes)}"
                child = self.child(self.arguments(what, target))
                child.let_run(self.draw.uniform(0, self.seconds[what]))
                child.kill(number)
                codes.append(child.wait())
                check(codes[-1] in (0, 130, -number), f"{what}, exit code after signal {number}: {codes[-1]}")
                check(len(child.said()) <= 2, f"{what}, signal {number}: {child.said()}")
                self.finish(what, target)
        counts = {code: codes.count(code) for code in sorted(set(codes))}
        return f"{len(codes)} signals to {len(ACTIVITIES)} activities, exit codes {counts}, same bits after going on"

    def two_processes(self) -> str:
        target = self.folder / "two"
        children = [self.child(self.arguments("training", target)) for _ in range(2)]
        codes = sorted(child.wait() for child in children)
        said = " ".join(child.log.read_text() for child in children)
        check(codes in ([0, 2], [0, 0]), f"exit codes {codes}")
        check(codes == [0, 0] or "another process" in said, said[-300:])
        self.finish("training", target)
        return f"exit codes {codes}; the folder is that of one run"

    def clock(self) -> str:
        def jumping() -> None:
            real, draw = time.time, random.Random(0)
            time.time = lambda: real() + draw.choice((-3e8, 0, 3e8))

        target = self.folder / "clock"
        code = self.child(self.arguments("calibration", target), jumping).wait()
        check(code == 0, f"exit code {code}")
        check(self.content("calibration", target) == self.expected["calibration"], "other bits")
        return "the wall clock jumped by ten years at every look; same bits"

    def full_disk(self) -> str:
        """Allow two more pages of memory at a time until all is written, so that every write meets a full disk."""
        told = []
        for what in ACTIVITIES[1:]:  # calibration is training and more
            refused, size = 0, 8  # KiB
            with tmpfs(self.folder / f"small-{what}", f"{size}k") as disk:
                (disk / "filler").write_bytes(bytes(size << 10))  # no page is left
                while True:
                    subprocess.run(["mount", "-o", f"remount,size={size}k", str(disk)], check=True)
                    child = self.child(self.arguments(what, disk / "run"))
                    code = child.wait()
                    if code == 0:
                        break
                    check(code in (1, 2), f"{what}: exit code {code} with {size} KiB")
                    check(len(child.said()) == 1, f"{what}, {size} KiB: {child.said()[-3:]}")
                    refused, size = refused + 1, size + 8
                    check(size < 4096, f"{what}: no room in 4 MiB: {child.said()}")
                subprocess.run(["mount", "-o", "remount,size=8m", str(disk)], check=True)  # for the old and the new file
                self.finish(what, disk / "run")
            check(refused > 0, f"{what}: the disk was never full")
            told.append(f"{what} {refused} times up to {size} KiB")
        return f"full in one line, {', '.join(told)}; with room the same bits"

    def read_only(self) -> str:
        with tmpfs(self.folder / "read-only", "8m") as disk:
            self.finish("training", disk / "run")
            subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
            check(self.child(["next", str(disk / "run"), "the"]).wait() == 0, "a question to a read-only folder")
            check(self.child(["verify", str(disk / "run"), "--texts", "1"]).wait() == 0, "verify a read-only folder")
            for what in ACTIVITIES:
                child = self.child(self.arguments(what, disk / "new"))
                code = child.wait()
                check(code in (1, 2) and len(child.said()) == 1, f"{what}: exit code {code}, {child.said()[-3:]}")
            subprocess.run(["mount", "-o", "remount,rw", str(disk)], check=True)
            self.finish("training", disk / "run")
        return f"a read-only folder answers; {', '.join(ACTIVITIES)} into one are refused in one line each"


@contextlib.contextmanager
def tmpfs(path: Path, size: str) -> Iterator[Path]:
    """Mount a small file system in memory."""
    path.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(path)], check=True)
    try:
        yield path
    finally:
        subprocess.run(["umount", str(path)], check=True)


def run_drill(
    folder: Path, kills: int, seed: int, note: Callable[[str], None], only: str | None = None
) -> dict[str, Any]:
    """Return all parts, or one; what each did, or why it failed."""
    began = time.monotonic()
    torch.set_num_threads(1)  # forked children share no threads
    for name in ("torch._dynamo", "torch.optim", "numba", "vlhmm.training.trainer", "vlhmm.inference.numba_backend"):
        importlib.import_module(name)  # once, not in every child: a kill should meet the work, not the imports
    drill = Drill(folder, kills, seed)
    parts: dict[str, Callable[[], str]] = {
        f"kill -9 while {what}": lambda what=what: drill.kill(what)
        for what in ACTIVITIES
    }
    parts |= {"SIGTERM and SIGINT": drill.signals, "two processes": drill.two_processes, "clock": drill.clock}
    if os.geteuid() == 0:
        parts |= {"full disk": drill.full_disk, "read-only folder": drill.read_only}
    if only is not None and only not in parts:
        raise ConfigError(f"--only {only}: expected one of {', '.join(parts)} (the disks need root)")
    parts = {name: part for name, part in parts.items() if only in (None, name)}
    found: dict[str, str] = {}
    failed = []
    for name, part in parts.items():
        try:
            found[name] = part()
        except Exception as error:
            found[name] = f"FAILED: {type(error).__name__}: {str(error)[:500]}"
            failed.append(name)
        note(f"{name}: {found[name]}")
    return {
        "command": f"python -m benchmarks.drill --kills {kills} --seed {seed}" + (f" --only '{only}'" if only else ""),
        "commit": machine.commit(),
        "machine": machine.describe(),
        "kills_per_activity": kills,
        "seed": seed,
        "root": os.geteuid() == 0,
        "seconds": round(time.monotonic() - began, 1),
        "parts": found,
        "failed": failed,
    }


def replaced_part(record: dict[str, Any], again: dict[str, Any], part: str) -> dict[str, Any]:
    """Return the record with one part as it went the second time, and what that run was."""
    about = {name: again[name] for name in ("command", "commit", "seconds")}
    failed = [name for name in record["failed"] if name != part] + again["failed"]
    runs = record.get("parts_run_again", {}) | {part: about}
    return record | {"parts": record["parts"] | again["parts"], "failed": failed, "parts_run_again": runs}


def main(arguments: list[str] | None = None) -> int:
    """Run the parts; return 0 if all pass, else 1."""
    from vlhmm.cli.numbers import count, seed

    parser = argparse.ArgumentParser(prog="python -m benchmarks.drill", description="What failures do to a run.")
    parser.add_argument("--kills", type=count(1, 10_000), default=50, metavar="N", help="per activity (default: 50)")
    parser.add_argument("--seed", type=seed, default=0, help="of the moments (default: 0)")
    parser.add_argument("--record", metavar="FILE", help="write what happened there, as JSON")
    parser.add_argument("--only", metavar="PART", help="one part; in an existing record it takes the place of the one before")
    args = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(prefix="vlhmm-drill-") as name:
        record = run_drill(
            Path(name), args.kills, args.seed, lambda line: print(line, file=sys.stderr, flush=True), args.only
        )
    if args.record and args.only and Path(args.record).exists():
        record = replaced_part(json.loads(Path(args.record).read_text()), record, args.only)
    if args.record:
        write_atomically(args.record, (json.dumps(record, indent=2) + "\n").encode())
    return 1 if record["failed"] else 0


if __name__ == "__main__":
    sys.exit(main())
