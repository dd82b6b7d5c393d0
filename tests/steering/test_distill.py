"""Samples of a language model, shards that outlive a kill, and an HMM trained on them."""

import json
import math
import os
import signal
import subprocess
import sys
import time
from collections import Counter

import numpy as np
import pytest
import torch

import vlhmm
from vlhmm.cli.main import main
from vlhmm.errors import ConfigError, DataError

pytest.importorskip("transformers")
pytest.importorskip("tokenizers")

from random_llm import make_tokenizer, save_llm

from vlhmm.data.tokenizer import TokenLine, TokenVocabulary
from vlhmm.steering.distill import (
    DrawSettings,
    draw_samples,
    draw_shard,
    llm_log_probs,
    read_prompts,
    read_samples,
)
from vlhmm.steering.llm import CachedReader, draw_ids, open_llm

PROMPTS = ["The big dog", "A cat", "rain"]


@pytest.fixture(scope="module")
def llm_folder(tmp_path_factory):
    return save_llm(tmp_path_factory.mktemp("llm"))


@pytest.fixture(scope="module")
def llm(llm_folder):
    return open_llm(llm_folder, "float32")


def plain_log_probs(llm, prompt, ids, temperature):
    """log p of each id, one forward pass per token and no padding."""
    found, before = [], llm.prompt_ids(prompt)
    for i in ids:
        with torch.inference_mode():
            logits = llm.model(torch.tensor([before])).logits[0, -1].double() / temperature
        found.append(torch.log_softmax(logits, -1))
        before = [*before, i]
    return found


def test_the_vocabulary_is_the_tokenizers_and_ends_as_the_model_does(llm):
    assert llm.end_ids == (1, 0)
    assert llm.vocabulary.eos == 1 and len(llm.vocabulary) == len(llm.tokenizer) < llm.model.config.vocab_size


def test_log_probs_of_samples_equal_those_of_single_unpadded_passes(llm):
    lines = [TokenLine([270, 40, 41], True, 1, "A cat"), TokenLine([33], False, 1, "The big dog"), TokenLine([50, 60], True, 1, "")]
    expected = []
    for line in lines:
        ids = [*line.ids, *([1] if line.finished else [])]
        rows = plain_log_probs(llm, line.prompt, ids, 0.7)
        own = [float(row[i]) for row, i in zip(rows, ids, strict=True)]
        if line.finished:
            own[-1] = math.log(float(rows[-1][[0, 1]].exp().sum()))
        expected += own
    for batch in (1, 3):
        assert np.allclose(llm_log_probs(llm, lines, 0.7, batch=batch), expected, atol=1e-4)


def test_samples_follow_the_model_at_its_temperature(llm):
    """Chi-square of first tokens: ids beyond the vocabulary are never drawn, two ids end a text."""
    settings = DrawSettings(temperature=0.8, max_new_tokens=1, batch=4000, seed=3)
    records = draw_shard(llm, PROMPTS[:1], 0, settings)
    ids = np.array([record["ids"][0] if record["ids"] else 1 for record in records])
    size = len(llm.vocabulary)
    logits = plain_log_probs(llm, PROMPTS[0], [0], 0.8)[0][:size]
    expected = torch.softmax(logits, -1).numpy() * len(ids)
    expected[1] += expected[0]
    expected[0] = 0
    counts = np.bincount(ids, minlength=size)
    assert len(counts) == size
    common = expected >= 10
    difference = ((counts[common] - expected[common]) ** 2 / expected[common]).sum()
    freedom = int(common.sum())
    assert difference < freedom + 5 * math.sqrt(2 * freedom)
    assert all(record["finished"] == (not record["ids"]) for record in records)


