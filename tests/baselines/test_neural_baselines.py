"""The feed-forward model and the LSTM against loops written from their formulas; training, stopping."""

import argparse
import json
import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from contract import check_language_model, next_word_distribution
from vlhmm.baselines import FeedForward, load_baseline, train_baseline
from vlhmm.baselines.kneser_ney import estimate, save
from vlhmm.baselines.lstm import LSTM
from vlhmm.baselines.softmax import cross_entropy, target_log_prob
from vlhmm.baselines.training import BaselineConfig, build_model, default_config
from vlhmm.cli import baseline as cli
from vlhmm.data.atomic_io import claimed
from vlhmm.data.corpora import Corpus
from vlhmm.data.manifest import accept_files
from vlhmm.data.text import encode
from vlhmm.data.vocabulary import Vocabulary
from vlhmm.errors import CheckpointError, ConfigError, QueryError, TrainingError
from vlhmm.evaluation.perplexity import evaluate
from vlhmm.products import fast_products

VOCABULARY = Vocabulary(("a", "b", "<unk>", "c", "<eos>", "d"))


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def models():
    return [
        FeedForward(VOCABULARY, generator(1), hidden_size=5, num_layers=1).double(),
        FeedForward(VOCABULARY, generator(2), hidden_size=4, num_layers=2, order=3).double(),
        LSTM(VOCABULARY, generator(3), hidden_size=5).double(),
        LSTM(VOCABULARY, generator(4), hidden_size=3, num_layers=1).double(),
    ]


# The output layer


@pytest.mark.parametrize("num_tokens", [1, 255, 256, 257, 700])
def test_cross_entropy_and_its_gradient_are_torchs(num_tokens):
    draw = generator(num_tokens)
    args = [torch.randn(n, 3, generator=draw, dtype=torch.float64) for n in (num_tokens, 7)]
    args.append(torch.randn(7, generator=draw, dtype=torch.float64))
    targets = torch.randint(7, (num_tokens,), generator=draw)
    ours, theirs = ([a.clone().requires_grad_() for a in args] for _ in range(2))
    loss = cross_entropy(*ours, targets)
    expected = torch.nn.functional.cross_entropy(theirs[0] @ theirs[1].t() + theirs[2], targets)
    torch.testing.assert_close(loss, expected, rtol=1e-12, atol=0)
    (3 * loss).backward()
    (3 * expected).backward()
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-10, atol=1e-14)
    log_prob = target_log_prob(*args, targets)
    torch.testing.assert_close(-log_prob.mean(), expected.detach(), rtol=1e-12, atol=0)
    assert not log_prob.requires_grad
    for a in ours:
        a.grad = None
    cross_entropy(*ours, targets).backward()  # by the short cut for a factor of one
    torch.testing.assert_close(3 * ours[1].grad, theirs[1].grad, rtol=1e-10, atol=1e-14)


# The models


def softmax(logits):
    p = np.exp(logits - logits.max())
    return p / p.sum()


def weights(model):
    return {name: tensor.detach().numpy() for name, tensor in model.named_parameters()}


def test_feed_forward_is_its_formula():
    for model in models()[:2]:
        w, context = weights(model), [VOCABULARY.eos] * (model.order - 1)
        for word in [0, 3, 3, VOCABULARY.eos, 5, 1]:
            hidden = np.concatenate([w["embedding"][x] for x in context[-(model.order - 1) :]])
            for n in range(len(model.layers)):
                hidden = np.maximum(w[f"layers.{n}.weight"] @ hidden + w[f"layers.{n}.bias"], 0)
            expected = softmax(w["embedding"] @ hidden + w["bias"])
            got = next_word_distribution(model, context[model.order - 1 :])
            np.testing.assert_allclose(got, expected, rtol=1e-12)
            context.append(word)


def test_lstm_is_its_formula():
    sigmoid = lambda x: 1 / (1 + np.exp(-x))  # noqa: E731
    for model in models()[2:]:
        w, depth, size = weights(model), len(model.layers), model.embedding.shape[1]
        output, cell = np.zeros((depth, size)), np.zeros((depth, size))
        words = [0, 3, 3, VOCABULARY.eos, 5]
        for t, word in enumerate([VOCABULARY.eos, *words]):
            below = w["embedding"][word]
            for n in range(depth):
                part = {k: w[f"layers.{n}.{k}_l0"] for k in ("weight_ih", "weight_hh", "bias_ih", "bias_hh")}
                gates = part["weight_ih"] @ below + part["bias_ih"] + part["weight_hh"] @ output[n] + part["bias_hh"]
                into, forget, candidate, out = np.split(gates, 4)
                cell[n] = sigmoid(forget) * cell[n] + sigmoid(into) * np.tanh(candidate)
                output[n] = below = sigmoid(out) * np.tanh(cell[n])
            expected = softmax(w["embedding"] @ below + w["bias"])
            np.testing.assert_allclose(next_word_distribution(model, words[:t]), expected, rtol=1e-12)


