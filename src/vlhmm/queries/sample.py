"""Texts drawn from the model. Input: a prompt, or nothing. Output: `Sample`s.

By default the draws are exact: a state, its word, the next state. Temperature, top-k and top-p
change each next-word distribution, and such samples are marked; with a constraint, draws are exact given the
constraint.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import Tensor

from vlhmm.constraints.constraint import Constraint
from vlhmm.data.user_text import DEFAULT_MEMORY, Seed, check_sample_memory, encode_words, generator_of
from vlhmm.data.vocabulary import Vocabulary
from vlhmm.distributions import HMMDistributions
from vlhmm.errors import QueryError
from vlhmm.lattice.sampling import Draw
from vlhmm.lattice.template import MAX_GAP, Fixed, Gap, Item
from vlhmm.queries.infill import Infilling, Scope, prepare_items
from vlhmm.queries.next_word import after
from vlhmm.queries.score import score_ids
from vlhmm.results import Result

if TYPE_CHECKING:
    from vlhmm.language_model import HMMLanguageModel

_AT_ONCE = 256  # texts drawn side by side
_WEIGHED_AT_ONCE = 64  # the same where every step needs the whole distribution of the next word


@dataclass(frozen=True, slots=True)
class Sample(Result):
    """One text."""

    text: str  # the prompt and what follows it, without the last <eos>
    words: tuple[str, ...]  # what follows the prompt, without the last <eos>
    ended: bool  # by an <eos>; False if `max_tokens` came first
    exact: bool  # drawn from the model's own distribution (given the constraint, if there is one)
    log_prob: float | None  # log p(what follows | prompt, constraint) under the model, if asked for; nats


def sample(
    model: "HMMLanguageModel",
    n: int = 1,
    prompt: str | Sequence[str] = "",
    max_tokens: int = 100,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    constraint: Constraint | None = None,
    scope: Scope = "text",
    scores: bool = False,
    seed: Seed = 0,
    memory: float = DEFAULT_MEMORY,
) -> list[Sample]:
    """Return `n` texts that begin with `prompt`, each up to its <eos> or `max_tokens` words.

    With a constraint every text satisfies it and ends within `max_tokens` words.
    """
    if n < 1 or max_tokens < 1:
        raise QueryError(f"asked for {n} texts of {max_tokens} words at most, expected at least 1 of each")
    check_sample_memory(n, max_tokens, memory)
    if constraint is not None:
        if temperature != 1.0 or top_k is not None or top_p is not None:
            raise QueryError("a constraint is kept exactly, so it takes no temperature, top-k or top-p; drop one")
        return constrained(model, prompt, constraint, max_tokens, scope, memory).draw(n, seed)
    weighing = Weighing(temperature, top_k, top_p)
    distributions, vocabulary = model.distributions, model.vocabulary
    given = encode_words(vocabulary, prompt)
    generator = generator_of(seed)
    before = _After(*after(distributions, given.ids))
    found: list[list[int]] = []
    size = _AT_ONCE if weighing.exact else _WEIGHED_AT_ONCE
    for first in range(0, n, size):
        count = min(size, n - first)
        if weighing.exact:
            draw = Draw(generator)
            found += ancestral(distributions, _first_states(distributions, before, count, draw), max_tokens, draw)[0]
        else:
            found += _weighed(distributions, before, count, max_tokens, generator, weighing)
    base = score_ids(model, given.ids) if scores else 0.0
    result = []
    for ids in found:
        log_prob = score_ids(model, [*given.ids, *ids]) - base if scores else None
        result.append(sample_of(vocabulary, given.words, ids, weighing.exact, log_prob))
    return result


def sample_of(
    vocabulary: Vocabulary, prompt: Sequence[str], ids: list[int], exact: bool, log_prob: float | None
) -> Sample:
    """Return the sample that drawn ids make after a prompt."""
    ended = bool(ids) and ids[-1] == vocabulary.eos
    words = tuple(vocabulary.words[i] for i in (ids[:-1] if ended else ids))
    return Sample(vocabulary.join([*prompt, *words]), words, ended, exact, log_prob)


class Constrained(NamedTuple):
    """Texts that begin with a prompt, end within a number of words and satisfy a constraint."""

    ready: Infilling
    prompt: list[str]

    @property
    def log_constraint(self) -> float:
        """log p(constraint | prompt, the text ends within the number of words), nats."""
        return self.ready.log_constraint or 0.0

    def draw(self, n: int, seed: Seed = 0) -> list[Sample]:
        """Return `n` exact samples, each with its log p(text | prompt, constraint, its end in time)."""
        vocabulary = self.ready.model.vocabulary
        return [
            Sample(vocabulary.join([*self.prompt, *fill.gaps[0]]), fill.gaps[0], True, True, fill.log_prob)
            for fill in self.ready.sample(n, seed)
        ]


def constrained(
    model: "HMMLanguageModel",
    prompt: str | Sequence[str],
    constraint: Constraint | None,
    max_tokens: int = 30,
    scope: Scope = "text",
    memory: float = DEFAULT_MEMORY,
) -> Constrained:
    """Compute the messages of the texts after `prompt` that satisfy `constraint`: `max_tokens` passes over A."""
    if max_tokens > MAX_GAP:
        raise QueryError(f"a constrained text has at most {MAX_GAP:,} words, asked for {max_tokens:,} (--max-tokens)")
    vocabulary = model.vocabulary
    given = encode_words(vocabulary, prompt)
    end = Fixed(vocabulary.eos, read=False)
    items: list[Item] = [*(Fixed(i) for i in given.ids), Gap(0, max_tokens), end]
    words = [*given.words, f"[MASK:0-{max_tokens}]", vocabulary.words[vocabulary.eos]]
    return Constrained(prepare_items(model, items, words, constraint, scope, False, memory), given.words)


class _After(NamedTuple):
    """The filtered posterior after a prompt; no block where the chain restarts."""

    block: int | None
    alpha: Tensor | None


def ancestral(
    distributions: HMMDistributions, state: Tensor, max_tokens: int, draw: Draw
) -> tuple[list[list[int]], list[list[int]]]:
    """Draw a text from each first state, up to its <eos> or `max_tokens` words; return their ids and their states."""
    texts: list[list[int]] = [[] for _ in range(len(state))]
    paths: list[list[int]] = [[] for _ in range(len(state))]
    going = np.arange(len(state))
    for t in range(max_tokens):
        if t > 0:
            following = []
            for part in state.split(_AT_ONCE):
                if distributions.interrupt is not None:
                    distributions.interrupt()
                following.append(distributions.sample_next(part, draw.generator))
            state = torch.cat(following)
        words = distributions.emitted.draw(state, draw.uniform(len(state)).to(state.device))
        for text, word, z in zip(going.tolist(), words.tolist(), state.tolist(), strict=True):
            texts[text].append(word)
            paths[text].append(z)
        open_ended = words != distributions.eos
        going, state = going[open_ended.cpu().numpy()], state[open_ended]
        if not len(going):
            break
    return texts, paths


def _first_states(distributions: HMMDistributions, before: _After, count: int, draw: Draw) -> Tensor:
    if before.block is None or before.alpha is None:
        return draw.again(distributions.start, count)
    state = distributions.states_of_block[before.block][draw.again(before.alpha, count)]
    return distributions.sample_next(state, draw.generator)


def sample_streams(distributions: HMMDistributions, count: int, length: int, generator: torch.Generator) -> Tensor:
    """Return (count, length) ids of streams of text that continue after every <eos>, as the context rule says."""
    draw = Draw(generator)
    state = draw.again(distributions.start, count)
    columns: list[Tensor] = []
    for t in range(length):
        if t > 0:
            state = distributions.sample_next(state, draw.generator)
            if distributions.rule == "reset":
                ended = columns[-1] == distributions.eos
                if bool(ended.any()):
                    state = torch.where(ended, draw.again(distributions.start, count), state)
        columns.append(distributions.emitted.draw(state, draw.uniform(count).to(state.device)))
    return torch.stack(columns, dim=1)


class Weighing:
    """What temperature, top-k and top-p make of a distribution."""

    def __init__(self, temperature: float, top_k: int | None, top_p: float | None) -> None:
        if not (temperature > 0 and math.isfinite(temperature)):
            raise QueryError(f"temperature is {temperature}, expected more than 0 (1 is the model itself)")
        if top_k is not None and top_k < 1:
            raise QueryError(f"top_k is {top_k}, expected at least 1")
        if top_p is not None and not 0 < top_p <= 1:
            raise QueryError(f"top_p is {top_p}, expected more than 0 and at most 1")
        self.temperature, self.top_k, self.top_p = temperature, top_k, top_p
        self.exact = temperature == 1.0 and top_k is None and top_p is None

    def __call__(self, words: Tensor) -> Tensor:
        """Return (n, V) weights to draw from, from (n, V) probabilities."""
        if self.temperature != 1.0:
            logs = words.log() / self.temperature
            words = (logs - logs.amax(1, keepdim=True)).exp()
        if self.top_k is None and self.top_p is None:
            return words
        ordered, order = words.sort(dim=1, descending=True, stable=True)
        keep = torch.ones_like(ordered, dtype=torch.bool)
        if self.top_k is not None:
            keep[:, self.top_k :] = False
        if self.top_p is not None:
            ordered = ordered * keep
            before = ordered.cumsum(1) - ordered
            keep &= before < self.top_p * ordered.sum(1, keepdim=True)
            keep[:, 0] = True  # also where top_p is so small that the product is zero
        return torch.zeros_like(words).scatter(1, order, ordered * keep)


def _weighed(
    distributions: HMMDistributions,
    before: _After,
    count: int,
    max_tokens: int,
    generator: torch.Generator,
    weighing: Weighing,
) -> list[list[int]]:
    """Return the same with every next word drawn from its reweighed distribution."""
    draw = Draw(generator)
    texts: list[list[int]] = [[] for _ in range(count)]
    going = list(range(count))
    blocks: list[int] | None = None if before.block is None else [before.block] * count
    alpha = None if before.alpha is None else before.alpha.expand(count, -1)
    for _ in range(max_tokens):
        if blocks is None or alpha is None:
            predicted = distributions.start.expand(len(going), -1)
        else:
            predicted = distributions.forward_step_from(blocks, alpha)
        words = draw.among(weighing(distributions.emit(predicted)))
        chosen = words.tolist()
        for text, word in zip(going, chosen, strict=True):
            texts[text].append(word)
        stay = [i for i, word in enumerate(chosen) if word != distributions.eos]
        if not stay:
            break
        going = [going[i] for i in stay]
        blocks = [distributions.block(chosen[i]) for i in stay]
        kept = torch.tensor(stay, device=distributions.device)
        here = words[kept]
        states = distributions.states_of_block[distributions.block_of_word[here]]
        alpha = predicted[kept].gather(1, states) * distributions.emission[here].double()
        alpha = alpha / distributions.emission_total[states]
        alpha = alpha / alpha.sum(1, keepdim=True)
    return texts
