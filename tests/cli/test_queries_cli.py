"""The verbs that ask a model, end to end on a small trained run; bad input gets one line and exit code 2."""

import io
import json
import math
import random
import re
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from numpy.testing import assert_allclose

import vlhmm
from vlhmm.cli.main import main
from vlhmm.constraints.constraint import compile_constraint
from vlhmm.data.manifest import accept_files
from vlhmm.data.user_text import encode_words
from vlhmm.errors import QueryError
from vlhmm.lattice.template import parse_template

EXAMPLES = sorted((Path(__file__).parents[2] / "examples").glob("*.py"))


def toy_lines(count, seed):
    """Sentences of a small grammar: verbs agree with subjects, and one sentence in four goes on."""
    draw = random.Random(seed)
    lines = []
    for _ in range(count):
        one = draw.random() < 0.5
        noun = draw.choice(["cat", "dog"] if one else ["cats", "dogs"])
        line = ["the", draw.choice(["big", "small"]), noun, "runs" if one else "run"]
        if draw.random() < 0.25:
            line += ["to", "the", draw.choice(["cat", "dogs"])]
        lines.append(" ".join([*line, "."]))
    return lines


@pytest.fixture(scope="session")
def run_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("asked")
    for name, count, seed in (("train", 300, 1), ("valid", 40, 2)):
        (folder / f"{name}.txt").write_text("\n".join(toy_lines(count, seed)) + "\n")
    changes = ["--states", "32", "--blocks", "8", "--epochs", "6"]
    code = main(
        [
            "train",
            str(folder / "train.txt"),
            "--valid",
            str(folder / "valid.txt"),
            "--preset",
            "tiny",
            "--quiet",
        ]
        + [*changes, "--out", str(folder / "run")]
    )
    assert code == 0
    return str(folder / "run")


@pytest.fixture(scope="session")
def model(run_folder):
    return vlhmm.load(run_folder)


@pytest.fixture
def ask(run_folder, capsys, monkeypatch):
    """ask(verb, *arguments, text=None) -> (exit code, standard output, standard error)."""

    def run(verb, *arguments, text=None):
        if text is not None:
            raw = io.BytesIO(text if isinstance(text, bytes) else text.encode())
            monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BufferedReader(raw)))
        code = main([verb, run_folder, *arguments])
        out, err = capsys.readouterr()
        return code, out, err

    return run


def answered(result):
    code, out, err = result
    assert code == 0, err
    return out


def refused(result, *parts):
    code, out, err = result
    assert code == 2 and out == "" and err.count("\n") == 1 and err.startswith("vlhmm: "), (code, out, err)
    for part in parts:
        assert part in err


def test_score(ask, model):
    text = "the big cat runs .\nthe zebra run .\n"
    lines = [json.loads(line) for line in answered(ask("score", "--format", "jsonl", text=text)).splitlines()]
    assert [line["oov"] for line in lines] == [0, 1] and lines[0]["tokens"] == 6
    for line, sentence in zip(lines, text.splitlines(), strict=True):
        assert_allclose(line["log_prob"], model.score(sentence), rtol=1e-9)
    per_token = ask("score", "--per", "token", "--log-base", "2", "--format", "json", text=text)
    words = json.loads(answered(per_token))[0]["words"]
    assert_allclose(sum(w["log_prob"] for w in words) * math.log(2), lines[0]["log_prob"], rtol=1e-9)
    assert words[-1]["word"] == "<eos>"
    shown = answered(ask("score", "--per", "token", "--log-base", "10", text=text))
    assert "the=" in shown and "(log base 10) OOV: 1" in shown


def test_score_has_the_protocols_score_too(model):
    import torch

    tokens = torch.tensor([[model.vocabulary.id_of[w] for w in "the big cat".split()]])
    scores, _ = model.score_batch(tokens, torch.tensor([3]), model.start(1))
    assert_allclose(float(scores.sum()), model.score("the big cat", eos=False), rtol=1e-5)