def test_language_model_contract():
    for seed, model in enumerate(models()):
        check_language_model(model, np.random.default_rng(seed), atol=1e-11)
        check_language_model(model.float(), np.random.default_rng(seed), atol=1e-5)


def test_loss_is_the_mean_score_and_reaches_every_weight():
    for model in models():
        tokens, lengths = torch.tensor([[0, 3, 4, 5], [1, 4, 0, 0]]), torch.tensor([4, 2])
        with torch.no_grad():
            _, carry = model.score_batch(tokens, lengths, model.start(2))
        loss, _ = model.loss(tokens, lengths, carry)
        log_prob, _ = model.score_batch(tokens, lengths, carry)
        assert loss.item() == pytest.approx(-log_prob.sum().item() / 6, rel=1e-12)
        loss.backward()
        assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in model.parameters())


def test_dropout_is_drawn_from_the_generator_alone():
    tokens, lengths = torch.tensor([[0, 3, 4, 5]]), torch.tensor([4])
    for model in models():
        loss = [model.loss(tokens, lengths, model.start(1), generator(s))[0].item() for s in (1, 1, 2)]
        plain = model.loss(tokens, lengths, model.start(1))[0].item()
        assert loss[0] == loss[1] != loss[2] and plain not in loss
    model.dropout = 0.3
    dropped = model.dropped(torch.ones(100_000), generator())
    assert (dropped == 0).float().mean().item() == pytest.approx(0.3, abs=0.01)
    assert dropped.mean().item() == pytest.approx(1.0, abs=0.01)


def test_one_mask_a_segment_drops_the_same_units_at_every_step():
    config = replace(small("lstm"), dropout=0.5, dropout_mask="segment")
    model = build_model("lstm", VOCABULARY, config)
    dropped = model.dropped(torch.ones(40, 6, 50), generator()) == 0
    assert (dropped == dropped[:, :1]).all() and dropped.float().mean().item() == pytest.approx(0.5, abs=0.05)
    assert not (dropped[0] == dropped[1]).all()  # a row has its own
    plain = build_model("lstm", VOCABULARY, replace(config, dropout_mask="token"))
    dropped = plain.dropped(torch.ones(40, 6, 50), generator()) == 0
    assert not (dropped == dropped[:, :1]).all()


def test_segments_are_the_lstms_alone():
    with pytest.raises(ConfigError, match="dropout_mask=segment is for the LSTM"):
        build_model("ff", VOCABULARY, replace(small("ff"), dropout_mask="segment"))


def test_sgd_steps_along_the_clipped_gradient():
    config = small(
        "lstm", optimizer="sgd", rate=2.0, clip=1e-3, dropout=0.0, epochs=1, num_streams=1, checks_per_epoch=1
    )
    config = replace(config, segment_length=len(corpus().train.tokens))  # one step per epoch
    before = build_model("lstm", VOCABULARY, config)
    after = train_baseline("lstm", corpus(), None, config)
    assert after.steps == 1
    pairs = zip(before.parameters(), after.model.parameters(), strict=True)
    assert sum((a - b).square().sum().item() for a, b in pairs) ** 0.5 == pytest.approx(2e-3, rel=1e-3)


def test_sizes_are_the_papers():
    """V h + V for the words, and 4 h^2 + h (FF) or 2 (8 h^2 + 8 h) (LSTM): 2.8M and 3.6M at V = 10,000."""
    vocabulary = Vocabulary(("<eos>", "<unk>", *(str(i) for i in range(9_998))))
    ff, lstm = (build_model(kind, vocabulary, default_config(kind)) for kind in ("ff", "lstm"))
    assert ff.num_parameters == 10_000 * 257 + 4 * 256**2 + 256
    assert lstm.num_parameters == 10_000 * 257 + 2 * (8 * 256**2 + 8 * 256)
    start = ff.embedding.detach()  # uniform in (-1/16, 1/16)
    assert start.abs().max() <= 1 / 16 and start.std().item() == pytest.approx(1 / 16 / 3**0.5, rel=0.01)


