"""The steering benchmark on a language model of random weights."""

import json
import re

import pytest

pytest.importorskip("outlines_core")
pytest.importorskip("transformers")

from benchmarks.steering import build_parser, mean_and_error, summary
from benchmarks.steering_tasks import KEYWORDS, NOUNS, SAMPLED_NOUNS, keyword_tasks, other_tasks
from steering.random_llm import save_llm
from vlhmm.cli.main import run_program

REQUIRED = (
    "satisfied, unfinished, nats_free, nats_masked, nats_steered, nats_rejection, nats_vs_rejection, overhead_vs_llm, "
    "table_s, peak_gb, train_minutes, hmm_mb, num_states, hmm_nats, kn_nats, llm_nats, samples_tokens"
).split(", ")


def test_tasks_are_apart_from_the_samples():
    assert len(set(NOUNS)) == 200 and not {*NOUNS, *KEYWORDS} & set(SAMPLED_NOUNS)
    tasks, others = keyword_tasks(200), other_tasks(100)
    assert len({task.name for task in [*tasks, *others]}) == 300
    assert keyword_tasks(5) == tasks[:5]
    assert {task.kind for task in others} == {"regex", "json", "words"}
    for task in [tasks[0], *others[:3]]:
        assert task.constraint().automaton.num_states > 1


def test_summary_by_hand():
    def answer(nats, tokens, satisfied=True):
        return {"nats": nats, "tokens": tokens, "finished": satisfied, "satisfied": satisfied}

    task = {
        "kind": "keywords", "free": [answer(2, 2)], "masked": [answer(9, 3)], "steered": [answer(4, 2), answer(4, 4, False)],
        "table_s": 1.0, "table_cpu_s": 2.0, "automaton_s": 0.1, "automaton_states": 7,
    }  # fmt: skip
    rejection = {"word": "dog", "rejection": [answer(2, 1)], "steered": [answer(5, 2)], "masked": [answer(3, 1)]}
    overhead = {**task, "rounds": [{"steering_s": 1, "llm_s": 4, "steps": 3}]}
    found = summary([task, task], [rejection, {"word": None}], [overhead])
    assert (found["satisfied"], found["unfinished"], found["keyword_tasks"]) == (0.5, 2, 2)
    assert (found["nats_free"], found["nats_masked"], found["nats_steered"]) == (1.0, 3.0, 1.5)
    assert (found["nats_rejection"], found["nats_vs_rejection"], found["overhead_vs_llm"]) == (2.0, 0.25, 0.25)
    assert mean_and_error([1.0, 3.0]) == (2.0, 1.0)


@pytest.mark.slow
def test_from_nothing_to_the_record(tmp_path):
    llm = save_llm(tmp_path / "llm")
    (tmp_path / "prompts.txt").write_text("A dog\n")
    made = ["distill", str(llm), "--prompts", str(tmp_path / "prompts.txt"), "--tokens", "1500", "--preset", "tiny",
            "--iterations", "2", "--out", str(tmp_path / "run"), "--quiet", "--threads", "1"]  # fmt: skip
    from vlhmm.cli.main import main

    assert main(made) == 0
    arguments = [
        "--llm", str(llm), "--run", str(tmp_path / "run"), "--work", str(tmp_path / "work"), "--out",
        str(tmp_path / "record.json"), "--prompts", "1", "--others", "3", "--rejection", "1", "--samples", "2",
        "--precision", "float32", "--threads", "1",
    ]  # fmt: skip
    assert run_program(lambda: build_parser().parse_args(arguments)) == 0
    record = json.loads((tmp_path / "record.json").read_text())
    assert set(REQUIRED) <= set(record)
    assert record["satisfied"] == 1.0 and record["unfinished"] == 0 and record["complete"]
    words = keyword_tasks(1)[0].detail
    task = json.loads((tmp_path / "work" / "keywords-000.json").read_text())
    for answer in task["steered"]:
        assert all(re.search(rf"\b{word}\b", answer["text"]) for word in words)
    # everything is kept: the same record without another word
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "work").iterdir()}
    assert run_program(lambda: build_parser().parse_args(arguments)) == 0
    assert before == {path: path.stat().st_mtime_ns for path in (tmp_path / "work").iterdir()}
