"""The next word. Input: a context. Output: p(x | context) of every word, exactly."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from torch import Tensor

from vlhmm.data.user_text import encode_words
from vlhmm.data.vocabulary import Vocabulary
from vlhmm.distributions import HMMDistributions
from vlhmm.errors import QueryError
from vlhmm.queries.sequence import read
from vlhmm.results import Result, html_table

if TYPE_CHECKING:
    from vlhmm.language_model import HMMLanguageModel


@dataclass(frozen=True, slots=True)
class WordProbability(Result):
    """A word and its log-probability in nats."""

    word: str
    log_prob: float

    @property
    def probability(self) -> float:
        return math.exp(self.log_prob)


@dataclass(frozen=True, eq=False)
class WordDistribution:
    """A distribution over the vocabulary."""

    vocabulary: Vocabulary
    probabilities: np.ndarray  # (V,) float64

    def __repr__(self) -> str:
        shown = ", ".join(f"{each.word} {each.probability:.3g}" for each in self.top(3))
        return f"WordDistribution({len(self.probabilities):,} words: {shown}, ...)"

    def _repr_html_(self) -> str:
        return html_table("Most probable words", {each.word: f"{each.probability:.4g}" for each in self.top(10)})

    def to_dict(self) -> dict[str, float]:
        """Return {word: p(word)}, most probable first."""
        return {each.word: each.probability for each in self.top()}

    def __getitem__(self, word: str) -> float:
        """Return p(word); a word beyond the vocabulary has that of <unk>."""
        return float(self.probabilities[self.vocabulary.id_of.get(word, self.vocabulary.unk)])

    def log_prob(self, word: str) -> float:
        """Return log p(word) in nats."""
        return log(self[word])

    def top(self, k: int | None = None) -> list[WordProbability]:
        """Return the k most probable words, most probable first (ties by id); all of them unless `k` is given."""
        size = len(self.probabilities)
        if k is not None and k < 1:
            raise QueryError(f"top_k is {k}, expected at least 1")
        count = size if k is None else min(k, size)
        if count < size // 8:
            near = np.argpartition(-self.probabilities, count - 1)[:count]
            least = self.probabilities[near].min()
            chosen = np.flatnonzero(self.probabilities >= least)  # every word tied with the last: ties go by id
        else:
            chosen = np.arange(size)
        order = chosen[np.argsort(-self.probabilities[chosen], kind="stable")][:count]
        return [WordProbability(self.vocabulary.words[i], log(float(self.probabilities[i]))) for i in order]

    @property
    def entropy(self) -> float:
        """-sum_x p(x) log p(x), in nats."""
        positive = self.probabilities[self.probabilities > 0]
        return float(-(positive * np.log(positive)).sum())


def log(value: float) -> float:
    """Return log(value), or -inf at zero."""
    return math.log(value) if value > 0 else -math.inf


def predict_after(distributions: HMMDistributions, block: int | None, alpha: Tensor | None) -> Tensor:
    """Return (S,) p(z_{t+1} | x_<=t) from a filtered posterior on `block`, or from a fresh start (None)."""
    if block is None or alpha is None:
        return distributions.start
    return distributions.forward_step_from([block], alpha[None])[0]


def distribution_after(
    distributions: HMMDistributions, vocabulary: Vocabulary, block: int | None, alpha: Tensor | None
) -> WordDistribution:
    """Return p(x_{t+1} | x_<=t), from a filtered posterior on the last word's K states."""
    words = distributions.emit(predict_after(distributions, block, alpha)[None])[0]
    return WordDistribution(vocabulary, words.cpu().numpy())


def next_distribution(model: "HMMLanguageModel", context: str | Sequence[str] = "") -> WordDistribution:
    """Return p(x | context) of every word x; words beyond the vocabulary are read as <unk>."""
    distributions = model.distributions
    ids = encode_words(model.vocabulary, context).ids
    return distribution_after(distributions, model.vocabulary, *after(distributions, ids))


def after(distributions: HMMDistributions, ids: Sequence[int]) -> tuple[int | None, Tensor | None]:
    """Return (block, p(z | x) on its states) after a text, both None if the chain restarts; refuse impossible texts."""
    passed = read(distributions, ids)
    if -math.inf in passed.log_probs:
        raise impossible_context()
    if not ids or distributions.restarts(ids[-1]):
        return None, None
    return distributions.block(ids[-1]), passed.alpha


def impossible_context() -> QueryError:
    return QueryError("the context has probability zero under the model: nothing can be asked given it")
