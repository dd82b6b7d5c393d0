"""Training: it learns, it goes on after any kill to the same bits, and it refuses what does not fit."""

import itertools
import json
import math
import os
import random
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch.testing import assert_close

import vlhmm
from models import small_hmm
from toy import GRADIENT, tiny
from vlhmm.config import override
from vlhmm.data.atomic_io import claimed, replace_atomically
from vlhmm.data.corpora import Corpus
from vlhmm.data.text import encode
from vlhmm.data.vocabulary import EOS, UNK, Vocabulary
from vlhmm.errors import CheckpointError, ConfigError, TrainingError
from vlhmm.evaluation.perplexity import evaluate, perplexity
from vlhmm.training import e_step
from vlhmm.training import trainer as trainer_module
from vlhmm.training.config import TrainingConfig
from vlhmm.training.e_step import expectation, expected_log_likelihood, prepare
from vlhmm.training.make_blocks import make_blocks
from vlhmm.training.migration import RENAMED
from vlhmm.training.model import load_hmm
from vlhmm.training.plan import make_plan
from vlhmm.training.presets import PRESETS, preset
from vlhmm.training.schedules import Plateau, rate_at
from vlhmm.training.trainer import Trainer, train


def final_weights(path) -> dict[str, torch.Tensor]:
    return load_file(path / "model.safetensors")


def assert_same_bits(a, b):
    assert a.keys() == b.keys()
    for name in a:
        assert torch.equal(a[name], b[name]), name


@pytest.mark.parametrize(
    "changes",
    [
        [],
        GRADIENT,
        [*GRADIENT, "training.context=carry"],
        [*GRADIENT, "training.context=paper"],
        ["model.transition=softmax", "model.source_block_init=0"],
        [*GRADIENT, "model.transition=softmax", "model.embedding=independent"],
        ["model.parameterization=scalar", "training.rate=0.1", "training.weight_decay=0"],
        ["training.optimizer=closed-form", "model.parameterization=scalar", "training.state_dropout=0", "training.smoothing=0.5"],
        ["training.optimizer=closed-form", "model.parameterization=scalar", "training.state_dropout=0", "training.smoothing=0.5",
         "model.transition=softmax"],
        ["model.constraint=uniform", "model.states_per_word=8", "model.transition=softmax", "model.embedding=independent",
         "training.epochs=20", "model.source_block_init=0"],
        ["training.em_tokens=700", "training.epochs=4", "training.average=0.9", "training.embedding_dropout=0.1"],
        ["training.batch=streams", "training.context=carry", "training.num_streams=8", "training.segment_length=100"],
        ["training.batch=streams", "training.context=paper", "training.num_streams=8", "training.segment_length=32"],
        ["model.allocation=tokens", "model.num_states=64"],
    ],
    ids=["em", "gradient", "gradient-carry", "gradient-paper", "em-softmax", "gradient-softmax", "em-scalar", "closed-form",
         "closed-form-softmax", "uniform", "em-share", "em-carry", "em-paper", "uneven"],
)  # fmt: skip
def test_every_way_of_training_beats_the_unigram(toy, tmp_path, changes):
    result = train(toy, tiny(*changes), tmp_path / "run")
    counts = np.bincount(toy.train.tokens, minlength=len(toy.vocabulary)) + 0.1
    log_unigram = np.log(counts / counts.sum())
    unigram = perplexity(log_unigram[toy.valid.tokens].sum(), toy.valid.num_tokens)
    assert result.finished
    assert result.best_valid < 0.6 * unigram


def test_validation_reads_as_many_streams_as_every_evaluation(toy, tmp_path):
    streams = ["training.batch=streams", "training.num_streams=8", "training.segment_length=100"]
    result = train(toy, tiny(*streams, "training.context=carry", "training.calibrate=false"), tmp_path / "run")
    report = evaluate(vlhmm.load(tmp_path / "run"), toy.valid, "carry")
    assert report.streams == 16 and result.best_valid == pytest.approx(report.perplexity, rel=1e-5)  # float32 on disk


