r"""Score many texts in one pass. Input: a model and lists of ids. Output: a list of `Token`s per text.

Without alternatives, the texts are the rows of one batch of the model's own `score_batch`, as in `vlhmm evaluate`. With
alternatives, $p(x_t | x_{<t})$ of every word is needed at every position: all positions of all texts are predicted
together, O(K S) each, and a token's own log-probability is read from the same distribution as its alternatives.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from vlhmm.queries.left_to_right import has_hidden_states
from vlhmm.queries.sequence import forward

_TOKENS_AT_ONCE = 8192  # of a batch, padding included
_ENTRIES_AT_ONCE = 1 << 23  # of a (places, states) or (places, words) array


class Token(NamedTuple):
    """A token with its log-probability and, if requested, the most probable alternatives."""

    id: int
    log_prob: float  # nats
    top: list[tuple[int, float]]  # most probable first


class GivenUp(Exception):
    """Raised when the job was cancelled."""


def score_texts(
    model: Any, texts: Sequence[Sequence[int]], num_top: int, given_up: Callable[[], bool] = lambda: False
) -> list[list[Token]]:
    """Return the scores of every token of every text, each text from the start, with `num_top` alternatives.

    Raises:
        GivenUp: `given_up()` became true between two parts of the work.
    """
    eos, resets = model.vocabulary.eos, getattr(model, "rule", "reset") == "reset"
    chains: list[list[int]] = []  # what lies between two fresh starts
    chains_of: list[range] = []
    for ids in texts:
        first = len(chains)
        chains += _split(ids, eos) if resets else [list(ids)] if ids else []
        chains_of.append(range(first, len(chains)))
    if not num_top:
        scored = _without_top(model, chains, given_up)
    elif has_hidden_states(model):
        scored = _with_top(model, chains, num_top, given_up)
    else:
        scored = _left_to_right(model, chains, num_top, given_up)
    return [[token for chain in places for token in scored[chain]] for places in chains_of]


def _split(ids: Sequence[int], eos: int) -> list[list[int]]:
    found: list[list[int]] = [[]]
    for token in ids:
        found[-1].append(token)
        if token == eos:
            found.append([])
    return [chain for chain in found if chain]


def _without_top(model: Any, chains: list[list[int]], given_up: Callable[[], bool]) -> list[list[Token]]:
    scored: list[list[Token]] = [[] for _ in chains]
    for rows in _batches([len(chain) for chain in chains]):
        carry = model.start(len(rows))
        longest = max(len(chains[row]) for row in rows)
        for first in range(0, longest, _TOKENS_AT_ONCE):  # more than one part only for a row by itself
            if given_up():
                raise GivenUp
            parts = [chains[row][first : first + _TOKENS_AT_ONCE] for row in rows]
            lengths = torch.tensor([len(part) for part in parts])
            logs, carry = model.score_batch(_padded(parts), lengths, carry)
            for row, part, values in zip(rows, parts, logs.tolist(), strict=True):
                scored[row] += [Token(token, _defined(log), []) for token, log in zip(part, values, strict=False)]
    return scored


def _batches(lengths: list[int]) -> Iterator[list[int]]:
    """Yield batches of rows of similar length, so that padding stays small."""
    rows: list[int] = []
    for row in sorted(range(len(lengths)), key=lengths.__getitem__):
        if rows and (len(rows) + 1) * lengths[row] > _TOKENS_AT_ONCE:
            yield rows
            rows = []
        rows.append(row)
    if rows:
        yield rows


def _padded(chains: list[list[int]]) -> Tensor:
    tokens = torch.zeros(len(chains), max(map(len, chains)), dtype=torch.long)
    for row, chain in enumerate(chains):
        tokens[row, : len(chain)] = torch.tensor(chain)
    return tokens


def _defined(log_prob: float) -> float:
    return log_prob if log_prob == log_prob else -math.inf  # NaN: after an impossible word nothing is defined


def _left_to_right(
    model: Any, chains: list[list[int]], num_top: int, given_up: Callable[[], bool]
) -> list[list[Token]]:
    """Score with alternatives through the `LanguageModel` protocol: one word of every text at a time."""
    scored: list[list[Token]] = [[] for _ in chains]
    num_top = min(num_top, len(model.vocabulary))
    size = max(1, _ENTRIES_AT_ONCE // len(model.vocabulary))
    for first in range(0, len(chains), size):
        rows = chains[first : first + size]
        tokens, carry = _padded(rows), model.start(len(rows))
        for place in range(tokens.shape[1]):
            if given_up():
                raise GivenUp
            words = model.next_word_probabilities(carry).cpu()
            own = words.gather(1, tokens[:, place : place + 1])[:, 0].log().tolist()
            best = words.topk(num_top, dim=1)
            for row, chain in enumerate(rows):
                if place < len(chain):
                    top = zip(best.indices[row].tolist(), best.values[row].log().tolist(), strict=True)
                    scored[first + row].append(Token(chain[place], _defined(own[row]), list(top)))
            _, carry = model.score_batch(tokens[:, place : place + 1], torch.ones(len(rows), dtype=torch.long), carry)
    return scored


def _with_top(model: Any, chains: list[list[int]], num_top: int, given_up: Callable[[], bool]) -> list[list[Token]]:
    distributions = model.distributions
    num_top = min(num_top, distributions.vocab_size)
    blocks: list[int] = []
    alphas, place_of, scored = [], [], [[Token(token, -math.inf, []) for token in chain] for chain in chains]
    fresh: list[tuple[int, int]] = []
    for row, chain in enumerate(chains):
        fresh.append((row, 0))
        if len(chain) > 1:
            alphas.append(forward(distributions, chain[:-1]).alpha)
            blocks += [distributions.block(token) for token in chain[:-1]]
            place_of += [(row, place) for place in range(1, len(chain))]

    def note(places: list[tuple[int, int]], words: Tensor) -> None:
        if given_up():
            raise GivenUp
        wanted = torch.tensor([chains[row][place] for row, place in places], device=words.device)
        own = words.gather(1, wanted[:, None])[:, 0].log().tolist()
        best = words.topk(num_top, dim=1)
        logs = best.values.log().tolist()
        for (row, place), log, ids, values in zip(places, own, best.indices.tolist(), logs, strict=True):
            scored[row][place] = Token(chains[row][place], log, list(zip(ids, values, strict=True)))

    if fresh:
        start = distributions.emit(distributions.start[None])
        size = max(1, _ENTRIES_AT_ONCE // distributions.vocab_size)
        for first in range(0, len(fresh), size):
            begun = fresh[first : first + size]
            note(begun, start.expand(len(begun), -1))
    if alphas:
        alpha = torch.cat(alphas)
        # places of one block together: its rows of A are made once
        order = sorted(range(len(blocks)), key=blocks.__getitem__)
        size = max(1, _ENTRIES_AT_ONCE // max(distributions.num_states, distributions.vocab_size))
        for first in range(0, len(order), size):
            part = order[first : first + size]
            predicted = distributions.forward_step_from([blocks[i] for i in part], alpha[part])
            note([place_of[i] for i in part], distributions.emit(predicted))
    return scored
