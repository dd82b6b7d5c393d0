"""Several processes and several machines: `vlhmm train` under torchrun beside one process, killed and continued.

    python -m benchmarks.ranks --data-dir DATA --out benchmarks/results/ranks.json

processes    the same ten iterations of EM by one process with two threads, by two with one thread each, and by three: their
             log-likelihoods, and the time of an iteration
machines     two network namespaces with addresses and host names of their own, joined by a virtual cable, one rank in each:
             bytes over the cable per update beside the bytes of the gradients; then one rank is killed with -9 on the way, and
             one process goes on. Needs root and iproute2.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks import machine
from benchmarks.errors import WorkerError
from benchmarks.material import choose_corpus
from vlhmm.cli.common import log_to
from vlhmm.cli.numbers import tokens
from vlhmm.data import Corpus
from vlhmm.data.atomic_io import write_atomically
from vlhmm.data.text import write_text

ADDRESSES = ("10.213.77.1", "10.213.77.2")
MACHINES = ("machine-a", "machine-b")
PORT = 29417
LIMIT = 1200.0  # seconds that one run may take


class Case:
    """A text and settings in a folder; every run trains the same."""

    def __init__(self, folder: Path, corpus: Corpus, states: int, blocks: int, iterations: int) -> None:
        self.folder, self.iterations = folder, iterations
        for name, text in (("train", corpus.train), ("valid", corpus.valid)):
            write_text(folder / f"{name}.txt", text, corpus.vocabulary)
        corpus.vocabulary.write(folder / "vocabulary.txt")
        settings = {
            "model.num_states": states,
            "model.num_blocks": blocks,
            "training.epochs": iterations,
            "training.checks_per_epoch": 1,
            "training.checkpoint_seconds": 1,
            "training.calibrate": "false",
        }
        self.settings = [part for name, value in settings.items() for part in ("--set", f"{name}={value}")]

    def command(self, out: Path) -> list[str]:
        """Return what follows `python -m` or `torchrun -m`."""
        texts = [str(self.folder / "train.txt"), "--valid", str(self.folder / "valid.txt")]
        vocabulary = ["--vocab", str(self.folder / "vocabulary.txt")]
        return ["vlhmm", "train", *texts, *vocabulary, "--preset", "em-ptb", *self.settings, "--out", str(out), "--quiet"]


def alone(case: Case, out: Path, threads: int) -> list[str]:
    return [sys.executable, "-m", *case.command(out), "--threads", str(threads)]


def together(case: Case, out: Path, processes: int, *, node: tuple[str, ...] = ("--standalone",)) -> list[str]:
    launcher = [sys.executable, "-m", "torch.distributed.run", *node, "--nproc-per-node", str(processes), "-m"]
    return [*launcher, *case.command(out), "--threads", "1"]


def finish(command: list[str], log: Path) -> float:
    """Run a command to its end. Returns its seconds; WorkerError with its last words if it fails."""
    began = time.monotonic()
    with log.open("w") as errors:
        code = subprocess.run(command, stdout=errors, stderr=errors, timeout=LIMIT, check=False).returncode
    if code:
        raise WorkerError(f"{' '.join(command[:6])} … ended with code {code}: {log.read_text()[-600:]}")
    return time.monotonic() - began


def checks(out: Path) -> list[dict[str, Any]]:
    """Return the checks of a run, one an iteration."""
    path = out / "journal.jsonl"
    events = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    return [event for event in events if event["event"] == "check"]


def iteration_seconds(out: Path) -> float:
    """Return the median over iterations after the first, which loads kernels."""
    at = [check["seconds"] for check in checks(out)]
    return median(b - a for a, b in zip(at[:-1], at[1:], strict=True))


def log_likelihoods(out: Path) -> dict[str, float]:
    """Return the nats per token after the last iteration: of the training text under dropout, and of the validation text."""
    last = checks(out)[-1]
    return {name: -math.log(last[name]) for name in ("train_under_dropout", "valid")}


def difference(one: Path, other: Path) -> float:
    """Return the largest relative difference of their last log-likelihoods."""
    a, b = log_likelihoods(one), log_likelihoods(other)
    return max(abs(a[name] - b[name]) / abs(a[name]) for name in a)


def measure_processes(case: Case, rounds: int, note: Callable[[str], None]) -> dict[str, Any]:
    """One, two and three processes; the first two in turn."""
    by_name: dict[str, list[Path]] = {"1 process": [], "2 processes": [], "3 processes": []}
    for number in range(rounds):
        for size, name in enumerate(by_name, start=1):
            if size == 3 and number:
                continue  # more processes than cores: its time says nothing
            out = case.folder / f"{size}-{number}"
            finish(alone(case, out, 2) if size == 1 else together(case, out, size), case.folder / "log")
            by_name[name].append(out)
            note(f"  {name}: {iteration_seconds(out):.2f} s an iteration, {log_likelihoods(out)}")
    one, two, three = by_name.values()
    ratios = [iteration_seconds(b) / iteration_seconds(a) for a, b in zip(one, two, strict=True)]
    return {
        "iterations": len(checks(one[0])),
        "log_likelihood": {name: log_likelihoods(outs[0]) for name, outs in by_name.items()},
        "relative_difference": {name: difference(one[0], outs[0]) for name, outs in by_name.items()},
        "same_bits_when_repeated": {name: same_bits(outs) for name, outs in by_name.items() if len(outs) > 1},
        "iteration_seconds": {name: [iteration_seconds(out) for out in outs] for name, outs in by_name.items()},
        "two_vs_one": median(ratios),
    }


def same_bits(outs: list[Path]) -> bool:
    first, *others = ((out / "model.safetensors").read_bytes() for out in outs)
    return all(other == first for other in others)


# ---- two machines


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True)


@contextmanager
def two_machines() -> Iterator[tuple[str, str]]:
    """Create two network namespaces that are connected only to each other."""
    names = tuple(f"vlhmm-{os.getpid()}-{side}" for side in "ab")
    cables = tuple(f"vlhmm{side}" for side in "ab")
    try:
        for name in names:
            ip("netns", "add", name)
        ip("link", "add", cables[0], "netns", names[0], "type", "veth", "peer", "name", cables[1], "netns", names[1])
        for name, cable, address in zip(names, cables, ADDRESSES, strict=True):
            ip("-n", name, "addr", "add", f"{address}/24", "dev", cable)
            for device in (cable, "lo"):
                ip("-n", name, "link", "set", device, "up")
        yield names
    except subprocess.CalledProcessError as error:
        raise WorkerError(f"no network namespaces here: {error.stderr.strip()[:200]}") from None
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)


def sent_bytes(name: str, side: int) -> int:
    """Return bytes that a namespace has sent over its cable."""
    device = f"vlhmm{'ab'[side]}"
    shown = subprocess.run(["ip", "-n", name, "-s", "-j", "link", "show", device], capture_output=True, check=True)
    return int(json.loads(shown.stdout)[0]["stats64"]["tx"]["bytes"])


def start_machines(case: Case, out: Path, names: tuple[str, str], job: str) -> list[subprocess.Popen]:
    """Return one launcher in each namespace, with a host name of its own, which both know."""
    started = []
    hosts = case.folder / "hosts"
    known = zip(("127.0.0.1", *ADDRESSES), ("localhost", *MACHINES), strict=True)
    hosts.write_text("".join(f"{address} {name}\n" for address, name in known))
    for side, (name, address) in enumerate(zip(names, ADDRESSES, strict=True)):
        node = (
            "--nnodes", "2", "--rdzv-backend", "c10d", "--rdzv-endpoint", f"{ADDRESSES[0]}:{PORT}", "--rdzv-id", job,
            "--local-addr", address,
        )  # fmt: skip
        enter = 'mount --bind "$0" /etc/hosts && hostname "$1" && shift && exec "$@"'  # seen by this machine alone
        named = ["unshare", "--uts", "--mount", "sh", "-c", enter, str(hosts), MACHINES[side]]
        command = ["ip", "netns", "exec", name, *named, *together(case, out, 1, node=node)]
        environment = {**os.environ, "GLOO_SOCKET_IFNAME": f"vlhmm{'ab'[side]}"}
        with (case.folder / f"log-{job}-{'ab'[side]}").open("w") as log:
            started.append(subprocess.Popen(command, stdout=log, stderr=log, env=environment))
    return started


def rank_of(launcher: int) -> int:
    """Return the process id of the rank that a launcher started; it becomes the launcher's only Python child."""
    for child in Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split():
        command = Path(f"/proc/{child}/cmdline").read_bytes().split(b"\0")
        if b"vlhmm" in command and b"train" in command and b"torch.distributed.run" not in command:
            return int(child)
    raise WorkerError("the launcher has no rank")