def test_the_papers_rule_learns_what_follows_a_line(toy, tmp_path):
    """Trained by reset the transitions out of <eos> are never seen; by the paper's rule they are, at segment cuts."""
    streams = [
        "training.batch=streams",
        "training.num_streams=8",
        "training.segment_length=16",
        "training.calibrate=false",
    ]
    valid = {}
    for rule in ("reset", "paper"):
        train(toy, tiny(*streams, f"training.context={rule}"), tmp_path / rule)
        model = vlhmm.load(tmp_path / rule)
        assert model.rule == ("carry" if rule == "paper" else "reset")
        valid[rule] = {each: evaluate(model, toy.valid, each).perplexity for each in ("reset", "carry")}
    assert valid["paper"]["carry"] < 0.9 * valid["reset"]["carry"]
    assert valid["paper"]["reset"] < 1.05 * valid["reset"]["reset"]


def test_the_papers_rule_shuffles_the_lines_of_every_epoch(toy):
    streams = ["training.num_streams=4", "training.segment_length=16"]
    settings = tiny("training.batch=streams", "training.context=paper", *streams).training
    plan = make_plan(toy.train, settings, toy.vocabulary.eos)
    first, again, second = ([batch.tokens.tolist() for step in plan(n) for batch in step] for n in (0, 0, 1))
    assert first == again != second


CLOSED_FORM = ["training.optimizer=closed-form", "model.parameterization=scalar", "training.state_dropout=0"]


@pytest.mark.parametrize("transition", ["block-factored", "softmax"])
def test_closed_form_em_never_lowers_the_likelihood(toy, tmp_path, transition):
    slots = ["model.source_block_init=0"] if transition == "softmax" else []
    changes = [
        *CLOSED_FORM,
        *slots,
        f"model.transition={transition}",
        "training.epochs=12",
        "training.checks_per_epoch=1",
    ]
    train(toy, tiny(*changes), tmp_path / "run")
    lines = map(json.loads, (tmp_path / "run" / "journal.jsonl").read_text().splitlines())
    perplexities = [line["train"] for line in lines if line["event"] == "check"]
    assert len(perplexities) == 12 and perplexities[-1] < 0.8 * perplexities[0]
    assert all(after <= before * (1 + 1e-5) for before, after in itertools.pairwise(perplexities))


@pytest.mark.parametrize("transition", ["block-factored", "softmax"])
def test_smoothing_leaves_no_pair_of_blocks_impossible(toy, tmp_path, transition):
    slots = ["model.source_block_init=0"] if transition == "softmax" else []
    least = []
    for smoothing in (0, 1):
        changes = [*CLOSED_FORM, *slots, f"model.transition={transition}", f"training.smoothing={smoothing}"]
        train(toy, tiny(*changes), tmp_path / f"run{smoothing}")
        weights = final_weights(tmp_path / f"run{smoothing}")
        if transition == "softmax":
            into_block = weights["transition_logits"].softmax(-1).view(32, 4, 8).sum(-1)
        else:
            into_block = weights["block_logits"].softmax(-1)
        least.append(into_block.min().item())
    assert least[0] < 1e-9 and least[1] > 1e-7  # some pair of blocks is never seen


def test_resuming_at_any_step_gives_the_same_bits(toy, tmp_path):
    for name, changes in {
        "em": [],
        "gradient": [*GRADIENT, "training.schedule=plateau", "training.average=0.9"],
        "paper": [*GRADIENT, "training.context=paper"],  # carried states and an order of lines for every epoch
    }.items():
        config = tiny(*changes)
        whole = train(toy, config, tmp_path / name)
        steps = 0

        def stop_now() -> bool:
            nonlocal steps
            steps += 1
            return steps % 4 == 0

        for _ in range(100):
            parts = train(toy, config, tmp_path / f"{name}-parts", should_stop=stop_now)
            if parts.step == parts.total_steps:
                break
        assert train(toy, config, tmp_path / f"{name}-parts").finished  # what is left may be to calibrate
        assert_same_bits(final_weights(tmp_path / name), final_weights(tmp_path / f"{name}-parts"))
        finals = [
            load_file(next((tmp_path / run / "checkpoint").glob("step-*.safetensors"))) for run in (name, f"{name}-parts")
        ]
        assert_same_bits(*finals)
        events = [
            [
                {k: v for k, v in json.loads(line).items() if k not in ("seconds", "tokens_per_second")}
                for line in path.read_text().splitlines()
            ]
            for path in (tmp_path / name / "journal.jsonl", tmp_path / f"{name}-parts" / "journal.jsonl")
        ]
        assert events[0] == events[1] and whole.finished


