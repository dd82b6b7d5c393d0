"""`python -m paper`: rows, records, costs and tables, on a toy corpus with tiny models."""

import json
import random
from dataclasses import replace
from pathlib import Path

import pytest

import vlhmm
import vlhmm.data
from paper import render, tables
from paper import reported as paper
from paper import run as reproduce
from paper.__main__ import main
from paper.costs import expected_cost, measured_cost
from paper.records import Store, changed_settings
from paper.rows import Hmm, KneserNey, Neural, Row, Run
from vlhmm.data.corpora import Corpus, load_texts
from vlhmm.errors import ConfigError, DataError
from vlhmm.evaluation import perplexity
from vlhmm.training import trainer

KEYS = (
    "table corpus model num_states parameters context valid test paper_valid paper_test "
    "epochs wall_s seed command status"
)


# ---- a toy table


@pytest.fixture(scope="module")
def toy(tmp_path_factory) -> Corpus:
    folder, draw = tmp_path_factory.mktemp("toy"), random.Random(0)
    for split, lines in (("train", 300), ("valid", 40), ("test", 50)):
        words = (["the", draw.choice(["cat", "dog"]), draw.choice(["ran", "sat"]), "."] for _ in range(lines))
        (folder / f"{split}.txt").write_text("\n".join(map(" ".join, words)) + "\n")
    return load_texts(folder / "train.txt", folder / "valid.txt", folder / "test.txt")._replace(name="toy")


def hmm_run(name: str = "toy-hmm", *changes: str, priority: int = 3, **about) -> Run:
    sizes = ("model.num_states=16", "model.num_blocks=4", "training.epochs=6", "training.checks_per_epoch=1")
    recipe = Hmm("tiny", (*sizes, *changes))
    return Run(name=name, corpus="toy", recipe=recipe, seconds_per_epoch=2.0, priority=priority, note="tiny", **about)


def lstm_run(epochs: int = 2) -> Run:
    changes = ("hidden_size=8", "num_layers=1", "num_streams=4", "segment_length=32", f"epochs={epochs}")
    return Run(name="toy-lstm", corpus="toy", recipe=Neural("lstm", changes), seconds_per_epoch=1.0, priority=2)


KN = Run(name="toy-kn", corpus="toy", recipe=KneserNey(3), seconds_per_epoch=0.1, priority=1)


def toy_row(name: str, run: Run | None, reported: paper.Reported | None = None, table: str = "table1", **more) -> Row:
    return Row(table=table, corpus="toy", name=name, model=f"the {name}", run=run, reported=reported, **more)


def toy_table() -> list[Row]:
    return [
        toy_row("hmm", hmm_run(), paper.Reported(12.0, 11.0, 1_000_000)),
        toy_row("kn", KN, paper.Reported(None, 9.0)),
        toy_row("lstm", lstm_run()),
        toy_row("quoted", None, paper.Reported(5.0, 4.0, source="Somebody 2020")),
    ]


