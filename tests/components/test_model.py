"""Every kind of model against its own definition written out densely, with and without state dropout."""

import inspect
import itertools
import math
from dataclasses import asdict

import numpy as np
import pytest
import torch
from parameter_oracle import dense
from torch.testing import assert_close

from contract import check_language_model
from models import KINDS, VOCABULARY, small_blocks, small_hmm
from vlhmm import distributions
from vlhmm.clustering.blocks import Blocks
from vlhmm.components.config import ModelConfig
from vlhmm.components.dropout import sample_columns, sample_kept, slots_of_columns
from vlhmm.components.transitions import BlockFactored, LowRank, Transitions, softmax, tiles
from vlhmm.data.batches import Batch
from vlhmm.distributions import HMMDistributions
from vlhmm.errors import ConfigError
from vlhmm.hmm import HMM, DropoutMask
from vlhmm.language_model import HMMLanguageModel
from vlhmm.training.config import TrainingConfig
from vlhmm.training.e_step import expectation, expected_log_likelihood, prepare

EXACT = dict(rtol=1e-10, atol=1e-12)  # float64


def dense_by_definition(hmm, blocks, kept=None):
    """(π, A, O) of the (reduced) model as plain differentiable matrices, from its potentials, which `dense` tests."""
    potentials = hmm.potentials(kept)
    transition, size = potentials.transition, potentials.log_emission.shape[1]
    num_states = blocks.num_states if not blocks.partition else blocks.num_blocks * size
    members = blocks.states_of_block if not blocks.partition else np.arange(num_states).reshape(-1, size)
    enterable = torch.ones(num_states, dtype=torch.bool)
    if transition.enterable is not None:
        enterable = transition.enterable.flatten()
    if isinstance(transition, BlockFactored | LowRank):
        rows = []
        for z in range(num_states):
            m, i = divmod(z, size)
            row = []
            for to in range(blocks.num_blocks):
                if isinstance(transition, LowRank):
                    scores = (transition.target[to].exp() @ transition.source[m, i].exp()).log()
                elif transition.logits is not None:
                    scores = transition.logits[m, to, i]
                else:
                    scores = transition.target[to] @ transition.source[m, i]
                weights = scores.exp() * enterable.view(-1, size)[to]
                row.append(transition.log_block[m, i, to].exp() * weights / weights.sum())
            rows.append(torch.cat(row))
        matrix = torch.stack(rows)
    else:
        scores = transition.logits if transition.logits is not None else transition.source @ transition.target.T
        weights = scores.exp() * enterable
        matrix = weights / weights.sum(1, keepdim=True)
    start = torch.zeros(num_states, dtype=matrix.dtype)
    emission = torch.zeros(num_states, blocks.vocab_size, dtype=matrix.dtype)
    for word, block in enumerate(blocks.block_of_word):
        for slot, state in enumerate(members[block]):
            start = (
                start.index_fill(0, torch.tensor(state), 0)
                + torch.nn.functional.one_hot(torch.tensor(state), num_states) * potentials.log_start[block, slot].exp()
            )
            mark = torch.zeros_like(emission)
            mark[state, word] = 1
            emission = emission + mark * potentials.log_emission[word, slot].exp()
    return start, matrix, emission


def log_likelihood_by_definition(dense, sentence):
    start, matrix, emission = dense
    message = start * emission[:, sentence[0]]
    for word in sentence[1:]:
        message = (message @ matrix) * emission[:, word]
    return message.sum().log()