def test_kill_at_random_moments_then_the_same_command(toy, tmp_path):
    """kill -9 at five random moments of a run; rerun each time; the final weights are those of an undisturbed run."""
    for name in ("train", "valid"):
        text = getattr(toy, name)
        lines = [" ".join(toy.vocabulary.decode(text.sentence(i)[:-1])) for i in range(text.num_sentences)]
        (tmp_path / f"{name}.txt").write_text("\n".join(lines) + "\n")

    def command(out: str) -> list[str]:
        return [
            sys.executable, "-m", "vlhmm", "train", str(tmp_path / "train.txt"), "--valid", str(tmp_path / "valid.txt"),
            "--preset", "tiny", "--states", "32", "--blocks", "4", "--epochs", "500", "--out", str(tmp_path / out),
            "--set", "training.checkpoint_seconds=0.01", "--quiet", "--threads", "1",
        ]  # fmt: skip

    subprocess.run(command("whole"), check=True, capture_output=True)
    draw, kills = random.Random(0), 0
    while kills < 5:
        process = subprocess.Popen(command("killed"), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        waited = time.monotonic()
        state = tmp_path / "killed" / "checkpoint" / "state.json"
        before = state.read_bytes() if state.exists() else b""
        while process.poll() is None and time.monotonic() - waited < 60:
            if state.exists() and state.read_bytes() != before:  # it has come further than the last time
                time.sleep(draw.random() * 0.3)
                break
            time.sleep(0.005)
        if process.poll() is not None:
            break  # finished before it could be killed
        process.send_signal(signal.SIGKILL)
        process.wait()
        kills += 1
    subprocess.run(command("killed"), check=True, capture_output=True)
    assert kills == 5
    assert_same_bits(final_weights(tmp_path / "whole"), final_weights(tmp_path / "killed"))


def sample_text(start, matrix, emission, count, vocabulary, rng) -> list[list[str]]:
    """Sentences drawn from an HMM given by dense tables; word 0 is <eos>."""
    lines = []
    for _ in range(count):
        state, line = rng.choice(len(start), p=start), []
        while True:
            word = rng.choice(emission.shape[1], p=emission[state])
            if word == 0:
                break
            line.append(vocabulary.words[word])
            state = rng.choice(len(start), p=matrix[state])
        lines.append(line)
    return lines


def test_comes_within_two_percent_of_a_known_hmm():
    """Text drawn from a known 4-state HMM: the trained model's perplexity is near that HMM's own on held-out text."""
    rng = np.random.default_rng(0)
    vocabulary = Vocabulary((EOS, UNK, "a", "b", "c", "d", "e", "f"))
    matrix = np.array([[0.8, 0.1, 0.05, 0.05], [0.1, 0.1, 0.7, 0.1], [0.1, 0.7, 0.1, 0.1], [0.3, 0.3, 0.3, 0.1]])
    start = np.array([0.7, 0.1, 0.1, 0.1])
    emission = np.array(
        [
            [0.05, 0, 0.6, 0.3, 0.05, 0, 0, 0],
            [0.1, 0, 0, 0, 0.7, 0.2, 0, 0],
            [0.1, 0, 0, 0, 0, 0.1, 0.6, 0.2],
            [0.3, 0, 0.1, 0.1, 0.1, 0.1, 0.1, 0.2],
        ]
    )
    texts = [encode(sample_text(start, matrix, emission, n, vocabulary, rng), vocabulary) for n in (4000, 500, 800)]
    corpus = Corpus("known", vocabulary, *texts)
    config = override(
        preset("tiny"),
        ["model.constraint=none", "model.num_blocks=1", "model.num_states=8", "training.epochs=80", "training.state_dropout=0",
         "model.source_block_init=0", "training.checks_per_epoch=0.1", "training.m_step_updates=3",
            "training.weight_decay=0"],
    )  # fmt: skip
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        train(corpus, config, folder)
        import vlhmm
        from vlhmm.evaluation.perplexity import evaluate

        ours = evaluate(vlhmm.load(folder), corpus.test, "reset").perplexity
    total = 0.0
    for i in range(corpus.test.num_sentences):
        message = start
        for t, word in enumerate(corpus.test.sentence(i)):
            message = (message @ matrix if t else message) * emission[:, word]
            total += math.log(message.sum())
            message = message / message.sum()
    theirs = perplexity(total, corpus.test.num_tokens)
    assert theirs * 0.98 < ours < theirs * 1.02


@pytest.mark.parametrize("parts", [1, 3])
def test_em_m_steps_raise_the_likelihood(toy, parts):
    """Generalized EM: after optimizer steps on the counts of an E-step the marginal likelihood itself is higher."""
    config = tiny(
        f"training.m_step_row_parts={parts}",
        "training.state_dropout=0",
        "training.rate=0.003",
        "training.warmup_steps=0",
        "training.epochs=100",
    )
    import tempfile

    with tempfile.TemporaryDirectory() as scratch:
        folder = trainer_module.RunFolder(scratch)
        blocks = make_blocks(config.model, toy.train.tokens, toy.vocabulary, 0)
        run = Trainer(toy, config, folder, blocks, "cpu", None)
        seen = []
        for _ in range(5):
            run.at.log_likelihood = 0.0
            run.train_step(run.batches())
            seen.append(run.at.log_likelihood)
    assert seen == sorted(seen) and seen[-1] > seen[0]


@pytest.mark.parametrize("transition", ["softmax", "block-factored"])
@pytest.mark.parametrize("method", ["gradient", "em"])
def test_training_with_and_without_kernels_is_the_same(toy, tmp_path, monkeypatch, transition, method):
    """Three steps, compiled and in plain torch: the same likelihoods on the way, to float32's accuracy."""
    changes = [f"training.method={method}", f"model.transition={transition}", "model.source_block_init=0"]
    config, seen = tiny(*changes, "training.rate=0.003", "training.warmup_steps=0"), []
    for kernels in ("1", "0"):
        monkeypatch.setenv("VLHMM_KERNELS", kernels)
        blocks = make_blocks(config.model, toy.train.tokens, toy.vocabulary, 0)
        run = Trainer(toy, config, trainer_module.RunFolder(tmp_path), blocks, "cpu", None)
        likelihoods = []
        for _ in range(3):
            run.at.log_likelihood = 0.0
            run.train_step(run.batches())
            likelihoods.append(run.at.log_likelihood)
        seen.append(likelihoods)
    assert seen[0] == pytest.approx(seen[1], rel=1e-4) and len(set(seen[0])) == 3


def test_counts_of_several_batches_pushed_through_once_equal_one_large_batch(toy):
    hmm, blocks = small_hmm("paper")
    vocabulary = Vocabulary(("<eos>", "<unk>", "a", "b", "c", "d", "e"))
    text = encode([["a", "b"], ["c", "d", "e", "a"], ["b"], ["e", "e", "d"]], vocabulary)
    gradients = []
    for tokens in (4, 1000):
        settings = TrainingConfig(method="em", batch="sentences", batch_tokens=tokens)
        (batches,) = make_plan(text, settings, 0)(0)
        prepared = prepare(batches, torch.from_numpy(blocks.block_of_word), blocks.num_blocks)
        potentials = hmm.potentials()
        found = expectation(potentials, prepared)
        hmm.zero_grad()
        expected_log_likelihood(potentials, found.counts, found.pairs).backward()
        gradients.append([p.grad.clone() for p in hmm.parameters()])
        assert (len(batches) > 1) == (tokens == 4)
    for a, b in zip(*gradients, strict=True):
        assert_close(a, b, rtol=1e-9, atol=1e-11)


def test_memory_budget_is_predicted_and_kept(toy, tmp_path):
    with pytest.raises(ConfigError, match="one E-step needs .* raise --memory"):
        train(toy, tiny(), tmp_path / "run", memory=1000)


def test_non_finite_loss_stops_with_its_position_and_keeps_the_checkpoint(toy, tmp_path, monkeypatch):
    config = tiny("training.epochs=12", "training.checkpoint_seconds=0.0001")
    real = trainer_module.expectation

    def broken(*arguments):
        result = real(*arguments)
        return result._replace(log_likelihood=math.nan) if len(calls) == 6 else result

    calls = []
    monkeypatch.setattr(trainer_module, "expectation", lambda *a: (calls.append(1), broken(*a))[1])
    with pytest.raises(TrainingError, match="not finite at step 5 .*last good checkpoint is kept"):
        train(toy, config, tmp_path / "run")
    monkeypatch.undo()
    state = json.loads((tmp_path / "run" / "checkpoint" / "state.json").read_text())
    assert state["step"] == 5
    assert train(toy, config, tmp_path / "run").finished


def test_parameters_that_are_not_finite_are_no_checkpoint(toy, tmp_path):
    config = tiny("training.rate=1e38", "training.warmup_steps=0", "training.checkpoint_seconds=0.0001")
    with pytest.raises(TrainingError, match="not finite"):
        train(toy, config, tmp_path / "run")
    for path in (tmp_path / "run").glob("checkpoint/step-*.safetensors"):
        tensors = load_file(path)
        assert all(t.isfinite().all() for name, t in tensors.items() if name.startswith("model."))


@pytest.mark.parametrize(
    "change",
    ["beta2=2", "epochs=inf", "weight_decay=-1", "warmup_steps=-5", "checkpoint_seconds=nan",
     "smoothing=-3", "smoothing=5", "seed=-1"],
)  # fmt: skip
def test_settings_out_of_range_are_refused_by_name(change):
    with pytest.raises(ConfigError, match=change.split("=")[0]):
        tiny(f"training.{change}")


def test_no_setting_is_silently_without_effect():
    scalar = ["model.parameterization=scalar", "training.optimizer=closed-form", "training.state_dropout=0"]
    with pytest.raises(ConfigError, match="average=0"):
        tiny(*scalar, "training.embedding_dropout=0", "training.average=0.9")
    with pytest.raises(ConfigError, match="source_block_init"):
        tiny("model.source_block_init=-1")
    with pytest.raises(ConfigError, match="format_version"):
        tiny("format_version=7")


def test_every_epoch_reads_every_token_once(toy):
    settings = tiny("training.em_tokens=300", "training.batch_tokens=64").training
    plan = make_plan(toy.train, settings, toy.vocabulary.eos)
    for epoch in range(8):
        steps = plan(epoch)
        assert len(steps) == len(plan(0))
        assert sum(int(batch.lengths.sum()) for step in steps for batch in step) == toy.train.num_tokens


def test_other_texts_and_other_blocks_are_refused(toy, tmp_path):
    train(toy, tiny(), tmp_path / "run")
    for other in (toy._replace(train=toy.valid), toy._replace(valid=toy.train)):
        with pytest.raises(ConfigError, match="another training or validation text"):
            train(other, tiny(), tmp_path / "run")
    blocks = make_blocks(tiny("model.constraint=frequency").model, toy.train.tokens, toy.vocabulary, 0)
    with pytest.raises(ConfigError, match="other blocks"):
        train(toy, tiny(), tmp_path / "run", blocks=blocks)


def test_a_folder_that_another_process_trains_in_is_refused(toy, tmp_path):
    with claimed(tmp_path) as ours, pytest.raises(CheckpointError, match="another process is training in"):
        assert ours
        train(toy, tiny(), tmp_path)


def test_what_a_killed_process_left_half_written_is_no_obstacle(toy, tmp_path):
    with pytest.raises(RuntimeError), replace_atomically(tmp_path / "run" / "blocks.tsv") as temporary:
        os.link(temporary, temporary.with_name(f".left{temporary.suffix}"))  # as a kill leaves it
        raise RuntimeError
    assert len(list((tmp_path / "run").iterdir())) == 1
    assert train(toy, tiny("training.epochs=1"), tmp_path / "run").step == 1
    assert not [path for path in (tmp_path / "run").rglob("*") if path.name.startswith(".")]


def test_a_refused_run_leaves_no_folder(toy, tmp_path):
    with pytest.raises(ConfigError):
        train(toy, tiny("model.num_blocks=16"), tmp_path / "a" / "run")
    assert not (tmp_path / "a" / "run").exists()


def test_another_runs_folder_is_refused(toy, tmp_path):
    train(toy, tiny("training.epochs=2"), tmp_path / "run")
    with pytest.raises(ConfigError, match="holds a run with training.rate=0.015, asked for 0.5"):
        train(toy, tiny("training.epochs=2", "training.rate=0.5"), tmp_path / "run")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "thesis.tex").write_text("precious")
    with pytest.raises(CheckpointError, match="not empty and holds no run"):
        train(toy, tiny(), tmp_path / "other")