@pytest.fixture
def cli(toy, tmp_path, monkeypatch, capsys):
    """Runs the command in an empty folder where table1 is the toy table; (code, output, errors)."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(tables.TABLES, "table1", toy_table)
    monkeypatch.setattr(vlhmm.data, "load_corpus", lambda name, data_dir: toy)

    def run(*arguments: str) -> tuple[int, str, str]:
        code = main([*arguments, "--threads", "1"])
        return code, *capsys.readouterr()

    return run


def place(folder: Path, **more) -> reproduce.Place:
    return reproduce.Place(runs=folder / "runs", store=Store(folder / "results"), **more)


def go(rows: list[Row], toy: Corpus, at: reproduce.Place, seed: int = 0, time_limit: float | None = None):
    return reproduce.reproduce(reproduce.missing(rows, at.store, seed), {"toy": toy}, at, time_limit)


def stop_after(calls: int):
    """A `should_stop` that says yes from that call on."""
    asked = iter(range(1_000_000))
    return lambda: next(asked) >= calls


# ---- the real rows


def all_rows() -> list[Row]:
    return [row for name in tables.TABLES for row in tables.table(name)]


def test_every_row_has_a_name_of_its_own_and_settings_that_hold_together():
    settings: dict[str, dict] = {}
    for name in tables.TABLES:
        names = [row.full_name for row in tables.table(name)]
        assert len(set(names)) == len(names)
    for row in all_rows():
        assert (row.run is None) == (row.table == "table1" and row.name in ("awd-lstm", "hmm-rnn", "hmm-900"))
        if row.run is not None:  # one name, one training, whichever table asks for it
            assert settings.setdefault(row.run.name, row.run.recipe.settings(0)) == row.run.recipe.settings(0)
            assert row.run.corpus == row.corpus and row.run.estimated_seconds() > 0
            assert selected_names(row.table, row.full_name) == [row.full_name]


def selected_names(table: str, pattern: str) -> list[str]:
    return [row.full_name for row in reproduce.selected(tables.table(table), [pattern])]


def test_every_number_of_the_paper_stands_in_a_row():
    def numbers(table: str) -> set:
        return {row.reported for row in tables.table(table)}

    assert numbers("table1") >= set(paper.MAIN.values())
    assert numbers("table2") >= set(paper.ABLATIONS.values())
    assert numbers("table3") >= {number for _, number in paper.CONSTRAINTS}
    assert numbers("figure-states") >= set(paper.STATES.values())
    assert numbers("figure-factored") >= {*paper.INDEPENDENT.values(), *paper.FACTORED.values()}


def test_both_families_stand_in_every_table_and_are_what_they_say():
    for name in tables.TABLES:
        for row in tables.table(name):
            if row.run is not None and isinstance(row.run.recipe, Hmm) and "900" not in row.name:
                config = row.run.recipe.config()
                softmax = config.model.transition == "softmax" and not config.training.calibrate
                ours = config.model.transition == "block-factored" and config.training.method == "em"
                assert softmax if tables.PAPERS in row.model else ours, row.full_name
    states = {row.x: row.num_states for row in tables.table("figure-states")}
    assert states == {2**n: 2**n for n in range(10, 17)}


def test_runs_are_taken_in_the_order_of_worth(tmp_path):
    names = [task.row.full_name for task in reproduce.missing(tables.table("table1"), Store(tmp_path), 0)]
    assert names[:4] == ["ptb/kn", "ptb/ff", "ptb/lstm", "ptb/vlhmm-em"]
    assert names[-2:] == ["ptb/vlhmm-softmax", "wikitext-2/vlhmm-softmax"]
    every = [task.run.name for task in reproduce.missing(all_rows(), Store(tmp_path), 0)]
    assert len(every) == len(set(every))


def test_every_teacher_is_a_row_that_is_trained_before_its_students():
    rows = tables.table("table1")
    by_name = {row.full_name: row.run for row in rows if row.run is not None}
    order = [task.row.full_name for task in reproduce.missing(rows, Store("nowhere"), 0)]
    students = [row for row in rows if row.run is not None and getattr(row.run.recipe, "teacher", None)]
    assert {row.run.recipe.teacher.name for row in students} == {"lstm", "lstm-short"}
    for row in students:
        name = f"{row.corpus}/{row.run.recipe.teacher.name}"
        assert by_name[name].recipe == row.run.recipe.teacher
        assert by_name[name].name == row.run.recipe.teacher.run_name(row.corpus)
        assert order.index(name) < order.index(row.full_name)


# ---- running


def test_a_table_is_run_recorded_and_never_repeated(toy, tmp_path, monkeypatch):
    at = place(tmp_path)
    outcome = go(toy_table(), toy, at)
    assert outcome == reproduce.Outcome(finished=("toy/kn", "toy/lstm", "toy/hmm"))
    for row in toy_table()[:3]:
        record = at.store.get(row.run.name, 0)
        model = vlhmm.load_any(tmp_path / "runs" / f"{row.run.name}-seed0")
        for split in ("valid", "test"):
            for rule in ("reset", "carry"):
                expected = perplexity.evaluate(model, getattr(toy, split), rule).perplexity
                assert record.scores[split][rule] == pytest.approx(expected, rel=1e-6)
        # the best checkpoint, not the last; float32 parameters saved and loaded
        assert record.best_valid == pytest.approx(record.scores["valid"][record.context], rel=1e-4)
        assert record.is_finished and record.progress == 1 and record.parameters > 0 and record.wall_s > 0
        assert record.epochs == record.epochs_planned == row.run.recipe.epochs()
        assert record.tokens == {"train": 1500, "valid": 200, "test": 250}
        assert record.command == f"python -m paper table1 --only toy/{row.name}"
        assert record.machine["threads"] and record.settings == row.run.recipe.settings(0)
    journal = (tmp_path / "results" / "toy-hmm-seed0.jsonl").read_text().splitlines()
    assert [json.loads(line)["event"] for line in journal[-2:]] == ["finished", "calibrated"]

    files = {path: path.read_bytes() for path in (tmp_path / "results").iterdir()}
    monkeypatch.setattr(trainer, "train", lambda *a, **k: pytest.fail("a finished run was trained again"))
    assert go(toy_table(), toy, at) == reproduce.Outcome()
    assert {path: path.read_bytes() for path in (tmp_path / "results").iterdir()} == files


def test_a_run_shorter_than_a_millisecond_keeps_its_wall_time(toy, tmp_path, monkeypatch):
    real = reproduce.estimate_kneser_ney
    monkeypatch.setattr(reproduce, "estimate_kneser_ney", lambda *given: real(*given)._replace(seconds=0.0002))
    at = place(tmp_path)
    go([toy_row("kn", KN)], toy, at)
    assert at.store.get("toy-kn", 0).wall_s == 0.0002


@pytest.mark.parametrize("run", [hmm_run(), lstm_run(epochs=3)], ids=["hmm", "lstm"])
def test_an_interrupted_row_says_so_and_goes_on_to_the_same_numbers(toy, tmp_path, run, monkeypatch):
    monkeypatch.setattr("vlhmm.baselines.training._CHECKPOINT_SECONDS", 0.0)
    rows, looked = [toy_row("it", run)], []
    real = perplexity.evaluate

    def spy(model, text, *rest, **more):
        looked.append(text is toy.test)
        return real(model, text, *rest, **more)

    for where in ("vlhmm.evaluation.perplexity", "vlhmm.training.validation", "vlhmm.baselines.training"):
        monkeypatch.setattr(f"{where}.evaluate", spy)
    whole = place(tmp_path / "whole")
    go(rows, toy, whole)
    assert looked.count(True) == 2  # once a rule, at the end
    looked.clear()

    stopped = go(rows, toy, place(tmp_path / "parts", should_stop=stop_after(5)))
    assert stopped.stopped_by == "interrupt" and stopped.unfinished == ("toy/it",) and not any(looked)
    store = Store(tmp_path / "parts" / "results")
    record = store.get(run.name, 0)
    assert record.status == "unfinished" and not record.scores and 0 < record.progress < 1
    assert 0 < record.epochs < record.epochs_planned
    values = render.row_values(rows[0], store, 0)
    assert values["status"] == "unfinished" and values["test"] is None
    assert "unfinished: epoch" in render.markdown([values]) and "unfinished: epoch" in render.text([values])
    cost = expected_cost(run, store, 0)
    assert cost.basis == "at its pace so far"
    assert cost.seconds == pytest.approx(record.wall_s * (1 / record.progress - 1))

    assert go(rows, toy, place(tmp_path / "parts")).finished == ("toy/it",)
    assert store.get(run.name, 0).scores == whole.store.get(run.name, 0).scores
    assert store.get(run.name, 0).began == record.began


def test_the_time_limit_holds_for_the_whole_sitting(toy, tmp_path):
    endless = hmm_run("toy-endless", "training.epochs=1000000", priority=1)
    rows = [toy_row("endless", endless), toy_row("kn", replace(KN, priority=2))]
    at = place(tmp_path)

    def sitting_until(epochs: float) -> None:
        for _ in range(100):  # on a busy machine the limit may come before the first validation
            outcome = go(rows, toy, at, time_limit=0.5)
            assert outcome.stopped_by == "time limit" and outcome.unfinished == ("toy/endless", "toy/kn")
            if at.store.get("toy-endless", 0).epochs > epochs:
                return

    sitting_until(0)
    record = at.store.get("toy-endless", 0)
    assert record.status == "unfinished" and record.wall_s > 0 and record.epochs > 0
    sitting_until(record.epochs)
    assert at.store.get("toy-endless", 0).epochs > record.epochs
    assert at.store.get("toy-kn", 0) is None

    no_time = go(rows[1:], toy, at, time_limit=1e-9)
    assert no_time.stopped_by == "time limit" and at.store.get("toy-kn", 0) is None


def test_a_row_that_fails_does_not_stop_the_others(toy, tmp_path):
    said: list[str] = []
    at = place(tmp_path, note=said.append)
    go([toy_row("hmm", hmm_run(priority=0))], toy, place(tmp_path, should_stop=stop_after(3)))
    other = hmm_run("toy-hmm", "training.rate=0.5", priority=0)  # the unfinished folder holds another training
    outcome = go([toy_row("hmm", other), toy_row("kn", KN)], toy, at)
    assert outcome.finished == ("toy/kn",) and [name for name, _ in outcome.failed] == ["toy/hmm"]
    assert any("training.rate" in line for line in said)


def test_a_run_is_held_by_one_process(toy, tmp_path):
    at = place(tmp_path)
    with reproduce.claimed(at.runs / "toy-kn-seed0.lock") as is_mine:
        assert is_mine
        assert go([toy_row("kn", KN)], toy, at).unfinished == ("toy/kn",)
    assert go([toy_row("kn", KN)], toy, at).finished == ("toy/kn",)


def test_ablations_have_train_and_the_time_of_a_batch(toy, tmp_path):
    row = toy_row("ablation", hmm_run(is_ablation=True), paper.ABLATIONS["full"], table="table2")
    at = place(tmp_path)
    go([row], toy, at)
    values = render.row_values(row, at.store, 0)
    assert 1 < values["train"] < values["valid"] * 1.5
    assert values["ms_per_batch"] >= values["ms_per_batch_cached"] > 0
    assert f"| 115.0 / 134.0 / 40 | {values['train']:.1f} / {values['valid']:.1f} /" in render.markdown([values])


# ---- seeds and settings


def test_other_seeds_stand_beside_the_number(toy, tmp_path):
    at = place(tmp_path)
    rows = [toy_row("hmm", hmm_run())]
    go(rows, toy, at, seed=0)
    assert expected_cost(rows[0].run, at.store, 1).basis == "as recorded with seed 0"
    go(rows, toy, at, seed=1)
    first, second = at.store.get("toy-hmm", 0), at.store.get("toy-hmm", 1)
    assert second.seed == second.settings["training"]["seed"] == 1 and second.command.endswith("--seed 1")
    assert first.scores != second.scores
    values = render.row_values(rows[0], at.store, 0)
    assert values["seed"] == 0 and [other["seed"] for other in values["other_seeds"]] == [1]
    assert f"(seed 1: {second.scores['valid']['reset']:.1f} / " in render.markdown([values])
    assert render.row_values(rows[0], at.store, 1)["valid"] == second.scores["valid"]["reset"]


def test_settings_that_changed_since_are_told(toy, tmp_path):
    at = place(tmp_path)
    go([toy_row("hmm", hmm_run())], toy, at)
    now = hmm_run("toy-hmm", "training.rate=0.5")
    record = at.store.get("toy-hmm", 0)
    assert not changed_settings(record, hmm_run())
    (told,) = changed_settings(record, now)
    assert told.startswith("training.rate ") and told.endswith(", now 0.5")
    values = render.row_values(toy_row("hmm", now), at.store, 0)
    assert "settings changed since" in render.markdown([values]) and told in render.markdown([values])


def test_a_damaged_record_is_named(tmp_path):
    (tmp_path / "toy-kn-seed0.json").write_text('{"format_version": 1')
    with pytest.raises(DataError, match="toy-kn-seed0.json is no record"):
        Store(tmp_path).get("toy-kn", 0)


# ---- the command


def test_the_command_tells_the_cost_runs_resumes_and_renders(cli, monkeypatch):
    code, out, err = cli("table1", "--dry-run", "--format", "json")
    told = json.loads(out)
    assert code == 0 and [cost["row"] for cost in told["missing"]] == ["toy/kn", "toy/lstm", "toy/hmm"]
    assert told["missing"][2]["seconds"] == 12.0 and "estimate" in told["missing"][2]["basis"]
    assert not Path("runs").exists() and not Path("results").exists()

    code, out, err = cli("table1", "--only", "kn")
    assert code == 0 and "1 run is missing" in err and "toy/kn" in err and "9.0" in out
    code, out, err = cli("table1", "--dry-run")
    assert "toy/kn" not in out and "toy/lstm" in out and "total" in out and "an estimate for two cores" in out

    code, out, err = cli("table1", "--format", "json", "--quiet")
    rows = json.loads(out)
    assert code == 0 and err == "" and len(rows) == 4
    for row in rows:
        assert set(KEYS.split()) <= row.keys()
    by_name = {row["row"]: row for row in rows}
    assert by_name["toy/quoted"]["status"] == "cited" and by_name["toy/quoted"]["valid"] is None
    assert (by_name["toy/quoted"]["paper_valid"], by_name["toy/quoted"]["paper_test"]) == (5.0, 4.0)
    hmm = by_name["toy/hmm"]
    assert hmm["status"] == "finished" and hmm["context"] == "reset" and hmm["num_states"] == 16
    assert hmm["valid"] == hmm["valid_reset"] and hmm["test"] == hmm["test_reset"] and hmm["test_carry"] > 1
    assert (
        by_name["toy/lstm"]["context"] == "carry" and by_name["toy/lstm"]["test"] == by_name["toy/lstm"]["test_carry"]
    )

    assert cli("table1", "--dry-run")[1] == "nothing is missing\n"
    monkeypatch.setattr(vlhmm.data, "load_corpus", lambda name, data_dir: pytest.fail("no text is needed to render"))
    code, out, _ = cli("table1", "--format", "markdown")
    assert code == 0 and "| the hmm | 16 |" in out and "12.0 / 11.0" in out and "cited: Somebody 2020" in out
    assert f"**{hmm['valid']:.1f} / {hmm['test']:.1f}**" in out and "`python -m paper table1 --only toy/hmm`" in out


def test_an_interrupt_ends_with_130_and_a_record(cli, monkeypatch):
    monkeypatch.setattr("paper.run.train", lambda *a: (_ for _ in ()).throw(KeyboardInterrupt))
    code, _, err = cli("table1", "--only", "hmm")
    assert code == 130 and "interrupted" in err
    assert Store("results/rows").get("toy-hmm", 0).status == "unfinished"


def test_the_list_and_what_is_not_in_it(cli):
    code, out, _ = cli("table1", "--list")
    assert code == 0 and [line.split()[1] for line in out.splitlines()] == [
        f"toy/{n}" for n in ("hmm", "kn", "lstm", "quoted")
    ]
    code, _, err = cli("table1", "--only", "lstn")
    assert code == 2 and "did you mean lstm?" in err and err.count("\n") == 1
    code, _, err = cli("table1", "--measure")
    assert code == 2 and "--dry-run" in err


def test_without_the_data_one_line_says_where_to_put_it(cli, tmp_path, monkeypatch):
    from vlhmm.data import corpora

    monkeypatch.setattr(vlhmm.data, "load_corpus", corpora.load_corpus)
    monkeypatch.delitem(tables.TABLES, "table1")
    monkeypatch.setitem(tables.TABLES, "table1", tables.table1)
    (tmp_path / "nothing").mkdir()
    monkeypatch.setenv("VLHMM_DATA", str(tmp_path / "nothing"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(corpora, "_fetch", lambda url: (_ for _ in ()).throw(corpora._NotAsExpected("no network")))
    code, out, err = cli("table1", "--quiet")
    assert code == 2 and out == "" and err.count("\n") == 1
    assert "VLHMM_DATA" in err and "ptb.train.txt" in err and "--only wikitext-2" in err
    assert cli("table1", "--render")[0] == 0


def test_measured_costs(cli):
    code, out, _ = cli("table1", "--dry-run", "--measure", "--only", "kn", "--format", "json")
    assert code == 0 and json.loads(out)["missing"][0]["basis"].startswith("measured here")
    assert not Path("runs").exists()


# ---- documents and pictures


def test_documents_are_filled_between_their_markers(cli):
    Path("docs").mkdir()
    Path("docs/reproduction.md").write_text(
        "before\n<!-- paper table1 -->\nyesterday's\n<!-- end -->\nafter\n"
    )
    Path("README.md").write_text("<!-- paper table1 short -->\n<!-- end -->\n")
    cli("table1", "--only", "lstm", "--write-docs", "--quiet")
    text = Path("docs/reproduction.md").read_text()
    assert text.startswith("before\n<!-- paper table1 -->\n\n|") and text.endswith("<!-- end -->\nafter\n")
    assert "yesterday" not in text and "| the hmm |" in text and "not run yet" in text and "<details>" in text
    assert "| the lstm |" in Path("README.md").read_text() and "<details>" not in Path("README.md").read_text()
    cli("table1", "--render", "--write-docs")
    assert Path("docs/reproduction.md").read_text() == text

    Path("docs/reproduction.md").write_text("<!-- paper table1 -->\n")
    code, _, err = cli("table1", "--render", "--write-docs")
    assert code == 2 and "<!-- end -->" in err
    Path("docs/reproduction.md").write_text("<!-- paper tabel1 -->\n<!-- end -->\n")
    code, _, err = cli("table1", "--render", "--write-docs")
    assert code == 2 and "did you mean table1?" in err


def test_this_checkouts_page_has_a_place_for_every_table():
    page = Path(__file__).parents[2] / "docs" / "reproduction.md"
    text = page.read_text(encoding="utf-8")
    fresh = render.filled(text, page, Store(page.parents[1] / "results" / "rows"), 0)
    for name in tables.TABLES:
        assert f"<!-- paper {name} -->\n\n" in text
        for row in tables.table(name):
            assert fresh.count(f"| {row.model} |") >= 1
    assert render.MARKED.sub("", fresh) == render.MARKED.sub("", text)  # the prose is left alone


def test_pictures(toy, tmp_path, cli):
    pytest.importorskip("matplotlib")
    code, _, err = cli("table1", "--render", "--plot", "it.png")
    assert code == 0 and Path("it.png").read_bytes().startswith(b"\x89PNG")
    rows = [
        toy_row(f"{series}-{x}", None, paper.Reported(100.0 - x), "figure-states", series=series, x=x)
        for series in (tables.PAPERS, tables.OURS)
        for x in (2, 4)
    ]
    values = [render.row_values(row, Store(tmp_path), 0) for row in rows]
    values[2] |= {"status": "finished", "valid": 90.0}
    render.plot("figure-states", values, rows, tmp_path / "curves.png")
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(ConfigError, match="one table"):
        main_raising("all", "--render", "--plot", "it.png")


def main_raising(*arguments: str) -> None:
    """The verb without the one-line handling of errors."""
    from paper.__main__ import build_parser

    args = build_parser().parse_args([*arguments])
    args.run(args)


# ---- a teacher


def taught_run() -> Run:
    student = hmm_run("toy-taught")
    changes = (*student.recipe.changes, "distillation.weight=1")
    return replace(student, recipe=replace(student.recipe, changes=changes, teacher=lstm_run().recipe), priority=4)


def test_a_guided_row_needs_its_teacher_and_counts_its_time(toy, tmp_path):
    at = place(tmp_path)
    row = toy_row("taught", taught_run())
    (failure,) = go([row], toy, at).failed
    assert failure[0] == "toy/taught" and "python -m paper table1 --only toy/lstm first" in str(failure[1])
    assert go([toy_row("lstm", lstm_run())], toy, at).finished == ("toy/lstm",)
    other = replace(row.run.recipe.teacher, changes=(*row.run.recipe.teacher.changes, "rate=0.5"))
    (failure,) = go([replace(row, run=replace(row.run, recipe=replace(row.run.recipe, teacher=other)))], toy, at).failed
    assert "trained with another rate (0.001, now 0.5)" in str(failure[1])
    ticks = []
    limited = replace(at, tick=ticks.append)
    assert go([row], toy, at, time_limit=1e-3).stopped_by == "time limit"
    teacher = replace(at.store.get("toy-lstm", 0), wall_s=9000.0)
    at.store.put(teacher)
    assert go([row], toy, limited).finished == ("toy/taught",)
    assert ticks and all(tick.seconds < 9000 for tick in ticks)  # of its own: what is left is told by its pace
    record = at.store.get("toy-taught", 0)
    assert 9000 < record.wall_s < 10000
    assert expected_cost(row.run, at.store, 1).seconds == pytest.approx(record.wall_s - 9000)
    assert measured_cost(row.run, 0, toy, "cpu", None).basis == "an estimate for two cores"
    assert record.settings["teacher"]["hidden_size"] == 8
    assert "--out TEACHER && vlhmm train toy" in record.train_command
    assert "--guide TEACHER" in record.train_command
