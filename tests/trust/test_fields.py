"""Every field of every file has a type and a range, manifest or not: a hostile value gets one line, never a traceback."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import vlhmm
from toy import toy_lines
from vlhmm.baselines.kneser_ney import KneserNey
from vlhmm.cli.main import main
from vlhmm.clustering.blocks import Blocks
from vlhmm.clustering.paths import read_paths
from vlhmm.data.vocabulary import Vocabulary
from vlhmm.errors import CheckpointError, VlhmmError

HOSTILE = ('"x"', "[]", "{}", "null", "-1", "1" + "0" * 30, "NaN", "Infinity", "-Infinity", "1e308", "9" * 5000, "[[1]]", '"\\u0000"')


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Runs of every kind: an HMM with a calibration, Kneser-Ney, feed-forward, their mixture."""
    folder = tmp_path_factory.mktemp("fields")
    for name, count, seed in (("train", 200, 1), ("valid", 40, 2)):
        (folder / f"{name}.txt").write_text("\n".join(map(" ".join, toy_lines(count, seed))) + "\n")
    texts = [str(folder / "train.txt"), "--valid", str(folder / "valid.txt"), "--quiet"]
    tiny = ["--preset", "tiny", "--states", "32", "--blocks", "4", "--epochs", "1", "--set", "training.calibrate=true"]
    assert main(["train", *texts, *tiny, "--out", str(folder / "hmm")]) == 0
    assert main(["baseline", "kn", *texts, "--order", "3", "--out", str(folder / "kn")]) == 0
    small = ["--epochs", "1", "--set", "hidden_size=8", "--set", "num_streams=4", "--set", "segment_length=8"]
    assert main(["baseline", "ff", *texts, *small, "--out", str(folder / "ff")]) == 0
    runs = [str(folder / name) for name in ("hmm", "kn")]
    assert main(["mix", *runs, "--valid", str(folder / "valid.txt"), "--out", str(folder / "mix"), "--quiet"]) == 0
    return folder


def leaves(content, path=()):
    """The paths to every value of nested JSON."""
    yield path
    items = content.items() if isinstance(content, dict) else enumerate(content) if isinstance(content, list) else ()
    for key, value in items:
        yield from leaves(value, (*path, key))


def changed(content, path, value):
    """JSON text with the value at `path` replaced by other JSON text."""
    copy = json.loads(json.dumps(content))
    if not path:
        return value
    inside = copy
    for key in path[:-1]:
        inside = inside[key]
    inside[path[-1]] = "group"
    return json.dumps(copy).replace('"group"', value)


@pytest.mark.parametrize(
    "kind, name", [("hmm", "config.json"), ("hmm", "calibration.json"), ("kn", "config.json"), ("ff", "config.json"), ("mix", "config.json")]
)
def test_hostile_values_in_json_load_or_are_refused_in_one_line(folder, tmp_path, kind, name):
    run = tmp_path / kind
    shutil.copytree(folder / kind, run)
    (run / "manifest.json").unlink()  # which would find every change by itself
    content = json.loads((run / name).read_text())
    refused = loaded = 0
    for path in leaves(content):
        for value in HOSTILE:
            (run / name).write_text(changed(content, path, value))
            try:
                vlhmm.load_any(run)
                loaded += 1
            except VlhmmError as error:
                refused += 1
                assert len(str(error)) < 800, (path, value)
    assert refused > 20 * loaded / 100


def test_unknown_keys_are_named(folder, tmp_path):
    for kind, name, where in (
        ("hmm", "config.json", ()), ("hmm", "config.json", ("model",)), ("hmm", "calibration.json", ()), ("kn", "config.json", ()),
        ("kn", "config.json", ("settings",)), ("ff", "config.json", ("settings",)), ("mix", "config.json", ()),
        ("mix", "config.json", ("components", 0)),
    ):  # fmt: skip
        run = tmp_path / f"{kind}-{name}-{len(where)}"
        shutil.copytree(folder / kind, run)
        (run / "manifest.json").unlink()
        content = json.loads((run / name).read_text())
        inside = content
        for key in where:
            inside = inside[key]
        inside["surprise"] = 1
        (run / name).write_text(json.dumps(content))
        with pytest.raises(CheckpointError, match="surprise"):
            vlhmm.load_any(run)


