"""Entropy rate, phrase probabilities, divergences of models. Estimates have a standard error; all else is exact."""

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from vlhmm.constraints.automaton import Automaton
from vlhmm.constraints.constraint import compile_constraint, must_contain
from vlhmm.data.user_text import DEFAULT_MEMORY, Seed, encode_sentence, encode_words, generator_of, memory_check
from vlhmm.distributions import HMMDistributions
from vlhmm.errors import QueryError
from vlhmm.lattice.backward import BackwardLattice, LatticeMessage, ScaledVectors, row_index
from vlhmm.lattice.forward import message_at_start, read_any_word, read_word, step
from vlhmm.lattice.semiring import SumProduct
from vlhmm.lattice.template import Fixed, Gap, InfillTemplate, check_memory, make_template
from vlhmm.limits import MAX_HOURS, time_of
from vlhmm.queries.next_word import impossible_context
from vlhmm.queries.sample import sample_streams
from vlhmm.queries.sequence import blocks_before, forward, read
from vlhmm.results import Result

if TYPE_CHECKING:
    from vlhmm.language_model import HMMLanguageModel

_PLACES_AT_ONCE = 32
_TIMED = (4, 64, 512)  # after these numbers of words the total time is estimated: the first ones may be slow


@dataclass(frozen=True, slots=True)
class Estimate(Result):
    """An estimate from samples."""

    value: float  # nats per token
    standard_error: float
    num_streams: int
    num_tokens: int  # a stream


def entropy_rate(model: "HMMLanguageModel", num_streams: int = 64, num_tokens: int = 256, seed: Seed = 0) -> Estimate:
    """Return an estimate of lim H(x_1 .. x_n) / n, in nats per token: -log p(x) / n averaged over sampled streams.

    Streams continue after every <eos> as the context rule says. No closed form is known for a hidden Markov
    model; the standard error is that of the average, and the first words of a stream, which know no past,
    count too.
    """
    if num_streams < 2 or num_tokens < 1:
        raise QueryError(f"{num_streams} streams of {num_tokens} tokens, expected at least 2 of at least 1")
    distributions = model.distributions
    what = f"{num_streams:,} streams of {num_tokens:,} tokens"
    memory_check(what, 24.0 * num_streams * num_tokens, DEFAULT_MEMORY, "ask for fewer", option=False)
    streams = sample_streams(distributions, num_streams, num_tokens, generator_of(seed))
    rates = np.array([-math.fsum(read(distributions, ids).log_probs) / num_tokens for ids in streams.tolist()])
    return Estimate(float(rates.mean()), float(rates.std(ddof=1) / math.sqrt(num_streams)), num_streams, num_tokens)


def phrase_probability(
    model: "HMMLanguageModel",
    phrase: str | Sequence[str],
    num_words: int,
    context: str | Sequence[str] = "",
    allow_eos: bool = True,
    memory: float = DEFAULT_MEMORY,
    progress: Callable[[int, int], None] | None = None,
) -> list[float]:
    """Return exact p(the phrase occurs within the next n tokens after `context`), for n = 1 .. num_words.

    An <eos> is one of the tokens and the text continues after it; without `allow_eos` the phrase must come
    before the first <eos>. One pass over the transitions a token. The first passes are timed: a request that would take
    more than an hour is refused with that estimate. `progress` is called with (tokens done, tokens in all).
    """
    if num_words < 1:
        raise QueryError(f"the next {num_words} words, expected at least 1")
    distributions, vocabulary = model.distributions, model.vocabulary
    automaton = compile_constraint(must_contain(phrase), vocabulary)
    given = [Fixed(i, read=False) for i in encode_words(vocabulary, context).ids]
    # The walk is forward: of the plan it reads what a single word may be.
    template = make_template(distributions, [*given, Gap(1, 1)], automaton, allow_eos, [automaton.initial])
    lattice = BackwardLattice(template, distributions, SumProduct(distributions))
    check_memory(_one_slot(distributions, automaton, allow_eos), distributions.num_states, memory)
    now = message_at_start(lattice, automaton.initial)
    block: int | None = None
    for item in given:
        now = read_word(lattice, item, now, block)
        block = None if distributions.restarts(item.word) else distributions.block(item.word)
    log_context = _log_mass(now, np.flatnonzero(now.row_of >= 0))
    if log_context == -math.inf:
        raise impossible_context()
    found, total = [], 0.0
    done = np.flatnonzero(automaton.accept)
    began = time.monotonic()
    for n in range(num_words):
        if n in _TIMED:
            _check_time(num_words, n, time.monotonic() - began)
        if progress is not None:
            progress(n, num_words)
        if (now.row_of >= 0).any():
            now = read_any_word(lattice, step(lattice, now, block))
            block = None
            total += math.exp(_log_mass(now, done[now.row_of[done] >= 0]) - log_context)
            now = _without(now, done)
        found.append(min(1.0, total))
    return found


