"""Checks that the answers of a model are exact. Input: a model. Output: the largest deviation of each check.

Each check compares two ways to one number that share as little as possible: streamed products against
tiles, messages against writing out every path, one float type against the other.
"""

import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from vlhmm.distributions import HMMDistributions
from vlhmm.queries.decode import decode, posteriors
from vlhmm.queries.infill import prepare
from vlhmm.queries.information import predictions
from vlhmm.queries.prefix import begin
from vlhmm.queries.sample import sample
from vlhmm.queries.score import score_ids
from vlhmm.queries.sequence import forward
from vlhmm.queries.word_posterior import word_posterior

_MAX_PATHS = 1 << 22
_MASS_STEPS, _MASS_STATES = 100, 1 << 12  # larger models take a tenth of the steps: each one makes all of A


class Check(NamedTuple):
    """One comparison."""

    name: str
    deviation: float  # the largest found
    bound: float
    cases: int  # how many numbers were compared

    @property
    def passed(self) -> bool:
        return self.deviation <= self.bound


class View:
    """A model in another float type: the same vocabulary and rule."""

    def __init__(self, model: Any, distributions: HMMDistributions) -> None:
        self.vocabulary, self.rule, self.distributions = model.vocabulary, model.rule, distributions


def verify(model: Any, num_texts: int = 3, seed: int = 0, progress: Callable[[str], None] | None = None) -> list[Check]:
    """Return every check on texts drawn from the model; all should pass."""
    double = View(model, model.distributions.double())
    texts = _texts(model, num_texts, seed)
    single = model.distributions.dtype != torch.float64
    loose, tight = (1e-4, 1e-9) if single else (1e-9, 1e-9)
    steps: list[tuple[str, float, Callable[[], list[float]]]] = [
        ("the parameters are distributions", loose, lambda: _normalized(model, seed)),
        ("mass kept over many steps", tight, lambda: _mass(model)),
        ("next words sum to one", loose, lambda: _sums(model, texts)),
        ("chain rule equals score", loose * 10, lambda: _chain_rule(model, texts)),
        ("state values equal score", tight * 1000, lambda: _steps(model, texts)),
        ("score equals the sum over all paths (float64)", tight, lambda: _paths(double, texts)),
        ("posteriors equal those of all paths (float64)", tight, lambda: _path_posteriors(double, texts)),
        ("best path equals the best of all paths (float64)", tight, lambda: _best_path(double, texts)),
        ("word posterior equals rescoring (float64)", tight, lambda: _rescoring(double, texts, seed)),
        ("a gap of two words: backwards equals forwards", loose * 10, lambda: _two_word_gap(model, texts[0])),
    ]
    if single:
        steps.append(("float32 equals float64, nats per token", 1e-3, lambda: _types(model, double, texts)))
    checks = []
    for name, bound, run in steps:
        if progress is not None:
            progress(name)
        found = run()
        worst = float("inf") if np.isnan(found).any() else max(found, default=0.0)
        checks.append(Check(name, worst, bound, len(found)))
    return checks


def _texts(model: Any, num_texts: int, seed: int) -> list[list[int]]:
    """Return ids of texts of two to twelve words, each with its <eos>."""
    id_of, eos = model.vocabulary.id_of, model.vocabulary.eos
    drawn = sample(model, num_texts * 8, max_tokens=12, seed=seed)
    found = [[id_of[word] for word in text.words] for text in drawn]
    long_enough = [ids for ids in found if len(ids) >= 2] or [ids or [eos] for ids in found]
    return [[*ids, eos] for ids in long_enough[:num_texts]]


def _normalized(model: Any, seed: int) -> list[float]:
    distributions = model.distributions
    chosen = torch.randperm(distributions.num_states, generator=torch.Generator().manual_seed(seed))[:64]
    rows = distributions.rows(chosen.to(distributions.device)).sum(1)
    reached = distributions.start > 0
    every = distributions.class_emission(torch.arange(distributions.vocab_size, device=distributions.device))[reached]
    return [*(rows - 1).abs().tolist(), abs(float(distributions.start.sum()) - 1), *(every - 1).abs().tolist()]


