"""The states behind a text. Input: words. Output: best paths, and each word's distribution over its states.

The filter p(z_t | x_<=t) uses the words up to z_t, the smoother p(z_t | x) the whole text. They agree at the last token.
The states of the best path (Viterbi) need not be the most probable ones word by word ("posterior" decoding), which in
turn need not be a possible path.

A text is decoded from a fresh start, or from what a text before it leaves (`before`): its paths and posteriors are then
given that text as well, whose own states are summed over.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from vlhmm import inference
from vlhmm.data.user_text import DEFAULT_MEMORY, encode_words, memory_check
from vlhmm.distributions import HMMDistributions
from vlhmm.errors import QueryError
from vlhmm.queries.prefix import Prefix
from vlhmm.queries.sequence import ChainInputs, chain_inputs
from vlhmm.results import Result

if TYPE_CHECKING:
    from vlhmm.language_model import HMMLanguageModel

Method = Literal["viterbi", "posterior"]
EosState = Literal["max", "sum"]


@dataclass(frozen=True, slots=True)
class Decoding(Result):
    """A state for every word."""

    words: list[str]
    states: list[int]
    blocks: list[int]  # the block of each state
    log_prob: float | None  # log p(words, states), nats; None for posterior decoding, which need not be a path
    posteriors: list[float]  # p(z_t = the chosen state | text)
    eos_state: int | None = None  # the path's state of the <eos> after the text; None where it has none


@dataclass(frozen=True, slots=True, eq=False)
class Posteriors(Result):
    """Each word's distribution over the K states that may emit it."""

    words: list[str]
    states: Tensor = field(repr=False)  # (T, K) ids
    filtered: Tensor = field(repr=False)  # (T, K) p(z_t | x_<=t)
    smoothed: Tensor = field(repr=False)  # (T, K) p(z_t | x)
    log_likelihood: float  # log p(text), nats


def posteriors(
    model: "HMMLanguageModel",
    text: str | Sequence[str],
    eos: bool = True,
    memory: float = DEFAULT_MEMORY,
    before: Prefix | None = None,
) -> Posteriors:
    """Return filtered and smoothed posteriors of every word's state; that the text ends there is known, if `eos`."""
    distributions = model.distributions
    words, ids = encode_words(model.vocabulary, text)
    plain, ended = _pieces(distributions, ids, eos, memory, before)
    filtered = inference.forward(plain.potentials, plain.chain).alpha[0]
    log_likelihood = float(inference.forward(ended.potentials, ended.chain).log_scale.sum())
    if log_likelihood == -float("inf"):
        raise QueryError("the text has probability zero under the model: no state can be behind it")
    smoothed = inference.posteriors(ended.potentials, ended.chain)[0]
    states = distributions.states_of_block[distributions.block_of_word[torch.tensor(ids, device=distributions.device)]]
    return Posteriors(words, states, filtered, smoothed, log_likelihood)


