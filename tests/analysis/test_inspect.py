"""What a state, a word, a block stands for, read off the joint table of two neighbouring tokens."""

import json
import math

import numpy as np
import pytest
import torch

import vlhmm.analysis.stationary as usage_module
from models import KINDS, VOCABULARY, small_hmm
from vlhmm.analysis.inspect import WORDS_SHOWN, Inspector
from vlhmm.analysis.stationary import CACHE_NAME, TOLERANCE, Usage, stationary, usage_of
from vlhmm.cli.main import main
from vlhmm.clustering.blocks import Blocks
from vlhmm.components.config import ModelConfig
from vlhmm.distributions import HMMDistributions
from vlhmm.errors import QueryError
from vlhmm.hmm import HMM
from vlhmm.language_model import HMMLanguageModel
from vlhmm.training.config import RunConfig, TrainingConfig
from vlhmm.training.run_folder import RunFolder

RULES = ("reset", "carry")
NEAR = dict(rel=1e-7, abs=1e-11)  # float64; views are tested with the oracle's own usage
SETTLED = dict(rel=0, abs=2e-5)  # the usage is stationary to 1e-6, and a slow chain makes ten times that of it
EVERY = pytest.mark.parametrize("rule", RULES)
KIND = pytest.mark.parametrize("kind", KINDS)


def model_of(kind, rule="reset", seed=0, dtype=torch.float64):
    hmm, blocks = small_hmm(kind, seed, dtype)
    with torch.no_grad():
        tables = HMMDistributions(hmm.potentials(), blocks)
    return HMMLanguageModel(VOCABULARY, tables, rule)


def neighbours(model):
    """(u, J): the stationary distribution, and J[z, x, z', x'] = p(state, word, next state, next word), all dense."""
    transition, emission = (matrix.double().numpy() for matrix in model.distributions.dense())
    start = model.distributions.start.double().numpy()
    num_states, num_words = emission.shape
    move = np.broadcast_to(transition[:, None, :], (num_states, num_words, num_states)).copy()
    if model.rule == "reset":
        move[:, model.vocabulary.eos] = start
    chain = np.einsum("zx,zxy->zy", emission, move)
    equations = np.concatenate([chain.T - np.eye(num_states), np.ones((1, num_states))])
    u = np.linalg.lstsq(equations, np.append(np.zeros(num_states), 1), rcond=None)[0]
    if model.distributions.blocks.partition:
        u[~model.distributions.blocks.alive.ravel()] = 0  # exactly, so that dead states are seen to be left out
    return u, np.einsum("z,zx,zxy,yw->zxyw", u, emission, move, emission)


def inspector_of(kind, rule):
    model = model_of(kind, rule)
    u, joint = neighbours(model)
    return model, Inspector(model, Usage(torch.from_numpy(u), 1, 0.0)), u, joint


def given(table):
    return table / table.sum()


def entropy(p):
    p = p[p > 0]
    return -(p * np.log(p)).sum()


def words_agree(listed, expected):
    """A list of all words against their probabilities; in order, largest first."""
    assert {entry.word: entry.probability for entry in listed} == pytest.approx(
        {VOCABULARY.words[i]: p for i, p in enumerate(expected) if p > 0}, **NEAR
    )
    in_order(listed)


def states_agree(listed, expected, emission):
    assert {entry.state: entry.probability for entry in listed} == pytest.approx(
        {i: p for i, p in enumerate(expected) if p > 0}, **NEAR
    )
    in_order(listed)
    for entry in listed:
        most = [VOCABULARY.words[x] for x in np.argsort(-emission[entry.state], kind="stable")][:WORDS_SHOWN]
        assert entry.words == most[: (emission[entry.state] > 0).sum()]


def blocks_agree(listed, expected, model):
    if not model.distributions.blocks.partition:
        assert listed == []
        return
    by_block = expected.reshape(model.distributions.num_blocks, -1).sum(1)
    assert {entry.block: entry.probability for entry in listed} == pytest.approx(dict(enumerate(by_block)), **NEAR)
    in_order(listed)
    for entry in listed:
        members = [
            w for w, g in zip(VOCABULARY.words, model.distributions.blocks.block_of_word, strict=True) if g == entry.block
        ]
        assert sorted(entry.words) == sorted(members)[:WORDS_SHOWN] or len(members) > WORDS_SHOWN


