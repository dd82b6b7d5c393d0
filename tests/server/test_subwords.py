"""A model over subword ids behind the same routes: text in, text out, constraints over characters."""

import json
import math
import sys
import threading
from pathlib import Path

import pytest

pytest.importorskip("starlette")
pytest.importorskip("httpx")
pytest.importorskip("tokenizers")
sys.path.insert(0, str(Path(__file__).parent.parent / "steering"))

from random_llm import LINES, make_tokenizer  # noqa: E402

import vlhmm  # noqa: E402
from server.test_routes import Client  # noqa: E402
from vlhmm.cli.main import main  # noqa: E402
from vlhmm.errors import QueryError  # noqa: E402


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    path = tmp_path_factory.mktemp("subwords")
    make_tokenizer(path / "tokenizer.json")
    (path / "train.txt").write_text("\n".join(LINES * 4) + "\n")
    (path / "valid.txt").write_text("\n".join(LINES) + "\n")
    options = [
        "--valid",
        str(path / "valid.txt"),
        "--tokenizer",
        str(path),
        "--preset",
        "tiny",
        "--epochs",
        "3",
        "--quiet",
    ]
    assert main(["train", str(path / "train.txt"), *options, "--out", str(path / "run")]) == 0
    return vlhmm.load(path / "run")


@pytest.fixture
def client(model):
    return Client(model=model)


def test_texts_and_ids_there_and_back(client, model):
    text = LINES[0]
    ids = client.post("/tokenize", prompt=text).json()["tokens"]
    assert ids == model.vocabulary.ids(text)
    assert client.post("/detokenize", tokens=ids).json()["prompt"] == text
    info = client.get("/tokenizer_info").json()
    assert info["eos_token_id"] == model.vocabulary.eos and info["bos_token_id"] == len(model.vocabulary)


def test_scores_and_completions_are_the_librarys(client, model):
    text = LINES[0]
    assert client.post("/v1/score", text=text).json()["log_prob"] == pytest.approx(model.score(text), abs=1e-6)
    wish = {"prompt": text[: len(text) // 2], "max_tokens": 12, "seed": 4, "n": 4, "logprobs": 0}
    whole = client.complete(**wish)["choices"]
    given = model.vocabulary.ids(wish["prompt"])
    answer = client.post("/v1/completions", stream=True, **wish)
    events = [json.loads(line[6:]) for line in answer.text.split("\n\n") if line and "[DONE]" not in line]
    for choice in whole:
        streamed = "".join(c["text"] for event in events for c in event["choices"] if c["index"] == choice["index"])
        assert streamed == choice["text"]
        state = model.begin()
        for token in given:
            state = state.step(token)
        assert choice["logprobs"]["token_logprobs"], "at least one token"
        assert all(value <= 0 for value in choice["logprobs"]["token_logprobs"])


def test_a_suffix_is_filled(client):
    prompt, suffix = LINES[0].split(" ", 1)
    rest = " " + suffix.split(" ", 1)[1]
    made = client.complete(prompt=prompt, suffix=rest, max_tokens=4, n=4, seed=1)["choices"]
    assert all(choice["text"] for choice in made)


@pytest.mark.parametrize("wish", [{"choice": [" dog", " cat"]}, {"regex": " (dog|cat)s?"}])
def test_constraints_speak_of_characters(client, wish):
    pytest.importorskip("outlines_core")
    answer = client.post("/v1/completions", prompt="The", structured_outputs=wish, n=8, seed=2, max_tokens=8)
    assert answer.status_code == 200, answer.text
    assert {choice["text"] for choice in answer.json()["choices"]} <= {" dog", " cat", " dogs", " cats"}


def test_json_of_a_schema(client):
    pytest.importorskip("outlines_core")
    schema = {
        "type": "object",
        "properties": {"a": {"type": "boolean"}},
        "required": ["a"],
        "additionalProperties": False,
    }
    answer = client.post("/v1/completions", prompt="", structured_outputs={"json": schema}, n=3, seed=1, max_tokens=40)
    assert answer.status_code == 200, answer.text
    assert all(isinstance(json.loads(choice["text"])["a"], bool) for choice in answer.json()["choices"])
    assert all(math.exp(choice["log_prob"]) <= 1 for choice in answer.json()["choices"])


def test_a_pattern_is_compiled_beside_the_thread_that_answers_others(client, monkeypatch):
    pytest.importorskip("outlines_core")
    threads = []

    def too_large(pattern):
        threads.append(threading.current_thread().name)
        raise QueryError("the regular expression is too large")

    monkeypatch.setattr("vlhmm.steering.byte_automaton._compiled_apart", too_large)
    answer = client.post("/v1/completions", prompt="The", structured_outputs={"regex": "(.*a){50}.{50}"}, max_tokens=8)
    assert answer.status_code == 400 and "too large" in answer.json()["error"]["message"]
    assert threads and all(name.startswith("vlhmm-compiler") for name in threads)


def test_constraints_over_words_are_refused(client):
    answer = client.post("/v1/infill", template="The [MASK:1-3]", must_contain="dog")
    assert answer.status_code == 400 and answer.json()["error"]["param"] == "must_contain"