def test_samples_follow_the_model_token_by_token(llm):
    """Chi-square of pairs of tokens after prompts of different lengths, against log-probabilities without padding."""
    settings = DrawSettings(temperature=0.5, max_new_tokens=2, batch=3000, seed=4)
    records = [record for number in range(2) for record in draw_shard(llm, PROMPTS, number, settings)]
    for prompt in PROMPTS:
        some = [record for record in records if record["prompt"] == prompt]
        pairs = Counter(tuple(record["ids"]) for record in some)
        first = torch.softmax(plain_log_probs(llm, prompt, [0], 0.5)[0][: len(llm.vocabulary)], -1)
        expected = {(): float(first[list(llm.end_ids)].sum())}
        for token in first.topk(12).indices.tolist():
            if token not in llm.end_ids:
                second = torch.softmax(plain_log_probs(llm, prompt, [token, 0], 0.5)[1][: len(llm.vocabulary)], -1)
                expected[(token,)] = float(first[token] * second[list(llm.end_ids)].sum())
                expected |= {(token, i): float(first[token] * p) for i, p in enumerate(second) if i not in llm.end_ids}
        common = {key: p * len(some) for key, p in expected.items() if p * len(some) >= 5}
        rest = len(some) - sum(common.values())
        others = len(some) - sum(pairs[key] for key in common)
        difference = sum((pairs[key] - n) ** 2 / n for key, n in common.items()) + (others - rest) ** 2 / rest
        assert len(common) >= 20
        assert difference < len(common) + 5 * math.sqrt(2 * len(common))


def test_a_reader_of_many_sequences_equals_plain_passes(llm):
    """Left padding, equal sequences, rows left out and doubled: the same log-probabilities as one sequence alone."""
    rows = [llm.prompt_ids(prompt) for prompt in (*PROMPTS, PROMPTS[0])]
    reader = CachedReader(llm, rows)
    for selected, tokens in (((0, 1, 2, 3), (40, 41, 42, 43)), ((3, 1), (44, 45)), ((1, 1, 0), (46, 47, 48))):
        logits = reader.logits()
        for row, found in zip(rows, logits, strict=True):
            with torch.inference_mode():
                assert torch.allclose(found, llm.model(torch.tensor([row])).logits[0, -1], atol=1e-4)
        reader.select(np.array(selected))
        reader.read(torch.tensor(tokens))
        rows = [[*rows[i], token] for i, token in zip(selected, tokens, strict=True)]


def test_ids_of_probability_zero_are_never_drawn():
    logits = torch.full((6, 700), -torch.inf)
    logits[:, [255, 256, 699]] = torch.tensor([0.0, -1.0, -2.0])
    uniforms = torch.tensor([[0.0, 0.0], [0.66, 1 - 2**-53], [0.67, 0.0], [0.9, 0.999], [0.92, 0.0], [1 - 2**-53, 1 - 2**-53]], dtype=torch.float64)
    assert draw_ids(logits, uniforms).tolist() == [255, 255, 256, 256, 699, 699]


def test_a_draw_goes_on_to_the_same_text(llm, tmp_path):
    settings = DrawSettings(max_new_tokens=6, batch=8, seed=5)
    total = draw_samples(llm, PROMPTS, tmp_path / "whole", 200, settings)
    assert total >= 200
    asked = iter([False, False, True])
    draw_samples(llm, PROMPTS, tmp_path / "halves", 200, settings, should_stop=lambda: next(asked))
    assert len(list((tmp_path / "halves").glob("*.jsonl"))) == 2
    assert draw_samples(llm, PROMPTS, tmp_path / "halves", 200, settings) == total
    files = sorted(path.name for path in (tmp_path / "whole").iterdir())
    assert files == sorted(path.name for path in (tmp_path / "halves").iterdir())
    for name in files:
        assert (tmp_path / "whole" / name).read_bytes() == (tmp_path / "halves" / name).read_bytes()
    with pytest.raises(ConfigError, match="temperature differs"):
        draw_samples(llm, PROMPTS, tmp_path / "whole", 200, DrawSettings(max_new_tokens=6, batch=8, seed=5, temperature=0.5))
    with pytest.raises(ConfigError, match="prompts differs"):
        draw_samples(llm, PROMPTS[:2], tmp_path / "whole", 200, settings)


def test_samples_are_parted_by_line(tmp_path):
    make_tokenizer(tmp_path / "tokenizer.json")
    vocabulary = TokenVocabulary.read(tmp_path)
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"ids": [i], "finished": True}) + "\n" for i in range(2, 82)))
    samples = read_samples([tmp_path / "a.jsonl"], vocabulary)
    assert samples.valid.tokens.tolist() == [21, 1, 61, 1]
    assert samples.test.tokens.tolist() == [41, 1, 81, 1]
    assert samples.train.num_tokens == 2 * 76 and samples.num_tokens == 160
    (tmp_path / "b.jsonl").write_text("[5]\n")
    with pytest.raises(DataError, match="expected at least 40; draw more"):
        read_samples([tmp_path / "b.jsonl"], vocabulary)