def test_next(ask, model):
    found = json.loads(answered(ask("next", "the big", "--top-k", "3", "--format", "json")))
    assert found["sum"] == pytest.approx(1, abs=1e-5) and len(found["words"]) == 3
    best = model.next_word("the big", 3)
    assert [w["word"] for w in found["words"]] == [w.word for w in best]
    everything = json.loads(answered(ask("next", "--top-k", "0", "--format", "json")))
    assert len(everything["words"]) == len(model.vocabulary)
    shown = answered(ask("next", "-", text="the big\nthe zebra\n"))
    assert shown.count("# probability") == 2 and "log base e" in shown
    assert "'zebra'" in ask("next", "the zebra")[2]


def test_sample(ask, model):
    one = answered(ask("sample", "-n", "4", "--seed", "3"))
    assert one == answered(ask("sample", "-n", "4", "--seed", "3")) and len(one.splitlines()) == 4
    records = json.loads(answered(ask("sample", "-n", "2", "--prompt", "the", "--scores", "--format", "json")))
    assert all(r["exact"] and r["text"].startswith("the") and r["log_base"] == "e" for r in records)
    code, out, err = ask("sample", "--temperature", "0.5", "--top-k", "3", "--top-p", "0.9", "--format", "jsonl")
    assert code == 0 and not json.loads(out)["exact"] and "not exact" in err
    wishes = ("--must-contain", "dogs", "--must-not", "cat", "--length", "3-8", "--max-tokens", "10")
    code, out, err = ask("sample", "-n", "50", *wishes, "--format", "jsonl")
    assert code == 0 and "p(constraint" in err
    for line in out.splitlines():
        record = json.loads(line)
        words = record["text"].split()
        assert "dogs" in words and "cat" not in words and 3 <= len(words) <= 8
        assert record["constraint_log_prob"] <= 0
        # the score is conditioned on the constraint and on the end: with both it is the model's own probability
        assert record["log_prob_given"] == "prompt, constraint and an end within max-tokens"
        assert record["log_prob"] > model.score(record["text"]) - record["constraint_log_prob"] - 1e-6


def test_infill(ask, model):
    text = "the [MASK] cat [MASK:1-2] ."
    records = json.loads(answered(ask("infill", text, "-n", "3", "--format", "json")))
    assert len(records) == 3 and all(0 < r["probability"] <= 1 and r["exact"] == "sample" for r in records)
    ready = model.gaps(text)
    for record in records:
        assert_allclose(record["log_prob"], ready.log_prob(*record["gaps"]), rtol=1e-6)
    best = json.loads(answered(ask("infill", "the [MASK] cat runs .", "--mode", "best", "--format", "json")))
    assert best["exact"] == "most probable word"
    path = answered(ask("infill", text, "--mode", "best"))
    assert "(exact: joint path)" in path
    marginals = json.loads(answered(ask("infill", text, "--mode", "marginals", "--format", "json", "--top-k", "2")))
    assert [len(gap["lengths"]) for gap in marginals["gaps"]] == [1, 2]
    assert sum(part["probability"] for part in marginals["gaps"][1]["lengths"]) == pytest.approx(1)
    assert "# gap 2, word 2 of 2" in answered(ask("infill", text, "--mode", "marginals"))
    several = answered(ask("infill", "-", "--open", "--allow-eos", text="the [MASK]\n[MASK] big\n"))
    assert len(several.splitlines()) == 2
    wishes = ("--must-contain", "dogs", "--must-not", "small", "--regex", "the [big dogs] .*", "--length", "3-4")
    filled = answered(ask("infill", "the [MASK:2-4]", "-n", "20", *wishes))
    for line in filled.splitlines():
        words = line.split("\t")[1].split()
        assert "dogs" in words and "small" not in words and words[1] in ("big", "dogs") and len(words) <= 4
    ordered = answered(
        ask("infill", "[MASK:4]", "--must-contain", "cat", "--must-contain", "the", "--in-order", "-n", "9")
    )
    assert all("the" in line.split("cat", 1)[1].split() for line in ordered.splitlines())