def in_order(listed):
    probabilities = [entry.probability for entry in listed]
    assert probabilities == sorted(probabilities, reverse=True)


def alive_states(blocks):
    return np.arange(blocks.num_states)[blocks.alive.ravel()] if blocks.partition else range(blocks.num_states)


# ---- usage


@EVERY
@KIND
def test_usage_is_the_stationary_distribution_of_the_generated_text(kind, rule):
    model = model_of(kind, rule)
    usage = usage_of(model)
    expected, joint = neighbours(model)
    assert joint.sum((0, 1, 3)) == pytest.approx(expected, abs=1e-9)  # the oracle: a token later all is the same
    assert usage.share.dtype == torch.float64 and usage.change < TOLERANCE
    assert usage.share.numpy() == pytest.approx(expected, **SETTLED)
    assert float(usage.share.sum()) == pytest.approx(1, abs=1e-12)
    if model.distributions.blocks.partition:
        assert not usage.share.view_as(model.distributions.states_of_block)[~torch.from_numpy(model.distributions.blocks.alive)].any()


@pytest.mark.parametrize("kind", ["paper", "block-factored", "uniform"])
def test_usage_in_float32_is_that_of_float64_to_the_tolerance(kind):
    hmm, blocks = small_hmm(kind)
    with torch.no_grad():
        potentials = hmm.potentials()
    tables = (HMMDistributions(potentials, blocks, dtype) for dtype in (torch.float32, torch.float64))
    single, double = (stationary(each, VOCABULARY.eos, "reset") for each in tables)
    assert single.change < TOLERANCE
    assert single.share.numpy() == pytest.approx(double.share.numpy(), abs=1e-5)


def test_usage_without_memory_for_the_matrix_is_the_same(monkeypatch):
    model, made = model_of("uneven", dtype=torch.float32), []
    rows = model.distributions.entering_rows
    monkeypatch.setattr(model.distributions, "entering_rows", lambda states: made.append(1) or rows(states))
    held = stationary(model.distributions, 0, "reset", memory=1 << 20)
    assert len(made) == 1  # the rows are made in the first round and kept
    streamed = stationary(model.distributions, 0, "reset", memory=0)
    assert len(made) == 1 + streamed.rounds
    assert torch.equal(held.share, streamed.share)


def scalar_model(logits, start, rule="carry"):
    """Every state emits every word; transitions and starts as given."""
    size = len(start)
    blocks = Blocks.none(len(VOCABULARY), size)
    config = ModelConfig(num_states=size, num_blocks=1, constraint="none", parameterization="scalar", hidden_size=2)
    hmm = HMM(config, blocks).double()
    with torch.no_grad():
        hmm.transition_logits.copy_(torch.tensor(logits))
        hmm.start_logits.copy_(torch.tensor([start]))
        tables = HMMDistributions(hmm.potentials(), blocks)
    return HMMLanguageModel(VOCABULARY, tables, rule)


def test_a_chain_that_goes_in_circles_is_used_evenly():
    circle = 900.0 * np.roll(np.eye(3), 1, axis=1)  # 0 -> 1 -> 2 -> 0: the plain iteration would never end
    usage = usage_of(scalar_model(circle, [900.0, 0.0, 0.0]))
    assert usage.change < TOLERANCE and usage.rounds < 10
    assert usage.share.tolist() == pytest.approx([1 / 3] * 3, abs=1e-6)


def test_usage_that_does_not_settle_says_so(monkeypatch):
    monkeypatch.setattr(usage_module, "MAX_ROUNDS", 2)
    usage = usage_of(model_of("paper", "carry"))
    assert usage.rounds == 2 and usage.change > TOLERANCE


# ---- views