@pytest.mark.parametrize("kind", ["hmm", "kn", "ff"])
def test_hostile_tensors_are_refused(folder, tmp_path, kind):
    run = tmp_path / kind
    shutil.copytree(folder / kind, run)
    (run / "manifest.json").unlink()
    whole = load_file(run / "model.safetensors")
    for name, tensor in whole.items():
        changes = {
            "dtype": tensor.double() if tensor.dtype == torch.float32 else tensor.float(),
            "shape": torch.cat([tensor, tensor]),
            "more axes": tensor[None],
            "gone": None,
        }
        if tensor.is_floating_point():
            changes |= {"nan": torch.full_like(tensor, torch.nan), "infinity": torch.full_like(tensor, torch.inf)}
        else:
            changes |= {"negative": -tensor - 1, "reversed": tensor.flip(0), "large": tensor + (1 << 60)}
        for what, other in changes.items():
            save_file({k: v for k, v in (whole | {name: other}).items() if v is not None}, run / "model.safetensors")
            with pytest.raises(CheckpointError):
                vlhmm.load_any(run)
                pytest.fail(f"{name}: {what}")
    save_file(whole | {"surprise": torch.zeros(1)}, run / "model.safetensors")
    with pytest.raises(CheckpointError):
        vlhmm.load_any(run)
    save_file(whole, run / "model.safetensors")
    vlhmm.load_any(run)


KINDS_OF_TRANSITIONS = (
    (), ("--set", "model.within=low-rank"), ("--set", "model.transition=softmax"),
    ("--set", "model.parameterization=scalar"), ("--set", "model.parameterization=scalar", "--set", "model.transition=softmax"),
)  # fmt: skip


@pytest.mark.parametrize("settings", KINDS_OF_TRANSITIONS, ids=lambda settings: " ".join(settings[1::2]) or "block-factored")
def test_finite_weights_whose_products_overflow_are_refused(folder, tmp_path, settings):
    """One flipped bit makes 1e38 of a weight. Without a manifest nothing sees it but the probabilities: NaN, or overflow."""
    run = tmp_path / "run"
    texts = [str(folder / "train.txt"), "--valid", str(folder / "valid.txt"), "--quiet"]
    tiny = ["--preset", "tiny", "--states", "32", "--blocks", "4", "--epochs", "0.2", "--set", "training.calibrate=false"]
    assert main(["train", *texts, *tiny, *settings, "--out", str(run)]) == 0
    (run / "manifest.json").unlink()
    whole, refused = load_file(run / "model.safetensors"), 0
    for name, tensor in whole.items():
        for value in (3e38, -3e38):
            large = tensor.clone()
            large.view(-1)[0] = value
            save_file(whole | {name: large}, run / "model.safetensors")
            try:
                model = vlhmm.load(run)
            except CheckpointError as error:
                assert "overflow" in str(error)
                refused += 1
                continue
            for text in ("the dog runs .", "the cats run .", "a big dog here"):
                assert not np.isnan(model.score(text)), (name, value)
            assert np.isfinite(model.next_word_probabilities(model.start(1)).numpy()).all(), (name, value)
    assert refused or "model.parameterization=scalar" in settings  # free logits are in no product


