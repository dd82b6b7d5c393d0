"""A small HMM held as dense matrices: the queries' other model to be tested on."""

from collections import OrderedDict

import numpy as np
import torch
from torch import Tensor

from vlhmm.data.vocabulary import Vocabulary
from vlhmm.distributions import HMMDistributions

WORDS = ("a", "b", "c", "d", "e", "f")


class DenseDistributions(HMMDistributions):
    """`HMMDistributions` from start (S,), A (S, S) and O (S, V), by plain matrix products."""

    def __init__(self, start, transition, emission, block_of_word, states_of_block, dtype=torch.float64):
        self.dtype, self.device = dtype, torch.device("cpu")
        self.matrices = (start, transition, emission)
        self.start = torch.tensor(start, dtype=dtype).double()
        self.A, self.O = (torch.tensor(m, dtype=dtype) for m in (transition, emission))
        self.block_of_word = torch.tensor(block_of_word)
        self.states_of_block = torch.tensor(states_of_block)
        self.num_blocks, self.states_per_block = self.states_of_block.shape
        self.num_states, self.vocab_size = self.O.shape
        words = torch.arange(self.vocab_size)[:, None]
        self.emission = self.O[self.states_of_block[self.block_of_word], words]
        self.emission_total = torch.ones(self.num_states, dtype=torch.float64)
        self._kept_tiles = OrderedDict()

    def double(self):
        exact = DenseDistributions(*self.matrices, self.block_of_word.tolist(), self.states_of_block.tolist())
        return exact.under(self.rule, self.eos)

    def _spread(self, blocks, rows: Tensor) -> Tensor:
        dense = rows.new_zeros(len(blocks), self.num_states)
        for i, block in enumerate(torch.as_tensor(blocks).tolist()):
            dense[i].index_add_(0, self.states_of_block[block], rows[i])
        return dense

    def forward_step(self, alpha):
        return alpha.double() @ self.A.double()

    def forward_step_from(self, blocks, alpha):
        return self._spread(blocks, alpha.double()) @ self.A.double()

    def backward_step(self, beta):
        return beta.double() @ self.A.T.double()

    def backward_step_to(self, blocks, beta):
        return self._spread(blocks, beta.double()) @ self.A.T.double()

    def backward_step_at(self, block, beta):
        return beta.double() @ self.A[self.states_of_block[block]].T.double()

    @property
    def real_states(self):
        return torch.arange(self.num_states)

    entered_states = real_states

    def entering_rows(self, states, out=None):
        return self.A[states]

    def tile(self, g, g2):
        return self.A[self.states_of_block[g]][:, self.states_of_block[g2]]

    def tiles(self, sources, targets):
        return torch.stack([self.tile(g, g2) for g, g2 in zip(sources.tolist(), targets.tolist(), strict=True)])

    def emit(self, predicted):
        return predicted.double() @ self.O.double()

    def raw_rows(self, states):
        return self.A[states]

    def normalized_rows(self, states, dtype):
        return self.A[states].to(dtype)

    def sample_next(self, states, generator):
        return torch.multinomial(self.A[states].double(), 1, generator=generator)[:, 0]

    def dense(self):
        return self.A, self.O


class DenseModel:
    """What the queries ask of a model: distributions, a vocabulary and a rule."""

    def __init__(self, distributions, vocabulary, rule):
        self.distributions = distributions.under(rule, vocabulary.eos)
        self.vocabulary, self.rule = vocabulary, rule


def random_model(
    seed: int,
    num_words: int = 3,
    num_blocks: int = 2,
    size: int = 2,
    kind: str = "partition",
    rule: str = "reset",
    dtype=torch.float64,
) -> DenseModel:
    """A random model of `num_words` words, <unk> and <eos>; kinds: partition, dead, uniform, zeros.

    "dead": slots that are never entered. "uniform": every word has its own subset of the states, overlapping.
    "zeros": a partition with exact zeros in A and O.
    """
    random = np.random.default_rng(seed)
    vocabulary = Vocabulary((*WORDS[:num_words], "<unk>", "<eos>"))
    num_types = len(vocabulary)
    if kind == "uniform":
        num_states = max(size, num_blocks * size - 1)
        block_of_word = np.arange(num_types)
        states_of_block = np.stack([np.sort(random.choice(num_states, size, replace=False)) for _ in range(num_types)])
    else:
        num_blocks = min(num_blocks, num_types)
        num_states = num_blocks * size
        block_of_word = np.concatenate(
            [np.arange(num_blocks), random.integers(num_blocks, size=num_types - num_blocks)]
        )
        random.shuffle(block_of_word)
        states_of_block = np.arange(num_states).reshape(num_blocks, size)
    allowed = np.zeros((num_states, num_types), dtype=bool)
    for word, block in enumerate(block_of_word):
        allowed[states_of_block[block], word] = True
    emission = random.gamma(0.7, size=(num_states, num_types)) * allowed
    transition = random.gamma(0.7, size=(num_states, num_states))
    start = random.gamma(0.7, size=num_states)
    if kind == "zeros":
        transition *= random.random(transition.shape) < 0.7
        start *= random.random(num_states) < 0.7
        thinned = emission * (random.random(emission.shape) < 0.7)
        emission = np.where(thinned.sum(1, keepdims=True) > 0, thinned, emission)
    enterable = emission.sum(1) > 0  # under "uniform" a state may have no word
    if kind == "dead" and size > 1:
        enterable[states_of_block[:-1, -1]] = False
    transition *= enterable
    start *= enterable
    transition[transition.sum(1) == 0] = enterable
    start = start if start.sum() > 0 else enterable.astype(float)
    transition /= transition.sum(1, keepdims=True)
    start /= start.sum()
    emission /= np.where(emission.sum(1, keepdims=True) > 0, emission.sum(1, keepdims=True), 1)
    distributions = DenseDistributions(
        start, transition, emission, block_of_word.tolist(), states_of_block.tolist(), dtype
    )
    return DenseModel(distributions, vocabulary, rule)


def kinds():
    """Kinds of random models, for parametrized tests."""
    return ("partition", "dead", "uniform", "zeros")


def oracle_model(model) -> tuple:
    """The model as the oracle takes it: dense matrices, the id of <eos>, the rule."""
    distributions = model.distributions
    transition, emission = distributions.dense()
    return (
        distributions.start.numpy(),
        transition.double().numpy(),
        emission.double().numpy(),
        model.vocabulary.eos,
        model.rule,
    )