def wait_for(launchers: list[subprocess.Popen], log: Path) -> list[int]:
    try:
        return [launcher.wait(timeout=LIMIT) for launcher in launchers]
    except subprocess.TimeoutExpired:
        raise WorkerError(f"two machines took more than {LIMIT:.0f} s: {log.read_text()[-600:]}") from None
    finally:
        for launcher in launchers:
            if launcher.poll() is None:
                launcher.kill()
                launcher.wait()


def measure_machines(case: Case, undisturbed: Path, note: Callable[[str], None]) -> dict[str, Any]:
    """Return a whole run over two namespaces, and one of which a rank is killed and one process goes on."""
    with two_machines() as names:
        whole = case.folder / "machines"
        launchers = start_machines(case, whole, names, "whole")
        if codes := [code for code in wait_for(launchers, case.folder / "log-whole-a") if code]:
            raise WorkerError(f"two machines: code {codes[0]}: {(case.folder / 'log-whole-a').read_text()[-600:]}")
        sent = [sent_bytes(name, side) for side, name in enumerate(names)]
        start = json.loads((whole / "journal.jsonl").read_text().splitlines()[0])
        updates = 3 * len(checks(whole))  # the preset's updates an iteration
        gradients = 4 * start["parameters"]
        note(f"  sent {sent[0] / 1e6:.0f} and {sent[1] / 1e6:.0f} MB in {updates} updates of {gradients / 1e6:.1f} MB")

        killed = case.folder / "killed"
        launchers = start_machines(case, killed, names, "killed")
        deadline = time.monotonic() + LIMIT
        while len(checks(killed)) < max(2, case.iterations // 2):
            if time.monotonic() > deadline or any(launcher.poll() is not None for launcher in launchers):
                raise WorkerError(f"nothing to kill: {(case.folder / 'log-killed-a').read_text()[-600:]}")
            time.sleep(0.05)
        os.kill(rank_of(launchers[1].pid), signal.SIGKILL)
        began = time.monotonic()
        codes = wait_for(launchers, case.folder / "log-killed-a")
        took = time.monotonic() - began
    logs = [(case.folder / f"log-killed-{side}").read_text() for side in "ab"]
    lines = [line for log in logs for line in log.splitlines() if line.startswith("vlhmm: ")]
    reached = len(checks(killed))
    finish(alone(case, killed, 2), case.folder / "log")
    note(f"  killed after {reached} iterations, all ended in {took:.1f} s, {lines}; then one process")
    return {
        "whole": {
            "log_likelihood": log_likelihoods(whole),
            "relative_difference": difference(undisturbed, whole),
            "updates": updates,
            "gradient_bytes": gradients,
            "sent_bytes": sent,
            "sent_per_update_by_gradient": [each / updates / gradients for each in sent],
        },
        "killed": {
            "checks_when_killed": reached,
            "seconds_until_all_ended": took,
            "exit_codes": codes,
            "lines": lines,
            "log_likelihood": log_likelihoods(killed),
            "relative_difference": difference(undisturbed, killed),
        },
    }


def run(args: argparse.Namespace) -> int:
    note = log_to(args.quiet)
    corpus, instead = choose_corpus(args.corpus, args.data_dir, args.tokens, args.seed)
    row: dict[str, Any] = {
        "settings": {name: getattr(args, name) for name in ("tokens", "states", "blocks", "iterations", "rounds", "seed")},
        "corpus": corpus.name,
        "corpus_instead": instead,
        "machine": machine.describe(None),
        "commit": machine.commit(),
    }
    with tempfile.TemporaryDirectory(prefix="vlhmm-ranks-") as scratch:
        case = Case(Path(scratch), corpus, args.states, args.blocks, args.iterations)
        if args.only != "machines":
            note("processes")
            row["processes"] = measure_processes(case, args.rounds, note)
        else:
            finish(alone(case, case.folder / "1-0", 2), case.folder / "log")
        if args.only == "processes":
            pass
        elif os.geteuid() == 0 and shutil.which("ip") and shutil.which("unshare"):
            note("machines")
            row["machines"] = measure_machines(case, case.folder / "1-0", note)
        else:
            row["machines"] = {"error": "needs root, ip and unshare"}
    written = json.dumps(row, indent=1) + "\n"
    sys.stdout.write(written)
    if args.out:
        write_atomically(args.out, written.encode())
    return 0


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.ranks", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--corpus", choices=("ptb", "sotu", "synthetic"), default="ptb")
    parser.add_argument("--data-dir", metavar="DIR", help="where ptb lies (default: $VLHMM_DATA)")
    parser.add_argument("--tokens", type=tokens, default=1_000_000, help="a longer training text is cut here")
    parser.add_argument("--states", type=int, default=2**13)
    parser.add_argument("--blocks", type=int, default=256)
    parser.add_argument("--iterations", type=int, default=10)
    parser.add_argument("--rounds", type=int, default=2, help="of one and two processes in turn")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", choices=("processes", "machines"))
    parser.add_argument("--out", metavar="FILE.json")
    parser.add_argument("--quiet", action="store_true")
    return run(parser.parse_args(arguments))


if __name__ == "__main__":
    sys.exit(main())