def test_foreign_ids_are_refused():
    for model in models():
        for word in (6, -1):
            with pytest.raises(QueryError, match="expected 0 to 5"):
                model.score_batch(torch.tensor([[0, word]]), torch.tensor([2]), model.start(1))


# Training


def corpus(num_lines=60, seed=0):
    """Lines in which the next word nearly follows from the last two."""
    rng = np.random.default_rng(seed)

    def lines(n):
        for _ in range(n):
            words = [str(rng.choice(["a", "b"])), "c"]
            while len(words) < 12 and rng.random() > 0.1:
                words.append("abcd"["abcd".index(words[-1]) * "abcd".index(words[-2]) % 4])
            yield words

    train, valid, test = (encode(lines(n), VOCABULARY) for n in (num_lines, 10, 10))
    return Corpus("made up", VOCABULARY, train, valid, test)


def small(kind, **changes):
    fast = dict(hidden_size=8, num_streams=4, segment_length=8, epochs=3, rate=1e-2, seed=5)
    return replace(default_config(kind), **(fast | changes))


def assert_same_weights(a, b):
    for (name, x), (_, y) in zip(a.state_dict().items(), b.state_dict().items(), strict=True):
        assert torch.equal(x, y), name


def journal(folder):
    return [json.loads(line) for line in (folder / "journal.jsonl").read_text().splitlines()]


both = pytest.mark.parametrize("kind", ["ff", "lstm"])


@both
@pytest.mark.parametrize("context", ["carry", "reset"])
def test_training_learns_and_keeps_the_best(tmp_path, kind, context):
    texts = corpus()
    untrained = evaluate(build_model(kind, VOCABULARY, small(kind)), texts.valid, rule=context).perplexity
    result = train_baseline(kind, texts, tmp_path, small(kind, epochs=12, context=context, dropout=0.1))
    assert result.finished and result.epochs == 12
    assert result.valid_perplexity < 0.6 * untrained
    with fast_products():  # as in training: another library rounds differently
        assert evaluate(result.model, texts.valid, rule=context).perplexity == result.valid_perplexity
    checks = [event for event in journal(tmp_path) if event["event"] == "check"]
    assert len(checks) == 48 and checks[-1]["epoch"] == 12
    assert min(check["valid_perplexity"] for check in checks) == result.valid_perplexity
    loaded = load_baseline(tmp_path)
    assert_same_weights(loaded, result.model)
    assert loaded.vocabulary == VOCABULARY
    assert {p.name for p in tmp_path.iterdir()} == {
        "config.json", "vocabulary.txt", "model.safetensors", "journal.jsonl", "checkpoint", "manifest.json"
    }  # fmt: skip


@both
def test_a_seed_makes_one_model(kind):
    a, b, c = (train_baseline(kind, corpus(), None, small(kind, seed=s)).model for s in (5, 5, 6))
    assert_same_weights(a, b)
    assert not torch.equal(a.embedding, c.embedding)


class Stop(Exception):
    """The machine goes down."""


def at_check(number, action):
    """A progress callback that acts at the `number`th check."""
    seen = []

    def progress(event):
        seen.extend([event] if event["event"] == "check" else [])
        if event["event"] == "check" and len(seen) == number:
            action()

    return progress


def die():
    raise Stop


@both
@pytest.mark.parametrize("context", ["carry", "reset"])
@pytest.mark.parametrize("way", ["killed", "interrupted", "time limit", "more epochs"])
def test_training_goes_on_as_if_it_had_not_stopped(tmp_path, kind, context, way):
    optimizer = {"carry": "adamw", "reset": "sgd"}[context]
    texts, config = corpus(), small(kind, context=context, patience=2, optimizer=optimizer)
    whole = train_baseline(kind, texts, tmp_path / "whole", config)
    folder = tmp_path / "stopped"
    if way == "killed":  # after the weights of a check were kept, before its checkpoint was written
        for check in (1, 6):
            with pytest.raises(Stop):
                train_baseline(kind, texts, folder, config, progress=at_check(check, die))
    elif way == "interrupted":
        asked: list[bool] = []
        with pytest.raises(KeyboardInterrupt):
            ask = at_check(6, lambda: asked.append(True))
            train_baseline(kind, texts, folder, config, progress=ask, should_stop=lambda: bool(asked))
    elif way == "time limit":
        for n in range(1, 4):
            result = train_baseline(kind, texts, folder, config, time_limit=0)
            assert not result.finished and result.steps == n
            assert load_baseline(folder).vocabulary == VOCABULARY  # there is a model, checked or not
    else:
        train_baseline(kind, texts, folder, replace(config, epochs=1))
    result = train_baseline(kind, texts, folder, config)
    assert result.finished and result.steps == whole.steps
    assert result.valid_perplexity == whole.valid_perplexity
    assert_same_weights(result.model, whole.model)
    checks = [
        [e["valid_perplexity"] for e in journal(f) if e["event"] == "check"] for f in (folder, tmp_path / "whole")
    ]
    assert checks[0] == checks[1]
    again = train_baseline(kind, texts, folder, config)  # done already
    assert again.finished and again.steps == whole.steps
    assert_same_weights(again.model, whole.model)


