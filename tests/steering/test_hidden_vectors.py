"""A language model's hidden vectors as evidence: which vector belongs to which token, what is stored, and that training uses it."""

import json

import numpy as np
import pytest

pytest.importorskip("transformers", reason="pip install 'vlhmm[llm]'")

import torch  # noqa: E402
from random_llm import save_llm  # noqa: E402

import vlhmm  # noqa: E402
from vlhmm.cli.main import main  # noqa: E402
from vlhmm.data.tokenizer import TokenLine  # noqa: E402
from vlhmm.steering import hidden_vectors  # noqa: E402
from vlhmm.steering.hidden_vectors import projection, read_hidden_vectors  # noqa: E402
from vlhmm.steering.llm import open_llm  # noqa: E402

LINES = [
    TokenLine([270, 40, 41], True, 1, "A cat"),
    TokenLine([33, 0], False, 1, "The big dog"),  # cut, and its last id is that of padding
    TokenLine([50, 60, 70, 80], True, 1, ""),
]


@pytest.fixture(scope="module")
def llm_folder(tmp_path_factory):
    return save_llm(tmp_path_factory.mktemp("llm") / "llama")


@pytest.fixture(scope="module")
def llm(llm_folder):
    return open_llm(str(llm_folder), "float32")


def alone(llm, line):
    """The last layer's vectors after a sample's tokens, from one pass without padding."""
    head, body = llm.prompt_ids(line.prompt), [*line.ids, *([1] if line.finished else [])]
    with torch.inference_mode():
        hidden = llm.model(torch.tensor([head + body]), output_hidden_states=True).hidden_states[-1][0]
    return hidden[len(head) :] @ projection(hidden.shape[1])


def test_every_token_has_the_vector_of_a_single_pass(llm, tmp_path):
    teacher = read_hidden_vectors(llm, LINES, tmp_path)
    tokens = torch.tensor([[270, 40, 41, 1, 0, 0], [33, 0, 0, 0, 0, 0], [50, 60, 70, 80, 1, 0]])
    found = teacher.vectors_after(tokens)
    for row, line in enumerate(LINES):
        expected = alone(llm, line)
        assert torch.allclose(found[row, : len(expected)], expected, atol=5e-3)
    stream = teacher.vectors_after(torch.tensor([[50, 60, 70, 80, 1, 270, 40, 41, 1, 9, 9]]))[0]
    assert torch.equal(stream[:5], found[2, :5]) and torch.equal(stream[5:9], found[0, :4])
    assert not stream[9:].any()  # what was never read


def test_parts_are_read_once_and_damaged_ones_again(llm, tmp_path, monkeypatch):
    monkeypatch.setattr(hidden_vectors, "LINES_AT_ONCE", 2)
    read, read_really = [], hidden_vectors._read
    monkeypatch.setattr(hidden_vectors, "_read", lambda *of: read.append(len(of[1])) or read_really(*of))
    asked = iter([False, True])
    assert read_hidden_vectors(llm, LINES, tmp_path, should_stop=lambda: next(asked)) is None
    assert read == [2]
    first = read_hidden_vectors(llm, LINES, tmp_path)
    assert read == [2, 1]  # it goes on where it stopped
    (tmp_path / "00001.vectors.safetensors").write_bytes(b"damaged")
    again = read_hidden_vectors(llm, LINES, tmp_path)
    assert read == [2, 1, 1]
    tokens = torch.tensor([[50, 60, 70, 80, 1]])
    assert torch.equal(first.vectors_after(tokens), again.vectors_after(tokens))
    read_hidden_vectors(llm, LINES, tmp_path, template="Say {prompt}")
    assert read == [2, 1, 1, 2, 1]  # other vectors


def test_a_projection_keeps_distances():
    vectors = torch.randn(40, 576, generator=torch.Generator().manual_seed(1))
    ratio = torch.pdist(vectors @ projection(576)) / torch.pdist(vectors)
    assert abs(float(ratio.mean()) - 1) < 0.1 and float(ratio.std()) < 0.15


def test_distill_with_evidence(llm_folder, tmp_path, capsys):
    (tmp_path / "prompts.txt").write_text("A cat\nThe big dog\n")
    command = [
        "distill", str(llm_folder), "--prompts", str(tmp_path / "prompts.txt"), "--tokens", "1500", "--max-new-tokens", "8",
        "--batch", "32", "--precision", "float32", "--preset", "tiny", "--iterations", "6", "--format", "json", "--threads", "1",
        "--set", "training.em_tokens=500",
    ]  # fmt: skip
    assert main([*command, "--evidence", "1", "--out", str(tmp_path / "run")]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["finished"] and np.isfinite(report["hmm_nats"])
    events = [json.loads(line) for line in (tmp_path / "run" / "journal.jsonl").read_text().splitlines()]
    assert any("train_under_guide" in event for event in events)
    assert main([*command, "--evidence", "1", "--out", str(tmp_path / "run"), "--quiet"]) == 0  # nothing is read or trained again
    assert json.loads(capsys.readouterr().out)["hmm_nats"] == report["hmm_nats"]
    assert vlhmm.load(tmp_path / "run").vocabulary.words
    samples = ["--samples", str(tmp_path / "run" / "samples"), "--tokenizer", str(llm_folder)]
    assert main(["distill", *samples, "--evidence", "1", "--out", str(tmp_path / "other")]) == 2
    assert "name the LLM" in capsys.readouterr().err
