"""The small-step benchmark at a size of seconds."""

import json

import pytest

from benchmarks.small_step import main


def test_a_small_step_is_told_beside_its_arithmetic(capsys):
    assert main("--states 32 --blocks 8 --words 60 --repeats 3 --format json".split()) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["tokens"] == 512 and found["num_states"] == 32
    assert set(found["parts_ms"]) == {"networks", "transitions", "emissions", "optimizer"}
    assert found["arithmetic_ms"] == pytest.approx(sum(found["parts_ms"].values()), abs=0.01)
    # so small a step is nearly all overhead
    assert found["ratio"] == pytest.approx(found["step_ms"] / found["arithmetic_ms"], rel=0.05) and found["ratio"] > 1


def test_wrong_sizes_are_refused(capsys):
    with pytest.raises(SystemExit) as refused:
        main(["--states", "10", "--blocks", "4"])
    assert refused.value.code == 2 and "multiple of --blocks" in capsys.readouterr().err