def test_damaged_files_get_one_clear_line(toy, tmp_path):
    train(toy, tiny("training.epochs=2"), tmp_path / "run")
    for name, match in (
        ("model.safetensors", "damaged"),
        ("config.json", "damaged"),
        ("blocks.tsv", "blocks.tsv"),
    ):
        path = tmp_path / "run" / name
        whole = path.read_bytes()
        path.write_bytes(whole[: len(whole) // 2])
        with pytest.raises(Exception, match=match) as caught:
            load_hmm(tmp_path / "run")
        assert type(caught.value).__module__ == "vlhmm.errors"
        path.write_bytes(whole)
    with pytest.raises(CheckpointError, match="has no config.json"):
        load_hmm(tmp_path)


def test_time_limit_stops_cleanly_and_goes_on(toy, tmp_path):
    config = tiny("training.epochs=30")
    first = train(toy, config, tmp_path / "run", time_limit=0.0)
    assert first.stopped_by == "time limit" and not first.finished
    assert train(toy, config, tmp_path / "run").finished


def test_plateau_divides_the_rate_after_patience():
    state = Plateau()
    for valid in [10.0, 9.0, 9.5, 9.2, 9.1]:
        state = state.after_check(valid, patience=3)
    assert state.divisions == 1 and state.best == 9.0
    settings = TrainingConfig(rate=0.08, decay=4.0)
    assert rate_at(settings, 5, 100, state) == pytest.approx(0.02)


def test_cosine_goes_from_the_rate_to_zero_after_warmup():
    settings = TrainingConfig(rate=1.0, schedule="cosine", warmup_steps=4)
    rates = [rate_at(settings, step, 100, Plateau()) for step in range(101)]
    assert rates[0] == pytest.approx(0.25) and max(rates) == rates[3] and rates[100] == pytest.approx(0)
    assert all(a >= b for a, b in zip(rates[3:], rates[4:], strict=False))


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_says_how_it_is_trained(name):
    config = preset(name)
    assert (config.training.method == "em") == (not name.startswith("paper"))
    assert (config.model.transition == "softmax") == name.startswith("paper")
    assert override(config, ["training.seed=3"]) == replace(config, training=replace(config.training, seed=3))


@pytest.mark.parametrize(
    "changes,match",
    [
        (["training.state_dropout=1"], "\\[0, 1\\)"),
        (["training.rte=1"], "did you mean training.rate"),
        (["model=3"], "group of settings"),
        (["training.epochs=many"], "takes a number"),
        (["model.transition=flat"], "no value of model.transition"),
        (["training.context=carry"], "needs batch=streams"),
        (["training.optimizer=closed-form", "training.state_dropout=0"], "parameterization=scalar"),
        (["training.optimizer=closed-form", "model.parameterization=scalar"], "needs state_dropout=0"),
        (["training.m_step_row_parts=2", "training.method=gradient"], "belongs to method=em"),
        (["training.m_step_row_parts=2", "model.within=low-rank"], "counts of channels"),
        (
            [
                "training.m_step_row_parts=2",
                "training.optimizer=closed-form",
                "model.parameterization=scalar",
                "training.state_dropout=0",
            ],
            "no optimizer steps",
        ),
        (["nonsense"], "name=value"),
    ],
)
def test_wrong_settings_are_refused(changes, match):
    with pytest.raises(ConfigError, match=match):
        tiny(*changes)


def test_nothing_in_a_run_folder_is_pickled(toy, tmp_path):
    train(toy, tiny("training.epochs=2"), tmp_path / "run")
    for root, _, files in os.walk(tmp_path / "run"):
        for name in files:
            head = Path(root, name).read_bytes()[:4]
            assert not head.startswith((b"\x80\x04", b"\x80\x02", b"PK\x03\x04")), name


@pytest.mark.parametrize(
    "changes", [[], ["model.transition=softmax", "model.source_block_init=0"], ["model.embedding=factored"]]
)
def test_any_number_of_threads_adds_up_in_one_order(toy, tmp_path, changes):
    """Sizes at which torch splits sums among threads: the same steps end in the same bits, on one thread, two or three."""
    config = tiny("model.num_states=2048", "model.num_blocks=8", "model.hidden_size=64", *changes)
    blocks = make_blocks(config.model, toy.train.tokens, toy.vocabulary, 0)
    seen, threads = [], torch.get_num_threads()
    try:
        for number in (1, 2, 3, 2):
            torch.set_num_threads(number)
            run = Trainer(toy, config, trainer_module.RunFolder(tmp_path), blocks, "cpu", None)
            for _ in range(2):
                run.train_step(run.batches())
            seen.append({name: p.detach().clone() for name, p in run.hmm.named_parameters()})
    finally:
        torch.set_num_threads(threads)
    for other in seen[1:]:
        assert_same_bits(seen[0], other)


@pytest.mark.parametrize("changes", [[], ["training.batch=streams", "training.num_streams=8"]])
def test_em_on_a_whole_text_prepares_its_batches_once(toy, tmp_path, monkeypatch, changes):
    prepared = []
    original = e_step.prepare
    monkeypatch.setattr(e_step, "prepare", lambda *args: prepared.append(1) or original(*args))
    train(toy, tiny("training.epochs=3", "training.calibrate=false", *changes), tmp_path)
    assert len(prepared) == 1


def test_other_batches_or_another_carry_are_prepared_anew(toy):
    settings = TrainingConfig(context="carry", num_streams=4, segment_length=16)
    first, second = make_plan(toy.train, settings, toy.vocabulary.eos)(0)[:2]
    cache = e_step.PreparedBatches(torch.arange(len(toy.vocabulary)) % 4, 4)
    carry = torch.tensor([0, 1, 2, 3])
    seen = [cache.get(first), cache.get(second), cache.get(second, carry), cache.get(second, 3 - carry)]
    assert all(a is not b for a, b in itertools.combinations(seen, 2))
    assert cache.get(list(second), 3 - carry) is seen[-1]
    for ours, batches, group in zip(seen, (first, second, second, second), (None, None, carry, 3 - carry), strict=True):
        expected = prepare(batches, cache.block_of_word, 4, group)
        assert torch.equal(ours.pairs.from_block, expected.pairs.from_block)


def test_a_run_of_an_earlier_version_loads_and_goes_on(toy, tmp_path):
    """Settings are read under their old names; a removed one that had an effect does not let training go on."""
    config = tiny("training.epochs=2", "training.calibrate=false")
    whole = train(toy, config, tmp_path)
    (tmp_path / "manifest.json").unlink()  # earlier versions had none
    path = tmp_path / "config.json"
    content = json.loads(path.read_text())
    for old, new in RENAMED.items():
        (group, name), (today, other) = old.split("."), new.split(".")
        content[group][name] = content[today].pop(other)
    content["training"] |= {"accumulate": 1, "state_decay": None, "guide_draws": 0, "guide_share": 0.5}
    path.write_text(json.dumps(content))
    assert train(toy, config, tmp_path).best_valid == whole.best_valid
    (tmp_path / "manifest.json").unlink()
    content["training"]["guide_draws"] = 6
    path.write_text(json.dumps(content))
    load_hmm(tmp_path)
    with pytest.raises(ConfigError, match="training.guide_draws=6, a setting that no longer exists"):
        train(toy, config, tmp_path)
