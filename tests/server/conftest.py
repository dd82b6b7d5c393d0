"""A small trained run, and a server of it in a process of its own."""

import contextlib
import os
import random
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest


def sentences(count: int, seed: int) -> list[str]:
    """Return sentences of a small grammar: verbs agree with subjects."""
    draw = random.Random(seed)
    lines = []
    for _ in range(count):
        one = draw.random() < 0.5
        noun = draw.choice(["cat", "dog"] if one else ["cats", "dogs"])
        line = ["the", draw.choice(["big", "small"]), noun, "runs" if one else "run"]
        if draw.random() < 0.25:
            line += ["to", "the", draw.choice(["cat", "dogs"])]
        lines.append(" ".join([*line, "."]))
    return lines


@pytest.fixture(scope="session")
def run_folder(tmp_path_factory) -> Path:
    import vlhmm

    folder = tmp_path_factory.mktemp("served") / "toy"
    vlhmm.train(
        sentences(300, 1),
        valid=sentences(40, 2),
        states=32,
        blocks=8,
        epochs=6,
        preset="tiny",
        out=folder,
        progress=False,
    )
    return folder


class Served(NamedTuple):
    """A running server."""

    address: str
    process: subprocess.Popen[str]
    curl: str  # the line it printed

    @property
    def port(self) -> int:
        return int(self.address.rsplit(":", 1)[1])


@contextlib.contextmanager
def serve(run: Path, *options: str, verb: str = "serve") -> Iterator[Served]:
    """Run `vlhmm serve` on a free port until the block ends."""
    command = [sys.executable, "-m", "vlhmm", verb, str(run), "--port", "0", *options]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=os.environ)
    try:
        seen, address = [], None
        assert process.stderr is not None
        for line in process.stderr:
            seen.append(line)
            address = address or next(iter(re.findall(r"http://\S+:\d+", line)), None)
            if line.startswith("curl "):
                break
        assert address is not None, "".join(seen)
        threading.Thread(target=process.stderr.read, daemon=True).start()  # so that it never blocks on a full pipe
        yield Served(address, process, seen[-1].strip())
    finally:
        process.terminate()
        try:
            process.wait(15)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        for stream in (process.stdout, process.stderr):
            if stream is not None:
                stream.close()


@pytest.fixture(scope="session")
def served(run_folder) -> Iterator[Served]:
    with serve(run_folder) as running:
        yield running
