"""Fused products against the plain expressions they stand for, values and gradients."""

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from vlhmm.components import fused
from vlhmm.components.networks import composed, network

CLOSE = dict(rtol=1e-11, atol=1e-13)


def randn(*shape, seed=0):
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(*shape, generator=generator, dtype=torch.float64).requires_grad_()


def assert_same(ours, plain, inputs):
    """Equal values, and equal gradients of a random weighting of them."""
    assert_close(ours, plain, **CLOSE)
    weighting = torch.randn(plain.shape, dtype=plain.dtype, generator=torch.Generator().manual_seed(3))
    gradients = [torch.autograd.grad((result * weighting).sum(), inputs) for result in (ours, plain)]
    for a, b in zip(*gradients, strict=True):
        assert_close(a, b, **CLOSE)


@pytest.mark.parametrize("shape", [(1, 1), (3, 5), (7, 300)])  # the last: more rows than one chunk holds
def test_linear_log_softmax(shape):
    inputs = randn(*shape, 6), randn(4, 6), randn(4)
    hidden, weight, bias = inputs
    assert_same(fused.linear_log_softmax(*inputs), (hidden @ weight.T + bias).log_softmax(-1), inputs)


@pytest.mark.parametrize("kernels", ["0", "1"])
@pytest.mark.parametrize("states", [1, 3, 4, 5, 8, 9])  # compiled loops take four at a time, up to eight
def test_blocked_log_softmax(states, kernels, monkeypatch):
    monkeypatch.setenv("VLHMM_KERNELS", kernels)
    sizes, words = [1, 4, 2], torch.tensor([3, 0, 6, 1, 2, 5, 4])
    inputs = randn(3, states, 6), randn(7, 6), randn(7)
    hidden, weight, bias = inputs
    blocks = [
        (h @ weight[w].T + bias[w]).log_softmax(-1).T for h, w in zip(hidden, words.split(sizes), strict=True)
    ]
    assert_same(fused.blocked_log_softmax(*inputs, words, sizes), torch.cat(blocks)[words.argsort()], inputs)


def test_emission_kernels_give_the_same_bits_on_any_number_of_threads(monkeypatch):
    inputs = [t.float() for t in (randn(5, 4, 16), randn(40, 16), randn(40))]
    words, sizes = torch.randperm(40, generator=torch.Generator().manual_seed(0)), [8, 1, 20, 4, 7]
    found = []
    for threads in (1, 2, 3):
        monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
        leaves = [t.detach().requires_grad_() for t in inputs]
        table = fused.blocked_log_softmax(*leaves, words, sizes)
        found.append([table, *torch.autograd.grad((table * table).sum(), leaves)])
    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], other, strict=True))


@pytest.mark.parametrize("shape", [(1, 1), (3, 5), (7, 300)])  # the last: more rows than one chunk holds
def test_layer_norm(shape):
    inputs = randn(*shape, 6), randn(6), randn(6)
    assert_same(fused.layer_norm(*inputs, 1e-5), nn.functional.layer_norm(inputs[0], (6,), *inputs[1:], 1e-5), inputs)


def test_take():
    table, slots = randn(3, 5, 6), torch.tensor([[0, 4], [3, 1], [2, 3]])
    plain = table.gather(1, slots[..., None].expand(-1, -1, 6))
    assert_same(fused.take(table, slots), plain, (table,))


def test_composed_maps_are_one_after_the_other():
    inner, outer, x = network("linear", 6).double(), nn.Linear(6, 4).double(), randn(5, 6)
    inputs = (*inner.parameters(), *outer.parameters())
    assert_same(nn.functional.linear(x, *composed(outer, inner)), outer(inner(x)), inputs)