def _check_time(num_words: int, done: int, seconds: float) -> None:
    """Raise a QueryError if the remaining words would take more than `MAX_HOURS`."""
    estimate = seconds / done * num_words
    if estimate > 3600 * MAX_HOURS:
        raise QueryError(
            f"the next {num_words:,} words would take about {time_of(estimate)} ({done} took {seconds:.2g} s), the limit is "
            f"{time_of(3600 * MAX_HOURS)}; ask for fewer words"
        )


def _one_slot(distributions: HMMDistributions, automaton: Automaton, allow_eos: bool) -> InfillTemplate:
    """Return a template as large as what a forward walk keeps: two vectors per automaton state."""
    return make_template(distributions, [Gap(2, 2)], automaton, allow_eos, list(range(automaton.num_states)))


def _log_mass(value: LatticeMessage, states: np.ndarray) -> float:
    """Return log of all that a message holds for the listed automaton states."""
    rows = torch.from_numpy(value.row_of[states])
    logs: list[Tensor] = []
    if value.rows is not None and len(rows):
        logs.append(value.rows.values[rows].sum(1).log() + value.rows.log_scale[rows])
    if value.log_fresh is not None and len(rows):
        logs.append(value.log_fresh[rows])
    return float(torch.cat(logs).logsumexp(0)) if logs else -math.inf


def _without(value: LatticeMessage, states: np.ndarray) -> LatticeMessage:
    """Return the message without some automaton states."""
    left = np.setdiff1d(np.flatnonzero(value.row_of >= 0), states)
    rows = torch.from_numpy(value.row_of[left])
    kept = None if value.rows is None else ScaledVectors(value.rows.values[rows], value.rows.log_scale[rows])
    fresh = None if value.log_fresh is None else value.log_fresh[rows]
    return LatticeMessage(row_index(len(value.row_of), left), kept, fresh)


@dataclass(frozen=True, slots=True)
class Divergence(Result):
    """How far model q is from model p along a text."""

    kl: float  # mean over tokens of KL(p(. | x_<t) || q(. | x_<t)), nats; exact for these contexts
    token_kl: list[float]
    log_ratio: float  # (log p(text) - log q(text)) / tokens, nats
    num_tokens: int


def kl_on_text(p: "HMMLanguageModel", q: "HMMLanguageModel", text: str | Sequence[str], eos: bool = True) -> Divergence:
    """Return the exact KL of the next-word distributions of two models after every prefix of a text, averaged."""
    if p.vocabulary.words != q.vocabulary.words:
        raise QueryError("the two models have different vocabularies: their distributions cannot be compared")
    _, ids = encode_sentence(p.vocabulary, text, eos)
    if not ids:
        raise QueryError("an empty text has no contexts to compare the models in; give at least one word")
    divergences: list[float] = []
    log_ratio = 0.0
    for ours, theirs in zip(predictions(p, ids), predictions(q, ids), strict=True):
        word, positive = ids[len(divergences)], ours > 0
        with np.errstate(divide="ignore"):  # what the other model excludes makes the divergence infinite
            terms = ours[positive] * (np.log(ours[positive]) - np.log(theirs[positive]))
            log_ratio += float(np.log(ours[word]) - np.log(theirs[word])) if ours[word] > 0 else -math.inf
        divergences.append(max(0.0, float(terms.sum())))
    return Divergence(float(np.mean(divergences)), divergences, log_ratio / len(ids), len(ids))


def predictions(model: "HMMLanguageModel", ids: Sequence[int]) -> Iterator[np.ndarray]:
    """Yield (V,) p(x_t | x_<t) for every place t of a sequence of ids, the first one given nothing."""
    distributions = model.distributions
    passed = forward(distributions, ids)
    if not torch.isfinite(passed.log_probs[:-1]).all():
        raise impossible_context()
    for first in range(0, len(ids), _PLACES_AT_ONCE):
        places = range(first, min(first + _PLACES_AT_ONCE, len(ids)))
        ahead = distributions.predict(blocks_before(distributions, ids, places), passed.alpha[[t - 1 for t in places]])
        yield from distributions.emit(ahead).cpu().numpy()
