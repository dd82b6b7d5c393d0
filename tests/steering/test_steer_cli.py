"""`vlhmm steer`: the way from a run to texts, and every bad input with its one line."""

import json
import subprocess
import sys

import pytest

pytest.importorskip("outlines_core")
pytest.importorskip("transformers")

import vlhmm
from steering.random_llm import LINES, save_llm
from vlhmm.cli.main import main
from vlhmm.steering import constraint, write_checkpoint


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A small language model, an HMM over its tokens, one over words, and one over another tokenizer's tokens."""
    path = tmp_path_factory.mktemp("steer")
    save_llm(path / "llm")
    (path / "train.txt").write_text("\n".join(LINES * 4) + "\n")
    other = json.loads((path / "llm/tokenizer.json").read_text())
    pieces = other["model"]["vocab"]
    pieces["A"], pieces["B"] = pieces["B"], pieces["A"]
    (path / "other").mkdir()
    (path / "other/tokenizer.json").write_text(json.dumps(other))
    for run, tokenizer in (("run", ["--tokenizer", str(path / "llm")]), ("words", []), ("foreign", ["--tokenizer", str(path / "other")])):
        code = main(
            ["train", str(path / "train.txt"), "--valid", str(path / "train.txt"), *tokenizer, "--preset", "tiny", "--out",
             str(path / run), "--epochs", "1", "--quiet"]
        )  # fmt: skip
        assert code == 0
    (path / "schema.json").write_text('{"type": "boolean"}')
    (path / "prompts.txt").write_text("The\nThe big\n")
    return path


def steer(folder, *more, run="run"):
    return ["steer", str(folder / run), "--llm", str(folder / "llm"), *more]


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (["--must-include", "dog|dogs,park", "--words", "2-5"], {"must_include": [["dog", "dogs"], "park"], "words": (2, 5)}),
        (["--choice", "red", "--choice", "a cat", "--mode", "greedy"], {"choice": ["red", "a cat"]}),
        (["--regex", "[ab]{3}", "--mode", "beam", "--beams", "3"], {"regex": "[ab]{3}"}),
        (["--prefix", "The", "--suffix", "us", "--must-not", "dog", "--must-not", "cat"], {"prefix": "The", "suffix": "us", "must_not": ["dog", "cat"]}),
        (["--sentence-end", "--must-include", "US", "--any-case", "--particles", "3"], {"sentence_end": True, "must_include": ["us"], "any_case": True}),
        (["--words", "3"], {"words": (3, 3)}),
    ],
)
def test_texts_meet_the_constraints(folder, capsys, options, named):
    assert main(steer(folder, "--prompt", "The", "-n", "2", "--max-new-tokens", "20", "--format", "jsonl", "--quiet", *options)) == 0
    out = capsys.readouterr()
    records = [json.loads(line) for line in out.out.splitlines()]
    assert len(records) == 2 and not out.err
    for record in records:
        assert record["satisfied"] and constraint(**named).accepts(record["text"])
        assert record["tokens"] == len(record["token_ids"]) and record["log_prob"] < 0


def test_formats_prompts_and_schemas(folder, capsys):
    schema = ["--json-schema", str(folder / "schema.json"), "--max-new-tokens", "12"]
    assert main(steer(folder, "--prompts", str(folder / "prompts.txt"), *schema)) == 0
    out = capsys.readouterr()
    assert len(out.out.splitlines()) == 2 and set(out.out.split()) <= {"true", "false"}
    assert "2 of 2 meet the constraint" in out.err and "lookahead table" in out.err
    assert main(steer(folder, "--prompt", "The", "--json-schema", '{"type": "null"}', "--format", "json", "--quiet")) == 0
    record = json.loads(capsys.readouterr().out)
    assert record["text"] == "null" and record["prompt"] == "The"


def test_a_checkpoint_of_ctrl_g(folder, capsys):
    write_checkpoint(vlhmm.load(folder / "run"), folder / "ctrlg", "ctrl-g")
    assert main(steer(folder, "--prompt", "The", "--must-include", "dog", "--quiet", run="ctrlg")) == 0
    assert "dog" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "run", "said"),
    [
        ([], "run", "--prompt is missing"),
        (["--prompt", "x"], "nowhere", "does not exist"),
        (["--prompt", "x"], "words", "over 18 words, steering needs one over the language model's tokens; make one with vlhmm distill"),
        (["--prompt", "x", "--llm", "nowhere.gguf"], "run", "no such file: nowhere.gguf"),
        (["--prompt", "x"], "foreign", "the tokenizers do not match"),
        (["--prompt", "x", "--prompts", "nowhere.txt"], "run", "no such file: nowhere.txt"),
        (["--prompt", "x", "--regex", "(a"], "run", "cannot compile"),
        (["--prompt", "x", "--json-schema", "nowhere.json"], "run", "no such file: nowhere.json"),
        (["--prompt", "x", "--words", "b"], "run", "--words 'b': expected a number, A-B or A-"),
        (["--prompt", "x", "--must-include", "a||b"], "run", "a text is empty"),
        (["--prompt", "x", "--words", "9-", "--max-new-tokens", "5"], "run", "at least 10 tokens with the end token, max_new_tokens is 5"),
        (["--prompt", "x", "--prefix", "a", "--choice", "b"], "run", "exclude each other"),
        (["--prompt", "x", "--max-new-tokens", "0"], "run", "from 1 to 100,000"),
        (["--prompt", "x", "--temperature", "0"], "run", "from 1e-06"),
        (["--prompt", "x", "--template", "no place"], "run", "has no {prompt}"),
        (["--prompt", "x", "--words", "1-12", "--memory", "10k"], "run", "raise memory"),
    ],
)
def test_bad_input_has_one_line(folder, capsys, arguments, run, said):
    assert main(steer(folder, *arguments, "--quiet", run=run)) == 2
    out = capsys.readouterr()
    assert not out.out and said in out.err and out.err.count("\n") == 1, out.err


@pytest.mark.parametrize("missing", ["transformers", "outlines_core"])
def test_a_missing_extra_is_named(folder, missing):
    code = f"import sys; sys.modules[{missing!r}] = None; from vlhmm.cli.main import main; sys.exit(main(sys.argv[1:]))"
    done = subprocess.run(
        [sys.executable, "-c", code, *steer(folder, "--prompt", "x", "--words", "1-2", "--quiet")], capture_output=True, text=True
    )
    assert done.returncode == 2 and "pip install 'vlhmm[llm]'" in done.stderr and done.stderr.count("\n") == 1, done.stderr