def _mass(model: Any) -> list[float]:
    """Return |1 - sum_z p(z_t = z)| and |1 - sum_x p(x_t = x)| after each of up to 100 steps of the chain from its start."""
    distributions = model.distributions
    alpha, found = distributions.start[None], []
    for _ in range(_MASS_STEPS if distributions.num_states <= _MASS_STATES else _MASS_STEPS // 10):
        alpha = distributions.forward_step(alpha)
        found += [abs(float(alpha.sum()) - 1), abs(float(distributions.emit(alpha).sum()) - 1)]
    return found


def _sums(model: Any, texts: list[list[int]]) -> list[float]:
    return [abs(float(words.sum()) - 1) for ids in texts for words in predictions(model, ids)]


def _chain_rule(model: Any, texts: list[list[int]]) -> list[float]:
    found = []
    for ids in texts:
        scored = forward(model.distributions, ids).log_probs.tolist()
        for word, log_prob, words in zip(ids, scored, predictions(model, ids), strict=True):
            found.append(abs(float(np.log(words[word])) - log_prob))
    return found


def _steps(model: Any, texts: list[list[int]]) -> list[float]:
    found = []
    for ids in texts:
        state = begin(model)
        for word in ids:
            state = state.step(word)
        found.append(abs(state.log_prob - score_ids(model, ids)))
    return found


def _joint(distributions: HMMDistributions, ids: list[int]) -> Tensor:
    """Return p(words, path) of every path, one axis of K per word."""
    table = distributions.start_at(ids[0]) * distributions.emission_of(ids[0])
    for word, following in itertools.pairwise(ids):
        table = table[..., None] * distributions.edge(word, following) * distributions.emission_of(following)
    return table


def _short(distributions: HMMDistributions, texts: list[list[int]]) -> list[list[int]]:
    """Return the beginnings of the texts, so short that every path can be written out."""
    length = 1
    while length < 6 and distributions.states_per_block ** (length + 1) <= _MAX_PATHS:
        length += 1
    return [ids[:length] for ids in texts]


def _paths(model: Any, texts: list[list[int]]) -> list[float]:
    distributions = model.distributions
    return [
        abs(float(_joint(distributions, ids).sum().log()) - score_ids(model, ids))
        for ids in _short(distributions, texts)
    ]


def _path_posteriors(model: Any, texts: list[list[int]]) -> list[float]:
    distributions = model.distributions
    found = []
    for ids in _short(distributions, texts):
        table = _joint(distributions, ids)
        table = table / table.sum()
        known = posteriors(model, model.vocabulary.decode(ids), eos=False)
        for t in range(len(ids)):
            others = tuple(axis for axis in range(len(ids)) if axis != t)
            expected = table.sum(others) if others else table
            found.append(float((known.smoothed[t] - expected).abs().max()))
    return found


def _best_path(model: Any, texts: list[list[int]]) -> list[float]:
    distributions = model.distributions
    found = []
    for ids in _short(distributions, texts):
        best = decode(model, model.vocabulary.decode(ids), eos=False)[0]
        found.append(abs(float(_joint(distributions, ids).max().log()) - (best.log_prob or 0.0)))
    return found


def _rescoring(model: Any, texts: list[list[int]], seed: int) -> list[float]:
    """Return the posterior of a reduced vocabulary against scoring the text with each of its words in turn."""
    vocabulary = model.vocabulary
    random = np.random.default_rng(seed)
    found = []
    for ids in texts:
        position = len(ids) // 2 if len(ids) > 1 else 0
        position = min(position, max(0, len(ids) - 2))
        drawn = random.choice(len(vocabulary), min(20, len(vocabulary)), replace=False)
        candidates = np.array(sorted({int(w) for w in drawn} - {vocabulary.eos} | {ids[position]}))
        logs = np.array([score_ids(model, [*ids[:position], int(w), *ids[position + 1 :]]) for w in candidates])
        if ids[position] == vocabulary.eos or not np.isfinite(logs).any():
            continue
        expected = np.exp(logs - logs.max())
        words = vocabulary.decode(ids[:-1])
        got = word_posterior(model, words, position).probabilities[candidates]
        found += np.abs(got / got.sum() - expected / expected.sum()).tolist()
    return found


def _two_word_gap(model: Any, ids: list[int]) -> list[float]:
    """Compare log p(first word, two words, the last) by messages from the right with distributions from the left."""
    distributions, vocabulary = model.distributions, model.vocabulary
    first, last = ids[0], ids[-1]
    if first == vocabulary.eos:
        return []
    backwards = prepare(model, [vocabulary.words[first], "[MASK:2]"], eos=True).log_evidence
    words = torch.tensor([w for w in range(len(vocabulary)) if w != vocabulary.eos], device=distributions.device)
    emission = distributions.class_emission(words)
    alpha = distributions.start_at(first) * distributions.emission_of(first)
    ahead = distributions.forward_step_from([distributions.block(first)], alpha[None]) * emission
    ahead = distributions.forward_step(ahead) * emission
    ahead = distributions.forward_step(ahead)
    forwards = float((ahead[0, distributions.states(last)] * distributions.emission_of(last)).sum().log())
    return [abs(backwards - forwards)]


def _types(model: Any, double: Any, texts: list[list[int]]) -> list[float]:
    found = []
    for ids in texts:
        ours, theirs = (forward(m.distributions, ids).log_probs for m in (model, double))
        found += (ours - theirs).abs().tolist()
    return found
