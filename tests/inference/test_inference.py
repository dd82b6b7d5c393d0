"""Inference against enumeration, the fast paths against the plain one, and the posterior identity."""

import math

import numpy as np
import oracle
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.testing import assert_close

from vlhmm import inference
from vlhmm.inference import Chain, Counts, Potentials, log_space, numba_backend, prefix_scan, torch_backend

EXACT = dict(rtol=1e-11, atol=1e-12)  # float64 sums of at most a few hundred products


def random_chain(seed, batch=3, time=4, size=3, blocks=2, words=3, tiles=3, sparse=False, dtype=torch.float64):
    """A random model and a ragged batch with fresh starts in the middle; a carry where a row begins by an edge."""
    draw = torch.Generator().manual_seed(seed)

    def table(*shape):
        values = torch.rand(*shape, generator=draw, dtype=torch.float64)
        if sparse:
            values *= torch.rand(*shape, generator=draw) < 0.7
        return (values / values.sum(-1, keepdim=True).clamp(min=1e-9)).to(dtype)

    potentials = Potentials(table(blocks, size), table(words, size), table(tiles, size, size))
    rows = (batch, time)
    edge_of = torch.randint(-1, tiles, rows, generator=draw)
    chain = Chain(
        torch.randint(0, blocks, rows, generator=draw),
        torch.randint(0, words, rows, generator=draw),
        edge_of,
        torch.randint(1, time + 1, (batch,), generator=draw),
    )
    sparse = False  # the carried posterior is a distribution
    return potentials, chain, table(batch, size)


def enumerate_row(potentials, chain, carry, b):
    length = int(chain.lengths[b])
    start, emission, tiles = (table.double().tolist() for table in potentials)
    return oracle.path_probabilities(
        start,
        emission,
        tiles,
        *(index[b, :length].tolist() for index in chain[:3]),
        carry=carry[b].double().tolist(),
    )


sizes = st.fixed_dictionaries(
    dict(
        seed=st.integers(0, 10**6),
        batch=st.integers(1, 3),
        time=st.integers(1, 4),
        size=st.integers(1, 3),
        sparse=st.booleans(),
    )
)


@given(sizes)
@settings(max_examples=40, deadline=None)
def test_every_form_sums_every_path(drawn):
    potentials, chain, carry = random_chain(**drawn)
    logs = [table.log() for table in potentials]
    expanded = log_space.expand(*logs, chain, carry.log())
    plain = log_space.log_likelihood(log_space.forward(*expanded), chain.lengths)
    by_scan = log_space.log_likelihood(prefix_scan.forward(*expanded), chain.lengths)
    by_torch = torch_backend.forward(potentials, chain, carry).log_scale.sum(1)
    by_kernel = numba_backend.forward(potentials, chain, carry).log_scale.sum(1)
    for b in range(len(chain.lengths)):
        expected = oracle.log_sum(enumerate_row(potentials, chain, carry, b).values())
        for name, total in dict(plain=plain, scan=by_scan, torch=by_torch, kernel=by_kernel).items():
            assert math.isclose(total[b], expected, rel_tol=1e-11, abs_tol=1e-11), (name, b)


@pytest.mark.parametrize("fast", [torch_backend, numba_backend])
@given(sizes)
@settings(max_examples=30, deadline=None)
def test_posteriors_equal_enumeration(fast, drawn):
    potentials, chain, carry = random_chain(**{**drawn, "sparse": False})
    passed = fast.forward(potentials, chain, carry)
    posterior, right = fast.backward(potentials, chain, passed)
    for b, length in enumerate(chain.lengths.tolist()):
        table = enumerate_row(potentials, chain, carry, b)
        for t in range(length):
            for slot, expected in oracle.marginal(table, t).items():
                assert math.isclose(posterior[b, t, slot], expected, abs_tol=1e-12)
            if chain.edge_of[b, t] >= 0:
                before = passed.alpha[b, t - 1] if t else carry[b]
                edge = before[:, None] * potentials.tiles[chain.edge_of[b, t]] * right[b, t]
                for (i, j), expected in oracle.pair_marginal(table, t).items():
                    assert math.isclose(edge[i, j], expected, abs_tol=1e-12)
        assert not posterior[b, length:].any() and not right[b, length:].any()


def test_posteriors_are_distributions():
    potentials, chain, carry = random_chain(5, batch=4, time=6, size=3)
    posterior = inference.posteriors(potentials, chain, carry)
    assert_close(posterior.sum(-1), chain.live.double(), **EXACT)
    passed = torch_backend.forward(potentials, chain, carry)
    assert_close(posterior, torch_backend.backward(potentials, chain, passed)[0], **EXACT)


@pytest.mark.parametrize("dtype,tolerance", [(torch.float64, 1e-12), (torch.float32, 2e-5)])
@pytest.mark.parametrize("size", [1, 3, 4, 7, 32])
def test_kernels_equal_torch(dtype, tolerance, size):
    potentials, chain, carry = random_chain(size, batch=5, time=12, size=size, tiles=6, words=9, dtype=dtype)
    close = dict(rtol=tolerance, atol=tolerance)
    a, b = torch_backend.forward(potentials, chain, carry), numba_backend.forward(potentials, chain, carry)
    assert_close(a.alpha, b.alpha, **close)
    assert_close(a.log_scale, b.log_scale, **close)
    plain, fast = Counts.zeros_like(potentials), Counts.zeros_like(potentials)
    torch_backend.add_expected_counts(plain, potentials, chain, carry)
    inference.add_expected_counts(fast, potentials, chain, carry)
    inference.finish_counts(fast, potentials)
    for table_a, table_b in zip(plain, fast, strict=True):
        assert_close(table_a, table_b, rtol=0, atol=tolerance * 50)  # counts are sums over up to 60 tokens