def decode(
    model: "HMMLanguageModel",
    text: str | Sequence[str],
    method: Method = "viterbi",
    k: int = 1,
    eos: bool = True,
    memory: float = DEFAULT_MEMORY,
    eos_state: EosState = "max",
    before: Prefix | None = None,
) -> list[Decoding]:
    """Return the `k` best state paths, best first; or, by method "posterior", the most probable state of each word.

    If `eos`, an <eos> comes after the words. A path has a state for it too (`eos_state` "max": Viterbi over all tokens);
    or paths are those of the words alone, and the state of <eos> is summed over ("sum").
    """
    if eos_state not in ("max", "sum"):
        raise QueryError(f"unknown way to treat the state of <eos>: {eos_state!r}, expected max or sum")
    if method not in ("viterbi", "posterior"):
        raise QueryError(f"unknown method {method!r}, expected viterbi or posterior")
    if k < 1 or (k > 1 and method == "posterior"):
        raise QueryError(f"asked for the {k} best by {method}, expected at least 1, and 1 for posterior decoding")
    distributions = model.distributions
    known = posteriors(model, text, eos, memory, before)
    _, ids = encode_words(model.vocabulary, text)
    found: list[tuple[Tensor, float | None]]
    if method == "posterior":
        found = [(known.smoothed.argmax(1), None)]
    else:
        if eos and eos_state == "max":
            ended = chain_inputs(distributions, [*ids, distributions.eos], None, _first(ids, before))
        else:
            _, ended = _pieces(distributions, ids, eos, memory, before)
        log_start, log_emission, log_tiles = (table.log() for table in ended.potentials)
        if k == 1:
            path, score = inference.viterbi(log_start, log_emission, log_tiles, ended.chain)
            found = [(path[0], float(score[0]))]
        else:
            size = distributions.states_per_block
            memory_check(f"the {k:,} best paths", 8 * k * size * (len(ids) + size), memory, "lower k")
            found = list(_best_paths(log_start, log_emission, log_tiles, ended.chain, k))
    rows = torch.arange(len(ids), device=distributions.device)
    blocks = [distributions.block(i) for i in ids]
    eos_states = distributions.states(distributions.eos).tolist()
    return [
        Decoding(
            known.words,
            known.states[rows, slots[: len(ids)]].tolist(),
            blocks,
            log_prob,
            known.smoothed[rows, slots[: len(ids)]].tolist(),
            eos_states[int(slots[-1])] if len(slots) > len(ids) else None,
        )
        for slots, log_prob in found
    ]


def _best_paths(
    log_start: Tensor, log_emission: Tensor, log_tiles: Tensor, chain: inference.Chain, k: int
) -> list[tuple[Tensor, float]]:
    """Return the k best paths of a chain of one row with their log p(x, path); fewer, where fewer are possible.

    Each state keeps its k best histories: O(T K^2 k log k).
    """
    size = log_start.shape[1]
    message = (log_start[0] + log_emission[0])[:, None]  # (K, histories)
    backs: list[Tensor] = []
    for t in range(1, chain.emit_of.shape[1]):
        edge = int(chain.edge_of[0, t])
        edges = log_tiles[edge] if edge >= 0 else log_start[t].expand(size, -1)
        arrive = (message[:, :, None] + edges[:, None, :]).reshape(-1, size)  # (from x history, to)
        best = arrive.topk(min(k, len(arrive)), dim=0)
        backs.append(best.indices.T)
        message = best.values.T + log_emission[t][:, None]
    histories = message.shape[1]
    scores, places = message.reshape(-1).topk(min(k, message.numel()))
    found = []
    for score, place in zip(scores.tolist(), places.tolist(), strict=True):
        if score == -float("inf"):
            break
        slots = [place // histories]
        rank = place % histories
        for t in range(len(backs) - 1, -1, -1):
            before = int(backs[t][slots[-1], rank])
            width = backs[t - 1].shape[1] if t > 0 else 1
            slots.append(before // width)
            rank = before % width
        found.append((torch.tensor(slots[::-1], device=message.device), score))
    return found


def _first(ids: Sequence[int], before: Prefix | None) -> Tensor | None:
    return None if before is None else before.first_states(ids[0])


def _pieces(
    distributions: HMMDistributions, ids: Sequence[int], eos: bool, memory: float, before: Prefix | None
) -> tuple[ChainInputs, ChainInputs]:
    """Return (the chain of the words, the same with p(<eos> | z) of the last state z as part of the text)."""
    if not ids:
        raise QueryError("an empty text has no states; give at least one word")
    size = distributions.states_per_block
    memory_check(f"the transitions of {len(ids):,} words", 24 * len(ids) * size * size, memory, "split the text")
    plain = chain_inputs(distributions, ids, None, _first(ids, before))
    if not eos:
        return plain, plain
    start, emission, tiles = plain.potentials
    emission = emission.clone()
    emission[-1] *= distributions.edge(ids[-1], distributions.eos) @ distributions.emission_of(distributions.eos)
    return plain, ChainInputs(inference.Potentials(start, emission, tiles), plain.chain)