def test_the_rate_is_divided_on_a_plateau_and_its_end_is_the_end(tmp_path):
    config = small("ff", patience=1, decay=10.0, epochs=200, min_rate=1e-4)
    result = train_baseline("ff", corpus(), tmp_path, config)
    checks = [event for event in journal(tmp_path) if event["event"] == "check"]
    best = min(check["valid_perplexity"] for check in checks)
    assert result.valid_perplexity == best < checks[-1]["valid_perplexity"]  # the best is kept, not the last
    with fast_products():
        assert evaluate(result.model, corpus().valid, rule="carry").perplexity == best
    rates = [check["rate"] for check in checks]
    assert rates[0] == 1e-2 and rates[-1] == pytest.approx(1e-4) and rates == sorted(rates, reverse=True)
    assert result.finished and result.epochs < 200


def test_a_folder_serves_one_run(tmp_path):
    config = small("ff", epochs=1)
    train_baseline("ff", corpus(), tmp_path, config)
    with pytest.raises(ConfigError, match="trained with rate=0.01, got 0.5"):
        train_baseline("ff", corpus(), tmp_path, replace(config, rate=0.5))
    about = json.loads((tmp_path / "config.json").read_text())
    del about["settings"]["optimizer"]  # a run of a version that had no such setting is the default's
    (tmp_path / "config.json").write_text(json.dumps(about))
    accept_files(tmp_path)
    assert train_baseline("ff", corpus(), tmp_path, config).finished
    with pytest.raises(ConfigError, match="kind ff, got lstm"):
        train_baseline("lstm", corpus(), tmp_path, config)
    with pytest.raises(ConfigError, match="kind ff, got kn"):
        save(estimate(corpus().train, VOCABULARY), tmp_path)
    with pytest.raises(CheckpointError, match="another text"):
        train_baseline("ff", corpus(seed=9), tmp_path, replace(config, epochs=2))
    other = corpus()._replace(vocabulary=Vocabulary((*VOCABULARY.words, "e")))
    with pytest.raises(ConfigError, match="another vocabulary"):
        train_baseline("ff", other, tmp_path, config)
    (tmp_path / "config.json").write_text('{"format_version": 1, "model": {}}')
    accept_files(tmp_path)
    with pytest.raises(CheckpointError, match="kind None, expected a baseline's"):
        train_baseline("ff", corpus(), tmp_path, config)


def test_damaged_folders_are_refused(tmp_path):
    config = small("ff", epochs=1)
    train_baseline("ff", corpus(), tmp_path, config)
    for file, match in (("checkpoint/state.safetensors", "damaged"), ("model.safetensors", "damaged")):
        whole = (tmp_path / file).read_bytes()
        (tmp_path / file).write_bytes(whole[:-100])
        with pytest.raises(CheckpointError, match=match):
            train_baseline("ff", corpus(), tmp_path, config)
        (tmp_path / file).write_bytes(whole)
    Vocabulary(("<eos>", "<unk>")).write(tmp_path / "vocabulary.txt")
    (tmp_path / "manifest.json").unlink()  # which would name the file first
    with pytest.raises(CheckpointError, match="does not fit config.json and vocabulary.txt"):
        load_baseline(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match="no model.safetensors yet"):
        load_baseline(tmp_path)


def test_a_model_knows_the_rule_it_was_trained_with(tmp_path):
    for context in ("carry", "reset"):
        train_baseline("ff", corpus(), tmp_path / context, small("ff", epochs=1, context=context))
        assert load_baseline(tmp_path / context).rule == context


