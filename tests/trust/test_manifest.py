"""The manifest: any damage to a file of a model is named and refused; a kill at any moment leaves a folder that loads."""

import json
import os
import random
import shutil
from pathlib import Path

import pytest

import vlhmm
from toy import toy_lines
from vlhmm.cli.main import main
from vlhmm.data import manifest
from vlhmm.data.manifest import MODEL_FILES, check_manifest, read_manifest, remove_listed, write_listed
from vlhmm.errors import CheckpointError


@pytest.fixture(scope="module")
def texts(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("trust")
    for name, count, seed in (("train", 200, 1), ("valid", 40, 2)):
        (folder / f"{name}.txt").write_text("\n".join(map(" ".join, toy_lines(count, seed))) + "\n")
    return folder


def train(folder: Path, out: Path) -> int:
    return main(
        ["train", str(folder / "train.txt"), "--valid", str(folder / "valid.txt"), "--preset", "tiny", "--states", "32",
         "--blocks", "4", "--epochs", "2", "--set", "training.calibrate=true", "--out", str(out), "--quiet"]
    )  # fmt: skip


@pytest.fixture(scope="module")
def trained(texts) -> Path:
    assert train(texts, texts / "run") == 0
    return texts / "run"


@pytest.fixture
def run(trained, tmp_path) -> Path:
    shutil.copytree(trained, tmp_path / "run")
    return tmp_path / "run"


def test_a_new_run_lists_every_file_that_makes_the_model(run):
    present = {name for name in MODEL_FILES if (run / name).exists()}
    assert present == read_manifest(run).keys() and "calibration.json" in present
    assert check_manifest(run)
    vlhmm.load(run)


def test_every_flipped_bit_of_the_weights_is_found(run):
    path, draw = run / "model.safetensors", random.Random(0)
    whole = path.read_bytes()
    for _ in range(400):
        place = draw.randrange(len(whole))
        damaged = bytearray(whole)
        damaged[place] ^= 1 << draw.randrange(8)
        path.write_bytes(damaged)
        with pytest.raises(CheckpointError, match="model.safetensors is damaged"):
            vlhmm.load(run)


def lines_shuffled(content: bytes) -> bytes:
    lines = content.splitlines(keepends=True)
    head = [line for line in lines if line.startswith(b"# ")]
    rest = lines[len(head) :]
    random.Random(1).shuffle(rest)
    return b"".join(head + rest)


def two_swapped(content: bytes) -> bytes:
    lines = content.splitlines(keepends=True)
    lines[-1], lines[-2] = lines[-2], lines[-1]
    return b"".join(lines)


def test_shuffled_words_and_blocks_are_found(run):
    for name in ("vocabulary.txt", "blocks.tsv"):
        whole = (run / name).read_bytes()
        for damage in (lines_shuffled, two_swapped, lambda content: content[:-1], lambda content: b""):
            (run / name).write_bytes(damage(whole))
            with pytest.raises(CheckpointError, match=f"{name} is damaged"):
                vlhmm.load(run)
        (run / name).write_bytes(whole)
    vlhmm.load(run)


BAD_FACTORS = ("{}", "NaN", "Infinity", "-Infinity", "0", "-1", "1e308", "1e-308", "true", '"1"', "null", "9" * 5000, "[1]")


@pytest.mark.parametrize("listed", [True, False], ids=["with manifest", "without"])
@pytest.mark.parametrize("value", BAD_FACTORS, ids=lambda value: value[:12])
def test_a_damaged_calibration_is_refused(run, value, listed, caplog):
    content = value if value == "{}" else f'{{"emission": {value}, "transition": 1.0, "within": 1.0}}'
    (run / "calibration.json").write_text(content)
    if not listed:
        (run / "manifest.json").unlink()
    with pytest.raises(CheckpointError, match="calibration.json is damaged"):
        vlhmm.load(run)


def test_a_missing_calibration_is_refused_and_one_removed_on_purpose_is_not(run, capsys):
    kept = (run / "calibration.json").read_bytes()
    (run / "calibration.json").unlink()
    with pytest.raises(CheckpointError, match="--remove-calibration"):
        vlhmm.load(run)
    (run / "calibration.json").write_bytes(kept)
    assert main(["manifest", str(run), "--remove-calibration"]) == 0
    assert "as it was trained" in capsys.readouterr().out
    vlhmm.load(run)
    (run / "calibration.json").write_bytes(kept)  # put back by hand
    with pytest.raises(CheckpointError, match="not listed"):
        vlhmm.load(run)


def test_a_changed_setting_is_found(run):
    config = json.loads((run / "config.json").read_text())
    config["model"]["within"] = "low-rank" if config["model"]["within"] == "softmax" else "softmax"
    (run / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match="config.json"):
        vlhmm.load(run)


def test_a_folder_without_a_manifest_loads_with_a_warning(run, caplog, capsys):
    (run / "manifest.json").unlink()
    vlhmm.load(run)
    assert "has no manifest.json" in caplog.text
    assert main(["manifest", str(run)]) == 2
    assert main(["manifest", str(run), "--accept"]) == 0
    assert main(["manifest", str(run)]) == 0


def test_a_baseline_without_a_manifest_warns_once(texts, tmp_path, caplog):
    out = tmp_path / "kn"
    assert main(["baseline", "kn", str(texts / "train.txt"), "--valid", str(texts / "valid.txt"), "--out", str(out), "--quiet"]) == 0
    (out / "manifest.json").unlink()
    vlhmm.load_any(out)
    assert caplog.text.count("has no manifest.json") == 1


def test_a_damaged_manifest_is_named(run):
    whole = (run / "manifest.json").read_bytes()
    draw = random.Random(2)
    for _ in range(200):
        damaged = bytearray(whole)
        damaged[draw.randrange(len(whole))] ^= 1 << draw.randrange(8)
        (run / "manifest.json").write_bytes(damaged)
        try:
            same = json.loads(damaged) == json.loads(whole)
        except ValueError:
            same = False
        if same:  # a blank that became another blank
            continue
        with pytest.raises(CheckpointError, match="manifest.json"):
            vlhmm.load(run)
    for content in (b"", b"[]", b"{}", b"\xff", b"[" * 100_000, b'{"format_version": ' + b"9" * 5000 + b"}"):
        (run / "manifest.json").write_bytes(content)
        with pytest.raises(CheckpointError, match="manifest.json"):
            vlhmm.load(run)


def test_links_out_of_the_folder_are_refused(run, tmp_path):
    shutil.move(run / "model.safetensors", tmp_path / "elsewhere.safetensors")
    os.symlink(tmp_path / "elsewhere.safetensors", run / "model.safetensors")
    with pytest.raises(CheckpointError, match="outside the folder"):
        vlhmm.load(run)


@pytest.mark.parametrize("name", ["config.json", "manifest.json", "vocabulary.txt", "blocks.tsv", "model.safetensors"])
def test_a_pipe_is_refused_instead_of_waited_for(run, name):
    for unlisted in ("manifest.json", name):
        (run / unlisted).unlink(missing_ok=True)
    os.mkfifo(run / name)
    with pytest.raises(CheckpointError, match="expected a file"):
        vlhmm.load(run)


def test_damage_to_the_cached_usage_of_states_is_found(run, capsys):
    path = run / "usage.safetensors"
    assert main(["inspect", str(run), "state", "3", "--quiet"]) == 0
    expected, content = capsys.readouterr().out, bytearray(path.read_bytes())
    content[-3] ^= 1  # an exponent: another share, still finite
    path.write_bytes(content)
    assert main(["inspect", str(run), "state", "3", "--quiet"]) == 0
    assert capsys.readouterr().out == expected and path.read_bytes() != bytes(content)


@pytest.mark.parametrize("name", ["/etc/passwd", "../x", "a/../../x", "", "a\0b", "x" * 300])
def test_names_outside_the_folder_are_refused(run, name):
    with pytest.raises(CheckpointError, match="expected a name inside the folder"):
        manifest.confined(run, name)


class Killed(BaseException):
    """Stands for kill -9: nothing after it runs, in particular no cleaning up."""


@pytest.mark.parametrize("change", ["replace", "add", "remove"])
def test_a_kill_at_any_point_of_a_change_leaves_a_folder_that_loads(tmp_path, monkeypatch, change):
    """Every os.replace and unlink is a moment to die at, before and after it took place."""
    outcomes = set()
    for moment in range(12):
        folder = tmp_path / f"{change}-{moment}"
        write_listed(folder, "config.json", b"old")
        if change != "add":
            write_listed(folder, "calibration.json", b"before")
        left = [moment]
        with monkeypatch.context() as patch:
            for owner, name in ((os, "replace"), (Path, "unlink")):
                real = getattr(owner, name)

                def dying(*args, real=real, left=left, **kwargs):
                    left[0] -= 1
                    if left[0] == -1:
                        raise Killed
                    real(*args, **kwargs)
                    left[0] -= 1
                    if left[0] == -1:
                        raise Killed

                patch.setattr(owner, name, dying)
            try:
                if change == "remove":
                    remove_listed(folder, "calibration.json")
                else:
                    write_listed(folder, "calibration.json", b"after")
            except Killed:
                pass
        assert check_manifest(folder)
        path = folder / "calibration.json"
        outcomes.add(path.read_bytes() if path.exists() else None)
        path.write_bytes(b"damage")  # and damage is found whenever the kill came
        with pytest.raises(CheckpointError):
            check_manifest(folder)
    assert outcomes == {"replace": {b"before", b"after"}, "add": {None, b"after"}, "remove": {b"before", None}}[change]


# ---- checkpoints

FIELDS = ("step", "updates", "seconds", "plateau", "valid", "log_likelihood", "tokens", "journal_bytes", "tensors")
WRONG = ('"x"', "[]", "{}", "true", "-1", "1" + "0" * 30, "3", "NaN", "9" * 5000)


@pytest.mark.parametrize("checksum", [True, False], ids=["with checksum", "without"])
def test_a_damaged_checkpoint_state_is_refused(run, texts, checksum, capsys):
    path = run / "checkpoint" / "state.json"
    state = json.loads(path.read_text())
    if not checksum:  # a checkpoint of an older version
        del state["checksum"], state["tensors_blake2b"]
    for field in FIELDS:
        for value in WRONG:
            if not checksum and value in ("3", "NaN", "true", "1" + "0" * 30) and field not in ("step", "plateau", "tensors"):
                continue  # a value of the right type and range: nothing can tell without a checksum
            if not checksum and (field, value) == ("log_likelihood", "-1"):
                continue
            path.write_text(json.dumps({**state, field: "@"}).replace('"@"', value))
            assert train(texts, run) == 2, (field, value)
            error = capsys.readouterr().err
            assert "checkpoint" in error and "Traceback" not in error and len(error.splitlines()[-1]) < 600


def test_a_checkpoint_names_no_file_elsewhere(run, texts, tmp_path, capsys):
    path = run / "checkpoint" / "state.json"
    state = json.loads(path.read_text())
    del state["checksum"], state["tensors_blake2b"]
    for name in ("/etc/passwd", "../model.safetensors", "../../x.safetensors"):
        path.write_text(json.dumps({**state, "tensors": name}))
        assert train(texts, run) == 2
        assert "expected step-" in capsys.readouterr().err


def test_damaged_tensors_of_a_checkpoint_are_refused(run, texts, capsys):
    path = next((run / "checkpoint").glob("step-*.safetensors"))
    whole = path.read_bytes()
    for place in (0, len(whole) // 2, len(whole) - 1):
        damaged = bytearray(whole)
        damaged[place] ^= 4
        path.write_bytes(damaged)
        assert train(texts, run) == 2
        assert "does not match its checksum" in capsys.readouterr().err
    path.write_bytes(whole)
    assert train(texts, run) == 0


@pytest.mark.parametrize("listed", [True, False], ids=["with manifest", "without"])
@pytest.mark.parametrize("damage", ["empty", "gone", "a bit"])
def test_training_again_restores_the_model_of_a_finished_run(run, texts, damage, listed, capsys, caplog):
    if damage == "a bit" and not listed:
        pytest.skip("nothing can tell")
    path = run / "model.safetensors"
    whole = path.read_bytes()
    if damage == "gone":
        path.unlink()
    else:
        path.write_bytes(b"" if damage == "empty" else whole[:-1] + bytes([whole[-1] ^ 1]))
    if not listed:
        (run / "manifest.json").unlink()
    else:
        with pytest.raises(CheckpointError, match="run the same vlhmm train command again"):
            vlhmm.load(run)
    assert train(texts, run) == 0
    assert "is restored from" in caplog.text and path.read_bytes() == whole
    assert check_manifest(run)
    vlhmm.load(run)


@pytest.mark.parametrize("listed", [True, False], ids=["with manifest", "without"])
@pytest.mark.parametrize("damage", ["empty", "gone"])
def test_a_finished_run_whose_model_is_gone_is_not_called_finished(run, texts, damage, listed, capsys):
    path = run / "model.safetensors"
    path.write_bytes(b"") if damage == "empty" else path.unlink()
    (run / "checkpoint" / "best.safetensors").write_bytes(b"" if listed else b"damaged")  # the copy cannot help
    if not listed:
        (run / "manifest.json").unlink()
    assert train(texts, run) == 2
    assert "model.safetensors" in capsys.readouterr().err
    shutil.rmtree(run / "checkpoint")  # the remedy: it trains again, to the same model
    assert train(texts, run) == 0
    assert path.read_bytes() == (texts / "run" / "model.safetensors").read_bytes()
    assert check_manifest(run)


def test_a_damaged_line_on_the_calibration_is_named(run, texts, capsys):
    path = run / "journal.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    number = next(i for i, line in enumerate(lines) if '"calibrated"' in line)
    for damage in (("valid", "walid"), ("seconds", "sceonds"), ('"valid": ', '"valid": []}'), ("{", "[")):
        path.write_text("".join([*lines[:number], lines[number].replace(*damage, 1), *lines[number + 1 :]]))
        assert train(texts, run) == 2, damage
        error = capsys.readouterr().err
        assert "journal.jsonl" in error and "Traceback" not in error
    path.write_text("".join(lines))
    assert train(texts, run) == 0


def test_an_older_run_goes_on_and_gets_a_manifest(run, texts, caplog):
    (run / "manifest.json").unlink()
    assert train(texts, run) == 0
    assert check_manifest(run)


def test_verify_checks_the_manifest_first(run, capsys):
    assert main(["verify", str(run), "--texts", "1"]) == 0
    assert "manifest" in capsys.readouterr().out
    data = bytearray((run / "model.safetensors").read_bytes())
    data[-1] ^= 64
    (run / "model.safetensors").write_bytes(data)
    assert main(["verify", str(run), "--texts", "1"]) == 2
    assert "damaged" in capsys.readouterr().err