def test_decode(ask, model):
    text = "the big cat runs .\n\nthe dogs run .\n"
    columns = answered(ask("decode", text=text))
    sentences = [block.splitlines() for block in columns.strip().split("\n\n")]
    assert [len(s) for s in sentences] == [5, 4]
    assert [int(line.split("\t")[1]) for line in sentences[0]] == model.decode("the big cat runs .")[0].states
    for method in ("posterior", "filtered"):
        shown = answered(ask("decode", "--method", method, "--top-k", "2", text=text))
        assert shown.splitlines()[0].count(":") == 2
    records = answered(ask("decode", "-k", "3", "--format", "jsonl", text="the dogs run .\n")).splitlines()
    scores = [json.loads(line)["log_prob"] for line in records]
    assert len(scores) == 3 and scores == sorted(scores, reverse=True)


@pytest.fixture
def carrying(run_folder, tmp_path):
    """The same model under the rule carry."""
    folder = tmp_path / "carrying"
    shutil.copytree(run_folder, folder)
    config = json.loads((folder / "config.json").read_text())
    config["training"] |= {"context": "carry", "batch": "streams"}
    (folder / "config.json").write_text(json.dumps(config))
    accept_files(folder)
    return str(folder)


def test_under_carry_every_verb_goes_on_over_line_ends(carrying, capsys, tmp_path):
    """decode and surprisal read the lines before, as score does; an empty line is an <eos>."""
    lines = ["the big cat runs .", "", "the dogs run ."]
    (tmp_path / "text").write_text("\n".join(lines) + "\n")
    model = vlhmm.load(carrying)
    capsys.readouterr()
    before = model.begin().read_line(lines[0].split()).read_line([])

    def told(verb, *arguments):
        assert main([verb, carrying, str(tmp_path / "text"), *arguments, "--format", "jsonl", "--quiet"]) == 0
        return [json.loads(line) for line in capsys.readouterr().out.splitlines()]

    best = model.decode(lines[2], before=before)[0]
    last = told("decode")[-1]
    assert (last["line"], last["states"], last["eos_state"]) == (3, best.states, best.eos_state)
    assert_allclose(last["log_prob"], best.log_prob, rtol=1e-9)
    assert best.log_prob != model.decode(lines[2])[0].log_prob
    assert_allclose(told("score")[-1]["log_prob"], model.posteriors(lines[2], before=before).log_likelihood, rtol=1e-9)
    summed = told("decode", "--eos-state", "sum")[-1]
    assert summed["log_prob"] > last["log_prob"] and "eos_state" not in summed
    expected = {s.position: s.log_prob for s in model.surprisal(lines[2], before=before)}
    found = [record for record in told("surprisal", "--each", "9") if record["line"] == 3]
    assert sorted(record["position"] for record in found) == [1, 2, 3, 4]
    for record in found:
        assert_allclose(record["log_prob"], expected[record["position"] - 1], rtol=1e-9)
        assert record["word"] == lines[2].split()[record["position"] - 1]


def test_surprisal(ask):
    text = "the big cat runs .\nthe runs big cat .\n"
    shown = answered(ask("surprisal", "--worst", "2", text=text)).splitlines()
    assert len(shown) == 2 and all(line.startswith("2:") for line in shown) and "expected: " in shown[0]
    each = answered(ask("surprisal", "--each", "1", "--format", "jsonl", "--top-k", "3", text=text)).splitlines()
    assert [json.loads(line)["line"] for line in each] == [1, 2]
    assert len(json.loads(each[0])["expected"]) == 3


def test_quantities(ask, run_folder):
    found = json.loads(answered(ask("information", "entropy", "--streams", "4", "--tokens", "20", "--format", "json")))
    assert found["estimate"] and 0 < found["entropy_rate"] < math.log(20)
    shown = answered(ask("information", "phrase", "the", "big", "--max-tokens", "4")).splitlines()
    values = [float(line.split("\t")[1]) for line in shown[1:]]
    assert len(values) == 4 and values[0] == 0 and values == sorted(values) and values[-1] <= 1
    same = json.loads(answered(ask("information", "kl", run_folder, "--format", "json", text="the cats run .\n")))
    assert same["kl"] == 0 and same["tokens"] == 5 and same["exact"]


