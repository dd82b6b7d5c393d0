"""Training, clustering and evaluation over prepared texts: as in memory, a share at a time."""

import json
import random

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from vlhmm.cli.main import main
from vlhmm.config import override
from vlhmm.data.corpora import load_texts
from vlhmm.data.prepared import PreparedText, prepare
from vlhmm.data.text import Text
from vlhmm.errors import ConfigError
from vlhmm.evaluation.perplexity import evaluate
from vlhmm.training.plan import make_plan
from vlhmm.training.presets import preset
from vlhmm.training.shares import SharePlan
from vlhmm.training.trainer import train


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A training text in memory and prepared, in many shards; a validation text."""
    path, draw = tmp_path_factory.mktemp("shares"), random.Random(5)
    words = [f"w{i}" for i in range(40)]
    for name, count in (("train", 900), ("valid", 80)):
        lines = (" ".join(draw.choices(words[: 10 + i % 31], k=i % 13)) for i in range(count))
        (path / f"{name}.txt").write_text("".join(f"{line}\n" for line in lines))
    prepare([path / "train.txt"], path / "prepared", shard_tokens=1500)
    return path


def tiny(*changes: str):
    return override(
        preset("tiny"),
        ["model.num_states=32", "model.num_blocks=4", "training.epochs=3", "training.calibrate=false", *changes],
    )


def no_whole_text(monkeypatch):
    """Fail where a prepared text is brought to memory as a whole."""

    def refuse(self):
        raise AssertionError("the whole text was asked for")

    for name in ("tokens", "offsets", "literal_unk"):
        monkeypatch.setattr(PreparedText, name, property(refuse))


def test_every_epoch_reads_every_line_once(folder):
    text = PreparedText(folder / "prepared")
    plan = SharePlan(text, share_tokens=1200, batch_tokens=256, seed=3)
    everything = np.sort(text.tokens)
    orders = []
    for epoch in range(3):
        shares = plan(epoch)
        assert len(shares) == plan.num_shares == -(-text.num_tokens // 1200)
        read = [
            np.concatenate([b.tokens[i, :n].numpy() for b in share for i, n in enumerate(b.lengths)])
            for share in shares
        ]
        np.testing.assert_array_equal(np.sort(np.concatenate(read)), everything)
        assert max(map(len, read)) < 2 * 1200
        orders.append(shares.shares)
        assert plan(epoch).shares == shares.shares  # a function of the epoch
    assert orders[0] != orders[1] != orders[2]


def test_one_share_is_the_training_of_a_text_in_memory_to_the_bit(folder, tmp_path, monkeypatch):
    changes = ["training.state_dropout=0.5"]
    in_memory = load_texts(folder / "train.txt", folder / "valid.txt")
    train(in_memory, tiny(*changes), tmp_path / "memory")
    no_whole_text(monkeypatch)
    prepared = load_texts(folder / "prepared", folder / "valid.txt")
    train(prepared, tiny(*changes, "training.em_tokens=1000000"), tmp_path / "prepared")
    one, other = (load_file(tmp_path / name / "model.safetensors") for name in ("memory", "prepared"))
    assert one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)
    assert (tmp_path / "memory/blocks.tsv").read_bytes() == (tmp_path / "prepared/blocks.tsv").read_bytes()


@pytest.mark.parametrize("method", ["em", "gradient"])
def test_a_stopped_run_goes_on_to_the_same_bits(folder, tmp_path, method):
    corpus = load_texts(folder / "prepared", folder / "valid.txt")
    config = tiny("training.em_tokens=1000", f"training.method={method}", "training.batch_tokens=512")
    whole = train(corpus, config, tmp_path / "whole")
    assert whole.total_steps > 6
    count = iter(range(100))
    stopped = train(corpus, config, tmp_path / "stopped", should_stop=lambda: next(count) >= 7)
    assert not stopped.finished
    assert train(corpus, config, tmp_path / "stopped").best_valid == whole.best_valid
    one, other = (load_file(tmp_path / name / "model.safetensors") for name in ("whole", "stopped"))
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_an_extra_text_may_be_prepared(folder, tmp_path):
    corpus = load_texts(folder / "train.txt", folder / "valid.txt")
    extra = PreparedText(folder / "prepared")
    plan = make_plan(corpus.train, tiny("training.extra_tokens=1000").training, corpus.vocabulary.eos, extra)
    read = []
    for epoch in range(5):
        (batches,) = plan(epoch)
        tokens = sum(int(batch.lengths.sum()) for batch in batches) - corpus.train.num_tokens
        assert 500 < tokens < 2000
        read.append(tokens)
    assert len(SharePlan(extra, 1000, 512, seed=0).pieces) > 10
    train(corpus._replace(extra=extra), tiny("training.extra_tokens=1000"), tmp_path / "run")


@pytest.mark.parametrize(
    "changes, message",
    [
        ((), "set the tokens per E-step"),
        (("training.em_tokens=500", "training.batch=streams"), "training.batch=sentences"),
    ],
)
def test_what_needs_the_whole_text_is_refused(folder, tmp_path, changes, message):
    corpus = load_texts(folder / "prepared", folder / "valid.txt")
    with pytest.raises(ConfigError, match=message):
        train(corpus, tiny(*changes), tmp_path / "run")


def test_a_run_is_not_continued_with_another_prepared_text(folder, tmp_path):
    config = tiny("training.em_tokens=1000")
    train(load_texts(folder / "prepared", folder / "valid.txt"), config, tmp_path / "run")
    lines = (folder / "train.txt").read_text().splitlines(keepends=True)
    (tmp_path / "other.txt").write_text("".join(reversed(lines)))
    prepare([tmp_path / "other.txt"], tmp_path / "other")
    with pytest.raises(ConfigError, match="another training or validation text"):
        train(load_texts(tmp_path / "other", folder / "valid.txt"), config, tmp_path / "run")


class Unigram:
    """A model of word frequencies with a state that counts tokens, so that the order of streams matters."""

    rule = "reset"

    def __init__(self, vocabulary):
        self.vocabulary = vocabulary

    def start(self, num_streams):
        return torch.zeros(num_streams, dtype=torch.float64)

    def score_batch(self, tokens, lengths, carry):
        place = carry[:, None] + torch.arange(tokens.shape[1])
        return -torch.log(2.0 + tokens + place % 17), carry + lengths


def assert_close(report, other):
    assert report.keys() == other.keys()
    for name, value in report.items():
        assert value == (pytest.approx(other[name], rel=1e-9) if isinstance(value, float) else other[name]), name


@pytest.mark.parametrize("rule", ["reset", "carry"])
@pytest.mark.parametrize("streams", [1, 7])
def test_evaluation_of_a_prepared_text_is_that_of_the_text(folder, tmp_path, rule, streams, monkeypatch):
    (tmp_path / "t.txt").write_text((folder / "train.txt").read_text() + "w1 <unk> never\n" * 3)
    vocabulary = PreparedText(folder / "prepared").vocabulary
    prepared = prepare([tmp_path / "t.txt"], tmp_path / "out", vocabulary, shard_tokens=1000)
    text = Text(
        prepared.tokens, prepared.offsets, prepared.num_oov, prepared.num_unk, prepared.num_bytes, prepared.literal_unk
    )
    monkeypatch.setattr("vlhmm.evaluation.perplexity.PREPARED_TOKENS", 700)
    expected = evaluate(Unigram(vocabulary), text, rule, streams, batch_tokens=300).to_dict()
    no_whole_text(monkeypatch)
    found = evaluate(Unigram(vocabulary), prepared, rule, streams, batch_tokens=300).to_dict()
    assert_close(found, expected)
    assert expected["oov"] == 3 and expected["perplexity_without_oov"] != expected["perplexity"]


def test_the_command_line(folder, tmp_path, capsys, monkeypatch):
    no_whole_text(monkeypatch)
    assert (
        main(["prepare", str(folder / "train.txt"), "--out", str(tmp_path / "p"), "--format", "json", "--quiet"]) == 0
    )
    about = json.loads(capsys.readouterr().out)
    assert about["shards"] == 1 and about["vocabulary_size"] == 42
    run = str(tmp_path / "run")
    small = ["--preset", "tiny", "--states", "32", "--blocks", "4", "--epochs", "1", "--quiet"]
    arguments = ["train", str(tmp_path / "p"), "--valid", str(folder / "valid.txt"), *small, "--out", run]
    assert main(arguments) == 2 and "training.em_tokens" in capsys.readouterr().err
    arguments = [*arguments[:-1], str(tmp_path / "run"), "--set", "training.em_tokens=2000"]
    assert main(arguments) == 0
    assert main(["evaluate", run, str(tmp_path / "p"), str(folder / "train.txt"), "--format", "json", "--quiet"]) == 0
    reports = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert_close(*({name: value for name, value in report.items() if name != "file"} for report in reports))
    for source in ("p", "train.txt"):
        where = tmp_path / "p" if source == "p" else folder / source
        assert (
            main(["cluster", str(where), "--blocks", "6", "--out", str(tmp_path / f"{source}.paths"), "--quiet"]) == 0
        )
    assert (tmp_path / "p.paths").read_bytes() == (tmp_path / "train.txt.paths").read_bytes()
    assert main(["prepare", str(folder / "train.txt"), "--out", str(tmp_path / "p"), "--quiet"]) == 2
    assert "holds a prepared text already" in capsys.readouterr().err