def test_a_journal_that_lost_its_end_is_not_padded(tmp_path):
    config, journal = small("ff", epochs=1, schedule="plateau"), tmp_path / "journal.jsonl"
    train_baseline("ff", corpus(), tmp_path, config)
    kept = journal.read_text().splitlines(keepends=True)[0]
    journal.write_text(kept)
    train_baseline("ff", corpus(), tmp_path, replace(config, epochs=2))
    assert journal.read_text().startswith(kept) and "\0" not in journal.read_text()


def test_a_folder_that_another_process_trains_in_is_refused(tmp_path):
    with claimed(tmp_path) as ours, pytest.raises(CheckpointError, match="another process is training in"):
        assert ours
        train_baseline("ff", corpus(), tmp_path, small("ff", epochs=1))


def test_a_loss_that_is_not_finite_stops_training(tmp_path, monkeypatch):
    train_baseline("ff", corpus(), tmp_path, small("ff", epochs=1))
    monkeypatch.setattr(FeedForward, "loss", lambda self, *args: (self.bias.sum() * math.nan, args[2]))
    with pytest.raises(TrainingError, match="not finite at epoch 2, batch 1 of"):
        train_baseline("ff", corpus(), tmp_path, small("ff", epochs=2))
    assert all(p.isfinite().all() for p in load_baseline(tmp_path).parameters())


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"hidden_size": 0}, "hidden_size is 0, expected at least 1"),
        ({"rate": 0.0}, "rate is 0.0, expected more than 0"),
        ({"dropout": 1.0}, "dropout is 1.0"),
        ({"order": 1}, "order is 1"),
        ({"decay": 1.0}, "decay is 1.0"),
        ({"context": "both"}, "context is 'both', expected reset or carry"),
        ({"optimizer": "adam"}, "optimizer is 'adam', expected adamw or sgd"),
        ({"dropout_mask": "row"}, "dropout_mask is 'row', expected token or segment"),
    ],
)
def test_settings_that_make_no_sense_are_refused(changes, message):
    with pytest.raises(ConfigError, match=message):
        BaselineConfig(**changes)


def test_unknown_kinds_are_refused():
    with pytest.raises(ConfigError, match="unknown neural baseline 'rnn'"):
        default_config("rnn")


# The command line


def run(*words):
    parser = argparse.ArgumentParser()
    cli.add_options(parser)
    return cli.run(parser.parse_args([*map(str, words)]))


@pytest.fixture
def files(tmp_path):
    for name, text in (("train", "a b c\nb c\n\na b\n" * 20), ("valid", "a b\nb zebra\n"), ("test", "a\n")):
        (tmp_path / name).write_text(text)
    return tmp_path


def test_cli_kneser_ney(files, capsys):
    texts = (files / "train", "--valid", files / "valid", "--test", files / "test")
    assert run("kn", *texts, "--order", 3, "--out", files / "run", "--arpa", files / "m.arpa") == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("kn  ") and lines[0].endswith("vocabulary 5")
    assert [line.split()[:2] for line in lines[2:]] == [
        ["valid", "reset"], ["valid", "carry"], ["test", "reset"], ["test", "carry"]
    ]  # fmt: skip
    assert run("kn", *texts, "--order", 3, "--format", "json") == 0
    report = json.loads(capsys.readouterr().out)
    valid = report["results"]["valid"]["reset"]
    assert (valid["tokens"], valid["words"], valid["oov"], valid["sentences"]) == (6, 4, 1, 2)
    assert report["kind"] == "kn" and report["settings"]["order"] == 3
    assert f"{valid['perplexity']:.2f}" in lines[2]
    assert load_baseline(files / "run").order == 3
    assert (files / "m.arpa").read_text().startswith("\\data\\")


@both
def test_cli_neural(files, capsys, kind):
    command = (kind, files / "train", "--valid", files / "valid", "--out", files / "run", "--format", "json")
    assert run(*command, "--epochs", 2, "--time-limit", "0s") == 0
    streams = capsys.readouterr()
    assert json.loads(streams.out)["finished"] is False and "run the same command again" in streams.err
    assert run(*command, "--epochs", 2) == 0
    streams = capsys.readouterr()
    report = json.loads(streams.out)
    assert report["finished"] and report["epochs"] == 2 and set(report["results"]) == {"valid"}
    assert set(report["results"]["valid"]) == {"reset", "carry"}
    assert "valid" in streams.err and "tok/s" in streams.err
    assert run(*command[:4], "--epochs", 1, "--quiet") == 0  # from the beginning, with nothing kept
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    "words, message",
    [
        (("kn", "train"), "--valid is missing"),
        (("kn", "ptb", "--valid", "valid"), "ptb has its own texts; drop --valid"),
        (("kn", "train", "--valid", "valid", "--epochs", "3"), "--epochs does not apply to baseline kn"),
        (("lstm", "train", "--valid", "valid", "--order", "3"), "--order does not apply to baseline lstm"),
        (("ff", "train", "--valid", "valid", "--arpa", "x"), "--arpa does not apply to baseline ff"),
    ],
)
def test_cli_refusals(files, monkeypatch, words, message):
    monkeypatch.chdir(files)
    with pytest.raises(ConfigError, match=message):
        run(*words)


