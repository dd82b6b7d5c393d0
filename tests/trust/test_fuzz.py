"""A few seconds of fuzzing, by hypothesis and by random corruption; findings of the past are replayed.

`make fuzz` runs 10^5 cases of the same kinds (benchmarks/fuzz.py).
"""

import json
import string
import tempfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from benchmarks import fuzz
from vlhmm.errors import VlhmmError

FINDINGS = json.loads((Path(__file__).parent / "findings.json").read_text())
CHEAP = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    return fuzz.make_world(tmp_path_factory.mktemp("fuzz"))


def test_random_cases_pass(world, caplog):
    found = fuzz.fuzz(150, 4, world)
    assert found["failures"] == []
    assert all(sum(outcomes.values()) for outcomes in found["outcomes"].values())


@pytest.mark.parametrize("finding", FINDINGS["parsers"], ids=lambda finding: f"{finding['kind']} {finding['input'][:20]}")
def test_findings_of_parsers_stay_mended(world, tmp_path, finding):
    text = finding["input"] * finding.get("times", 1) if "times" in finding else finding["input"]
    with fuzz.limited(fuzz.LIMIT):
        try:
            fuzz.parsed(finding["kind"], text, world, tmp_path)
        except VlhmmError as error:
            assert len(str(error)) < 2000


@pytest.mark.parametrize("arguments", FINDINGS["command lines"], ids=lambda arguments: " ".join(arguments)[:40])
def test_findings_of_command_lines_stay_mended(world, capsys, arguments):
    with fuzz.limited(fuzz.LIMIT):
        assert fuzz.command([part.replace("RUN", str(world.folder / "hmm")) for part in arguments]) in (0, 1, 2)
    assert "Traceback" not in capsys.readouterr().err


def test_the_fuzzer_sees_what_it_must_see(world, monkeypatch):
    """Each of its verdicts can be seen red: a crash, a wrong answer, a hang, an endless error line."""
    outcome, failure = fuzz.run_case("parsers", 0, 0, world)
    assert outcome in ("answered", "refused") and failure is None

    def replaced(case):
        monkeypatch.setitem(fuzz.KINDS, "parsers", (1.0, case))
        return fuzz.run_case("parsers", 0, 0, world, limit=0.2)

    def hang(*_):
        while True:
            pass

    def crash(*_):
        raise KeyError("x")

    def long_line(*_):
        raise VlhmmError("no " * 1000)

    for case, why in ((hang, "more than"), (crash, "KeyError"), (long_line, "characters")):
        outcome, failure = replaced(case)
        assert outcome == "failed" and why in failure.why
    monkeypatch.undo()
    monkeypatch.setattr(fuzz, "score_of", lambda run: -1.0)  # as if a damaged model had been loaded
    found = [fuzz.run_case("corrupted files", number, 0, world) for number in range(20)]
    assert any(failure is not None and "loads in silence" in failure.why for _, failure in found)


@CHEAP
@given(st.sampled_from(["mask", "regex", "phrase", "setting"]), st.text(max_size=80))
def test_any_text_is_parsed_or_refused(world, kind, text):
    with fuzz.limited(fuzz.LIMIT), tempfile.TemporaryDirectory() as name:
        try:
            fuzz.parsed(kind, text, world, Path(name))
        except VlhmmError:
            pass


@CHEAP
@given(st.text(alphabet="()[]{}|*+?.\\ ^,0123456789thecatdog", max_size=60))
def test_any_pattern_is_compiled_or_refused(world, pattern):
    with fuzz.limited(fuzz.LIMIT):
        try:
            fuzz.parsed("regex", pattern, world, Path())
        except VlhmmError:
            pass


@CHEAP
@given(st.sampled_from(["arpa", "paths", "blocks", "vocabulary", "text"]), st.binary(max_size=200))
def test_any_bytes_are_read_or_refused(world, kind, content):
    with fuzz.limited(fuzz.LIMIT), tempfile.TemporaryDirectory() as name:
        try:
            fuzz.parsed(kind, content.decode("utf-8", "surrogateescape"), world, Path(name))
        except VlhmmError:
            pass


@CHEAP
@given(st.sampled_from(["count", "real", "duration", "byte_size", "seed", "tokens"]), st.text(alphabet=string.printable, max_size=30))
def test_any_number_is_read_or_refused(world, kind, text):
    fuzz.parsed("number", f"{kind}={text}", world, Path())
