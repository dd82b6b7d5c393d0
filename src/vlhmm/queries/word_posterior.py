r"""A word given both sides. Input: a text. Output: $p(x_t | x_{\ne t})$ of every word, and which words are
unexpected.

$p(x_t = w | x_{\ne t}) \propto \sum_z p(z_t = z | x_{<t})\, p(w | z)\, p(x_{>t} | z)$: the left factor is
one pass from the K states of the word before to all S, the right one from the K states of the word after;
all places of a text in one batch. The text follows a restart, or another text (`before`).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from vlhmm.data.user_text import DEFAULT_MEMORY, encode_sentence, memory_check
from vlhmm.distributions import HMMDistributions
from vlhmm.errors import QueryError
from vlhmm.queries.next_word import WordDistribution, WordProbability
from vlhmm.queries.prefix import Prefix
from vlhmm.queries.sequence import blocks_before, forward
from vlhmm.results import Result

if TYPE_CHECKING:
    from vlhmm.language_model import HMMLanguageModel

_PLACES_AT_ONCE = 32


@dataclass(frozen=True, slots=True)
class Surprise(Result):
    """A word of a text, against what the model expects there given everything else."""

    position: int  # 0 is the first word
    word: str  # as written
    log_prob: float  # log p(word | all other words), nats; of <unk>, for a word beyond the vocabulary
    rank: int  # 1: no word is more probable there
    expected: list[WordProbability]  # the most probable words
    oov: bool


def word_posterior(
    model: "HMMLanguageModel", text: str | Sequence[str], position: int, eos: bool = True, allow_eos: bool = False
) -> WordDistribution:
    """Return p(x | all other words of the text) for the place `position` (0 the first word, -1 the last).

    The <eos> after the text is one of the other words, if `eos`; the word sought is none, unless `allow_eos`.
    """
    words, ids = encode_sentence(model.vocabulary, text, eos)
    count = len(words) - eos
    if not -count <= position < count:
        raise QueryError(f"position {position} in a text of {count} words, expected {-count} to {count - 1}")
    (found,) = _posteriors(model.distributions, ids, [position % count], allow_eos, None)
    return _distribution(model, found)


def word_posteriors(
    model: "HMMLanguageModel",
    text: str | Sequence[str],
    eos: bool = True,
    allow_eos: bool = False,
    memory: float = DEFAULT_MEMORY,
    before: Prefix | None = None,
) -> Iterator[WordDistribution]:
    """Yield the same for every place of the text, in order, given the text `before` too."""
    words, ids = encode_sentence(model.vocabulary, text, eos)
    distributions = model.distributions
    count = len(words) - eos
    at_once = min(count, _PLACES_AT_ONCE)
    num_bytes = 16 * len(ids) * distributions.states_per_block + 32 * at_once * distributions.num_states
    memory_check(f"a text of {count:,} words", num_bytes, memory, "split the text")
    for found in _posteriors(distributions, ids, list(range(count)), allow_eos, before):
        yield _distribution(model, found)


def surprisal(
    model: "HMMLanguageModel",
    text: str | Sequence[str],
    top_k: int = 5,
    eos: bool = True,
    memory: float = DEFAULT_MEMORY,
    before: Prefix | None = None,
) -> list[Surprise]:
    """Return the words of a text, the least expected first, each with the `top_k` words expected in its place."""
    words, ids = encode_sentence(model.vocabulary, text, eos)
    found = []
    for position, expected in enumerate(word_posteriors(model, text, eos, memory=memory, before=before)):
        probability = expected.probabilities[ids[position]]
        found.append(
            Surprise(
                position,
                words[position],
                float(np.log(probability)) if probability > 0 else -float("inf"),
                int((expected.probabilities > probability).sum()) + 1,
                expected.top(top_k),
                words[position] not in model.vocabulary,
            )
        )
    return sorted(found, key=lambda surprise: surprise.log_prob)


def _distribution(model: "HMMLanguageModel", weights: np.ndarray) -> WordDistribution:
    total = weights.sum()
    if not total > 0:
        raise QueryError("the other words have probability zero under the model, whatever the word in this place")
    return WordDistribution(model.vocabulary, weights / total)


def _posteriors(
    distributions: HMMDistributions, ids: list[int], places: list[int], allow_eos: bool, before: Prefix | None
) -> Iterator[np.ndarray]:
    """Yield (V,) weights proportional to p(x_t = w | the rest), for each place t."""
    if not places:
        return
    start = distributions.start if before is None else before.all_states()
    alpha = forward(
        distributions, ids, start[distributions.states(ids[0])]
    ).alpha  # zeros from the first impossible word on
    arrival = _arrivals(distributions, ids)
    for first in range(0, len(places), _PLACES_AT_ONCE):
        part = places[first : first + _PLACES_AT_ONCE]
        left = _left(distributions, ids, start, alpha, part)
        right, fresh = _right(distributions, ids, arrival, part)
        words = distributions.emit(left * right)
        if distributions.restarts(distributions.eos) and allow_eos:
            # After an <eos> in this place the chain would restart: what follows does not depend on z.
            here = distributions.states(distributions.eos)
            words[:, distributions.eos] = (left[:, here] * distributions.emission_of(distributions.eos)).sum(1) * fresh
        if not allow_eos:
            words[:, distributions.eos] = 0
        yield from words.cpu().numpy()


def _arrivals(distributions: HMMDistributions, ids: list[int]) -> Tensor:
    """Return (T, K) p(x_t | z) p(x_>t | z) for z in the states of x_t, each row up to a factor."""
    rows = torch.ones(len(ids), distributions.states_per_block, dtype=torch.float64, device=distributions.device)
    beta = rows[0]
    for t in range(len(ids) - 1, -1, -1):
        row = distributions.emission_of(ids[t]) * beta
        rows[t] = row / row.max() if row.max() > 0 else row
        if t > 0:
            beta = distributions.edge(ids[t - 1], ids[t]) @ rows[t]
    return rows


def _left(distributions: HMMDistributions, ids: list[int], start: Tensor, alpha: Tensor, places: list[int]) -> Tensor:
    """Return (n, S) p(z_t | x_<t), each row up to a factor; `start` is used for the first word."""
    result = distributions.predict(blocks_before(distributions, ids, places), alpha[[t - 1 for t in places]])
    for i, t in enumerate(places):
        if t == 0:
            result[i] = start
        elif not bool((alpha[t - 1] > 0).any()):
            result[i] = 0  # under "reset" an impossible sentence before this one makes this place impossible as well
    return result


def _right(
    distributions: HMMDistributions, ids: list[int], arrival: Tensor, places: list[int]
) -> tuple[Tensor, Tensor]:
    """Return ((n, S) p(x_>t | z_t), (n,) p(x_>t | fresh start)), each place up to a factor of its own."""
    last = len(ids) - 1
    right = torch.ones(len(places), distributions.num_states, dtype=torch.float64, device=distributions.device)
    fresh = torch.ones(len(places), dtype=torch.float64, device=distributions.device)
    inner = [i for i, t in enumerate(places) if t < last]
    if inner:
        after = [places[i] + 1 for i in inner]
        right[inner] = distributions.backward_step_to([distributions.block(ids[t]) for t in after], arrival[after])
        starts = torch.stack([distributions.start_at(ids[t]) for t in after])
        fresh[inner] = (starts * arrival[after]).sum(1)
    return right, fresh