def test_durations():
    assert [cli.duration(t) for t in ("90m", "1h30m", "45s", "300", "2h")] == [5400, 5400, 45, 300, 7200]
    for text in ("", "soon", "5d", "-1s"):
        with pytest.raises(argparse.ArgumentTypeError, match="no duration"):
            cli.duration(text)


# Samples


@pytest.mark.parametrize("model", models()[::2], ids=["ff", "lstm"])
def test_samples_follow_the_model(model):
    """Whole lines; and the first two words of streams against the model's own probabilities, chi-square."""
    text = model.sample(12_000, generator(7), num_streams=400)
    assert text.tokens[-1] == VOCABULARY.eos and 6_000 < text.num_tokens == text.offsets[-1] <= 12_000
    assert (np.diff(text.offsets) >= 1).all() and text.num_unk == (text.tokens == VOCABULARY.unk).sum()
    drawn = draws(model, 2, 30_000)
    for context in ([], [0], [3]):
        chosen = drawn[(drawn[:, : len(context)] == np.array(context, dtype=int)).all(1)]
        observed = np.bincount(chosen[:, len(context)], minlength=len(VOCABULARY))
        expected = next_word_distribution(model, context) * observed.sum()
        assert observed.sum() > 300
        statistic = ((observed - expected) ** 2 / expected).sum()
        assert statistic < 25  # five degrees of freedom: exceeded once in 7,000


def draws(model, length, count):
    """(count, length) first words of streams, before they are cut to whole lines."""
    import vlhmm.baselines.neural as neural

    seen = {}
    keep = neural.whole_lines
    neural.whole_lines = lambda streams, vocabulary: seen.update(streams=streams.copy()) or keep(streams, vocabulary)
    try:
        model.sample(count * length, generator(9), num_streams=count)
    finally:
        neural.whole_lines = keep
    return seen["streams"]


def test_cosine_ends_at_zero_and_never_stops_early(tmp_path):
    config = small("lstm", schedule="cosine", epochs=3, patience=1)
    result = train_baseline("lstm", corpus(), tmp_path, config)
    rates = [event["rate"] for event in journal(tmp_path) if event["event"] == "check"]
    assert result.finished and result.epochs == 3
    assert rates == sorted(rates, reverse=True) and 0 < rates[-1] < 0.1 * config.rate
    with pytest.raises(ConfigError, match="was trained with epochs=3, got 4"):
        train_baseline("lstm", corpus(), tmp_path, replace(config, epochs=4))


def test_samples_by_command_can_be_trained_on(tmp_path, capsys):
    lines = [" ".join("abcd"[(i + j) % 4] for j in range(3 + i % 5)) for i in range(60)]
    train, valid = tmp_path / "train.txt", tmp_path / "valid.txt"
    train.write_text("\n".join(lines) + "\n")
    valid.write_text("\n".join(lines[:9]) + "\n")
    samples = tmp_path / "teacher.txt.gz"
    command = ["baseline", "lstm", str(train), "--valid", str(valid), "--epochs", "1", "--out", str(tmp_path / "run")]
    extra = ["--set", "hidden_size=8", "--set", "schedule=cosine", "--samples", str(samples), "--sample-tokens", "3k"]
    from vlhmm.cli.main import main
    from vlhmm.data.text import read_lines

    assert main([*command, *extra, "--quiet"]) == 0
    drawn = list(read_lines(samples))
    assert 1000 < sum(len(line) + 1 for line in drawn) <= 3072
    assert {word for line in drawn for word in line} <= {"a", "b", "c", "d", "<unk>"}
    assert main(["baseline", "kn", str(train), "--valid", str(valid), "--samples", "x"]) == 2
    assert "does not apply to baseline kn" in capsys.readouterr().err