@EVERY
@KIND
def test_state_views_agree_with_the_joint_table(kind, rule):
    model, inspector, u, joint = inspector_of(kind, rule)
    emission = model.distributions.dense()[1].numpy()
    for z in alive_states(model.distributions.blocks):
        view = inspector.state(int(z), top=100)
        assert view.usage == pytest.approx(u[z], **NEAR)
        assert view.usage_rank == 1 + (inspector.usage > inspector.usage[z]).sum()
        words_agree(view.words, emission[z])
        assert view.num_words == (emission[z] > 0).sum()
        assert view.entropy == pytest.approx(entropy(emission[z]), **NEAR)
        ahead, behind = given(joint[z].sum((0, 2))), given(joint[:, :, z].sum((1, 2)))
        states_agree(view.next_states, ahead, emission)
        states_agree(view.previous_states, behind, emission)
        blocks_agree(view.next_blocks, ahead, model)
        blocks_agree(view.previous_blocks, behind, model)
        words_agree(view.next_words, given(joint[z].sum((0, 1))))
        words_agree(view.previous_words, given(joint[:, :, z].sum((0, 2))))
        assert view.next_entropy == pytest.approx(entropy(ahead), **NEAR)
        assert view.previous_entropy == pytest.approx(entropy(behind), **NEAR)
        if model.distributions.blocks.partition:
            assert divmod(z, model.distributions.states_per_block) == (view.block, view.slot)
            of_block = u.reshape(model.distributions.num_blocks, -1)[view.block].sum()
            assert view.share_of_block == pytest.approx(u[z] / of_block, **NEAR)
        else:
            assert (view.block, view.slot, view.share_of_block) == (None, None, None)


@EVERY
@KIND
def test_word_views_agree_with_the_joint_table(kind, rule):
    model, inspector, u, joint = inspector_of(kind, rule)
    emission = model.distributions.dense()[1].numpy()
    frequency = u @ emission
    for x, word in enumerate(VOCABULARY.words):
        view = inspector.word(word, top=100)
        assert (view.word, view.id) == (word, x)
        assert view.frequency == pytest.approx(frequency[x], **NEAR)
        assert view.frequency_rank == 1 + (frequency > frequency[x] + 1e-9).sum()
        share = given(u * emission[:, x])
        assert view.num_states == (share > 0).sum()
        assert {s.state: s.share for s in view.states} == pytest.approx(
            {z: p for z, p in enumerate(share) if p > 0}, **NEAR
        )
        assert view.entropy == pytest.approx(entropy(share), **NEAR)
        words_agree(view.next_words, given(joint[:, x].sum((0, 1))))
        words_agree(view.previous_words, given(joint[..., x].sum((0, 2))))
        for s in view.states:
            assert s.probability == pytest.approx(emission[s.state, x], **NEAR)
            after, before = given(joint[s.state, x].sum(0)), given(joint[:, :, s.state, x].sum(0))
            for listed, expected in ((s.next_words, after), (s.previous_words, before)):
                assert [entry.probability for entry in listed] == pytest.approx(
                    sorted(expected)[::-1][:WORDS_SHOWN], **NEAR
                )
                assert all(expected[VOCABULARY.id_of[e.word]] == pytest.approx(e.probability, **NEAR) for e in listed)


@EVERY
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "uniform"])
def test_block_views_agree_with_the_joint_table(kind, rule):
    model, inspector, u, joint = inspector_of(kind, rule)
    emission, size = model.distributions.dense()[1].numpy(), model.distributions.states_per_block
    mass = u.reshape(-1, size)
    for block in range(model.distributions.num_blocks):
        view = inspector.block(block, top=100)
        own = np.arange(block * size, (block + 1) * size)
        assert view.usage == pytest.approx(mass[block].sum(), **NEAR)
        assert view.usage_rank == 1 + (mass.sum(1) > mass[block].sum() + 1e-9).sum()
        assert view.num_states == model.distributions.blocks.num_alive[block]
        assert view.used_states == pytest.approx(math.exp(entropy(given(mass[block]))), **NEAR)
        words = given(mass[block] @ emission[own])
        words_agree(view.words, words)
        assert view.num_words == (words > 0).sum()
        assert view.entropy == pytest.approx(entropy(words), **NEAR)
        within = np.zeros_like(u)
        within[own] = given(mass[block])
        states_agree(view.states, within, emission)
        ahead, behind = given(joint[own].sum((0, 1, 3))), given(joint[:, :, own].sum((1, 2, 3)))
        states_agree(view.next_states, ahead, emission)
        states_agree(view.previous_states, behind, emission)
        blocks_agree(view.next_blocks, ahead, model)
        blocks_agree(view.previous_blocks, behind, model)
        words_agree(view.next_words, given(joint[own].sum((0, 1, 2))))
        words_agree(view.previous_words, given(joint[:, :, own].sum((0, 2, 3))))
        assert view.next_entropy == pytest.approx(entropy(ahead.reshape(-1, size).sum(1)), **NEAR)
        assert view.previous_entropy == pytest.approx(entropy(behind.reshape(-1, size).sum(1)), **NEAR)