@pytest.mark.parametrize("kind", KINDS)
def test_parameters_become_the_model_that_the_formulas_say(kind):
    hmm, blocks = small_hmm(kind)
    weights = {name: parameter.detach().numpy() for name, parameter in hmm.named_parameters()}
    states_of_word = [blocks.states_of_block[block].tolist() for block in blocks.block_of_word]
    num_slots = blocks.states_per_block if blocks.partition else blocks.num_states
    alive = np.ones(blocks.num_states, dtype=bool)
    if blocks.partition:
        alive = (np.arange(num_slots)[None] < blocks.num_alive[:, None]).ravel()
    settings = asdict(hmm.config)
    start, matrix, emission = dense(weights, settings, states_of_word, num_slots, alive)
    tables = HMMDistributions(hmm(), blocks)
    found_matrix, found_emission = tables.dense()
    found = (tables.start, found_matrix[alive], found_emission[alive])
    for ours, expected in zip(found, (start, matrix[alive], emission[alive]), strict=True):
        assert_close(ours, torch.from_numpy(expected), **EXACT)


def keep(hmm, blocks, seed=3, dropout=0.5):
    generator = torch.Generator().manual_seed(seed)
    if not blocks.partition:
        return DropoutMask(
            columns=sample_columns(torch.from_numpy(blocks.states_of_block), blocks.num_states, dropout, generator)
        )
    slots, alive = sample_kept(hmm.num_alive, blocks.states_per_block, dropout, generator)
    return DropoutMask(slots=slots, num_alive=alive)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dropped", [False, True])
def test_distributions_are_normalized(kind, dropped):
    hmm, blocks = small_hmm(kind)
    start, matrix, emission = dense_by_definition(hmm, blocks, keep(hmm, blocks) if dropped else None)
    assert_close(start.sum().item(), 1.0, **EXACT)
    assert_close(matrix.sum(1), torch.ones(len(matrix)).double(), **EXACT)
    assert_close(emission.sum(1), torch.ones(len(matrix)).double(), **EXACT)


@pytest.mark.parametrize("kind", KINDS)
def test_tables_equal_the_definition(kind):
    hmm, blocks = small_hmm(kind)
    start, matrix, emission = dense_by_definition(hmm, blocks)
    tables = HMMDistributions(hmm.potentials(), blocks)
    dense_matrix, dense_emission = tables.dense()
    assert_close(tables.start, start, **EXACT)
    assert_close(dense_matrix, matrix, **EXACT)
    assert_close(dense_emission, emission, **EXACT)
    members = torch.from_numpy(blocks.states_of_block)
    for a, b in itertools.product(range(blocks.num_blocks), repeat=2):
        assert_close(tables.tiles_of([(a, b)])[0], matrix[members[a]][:, members[b]], **EXACT)
    assert_close(tables.double().dense()[0], matrix, **EXACT)


UNEVEN_SCALAR = {
    "uneven-scalar": dict(allocation="tokens", parameterization="scalar"),
    "uneven-block-factored-scalar": dict(allocation="tokens", transition="block-factored", parameterization="scalar"),
}


@pytest.mark.parametrize("size_classes", [2, 16])  # of uneven blocks: two that still have padding, or one for each size
@pytest.mark.parametrize("kind", [*KINDS, *UNEVEN_SCALAR])
def test_products_are_those_of_the_dense_matrix(kind, size_classes, monkeypatch):
    monkeypatch.setattr(distributions, "SIZE_CLASSES", size_classes)
    for name, settings in UNEVEN_SCALAR.items():
        monkeypatch.setitem(KINDS, name, settings)
    hmm, blocks = small_hmm(kind)
    tables = HMMDistributions(hmm.potentials(), blocks)
    matrix, emission = tables.dense()
    members, alive = torch.from_numpy(blocks.states_of_block), torch.ones(len(matrix), dtype=torch.bool)
    if blocks.partition:
        alive = torch.from_numpy(blocks.alive.flatten())
        matrix = matrix * alive[:, None]  # states of padding are not left
    generator = torch.Generator().manual_seed(0)
    alpha = torch.rand(2, len(matrix), generator=generator, dtype=torch.float64)
    assert_close(tables.forward_step(alpha), alpha @ matrix, **EXACT)
    assert_close(tables.backward_step(alpha), alpha @ matrix.T, **EXACT)
    assert_close(tables.emit(alpha * alive), alpha @ (emission * alive[:, None]), **EXACT)
    some = torch.tensor([blocks.num_blocks - 1, 0])
    part = torch.rand(2, members.shape[1], generator=generator, dtype=torch.float64)
    spread = torch.zeros(2, len(matrix), dtype=torch.float64).scatter_(1, members[some], part)
    assert_close(tables.forward_step_from(some, part), spread @ matrix, **EXACT)
    assert_close(tables.backward_step_to(some, part), spread @ matrix.T, **EXACT)
    at = torch.stack([tables.backward_step_at(int(block), alpha[:1])[0] for block in some])
    assert_close(at, (alpha[:1] @ matrix.T)[0, members[some]], **EXACT)