def test_verify(ask, monkeypatch):
    found = json.loads(answered(ask("verify", "--format", "json")))
    assert found["passed"] and len(found["checks"]) == 11
    assert "all exact" in answered(ask("verify"))
    monkeypatch.setattr("vlhmm.analysis.verify._sums", lambda *_: [0.5])
    code, out, _ = ask("verify")
    assert code == 1 and "FAIL" in out and "OUT OF BOUNDS" in out


def test_export(ask, tmp_path):
    code, out, err = ask("export", str(tmp_path / "m.npz"), "--format", "json")
    assert code == 0 and json.loads(out)["kind"] == "npz" and "will take" in err
    with np.load(tmp_path / "m.npz", allow_pickle=False) as file:
        assert_allclose(file["transition"].sum(1), 1, rtol=1e-5)
    answered(ask("export", str(tmp_path / "folder"), "--kind", "ctrl-g"))
    assert (tmp_path / "folder" / "config.json").exists()


@pytest.mark.parametrize(
    ("verb", "arguments", "text", "what"),
    [
        ("infill", ["the [MASK:5-2] cat"], None, "counts downwards"),
        ("infill", ["the [MASK"], None, "malformed mask"),
        ("infill", ["the cat"], None, "no gap"),
        ("infill", ["the [MASK]", "--must-contain", "zebra"], None, "no word '"),
        (
            "infill",
            ["the [MASK]", "--must-contain", "cat", "--must-not", "cat"],
            None,
            "impossible constraint",
        ),
        ("infill", ["the [MASK]", "--regex", "(the"], None, "without"),
        ("infill", ["the [MASK]", "--length", "x"], None, "--length 'x'"),
        ("infill", ["the [MASK]", "--in-order"], None, "--must-contain"),
        ("infill", ["the [MASK]", "--regex", "(the|cat)* the (the|cat){14}"], None, "more than 4,096 states"),
        ("infill", ["[MASK:1-9000]", "--memory", "1M"], None, "would take"),
        ("infill", ["the [MASK]", "-n", "0"], None, "-n: '0': expected a whole number from 1"),
        ("infill", ["-"], "the [MASK]\nthe [MASK:3-1]\n", "line 2: [MASK:3-1]"),
        ("infill", ["-"], b"\xff\n", "line 1: not UTF-8"),
        ("next", ["--top-k", "-1"], None, "--top-k: '-1'"),
        ("score", ["missing.txt"], None, "no such file"),
        ("score", [], "", "empty"),
        ("score", [], b"the cat\n\xff\xfe\n", "line 2: not UTF-8"),
        ("score", [], "the <eos> cat\n", "literal <eos>"),
        ("sample", ["-n", "0"], None, "-n: '0': expected a whole number from 1"),
        ("sample", ["--temperature", "0"], None, "temperature"),
        ("sample", ["--must-contain", "cat", "--top-k", "3"], None, "--top-k"),
        ("decode", ["-k", "2", "--method", "posterior"], "the cat\n", "-k 2"),
        (
            "decode",
            ["--memory", "1M"],
            "the " * 4000 + "\n",
            "line 1: the transitions of 4,000 words would take",
        ),
        ("surprisal", ["--worst", "0"], "the cat\n", "--worst 0"),
        ("information", ["phrase"], None, "takes"),
        ("information", ["phrase", "zebra"], None, "no word '"),
        ("verify", ["--texts", "0"], None, "--texts: '0'"),
        ("export", ["model.bin"], None, "name the kind"),
    ],
)
def test_bad_input_gets_its_line(ask, verb, arguments, text, what):
    code, out, err = ask(verb, *arguments, "--quiet", text=text)
    assert code == 2, (code, out, err)
    assert err.startswith("vlhmm: ") and err.count("\n") == 1 and what in err, err