def test_prompts(tmp_path):
    (tmp_path / "p.txt").write_text("one\n\ntwo words\n")
    assert read_prompts(tmp_path / "p.txt") == ["one", "two words"]
    (tmp_path / "p.jsonl").write_text('{"prompt": "three"}\n')
    assert read_prompts(tmp_path / "p.jsonl") == ["three"]
    (tmp_path / "p.jsonl").write_text('{"text": "three"}\n')
    with pytest.raises(DataError, match="line 1"):
        read_prompts(tmp_path / "p.jsonl")


def arguments(llm_folder, tmp_path, out, *more):
    (tmp_path / "prompts.txt").write_text("\n".join(PROMPTS) + "\n")
    return [
        "distill", str(llm_folder), "--prompts", str(tmp_path / "prompts.txt"), "--tokens", "1500", "--max-new-tokens", "8",
        "--batch", "32", "--precision", "float32", "--preset", "tiny", "--iterations", "3", "--out", str(tmp_path / out),
        "--format", "json", "--threads", "1", *more,
    ]  # fmt: skip


def test_distill_on_the_command_line(llm_folder, llm, tmp_path, capsys):
    assert main(arguments(llm_folder, tmp_path, "run")) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["num_states"] == 64 and report["vocabulary_size"] == len(llm.vocabulary) and report["finished"]
    samples = read_samples([tmp_path / "run" / "samples"], llm.vocabulary)
    assert report["samples_tokens"] == samples.num_tokens >= 1500
    (tmp_path / "test.jsonl").write_text(
        "".join(json.dumps({"ids": line.ids, "finished": line.finished}) + "\n" for line in samples.test_lines)
    )
    model = vlhmm.load(tmp_path / "run")
    assert math.isclose(report["hmm_nats"], math.log(model.perplexity(tmp_path / "test.jsonl").perplexity), rel_tol=1e-5)
    assert math.isclose(report["llm_nats"], -llm_log_probs(llm, samples.test_lines).mean(), rel_tol=1e-3)
    assert report["mixture_nats"] <= max(report["hmm_nats"], report["kn_nats"])
    assert json.loads((tmp_path / "run" / "distillation.json").read_text()) == {k: v for k, v in report.items() if k != "run"}
    # once more: nothing is drawn or trained again
    assert main(arguments(llm_folder, tmp_path, "run", "--quiet")) == 0
    again = json.loads(capsys.readouterr().out)
    assert again["hmm_nats"] == report["hmm_nats"]
    # and from the samples alone
    assert main(
        ["distill", "--samples", str(tmp_path / "run" / "samples"), "--tokenizer", str(llm_folder), "--preset", "tiny",
         "--iterations", "3", "--out", str(tmp_path / "other"), "--quiet", "--threads", "1"]
    ) == 0  # fmt: skip
    assert f"{report['hmm_nats']:6.3f}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere.gguf", "--prompts", "p"], "no such file: nowhere.gguf"),
        (["./nowhere", "--prompts", "p"], "no such folder: ./nowhere"),
        (["x"], "--prompts is missing"),
        ([], "LLM is missing"),
        (["--samples", "s.jsonl"], "add --tokenizer"),
        (["--samples", "s.jsonl", "--tokenizer", "nowhere.json"], "no such file: nowhere.json"),
        (["x", "--prompts", "p", "--preset", "distil"], "distill"),
    ],
)
def test_bad_input_has_one_line(arguments, message, tmp_path, capsys):
    assert main(["distill", *arguments, "--out", str(tmp_path / "run"), "--quiet"]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_a_killed_process_goes_on(llm_folder, tmp_path):
    """kill -9 while it draws, then the same command: the same shards as in one sitting."""
    command = [sys.executable, "-m", "vlhmm", *arguments(llm_folder, tmp_path, "killed")]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    samples = tmp_path / "killed" / "samples"
    while len(list(samples.glob("*.jsonl"))) < 2 and process.poll() is None:
        time.sleep(0.01)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    drawn = len(list(samples.glob("*.jsonl")))
    assert drawn >= 2
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    assert main(arguments(llm_folder, tmp_path, "whole", "--quiet")) == 0
    for path in (tmp_path / "whole" / "samples").glob("*.jsonl"):
        assert path.read_bytes() == (samples / path.name).read_bytes()
    first, second = (json.loads((tmp_path / name / "distillation.json").read_text()) for name in ("killed", "whole"))
    assert first["hmm_nats"] == second["hmm_nats"]