@EVERY
@KIND
def test_summary_agrees_with_the_stationary_distribution(kind, rule):
    model, inspector, u, _ = inspector_of(kind, rule)
    view, emission = inspector.summary(top=100), model.distributions.dense()[1].numpy()
    assert view.context == rule and view.vocabulary_size == len(VOCABULARY)
    assert view.num_states == model.distributions.blocks.num_real_states
    assert view.used_states == pytest.approx(math.exp(entropy(u)), **NEAR)
    for limit, states in ((0.5, view.half_of_tokens), (0.9, view.most_of_tokens)):
        held = np.cumsum(sorted(u)[::-1])
        assert held[states - 1] >= limit and (states == 1 or held[states - 2] < limit)
    states_agree(view.states, u, emission)
    blocks_agree(view.blocks, u, model)
    words_agree(view.words, u @ emission)


def test_lists_are_as_long_as_asked_for():
    _, inspector, *_ = inspector_of("paper", "reset")
    view = inspector.state(0, top=2)
    assert [len(entries) for entries in (view.words, view.next_states, view.previous_blocks)] == [2, 2, 2]
    assert len(inspector.word("a", top=1).states) == 1
    assert view.next_states == inspector.state(0, top=9).next_states[:2]


def test_a_state_that_is_never_reached_has_no_predecessors():
    never = np.zeros((3, 3))
    never[:, 2] = -np.inf
    model = scalar_model(never, [0.0, 0.0, -np.inf])
    view = Inspector(model, usage_of(model)).state(2)
    assert (view.usage, view.usage_rank, view.previous_states, view.previous_words) == (0, 3, [], [])
    assert view.previous_entropy == 0 and len(view.next_states) == 2


# ---- refusals


@pytest.mark.parametrize(
    ("kind", "ask", "message"),
    [
        ("paper", lambda i: i.state(12), "no state 12: the model's states are 0 to 11"),
        ("paper", lambda i: i.state(-1), "no state -1: the model's states are 0 to 11"),
        ("uneven", lambda i: i.state(6), "no state 6: block 1 has the states 4 to 5 only"),
        ("paper", lambda i: i.block(3), "no block 3: the model's blocks are 0 to 2"),
        ("uniform", lambda i: i.block(0), "the model has no blocks"),
        ("paper", lambda i: i.word("A"), "no word 'A' in the vocabulary of 7 words; nearest: a"),
        ("paper", lambda i: i.word("<eo>"), "nearest: <eos>"),
        ("paper", lambda i: i.word("zzzzzz"), "nothing is near it"),
        ("paper", lambda i: i.state(1, top=0), "top is 0, expected at least 1"),
    ],
)
def test_what_is_not_there_is_refused(kind, ask, message):
    _, inspector, *_ = inspector_of(kind, "reset")
    with pytest.raises(QueryError) as refused:
        ask(inspector)
    assert message in str(refused.value)


# ---- the run's folder, and the command line


@pytest.fixture
def run(tmp_path):
    """A run folder with an untrained model."""
    hmm, blocks = small_hmm("uneven-block-factored", dtype=torch.float32)
    folder = RunFolder(tmp_path / "run")
    config = RunConfig(model=hmm.config, training=TrainingConfig(context="reset"))
    folder.path.mkdir()
    blocks.write(folder.blocks_path, VOCABULARY.words)
    folder.create(config, VOCABULARY, {"name": "made up"})
    folder.save_model(dict(hmm.named_parameters()))
    return folder.path


def count_rounds(model, run):
    rounds = []
    usage = usage_of(model, run, progress=lambda number, change: rounds.append(number))
    return usage, len(rounds)


def test_usage_is_kept_in_the_run_and_found_again(run):
    model = model_of("uneven-block-factored", dtype=torch.float32)
    first, rounds = count_rounds(model, run)
    assert rounds == first.rounds and (run / CACHE_NAME).exists()
    again, rounds = count_rounds(model, run)
    assert rounds == 0 and torch.equal(again.share, first.share) and again[1:] == first[1:]
    assert not [path for path in run.iterdir() if path.name.startswith(".")]  # nothing half-written is left


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "blocks.tsv"])
def test_usage_of_another_model_is_not_taken(run, name):
    model = model_of("uneven-block-factored", dtype=torch.float32)
    count_rounds(model, run)
    (run / name).write_bytes((run / name).read_bytes() + b" ")
    assert count_rounds(model, run)[1] > 0
    model.rule = "carry"
    assert count_rounds(model, run)[1] > 0