def test_a_missing_run_and_a_baseline_are_refused(capsys, tmp_path):
    assert main(["next", str(tmp_path / "nowhere"), "the"]) == 2
    assert "does not exist" in capsys.readouterr().err
    (tmp_path / "text").write_text("the cat\nthe dog\n")
    text = str(tmp_path / "text")
    assert main(["baseline", "kn", text, "--valid", text, "--out", str(tmp_path / "kn"), "--quiet"]) == 0
    assert main(["decode", str(tmp_path / "kn"), text]) == 2
    assert "holds a baseline, which has no hidden states" in capsys.readouterr().err


def test_a_closed_pipe_is_no_error(run_folder):
    program = [sys.executable, "-m", "vlhmm", "sample", run_folder, "-n", "20000", "--quiet"]
    process = subprocess.Popen(program, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout.readline()
    process.stdout.close()
    assert process.stderr.read() == b"" and process.wait(timeout=60) == 0
    process.stderr.close()


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_examples_run(path, run_folder, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [str(path), run_folder])
    runpy.run_path(str(path), run_name="__main__")
    assert capsys.readouterr().out.strip()


def test_unknown_words_are_told(ask):
    """In the singular where there is one, with dots where there are many; a mask is a gap in `infill` alone."""
    assert ask("next", "the zebra")[2] == "1 word not in the vocabulary is read as <unk>: 'zebra'\n"
    many = ask("next", "a b c d e f g")[2]
    assert many == "7 words not in the vocabulary are read as <unk>: 'a', 'b', 'c', 'd', 'e', ...\n"
    for verb, *arguments in (("next", "the [MASK]"), ("sample", "--prompt", "the [MASK]")):
        assert "'[MASK]'" in ask(verb, *arguments)[2]
    assert ask("infill", "the [MASK] cat runs .")[2] == ""


def test_a_mask_without_blanks_is_explained(ask):
    code, _, err = ask("infill", "the[MASK] .")
    assert code == 2 and err.splitlines()[-1].endswith("between blanks")


def test_the_size_of_a_small_export_is_told(ask, tmp_path):
    err = ask("export", str(tmp_path / "model.npz"))[2]
    assert " 0 MiB" not in err and " KiB" in err


def test_a_constrained_text_has_a_largest_length(ask):
    """Its messages are laid out before their size is known: with 10^9 words that alone took gigabytes and minutes."""
    refused(ask("sample", "--max-tokens", "1000000000", "--must-contain", "cat"), "--max-tokens", "10,000")


def test_a_very_small_probability_is_not_printed_as_zero(ask):
    line = answered(ask("infill", " ".join(["[MASK]"] * 400))).split("\t")[0]
    assert re.fullmatch(r"\d\.\d{3}e-\d{3}", line)


def test_a_closed_standard_output_is_one_line_and_a_closed_standard_error_keeps_the_answer_alone(run_folder):
    def score(closing):
        command = f'exec "{sys.executable}" -m vlhmm score "{run_folder}" {closing}'
        return subprocess.run(["sh", "-c", command], input="the cat runs .\n", capture_output=True, text=True)

    closed = score(">&-")
    assert closed.returncode == 2 and closed.stderr.startswith("vlhmm: standard output is closed") and closed.stderr.count("\n") == 1
    silent = score("2>&-")
    assert silent.returncode == 0 and silent.stdout.count("\n") == 1 and silent.stdout.startswith("Total")


def test_ids_in_place_of_words_and_words_in_place_of_constraints_are_refused(model):
    """Ids were read as unknown words, in silence."""
    for text in ([0, 1], ["the", 1], 5, None):
        for read in (encode_words, parse_template):
            with pytest.raises(QueryError, match="expected a string or a sequence of words"):
                read(model.vocabulary, text)
    with pytest.raises(QueryError, match="'cat' is a str, expected a constraint"):
        compile_constraint("cat", model.vocabulary)