def without_dropped(hmm, kept):
    """The same states kept, of a model made of them alone."""
    slots, num_alive = slots_of_columns(hmm.states_of_block, kept.columns)
    return kept._replace(slots=slots, num_alive=num_alive)


@pytest.mark.parametrize(
    "kind,dropped", [*itertools.product(KINDS, ["nothing", "states"]), ("uniform", "states and their columns")]
)
@pytest.mark.parametrize("kernels", ["0", "1"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_expected_counts_give_the_gradient_of_the_marginal_likelihood(kind, dropped, kernels, dtype, monkeypatch):
    monkeypatch.setenv("VLHMM_KERNELS", kernels)
    hmm, blocks = small_hmm(kind)
    kept = keep(hmm, blocks) if dropped != "nothing" else None
    sentences = [[2, 5, 3, 0], [4, 0], [6, 6, 2, 1, 0]]
    dense = dense_by_definition(hmm, blocks, kept)
    if dropped == "states and their columns":
        kept = without_dropped(hmm, kept)
    plain = sum(log_likelihood_by_definition(dense, s) for s in sentences)
    names = [name for name, _ in hmm.named_parameters()]
    expected = torch.autograd.grad(plain, list(hmm.parameters()), allow_unused=True)

    tokens = torch.zeros(3, 5, dtype=torch.long)
    for row, sentence in zip(tokens, sentences, strict=True):
        row[: len(sentence)] = torch.tensor(sentence)
    restart = torch.zeros(3, 5, dtype=torch.bool)
    restart[:, 0] = True
    batch = Batch(tokens, torch.tensor([len(s) for s in sentences]), restart, False)
    prepared = prepare([batch], torch.from_numpy(blocks.block_of_word), blocks.num_blocks)
    hmm = hmm.to(dtype)
    exact = dtype == torch.float64
    close = dict(rtol=1e-8, atol=1e-10) if exact else dict(rtol=1e-3, atol=1e-4)
    potentials = hmm.potentials(kept)
    found = expectation(potentials, prepared)
    assert math.isclose(found.log_likelihood, plain.item(), rel_tol=1e-11 if exact else 1e-5)
    parts_of_rows = {1, min(2, potentials.log_emission.shape[1])}  # the rows of all states at once, or of every second
    shortcuts = ({}, {"value": False}, {"value": False, "tiles": found.tiles})
    for parts, shortcut in itertools.product(parts_of_rows, shortcuts):
        hmm.zero_grad()
        for part in range(parts):
            counted = expected_log_likelihood(
                hmm.potentials(kept), found.counts, found.pairs, **shortcut, part=part, parts=parts
            )
            (counted / parts).backward()
        for name, parameter, gradient in zip(names, hmm.parameters(), expected, strict=True):
            ours = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            theirs = torch.zeros_like(parameter) if gradient is None else gradient.to(dtype)
            assert_close(ours, theirs, **close, msg=lambda m, about=(name, parts, shortcut): f"{about}: {m}")


@pytest.mark.parametrize("dropped", [False, True])
def test_blocks_of_few_states_are_moved_together_or_one_by_one(dropped, monkeypatch):
    """The tiles, the value and its gradient do not depend on how tiles are moved, nor on how many rows are in hand."""
    hmm, blocks = small_hmm("paper")
    transition = hmm.potentials(keep(hmm, blocks) if dropped else None).transition
    pairs = torch.tensor([[0, 0, 1, 2, 2], [0, 2, 1, 0, 1]])
    slots = transition.states_of_block.shape[1]
    counts = torch.rand(5, slots, slots, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    found = []
    for few, rows in ((16, 512), (0, 512), (16, slots), (0, slots)):
        for module in (tiles, softmax):
            monkeypatch.setattr(module, "FEW_STATES", few)
            monkeypatch.setattr(module, "ROWS_AT_ONCE", rows)
        value = transition.expected_log_likelihood(*pairs, counts)
        gradients = torch.autograd.grad(value, (hmm.embedding.state, *hmm.networks["source"].parameters()), retain_graph=True)
        found.append((transition.tiles(*pairs), value, *gradients))
    for other in found[1:]:
        for ours, theirs in zip(found[0], other, strict=True):
            assert_close(ours, theirs, rtol=1e-11, atol=1e-13)


def test_tiles_side_by_side_in_parts_or_at_once(monkeypatch):
    """The value and its gradient do not depend on how many tiles of a block are in hand, and are those of the definition."""
    draw = torch.Generator().manual_seed(0)
    source, target = (torch.randn(3, 4, 5, dtype=torch.float64, generator=draw).requires_grad_() for _ in range(2))
    log_block = torch.randn(3, 4, 3, dtype=torch.float64, generator=draw).log_softmax(-1)
    pairs = torch.tensor([[0, 0, 0, 1, 2, 2], [0, 1, 2, 1, 0, 1]])
    counts = torch.rand(6, 4, 4, dtype=torch.float64, generator=draw)
    alive = torch.tensor([4, 3, 4])
    enterable = torch.arange(4)[None] < alive[:, None]
    counts = counts * enterable[pairs[0]][:, :, None] * enterable[pairs[1]][:, None]
    scores = torch.einsum("nid,njd->nij", source[pairs[0]], target[pairs[1]])
    scores = scores.masked_fill(~enterable[pairs[1]][:, None], -torch.inf)
    log_tiles = scores.log_softmax(-1) + log_block[pairs[0], :, pairs[1]][..., None]
    plain = (counts * log_tiles.masked_fill(counts == 0, 0.0)).sum()
    expected = (plain, *torch.autograd.grad(plain, (source, target)))
    transition = BlockFactored(log_block, source, target, None, enterable)
    for at_once in (1 << 20, 32, 1):
        monkeypatch.setattr("vlhmm.components.transitions.block_factored.ENTRIES_AT_ONCE", at_once)
        value = transition.expected_log_likelihood(*pairs, counts)
        found = (value, *torch.autograd.grad(value, (source, target)))
        for ours, theirs in zip(found, expected, strict=True):
            assert_close(ours, theirs, rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize("kind", KINDS)
def test_language_model_sums_every_state_path(kind):
    hmm, blocks = small_hmm(kind)
    model = HMMLanguageModel(VOCABULARY, HMMDistributions(hmm.potentials(), blocks))
    dense = dense_by_definition(hmm, blocks)
    for sentence in ([2], [3, 5, 0], [6, 1, 2, 2, 4]):
        tokens = torch.tensor([sentence])
        log_prob, _ = model.score_batch(tokens, torch.tensor([len(sentence)]), model.start(1))
        expected = log_likelihood_by_definition(dense, sentence).item()
        assert math.isclose(log_prob.sum().item(), expected, rel_tol=1e-11)


def test_scoring_within_a_small_memory_budget_changes_nothing():
    hmm, blocks = small_hmm("block-factored")
    tables = HMMDistributions(hmm.potentials(), blocks)
    tokens = torch.tensor([[2, 3, 4, 5, 6, 1, 2, 0, 3, 3], [6, 5, 4, 3, 2, 1, 1, 0, 2, 4]])
    lengths = torch.tensor([10, 9])
    plenty = HMMLanguageModel(VOCABULARY, tables)
    scarce = HMMLanguageModel(VOCABULARY, tables, memory=2 * 4 * 4 * 8)  # two tiles
    a, carry_a = plenty.score_batch(tokens, lengths, plenty.start(2))
    b, carry_b = scarce.score_batch(tokens, lengths, scarce.start(2))
    assert_close(a, b, **EXACT)
    assert_close(carry_a.alpha, carry_b.alpha, **EXACT)
    with pytest.raises(ConfigError, match="raise --memory"):
        HMMLanguageModel(VOCABULARY, tables, memory=10)


def test_permuted_slots_change_nothing():
    hmm, blocks = small_hmm("paper")
    twin, _ = small_hmm("paper")
    with torch.no_grad():
        twin.embedding.state[:, [0, 1, 2, 3]] = hmm.embedding.state[:, [2, 0, 3, 1]]
    tokens, lengths = torch.tensor([[2, 5, 3, 6, 0]]), torch.tensor([5])
    scores = []
    for model in (hmm, twin):
        lm = HMMLanguageModel(VOCABULARY, HMMDistributions(model.potentials(), blocks))
        scores.append(lm.score_batch(tokens, lengths, lm.start(1))[0])
    assert_close(*scores, **EXACT)


def test_parameter_counts_are_those_of_the_released_configuration():
    words = np.arange(10_001) % 128
    hmm = HMM(ModelConfig(), Blocks.partition_of(words, 128, 256))
    assert sum(p.numel() for p in hmm.parameters()) == 11_355_410
    half = HMM(ModelConfig(num_states=2**14, embedding="factored"), Blocks.partition_of(words, 128, 128))
    assert round(sum(p.numel() for p in half.parameters()) / 1e6, 1) == 5.6  # the paper's "+ block emb" row


@pytest.mark.parametrize("kind", ["paper", "additive", "block-factored-coded", "scalar"])
def test_first_loss_is_about_log_vocabulary(kind):
    words = np.arange(400) % 8
    blocks = Blocks.partition_of(words, 8, 16)
    settings = {"num_states": 128, "num_blocks": 8, "hidden_size": 64, **KINDS[kind]}
    hmm = HMM(ModelConfig(**settings), blocks)
    tables = HMMDistributions(hmm.potentials(), blocks)
    for state_distribution in (tables.start[None], tables.forward_step(tables.start[None])):
        log_prob = tables.emit(state_distribution).log()
        assert abs(-log_prob.mean().item() - math.log(400)) < 0.7
    assert tables.rows(torch.arange(128)).log().std() < 2  # nobody is certain of anything yet


@pytest.mark.parametrize("dropout,expected", [(0.0, 8), (0.5, 4), (0.75, 2), (0.99, 1)])
def test_dropout_keeps_its_share(dropout, expected):
    slots, alive = sample_kept(torch.tensor([8, 8, 8]), 8, dropout, torch.Generator().manual_seed(0))
    assert slots.shape == (3, expected) and (alive == expected).all()
    for row in slots.tolist():
        assert row == sorted(set(row))


def test_dropped_columns_leave_every_word_a_state():
    states_of_word = torch.tensor([[0, 1], [2, 3], [4, 5], [6, 7]])
    for seed in range(50):
        keep = sample_columns(states_of_word, 8, 0.75, torch.Generator().manual_seed(seed))
        assert keep[states_of_word].any(dim=1).all() and 4 <= keep.sum() <= 5


def test_dropout_is_uniform_without_replacement():
    seen = torch.zeros(6)
    generator = torch.Generator().manual_seed(0)
    for _ in range(3000):
        slots, _ = sample_kept(torch.tensor([6]), 6, 0.5, generator)
        seen[slots[0]] += 1
    chi2 = ((seen - 1500) ** 2 / 1500).sum()
    assert chi2 < 20.5  # 99.9% of chi-square with 5 degrees of freedom


def test_dropout_keeps_shares_of_uneven_blocks():
    slots, alive = sample_kept(torch.tensor([8, 4, 1]), 8, 0.5, torch.Generator().manual_seed(1))
    assert alive.tolist() == [4, 2, 1]
    assert (slots[1, :2] < 4).all() and slots[2, 0] == 0


def test_zero_dropout_equals_none():
    hmm, blocks = small_hmm("block-factored-coded")
    slots, alive = sample_kept(hmm.num_alive, blocks.states_per_block, 0.0, torch.Generator().manual_seed(0))
    with_mask = dense_by_definition(hmm, blocks, DropoutMask(slots=slots, num_alive=alive))
    for a, b in zip(with_mask, dense_by_definition(hmm, blocks), strict=True):
        assert_close(a, b, **EXACT)


def test_refusals():
    with pytest.raises(ConfigError, match="in \\[0, 1\\)"):
        TrainingConfig(state_dropout=1.0)
    with pytest.raises(ConfigError, match="not a multiple.*take 896 or 1024 states"):
        ModelConfig(num_states=1000, num_blocks=128)
    with pytest.raises(ConfigError, match="use transition=softmax"):
        ModelConfig(constraint="uniform", transition="block-factored")
    hmm, blocks = small_hmm("paper")
    with pytest.raises(ConfigError, match="different runs"):
        HMMLanguageModel(type(VOCABULARY)(VOCABULARY.words[:-1]), HMMDistributions(hmm.potentials(), blocks))
    assert small_blocks("paper").num_states == 12


@pytest.mark.parametrize("kind", KINDS)
def test_language_model_contract(kind):
    """Sums to one, splits with the carry, and does not care about padding, batch size or order."""
    hmm, blocks = small_hmm(kind)
    model = HMMLanguageModel(VOCABULARY, HMMDistributions(hmm.potentials(), blocks))
    check_language_model(model, np.random.default_rng(0))


@pytest.mark.parametrize(
    "parameterization,emissions,others",
    [("scalar", "emission_logits", "transition_logits"), ("neural", "word.weight", "word.bias")],
)
def test_emissions_begin_as_far_apart_as_asked(parameterization, emissions, others):
    blocks = small_blocks("scalar")
    about = {"num_states": blocks.num_states, "num_blocks": 3, "parameterization": parameterization}
    near, far = (HMM(ModelConfig(**about, emission_init_scale=spread), blocks, seed=3) for spread in (1.0, 6.0))
    assert_close(far.get_parameter(emissions), 6 * near.get_parameter(emissions))
    assert_close(far.get_parameter(others), near.get_parameter(others))
    with pytest.raises(ConfigError, match="emission_init_scale=0"):
        ModelConfig(emission_init_scale=0.0)


@pytest.mark.parametrize("rule", ["reset", "carry"])
@pytest.mark.parametrize("kind", KINDS)
def test_three_implementations_and_the_filter_give_one_score(kind, rule):
    hmm, blocks = small_hmm(kind, dtype=torch.float64)
    with torch.no_grad():
        model = HMMLanguageModel(VOCABULARY, HMMDistributions(hmm.potentials(), blocks), rule)
    words = [word for word in VOCABULARY.words if not word.startswith("<")]
    for text in ([], words[:1], words, [*words[:2], "<eos>", *words[::-1]]):  # an <eos> inside restarts the chain
        expected = model.score(text)
        for implementation in ("numba", "torch", "log-space"):
            assert model.score(text, implementation=implementation) == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("kind", [BlockFactored, LowRank, softmax.Softmax])
def test_every_kind_of_transition_has_the_methods_of_the_protocol(kind):
    for name, method in vars(Transitions).items():
        if name.startswith("_") or not callable(method):
            continue
        asked, given = inspect.signature(method).parameters, inspect.signature(getattr(kind, name)).parameters
        assert list(given)[: len(asked)] == list(asked), name
