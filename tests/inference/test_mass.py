"""A float32 model keeps probability mass over many steps: products are summed in float64 over normalized rows."""

import numpy as np
import pytest
import torch

from dense_hmm import DenseModel
from models import KINDS, VOCABULARY, small_hmm
from vlhmm.analysis.verify import verify
from vlhmm.clustering.blocks import Blocks
from vlhmm.components.config import ModelConfig
from vlhmm.distributions import HMMDistributions
from vlhmm.hmm import HMM

STEPS = 100


def distributions_of(kind: str) -> HMMDistributions:
    hmm, blocks = small_hmm(kind, dtype=torch.float32)
    with torch.no_grad():
        return HMMDistributions(hmm.potentials(), blocks).under("carry", VOCABULARY.eos)


@pytest.mark.parametrize("kind", KINDS)
def test_mass_is_kept_over_many_steps(kind):
    distributions = distributions_of(kind)
    alive = torch.zeros(distributions.num_states, dtype=torch.float64)
    alive[distributions.real_states] = 1  # products pass over the padding of uneven blocks
    alpha, beta = distributions.start[None], alive[None]
    for _ in range(STEPS):
        alpha, beta = distributions.forward_step(alpha), distributions.backward_step(beta)
    assert abs(float(alpha.sum()) - 1) < 1e-9
    assert float((beta - alive).abs().max()) < 1e-9
    assert abs(float(distributions.emit(alpha).sum()) - 1) < 1e-9
    blocks = list(range(distributions.num_blocks))
    inside = alive[distributions.states_of_block]
    inside /= inside.sum(1, keepdim=True)
    assert float((distributions.forward_step_from(blocks, inside).sum(1) - 1).abs().max()) < 1e-9
    for block in blocks:
        ones = distributions.backward_step_at(block, alive[None])[0]
        assert float((ones - alive[distributions.states_of_block[block]]).abs().max()) < 1e-9


@pytest.mark.parametrize("kind", KINDS)
def test_float32_products_equal_those_of_the_float64_model(kind):
    distributions = distributions_of(kind)
    double = distributions.double()
    alpha = torch.rand(3, distributions.num_states, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    alpha[1] *= 1e-60  # below the smallest float32
    for ours, theirs in (
        (distributions.forward_step, double.forward_step),
        (distributions.backward_step, double.backward_step),
        (distributions.emit, double.emit),
    ):
        torch.testing.assert_close(ours(alpha), theirs(alpha), rtol=3e-5, atol=0)


def test_emissions_of_a_dense_model_with_many_words_sum_to_one():
    blocks = Blocks.none(9000, 16)
    hmm = HMM(ModelConfig(num_states=16, num_blocks=1, hidden_size=8, constraint="none"), blocks, seed=3)
    with torch.no_grad():
        for parameter in hmm.parameters():
            parameter += torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1))
        distributions = HMMDistributions(hmm.potentials(), blocks).under("reset", 0)
    stored = distributions.emission.double().sum(0).numpy()
    assert np.abs(stored - 1).max() < 1e-7
    every = distributions.class_emission(torch.arange(9000))
    assert float((every - 1).abs().max()) < 1e-12


def test_verify_checks_mass_over_many_steps():
    hmm, blocks = small_hmm("block-factored", dtype=torch.float32)
    with torch.no_grad():
        model = DenseModel(HMMDistributions(hmm.potentials(), blocks), VOCABULARY, "carry")
    found = {check.name: check for check in verify(model, num_texts=1)}["mass kept over many steps"]
    assert found.passed and found.cases == 2 * STEPS and found.bound == 1e-9
