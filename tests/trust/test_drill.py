"""The drill of benchmarks/drill.py, with few kills; `make drill` does 50 per activity."""

import sys

import pytest

from benchmarks.drill import run_drill


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="forks, mounts a tmpfs")
def test_nothing_is_lost_when_the_machine_fails(tmp_path):
    lines: list[str] = []
    record = run_drill(tmp_path, 5, 1, lines.append)
    assert record["failed"] == [], lines