def test_sizes_beyond_the_files_are_refused_before_they_are_allocated(folder, tmp_path):
    run = tmp_path / "hmm"
    shutil.copytree(folder / "hmm", run)
    (run / "manifest.json").unlink()
    config = json.loads((run / "config.json").read_text())
    for key, value in (("num_states", 1 << 24), ("num_states", 10**30), ("hidden_size", 1 << 16), ("num_blocks", 10**12)):
        (run / "config.json").write_text(json.dumps(config | {"model": config["model"] | {key: value}}))
        with pytest.raises(CheckpointError, match="config.json"):
            vlhmm.load(run)


@pytest.mark.parametrize(
    "change",
    [("# num_states 32", "# num_states " + "9" * 5000), ("# num_states 32", "# num_states 1" + "0" * 30), ("# num_states 32", "# num_states 4096000"),
     ("# kind partition", "# kind \0"), ("# states_per_group 8", "# states_per_group 0"), ("# num_states 32", "# surprise 1\n# num_states 32"),
     ("# num_states 32", "# num_states 32\n# num_states 32"), ("\t0\t", "\t999\t"), ("\t0\t", "\t-1\t"), ("\t0\t", "\t" + "1" * 5000 + "\t"),
     ("\t0\t", "\t\u0663\t"), ("\t1\t", "\t1\tx")],
    ids=lambda change: change[1][:20],
)  # fmt: skip
def test_hostile_blocks_are_refused(folder, tmp_path, change):
    words = Vocabulary.read(folder / "hmm" / "vocabulary.txt").words
    content = (folder / "hmm" / "blocks.tsv").read_text()
    assert change[0] in content
    (tmp_path / "blocks.tsv").write_text(content.replace(*change, 1))
    with pytest.raises(VlhmmError) as error:
        Blocks.read(tmp_path / "blocks.tsv", words)
    assert len(str(error.value)) < 500


@pytest.mark.parametrize("count", ["9" * 5000, "1" + "0" * 30, "-1", "x", "\u0663"], ids=lambda count: count[:5])
def test_hostile_counts_in_paths_and_arpa_files_are_refused(tmp_path, count):
    (tmp_path / "paths").write_text(f"0\ta\t1\n10\tb\t{count}\n11\t<eos>\t1\n11\t<unk>\t1\n")
    with pytest.raises(VlhmmError):
        read_paths(tmp_path / "paths", ["a", "b", "<eos>", "<unk>"])
    (tmp_path / "model.arpa").write_text(f"\\data\\\nngram 1={count}\n\n\\1-grams:\n-1\ta\n\\end\\\n")
    with pytest.raises(VlhmmError):
        KneserNey.read_arpa(tmp_path / "model.arpa")


def test_a_baseline_checkpoint_has_types_and_ranges(folder, tmp_path, capsys):
    run = tmp_path / "ff"
    shutil.copytree(folder / "ff", run)
    (run / "manifest.json").unlink()
    path = run / "checkpoint" / "state.safetensors"
    tensors = load_file(path)
    from safetensors import safe_open

    with safe_open(path, "pt") as file:
        about = json.loads(file.metadata()["about"])
    command = ["baseline", "ff", str(folder / "train.txt"), "--valid", str(folder / "valid.txt"), "--epochs", "1", "--quiet",
               "--set", "hidden_size=8", "--set", "num_streams=4", "--set", "segment_length=8", "--out", str(run)]  # fmt: skip
    for key in about:
        for value in ('"x"', "[]", "-1", "1" + "0" * 30, "NaN", "{}"):
            save_file(tensors, path, {"about": changed(about, (key,), value)})
            assert main(command) == 2, (key, value)
            assert "Traceback" not in capsys.readouterr().err
    for value in ("[]", "1", "{", "[" * 100_000):
        save_file(tensors, path, {"about": value})
        assert main(command) == 2
    for name, tensor in tensors.items():
        other = torch.full_like(tensor, torch.nan) if tensor.is_floating_point() else tensor[..., :-1]
        save_file(tensors | {name: other.contiguous()}, path, {"about": json.dumps(about)})
        assert main(command) == 2, name
    np.testing.assert_equal(len(capsys.readouterr().out), 0)