def test_usage_of_a_model_before_its_calibration_is_not_taken(run):
    model = model_of("uneven-block-factored", dtype=torch.float32)
    for content in ("{}", '{"emission": 0.9}', None):
        count_rounds(model, run)
        (run / "calibration.json").unlink(missing_ok=True)
        if content is not None:
            (run / "calibration.json").write_text(content)
        assert count_rounds(model, run)[1] > 0


def test_a_damaged_usage_file_is_replaced(run):
    model = model_of("uneven-block-factored", dtype=torch.float32)
    (run / CACHE_NAME).write_bytes(b"not what it should be")
    assert count_rounds(model, run)[1] > 0
    assert count_rounds(model, run)[1] == 0


def test_a_usage_file_that_cannot_be_written_is_done_without(run):
    (run / CACHE_NAME).mkdir()  # in its place something that cannot be replaced
    model = model_of("uneven-block-factored", dtype=torch.float32)
    assert count_rounds(model, run)[0].change < TOLERANCE
    assert count_rounds(model, run)[1] > 0
    assert not [path for path in run.iterdir() if path.name.startswith(".")]


def ask(capsys, *arguments):
    code = main(["inspect", *map(str, arguments)])
    out, err = capsys.readouterr()
    return code, out, err


def test_the_command_line_answers_in_json(run, capsys):
    code, out, err = ask(capsys, run, "--format", "json", "--top-k", 3)
    content = json.loads(out)
    assert code == 0 and err == "finding the usage of every state (once for a model)\n"
    assert (content["kind"], content["num_states"], content["num_blocks"]) == ("model", 7, 3)
    hmm, _ = small_hmm("uneven-block-factored")
    assert content["parameters"] == sum(p.numel() for p in hmm.parameters())
    assert (content["transition"], content["context"], content["log_base"]) == ("block-factored", "reset", "e")
    assert len(content["states"]) == 3 and set(content["states"][0]) == {"state", "probability", "words"}
    for kind, subject in (("state", "1"), ("word", "b"), ("block", "2")):
        code, out, err = ask(capsys, run, kind, subject, "--format", "json")
        assert (code, err) == (0, "")  # the usage is known by now
        content = json.loads(out)
        assert content["kind"] == kind and str(content[kind]) == subject
        assert {"word", "probability"} == set(content["next_words"][0])


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ((), "7 states in 3 blocks of up to 4, 7 words"),
        (("state", "1"), "state 1, slot 1 of block 0"),
        (("word", "b"), "states of block 0 may emit it"),
        (("block", "2"), "block 2  3 words, 1 states"),
    ],
)
def test_the_command_line_answers_in_text(run, capsys, arguments, expected):
    code, out, err = ask(capsys, run, *arguments, "--quiet")
    assert (code, err) == (0, "")
    assert expected in out and "nan" not in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("state",), "state takes a number: vlhmm inspect"),
        (("state", "one"), "state takes a number, got 'one'"),
        (("word",), "word takes a word"),
        (("state", "7"), "block 1 has the states 4 to 5 only"),
        (("state", "99"), "states are 0 to 11"),
        (("block", "-1"), "blocks are 0 to 2"),
        (("word", "B"), "nearest: b"),
        (("word", "b", "--top-k", "0"), "argument --top-k: '0': expected a whole number from 1"),
    ],
)
def test_the_command_line_refuses_in_one_line_before_any_work(run, capsys, arguments, message):
    code, out, err = ask(capsys, run, *arguments)
    assert (code, out) == (2, "") and message in err and err.count("\n") == 1
    assert not (run / CACHE_NAME).exists()


def test_a_folder_without_a_run_is_refused(tmp_path, capsys):
    code, _, err = ask(capsys, tmp_path / "none")
    assert code == 2 and "does not exist" in err


def test_a_baseline_is_refused(tmp_path, capsys):
    text, folder = str(tmp_path / "text"), str(tmp_path / "kn")
    (tmp_path / "text").write_text("the cat\nthe dog\n")
    assert main(["baseline", "kn", text, "--valid", text, "--out", folder, "--quiet"]) == 0
    code, _, err = ask(capsys, folder)
    assert code == 2 and f"{folder} holds a baseline, which has no hidden states" in err
