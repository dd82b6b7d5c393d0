"""Clients that others wrote: the official openai package and lm-evaluation-harness. Both talk to a real server."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("starlette")

import vlhmm  # noqa: E402
from server.conftest import sentences, serve  # noqa: E402

pytestmark = pytest.mark.slow
EXAMPLES = Path(__file__).parent.parent.parent / "examples" / "lm_eval"


@pytest.fixture
def openai():
    return pytest.importorskip("openai", reason="pip install openai")


@pytest.fixture
def client(openai, served):
    with openai.OpenAI(base_url=served.address + "/v1", api_key="none", max_retries=0) as made:
        yield made


def test_openai_completes_and_streams_the_same_text(client):
    wish = {"model": "toy", "prompt": "the big", "max_tokens": 12, "seed": 7}
    whole = client.completions.create(**wish, logprobs=2)
    (choice,) = whole.choices
    assert choice.text.startswith(" ") and choice.finish_reason in ("stop", "length")
    assert len(choice.logprobs.token_logprobs) == whole.usage.completion_tokens == len(choice.text.split())
    parts = list(client.completions.create(**wish, stream=True))
    assert "".join(part.choices[0].text for part in parts) == choice.text
    assert [model.id for model in client.models.list()] == ["toy"]


def test_openai_fills_between_prompt_and_suffix(client, run_folder):
    made = client.completions.create(model="toy", prompt="the", suffix=" run .", max_tokens=3, n=8, seed=1)
    assert len(made.choices) == 8 and all(1 <= len(choice.text.split()) <= 3 for choice in made.choices)
    chosen = client.completions.create(
        model="toy",
        prompt="the",
        max_tokens=4,
        extra_body={"structured_outputs": {"choice": ["big dog runs .", "cat"]}},
    )
    assert chosen.choices[0].text.strip() in ("big dog runs .", "cat")


def test_openai_raises_its_own_error_classes(openai, client, run_folder):
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model="toy", prompt="the", max_tokens=-1)
    assert caught.value.param == "max_tokens" and caught.value.status_code == 400
    with pytest.raises(openai.NotFoundError) as missing:
        client.completions.create(model="other", prompt="the")
    assert missing.value.code == "model_not_found"
    with serve(run_folder, "--api-key", "secret", "--max-concurrent", "1") as locked:
        with openai.OpenAI(base_url=locked.address + "/v1", api_key="wrong", max_retries=0) as stranger:
            with pytest.raises(openai.AuthenticationError):
                stranger.models.list()
        with openai.OpenAI(base_url=locked.address + "/v1", api_key="secret", max_retries=0) as friend:
            wish = {"model": "toy", "prompt": "the", "max_tokens": 1000, "n": 60, "temperature": 50}
            stream = friend.completions.create(**wish, stream=True)
            next(iter(stream))
            with pytest.raises(openai.RateLimitError):
                friend.completions.create(model="toy", prompt="the", max_tokens=1)
            stream.close()


# ---- lm-evaluation-harness


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    """A text of more than 50,000 tokens under the names of the task files."""
    pytest.importorskip("lm_eval", reason="pip install lm-eval")
    folder = tmp_path_factory.mktemp("texts")
    lines = sentences(9_000, 5)
    lines[17] = "the unheard dog runs ."
    content = "\n".join(lines) + "\n"
    (folder / "ptb.test.txt").write_text(content)
    return folder


def harness(folder, module, *arguments):
    """Run lm_eval in a folder; return the perplexity it finds."""
    options = ["--include_path", str(EXAMPLES), "--output_path", str(folder / "out"), *arguments]
    environment = os.environ | {
        "HF_HOME": str(folder / "hf"),
        "HF_DATASETS_OFFLINE": "1",
        "HF_HUB_OFFLINE": "1",
        "OPENAI_API_KEY": "none",
    }
    command = [sys.executable, "-m", module, *options]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=1500)
    assert done.returncode == 0, done.stderr[-3000:]
    newest = max(folder.glob("out/**/results*.json"), key=lambda path: path.stat().st_mtime)
    (found,) = json.loads(newest.read_text())["results"].values()
    return next(value for name, value in found.items() if name.startswith("word_perplexity,"))


def expected(run, path, rule, streams):
    report = vlhmm.load(run).perplexity(path, rule, streams)
    assert report.tokens >= 50_000
    return report.perplexity


def test_lm_eval_over_http_gives_our_perplexity(run_folder, served, texts):
    arguments = f"model=toy,base_url={served.address}/v1/completions,tokenizer_backend=remote,num_concurrent=1,max_length=1000000"
    found = harness(
        texts, "lm_eval", "--model", "local-completions", "--model_args", arguments, "--tasks", "ptb_stream"
    )
    assert found == pytest.approx(expected(run_folder, texts / "ptb.test.txt", "reset", 1), rel=1e-7)


def test_lm_eval_in_process_gives_our_perplexity(run_folder, texts):
    arguments = ["--model", "vlhmm", "--model_args", f"run={run_folder}", "--tasks", "ptb_lines"]
    found = harness(texts, "vlhmm.server.lm_eval_model", *arguments)
    assert math.isclose(found, expected(run_folder, texts / "ptb.test.txt", "reset", 16), rel_tol=1e-7)
