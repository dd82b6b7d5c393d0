"""Findings of trials by hand: hostile files and arguments that are refused in one line, quickly, with nothing lost."""

import json
import os
import shutil
import signal
from pathlib import Path

import pytest

import vlhmm
from toy import toy_lines
from vlhmm.cli.main import main
from vlhmm.data.atomic_io import write_atomically
from vlhmm.errors import DataError, VlhmmError


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Path:
    """Texts, a run, and a prepared text."""
    folder = tmp_path_factory.mktemp("hostile")
    for name, count, seed in (("train", 200, 1), ("valid", 40, 2)):
        (folder / f"{name}.txt").write_text("\n".join(map(" ".join, toy_lines(count, seed))) + "\n")
    assert train(folder, folder / "run") == 0
    assert main(["prepare", str(folder / "train.txt"), "--out", str(folder / "prepared"), "--quiet"]) == 0
    return folder


def train(texts: Path, out: Path, *more: str) -> int:
    return main(
        ["train", str(texts / "train.txt"), "--valid", str(texts / "valid.txt"), "--preset", "tiny", "--states", "32",
         "--blocks", "4", "--epochs", "2", "--quiet", "--out", str(out), *more]
    )  # fmt: skip


@pytest.fixture
def soon():
    """Fail what waits for a pipe, instead of waiting too."""

    def fail(*_):
        raise AssertionError("no answer within 20 seconds")

    before = signal.signal(signal.SIGALRM, fail)
    signal.alarm(20)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


def copied(made: Path, tmp_path: Path, name: str) -> Path:
    shutil.copytree(made / name, tmp_path / name)
    return tmp_path / name


def refused(capsys, said: str, code: int, lines: int = 1) -> None:
    error = capsys.readouterr().err
    assert code == 2 and said in error and error.count("\n") == lines, (code, error)


@pytest.mark.parametrize("name", ["prepared.json", "vocabulary.txt", "counts.u64", "00000.ids", "00000.ends", "00000.unk"])
def test_a_file_of_a_prepared_text_may_be_no_pipe_and_no_link_out_of_it(made, tmp_path, soon, name):
    folder = copied(made, tmp_path, "prepared")
    kept = shutil.move(folder / name, tmp_path / "kept")
    (folder / name).symlink_to(kept)
    with pytest.raises(VlhmmError, match="outside the folder"):
        vlhmm.data.prepared.PreparedText(folder)
    (folder / name).unlink()
    os.mkfifo(folder / name)
    with pytest.raises(VlhmmError, match="pipe"):
        vlhmm.data.prepared.PreparedText(folder)


def test_a_journal_that_is_a_pipe_or_a_folder_is_refused(made, tmp_path, soon, capsys):
    run = copied(made, tmp_path, "run")
    (run / "journal.jsonl").unlink()
    os.mkfifo(run / "journal.jsonl")
    refused(capsys, "pipe", train(made, run))
    (run / "journal.jsonl").unlink()
    (run / "journal.jsonl").mkdir()
    refused(capsys, "directory", train(made, run))


def test_a_model_whose_config_is_gone_is_not_trained_over(made, tmp_path, capsys):
    run = copied(made, tmp_path, "run")
    config = (run / "config.json").read_bytes()
    (run / "config.json").unlink()
    before = (run / "model.safetensors").stat().st_mtime_ns
    refused(capsys, "no config.json", train(made, run))
    assert (run / "model.safetensors").stat().st_mtime_ns == before
    (run / "config.json").write_bytes(config)
    assert train(made, run) == 0


def test_training_is_named_as_the_remedy_only_where_it_is_one(made, tmp_path, capsys):
    run = copied(made, tmp_path, "run")
    for name in ("checkpoint/best.safetensors", "model.safetensors"):
        (run / name).write_bytes((run / name).read_bytes()[:-1])
    refused(capsys, "train again into another folder", train(made, run))


def test_a_device_or_a_pipe_is_not_replaced_by_a_file(made, tmp_path, soon, capsys):
    pipe = tmp_path / "pipe.npz"
    os.mkfifo(pipe)
    refused(capsys, "a device or a pipe", main(["export", str(made / "run"), str(pipe), "--quiet"]))
    assert pipe.is_fifo()
    (tmp_path / "out").symlink_to(pipe)
    with pytest.raises(DataError, match="a device or a pipe"):
        write_atomically(tmp_path / "out", b"")


def test_an_export_without_a_kind_is_refused_before_the_model_is_loaded(tmp_path, capsys):
    refused(capsys, "neither the suffix", main(["export", str(tmp_path / "nothing"), str(tmp_path / "out")]))


def test_a_name_that_is_too_long_is_the_users(made, tmp_path, capsys):
    code = main(["train", str(made / "train.txt"), "--valid", str(made / "valid.txt"), "--out", str(tmp_path / ("n" * 300)), "--quiet"])
    refused(capsys, "too long", code)


def test_weights_whose_sum_is_beyond_a_float_are_shares_all_the_same(made, tmp_path):
    run, out = str(made / "run"), tmp_path / "mixture"
    kn = ["baseline", "kn", str(made / "train.txt"), "--valid", str(made / "valid.txt"), "--order", "2", "--quiet"]
    assert main([*kn, "--out", str(tmp_path / "kn")]) == 0
    assert main(["mix", run, str(tmp_path / "kn"), "--weights", "1.5e308,1e308", "--out", str(out), "--quiet"]) == 0
    assert [part["weight"] for part in json.loads((out / "config.json").read_text())["components"]] == pytest.approx([0.6, 0.4])


def test_a_state_is_named_by_ascii_digits(made, capsys):
    refused(capsys, "takes a number", main(["inspect", str(made / "run"), "state", "\u0663", "--quiet"]))


def test_ids_of_a_tokenizer_have_a_range(made, tmp_path, soon, capsys):
    pytest.importorskip("tokenizers")
    from steering.random_llm import make_tokenizer

    make_tokenizer(tmp_path / "tokenizer.json")
    content = json.loads((tmp_path / "tokenizer.json").read_text())
    content["model"]["vocab"][next(iter(content["model"]["vocab"]))] = 10**9
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    refused(capsys, "1,000,000,000", train(made, tmp_path / "run", "--tokenizer", str(tmp_path / "tokenizer.json")))
