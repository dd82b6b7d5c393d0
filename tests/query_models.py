"""Small models to ask: random dense ones by hypothesis, and real `HMMDistributions` of every parameterization."""

import torch
from hypothesis import settings
from hypothesis import strategies as st

from dense_hmm import DenseModel, random_model
from models import KINDS, VOCABULARY, small_hmm
from vlhmm.distributions import HMMDistributions

RULES = ("reset", "carry")
MANY = settings(deadline=None, max_examples=60, derandomize=True)


def real_model(kind: str, rule: str, seed: int = 0, dtype: torch.dtype = torch.float64) -> DenseModel:
    """A model of one of the package's own parameterizations, with its real tables."""
    hmm, blocks = small_hmm(kind, seed, dtype)
    with torch.no_grad():
        return DenseModel(HMMDistributions(hmm.potentials(), blocks), VOCABULARY, rule)


REAL = [(kind, rule) for i, kind in enumerate(KINDS) for rule in (RULES if i % 3 == 0 else (RULES[i % 2],))]


@st.composite
def models(draw, max_words: int = 3, rules: tuple[str, ...] = RULES) -> DenseModel:
    """A random dense model: 1 to 3 states a block, dead slots, overlapping blocks, exact zeros."""
    return random_model(
        seed=draw(st.integers(0, 10_000)),
        num_words=draw(st.integers(1, max_words)),
        num_blocks=draw(st.integers(1, 3)),
        size=draw(st.integers(1, 3)),
        kind=draw(st.sampled_from(("partition", "dead", "uniform", "zeros"))),
        rule=draw(st.sampled_from(rules)),
    )


@st.composite
def texts(draw, model: DenseModel, min_size: int = 0, max_size: int = 4) -> list[str]:
    """Words of the model's vocabulary, <eos> and <unk> included, and now and then one beyond it."""
    words = st.sampled_from((*model.vocabulary.words, "zzz"))
    return draw(st.lists(words, min_size=min_size, max_size=max_size))


def ids_of(model, words) -> list[int]:
    """Ids, by the vocabulary's own table."""
    return [model.vocabulary.id_of.get(word, model.vocabulary.id_of["<unk>"]) for word in words]
