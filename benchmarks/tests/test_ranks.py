"""`benchmarks.ranks` at a size for tests: the record it writes, and two machines in network namespaces."""

import json
import os
import shutil
import subprocess

import pytest

from benchmarks import ranks

TINY = ["--corpus", "synthetic", "--tokens", "3000", "--states", "64", "--blocks", "8", "--iterations", "8", "--rounds", "1"]


def namespaces_work() -> bool:
    if os.geteuid() != 0 or not shutil.which("ip") or not shutil.which("unshare"):
        return False
    name = f"vlhmm-test-{os.getpid()}"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True, check=False).returncode == 0
    return made and subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False).returncode == 0


@pytest.mark.slow
def test_processes_agree(tmp_path, capsys):
    ranks.main([*TINY, "--only", "processes", "--quiet", "--out", str(tmp_path / "ranks.json")])
    row = json.loads((tmp_path / "ranks.json").read_text())
    assert json.loads(capsys.readouterr().out) == row
    assert row["processes"]["iterations"] == 8
    assert max(row["processes"]["relative_difference"].values()) < 1e-6


@pytest.mark.slow
@pytest.mark.skipif(not namespaces_work(), reason="needs root and iproute2")
def test_two_machines_one_killed_and_continued(tmp_path, capsys):
    ranks.main([*TINY, "--only", "machines", "--quiet", "--out", str(tmp_path / "ranks.json")])
    found = json.loads((tmp_path / "ranks.json").read_text())["machines"]
    assert found["whole"]["relative_difference"] < 1e-6
    assert found["killed"]["relative_difference"] < 1e-6
    assert found["killed"]["exit_codes"] == [1, 1]
    (line,) = found["killed"]["lines"]
    assert "on another machine, is lost; the last checkpoint is kept" in line
    assert all(1 <= each < 1.1 for each in found["whole"]["sent_per_update_by_gradient"])