def test_gradient_is_the_posterior_identity():
    potentials, chain, carry = random_chain(11, batch=4, time=6, size=3)
    logs = [table.log().requires_grad_() for table in potentials]
    log_space.log_likelihood(
        log_space.forward(*log_space.expand(*logs, chain, carry.log())), chain.lengths
    ).sum().backward()
    expected = [table.grad.clone() for table in logs]
    for table in logs:
        table.grad = None
    (2 * inference.log_likelihood(*logs, chain, carry)).backward()
    for table, gradient in zip(logs, expected, strict=True):
        assert_close(table.grad, 2 * gradient, **EXACT)


def test_gradient_survives_impossible_edges():
    potentials, chain, carry = random_chain(3, size=3, sparse=True, batch=6)
    logs = [table.log().requires_grad_() for table in potentials]
    inference.log_likelihood(*logs, chain, carry).backward()
    assert all(table.grad.isfinite().all() for table in logs)


def test_counts_gathered_over_batches_equal_one_batch():
    potentials, chain, carry = random_chain(8, batch=6, time=5)
    whole, parts = Counts.zeros_like(potentials), Counts.zeros_like(potentials)
    inference.add_expected_counts(whole, potentials, chain, carry)
    for rows in (slice(0, 2), slice(2, 6)):
        inference.add_expected_counts(parts, potentials, Chain(*(i[rows] for i in chain)), carry[rows])
    for a, b in zip(whole, parts, strict=True):
        assert_close(a, b, **EXACT)


def test_splitting_a_row_with_the_carry_changes_nothing():
    potentials, chain, carry = random_chain(21, batch=3, time=8, size=3)
    chain = chain._replace(lengths=torch.full((3,), 8))
    whole = inference.forward(potentials, chain, carry)
    left = Chain(*(i[:, :3] for i in chain[:3]), torch.full((3,), 3))
    right = Chain(*(i[:, 3:] for i in chain[:3]), torch.full((3,), 5))
    first = inference.forward(potentials, left, carry)
    second = inference.forward(potentials, right, first.alpha[:, -1])
    assert_close(torch.cat([first.log_scale, second.log_scale], 1), whole.log_scale, **EXACT)


def test_all_ones_potentials_count_paths():
    size, time = 3, 5
    ones = Potentials(torch.ones(1, size).double(), torch.ones(1, size).double(), torch.ones(1, size, size).double())
    zero = torch.zeros(1, time, dtype=torch.long)
    chain = Chain(zero, zero, torch.tensor([[-1, 0, 0, 0, 0]]), torch.tensor([time]))
    assert_close(inference.forward(ones, chain).log_scale.sum().exp().item(), float(size**time), rtol=1e-12, atol=0)


def test_impossible_text_has_probability_zero_not_nan():
    potentials, chain, carry = random_chain(2, batch=1, time=3)
    silent = potentials._replace(emission=torch.zeros_like(potentials.emission))
    for fast in (torch_backend, numba_backend):
        passed = fast.forward(silent, chain, carry)
        assert passed.log_scale.sum() == -math.inf
        assert all(not message.isnan().any() for message in fast.backward(silent, chain, passed))


@given(sizes)
@settings(max_examples=30, deadline=None)
def test_viterbi_is_the_best_of_all_paths(drawn):
    potentials, chain, carry = random_chain(**{**drawn, "sparse": False})
    logs = [table.log() for table in potentials]
    path, score = inference.viterbi(*logs, chain, carry.log())
    total = inference.forward(potentials, chain, carry).log_scale.sum(1)
    for b, length in enumerate(chain.lengths.tolist()):
        table = enumerate_row(potentials, chain, carry, b)
        assert math.isclose(score[b], math.log(max(table.values())), rel_tol=1e-11, abs_tol=1e-11)
        chosen = tuple(path[b, :length].tolist())
        assert math.isclose(max(p for key, p in table.items() if key[1:] == chosen), max(table.values()))
        assert score[b] <= total[b] + 1e-9
        assert (path[b, length:] == -1).all()


def test_posterior_samples_have_the_posterior_frequencies():
    potentials, chain, carry = random_chain(4, batch=1, time=3, size=2)
    many = 20_000
    repeated = Chain(*(i.expand(many, *i.shape[1:]).contiguous() for i in chain))
    logs = [table.log() for table in potentials]
    path = inference.sample_posterior(*logs, repeated, torch.Generator().manual_seed(0), carry.log().expand(many, -1))
    table = enumerate_row(potentials, chain, carry, 0)
    total, length = sum(table.values()), int(chain.lengths[0])
    expected = {}
    for key, p in table.items():
        expected[key[1:]] = expected.get(key[1:], 0) + p / total
    seen = {}
    for row in path[:, :length].tolist():
        seen[tuple(row)] = seen.get(tuple(row), 0) + 1
    chi2 = sum((seen.get(key, 0) - many * p) ** 2 / (many * p) for key, p in expected.items())
    # 99.9% quantile of chi-square with at most 7 degrees of freedom
    assert chi2 < 24.3


def test_counts_do_not_depend_on_the_number_of_threads():
    potentials, chain, carry = random_chain(9, batch=16, time=20, size=8, tiles=5, dtype=torch.float32)
    results = []
    before = torch.get_num_threads()
    try:
        for threads in (1, 3):
            torch.set_num_threads(threads)
            counts = Counts.zeros_like(potentials)
            inference.add_expected_counts(counts, potentials, chain, carry)
            results.append(inference.finish_counts(counts, potentials))
    finally:
        torch.set_num_threads(before)
    for a, b in zip(*results, strict=True):
        assert np.array_equal(a.numpy(), b.numpy())
