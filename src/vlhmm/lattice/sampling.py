"""Fills from messages: drawn with their exact probability, or the best path's. Input: `BackwardLattice`. Output:
word ids.

Left to right. Between gaps the given words are filtered (K states); at the last word before a gap its state
is drawn together with the gap's length, and from there on every word's state, then its class, then the
word. With messages of the max-product kind and `Best` choosing, the same walk traces the most probable
path.
"""

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor

from vlhmm.lattice.backward import BackwardLattice, GapMessages, LatticeMessage
from vlhmm.lattice.template import Fixed, Gap


@runtime_checkable
class Chooser(Protocol):
    """How one of several weighted alternatives is chosen."""

    def among(self, weights: Tensor) -> Tensor:
        """Return (n,) one index per row of (n, m) weights."""
        ...

    def again(self, weights: Tensor, count: int) -> Tensor:
        """Return (count,) indices into the same (m,) weights."""
        ...

    def words(self, lattice: BackwardLattice, states: Tensor, word_class: int) -> Tensor:
        """Return (n,) a word of one class for each state."""
        ...


class Draw:
    """Chooses in proportion to the weights."""

    def __init__(self, generator: torch.Generator) -> None:
        self.generator = generator
        self._sums: dict[int, Tensor] = {}

    def uniform(self, count: int) -> Tensor:
        """Return (count,) numbers in [0, 1)."""
        return torch.rand(count, generator=self.generator, dtype=torch.float64)

    def among(self, weights: Tensor) -> Tensor:
        return inverted(weights.cumsum(1), self.uniform(len(weights)).to(weights.device)[:, None])[:, 0]

    def again(self, weights: Tensor, count: int) -> Tensor:
        return inverted(weights.cumsum(0), self.uniform(count).to(weights.device))

    def words(self, lattice: BackwardLattice, states: Tensor, word_class: int) -> Tensor:
        members = lattice.template.automaton.class_of_word == word_class
        if members.sum() == 1:
            return torch.full_like(states, int(np.flatnonzero(members)[0]))
        emitted = lattice.distributions.emitted
        if word_class not in self._sums:
            self._sums[word_class] = emitted.running_sums(torch.from_numpy(members).to(states.device))
        return emitted.draw(states, self.uniform(len(states)).to(states.device), self._sums[word_class])


class Best:
    """Chooses the largest weight, the first of several."""

    def among(self, weights: Tensor) -> Tensor:
        return weights.argmax(1)

    def again(self, weights: Tensor, count: int) -> Tensor:
        return weights.argmax().expand(count)

    def words(self, lattice: BackwardLattice, states: Tensor, word_class: int) -> Tensor:
        members = torch.from_numpy(lattice.template.automaton.class_of_word == word_class).to(states.device)
        chosen = []
        for state in states.tolist():
            words, probability = lattice.distributions.emitted.words(state)
            chosen.append(int(words[(probability * members[words]).argmax()]))
        return torch.tensor(chosen, dtype=torch.long, device=states.device)


def inverted(cumulative: Tensor, uniform: Tensor) -> Tensor:
    """Return the first index whose running sum exceeds uniform * total: never one of weight zero."""
    total = cumulative[..., -1:]
    target = torch.minimum(uniform * total, torch.nextafter(total, torch.zeros_like(total)))
    return torch.searchsorted(cumulative.contiguous(), target.contiguous(), right=True)


class _Walk:
    """The position of each of n texts.

    One of: restarting everywhere; a filter `alpha` on the states of a word's block; a state each, -1 for a restart.
    """

    def __init__(self, count: int, start: int, device: torch.device) -> None:
        self.count, self.device = count, device
        self.q = np.full(count, start, dtype=np.int64)
        self.block: int | None = None
        self.alpha: Tensor | None = None
        self.state: Tensor | None = None


def fills(lattice: BackwardLattice, start: int, count: int, chooser: Chooser) -> list[list[list[int]]]:
    """Return `count` fills, each a list of word ids for every gap, the automaton beginning in `start`."""
    template, distributions = lattice.template, lattice.distributions
    walk = _Walk(count, start, distributions.device)
    found: list[list[list[int]]] = [[] for _ in range(count)]
    for i, item in enumerate(template.items):
        if isinstance(item, Gap):
            for text, words in zip(found, _walk_gap(lattice, lattice.gaps[i], walk, chooser), strict=True):
                text.append(words)
        else:
            _read_word(lattice, item, walk)
    return found


def _read_word(lattice: BackwardLattice, item: Fixed, walk: _Walk) -> None:
    distributions, ring = lattice.distributions, lattice.ring
    walk.q = lattice.template.step(walk.q, item)
    if distributions.restarts(item.word):
        walk.block = walk.alpha = walk.state = None
        return
    if walk.state is not None:
        arrive = _rows_into(lattice, walk.state, distributions.states(item.word), distributions.start_at(item.word))
    elif walk.alpha is not None:
        assert walk.block is not None
        tile = distributions.tiles_of([(walk.block, distributions.block(item.word))])[0].double()
        arrive = ring.forward_step_tile(walk.alpha, tile)
    else:
        arrive = distributions.start_at(item.word).expand(walk.count, -1)
    alpha = arrive * distributions.emission_of(item.word)
    top = alpha.amax(dim=1, keepdim=True)
    walk.alpha = alpha / torch.where(top > 0, top, torch.ones_like(top))
    walk.block, walk.state = distributions.block(item.word), None


def _rows_into(lattice: BackwardLattice, states: Tensor, columns: Tensor, fresh: Tensor) -> Tensor:
    """Return (n, K) p(z' | z) for z' in `columns`, or `fresh` where z is -1."""
    distributions = lattice.distributions
    distinct, where = states.unique(return_inverse=True)
    result = torch.empty(len(distinct), len(columns), dtype=torch.float64, device=states.device)
    for chunk in distributions.row_slices(len(distinct)):
        part = distinct[chunk]
        rows = distributions.rows(part.clamp(min=0))[:, columns]
        result[chunk] = torch.where(part[:, None] < 0, fresh, rows)
    return result[where]


def _walk_gap(lattice: BackwardLattice, gap: GapMessages, walk: _Walk, chooser: Chooser) -> list[list[int]]:
    distributions = lattice.distributions
    remaining = _enter(lattice, gap, walk, chooser)
    words: list[list[int]] = [[] for _ in range(walk.count)]
    state = walk.state
    assert state is not None
    while (remaining > 0).any():
        for r in np.unique(remaining[remaining > 0])[::-1]:
            for q in np.unique(walk.q[remaining == r]):
                texts = np.flatnonzero((remaining == r) & (walk.q == q))
                chosen, classes, q_after = _slot_words(lattice, gap.remaining[r - 1], int(q), state, texts, chooser)
                index = torch.from_numpy(texts).to(distributions.device)
                state[index] = classes
                walk.q[texts] = q_after
                remaining[texts] -= 1
                for text, word in zip(texts, chosen.tolist(), strict=True):
                    words[text].append(word)
    return words


def _enter(lattice: BackwardLattice, gap: GapMessages, walk: _Walk, chooser: Chooser) -> np.ndarray:
    """Choose the gap's length in each text together with the state on its left; return (n,), and set `walk.state`."""
    lengths = sorted(gap.lengths)
    remaining = np.zeros(walk.count, dtype=np.int64)
    state = torch.full((walk.count,), -1, dtype=torch.long, device=walk.device) if walk.state is None else walk.state
    for q in np.unique(walk.q):
        texts = np.flatnonzero(walk.q == q)
        index = torch.from_numpy(texts).to(walk.device)
        values = [gap.lengths[n] for n in lengths]
        if walk.alpha is not None:
            table = _joint(values, int(q), None)  # (lengths, K)
            weights = walk.alpha[index][:, None, :] * table
            place = chooser.among(weights.reshape(len(texts), -1))
            size = table.shape[1]
            which = torch.div(place, size, rounding_mode="floor")
            assert walk.block is not None
            state[index] = lattice.distributions.states_of_block[walk.block][place % size]
        elif walk.state is None:
            which = chooser.again(_fresh(values, int(q)), len(texts))
        else:
            which = torch.empty(len(texts), dtype=torch.long, device=walk.device)
            restarts = state[index] < 0
            if restarts.any():
                which[restarts] = chooser.again(_fresh(values, int(q)), int(restarts.sum()))
            if not restarts.all():
                which[~restarts] = chooser.among(_joint(values, int(q), state[index][~restarts]).T.contiguous())
        remaining[texts] = np.array(lengths)[which.cpu().numpy()]
    walk.block = walk.alpha = None
    walk.state = state
    return remaining


def _joint(values: Sequence[LatticeMessage], q: int, states: Tensor | None) -> Tensor:
    """Return (lengths, K or chosen states) the messages of one automaton state, on one scale or one per chosen state."""
    rows = []
    for value in values:
        assert value.rows is not None
        row = int(value.row_of[q])
        if row < 0:
            vector, scale = value.rows.values.new_zeros(value.rows.values.shape[1]), -np.inf
        else:
            vector, scale = value.rows.values[row], float(value.rows.log_scale[row])
        rows.append((vector if states is None else vector[states]).log() + scale)
    logs = torch.stack(rows)
    top = logs.max() if states is None else logs.amax(0, keepdim=True)
    return (logs - top).exp()


def _fresh(values: Sequence[LatticeMessage], q: int) -> Tensor:
    """Return (lengths,) the messages of one automaton state for a fresh start, on one scale."""
    logs = []
    for value in values:
        assert value.log_fresh is not None
        row = int(value.row_of[q])
        logs.append(value.log_fresh[row] if row >= 0 else torch.tensor(-torch.inf, dtype=torch.float64))
    stacked = torch.stack([log.cpu() for log in logs])
    return (stacked - stacked.max()).exp()


def _slot_words(
    lattice: BackwardLattice, following: LatticeMessage, q: int, state: Tensor, texts: np.ndarray, chooser: Chooser
) -> tuple[Tensor, Tensor, np.ndarray]:
    """Return (word, state or -1 after a fresh start, automaton state after it) for each text in q."""
    distributions, automaton, template = lattice.distributions, lattice.template.automaton, lattice.template
    arrival, _ = lattice.arrival(following, q)
    index = torch.from_numpy(texts).to(distributions.device)
    before = state[index]
    after = torch.empty_like(before)
    restarts = before < 0
    if restarts.any():
        after[restarts] = chooser.again(distributions.start * arrival, int(restarts.sum())).to(after.device)
    moving = (~restarts).nonzero()[:, 0]
    for chunk in distributions.row_slices(len(moving)):
        part = moving[chunk]
        after[part] = chooser.among(distributions.rows(before[part]) * arrival)
    # Which class of word it was, given its state.
    logs = []
    for c in template.classes:
        row = int(following.row_of[automaton.delta[q, c]])
        emission = lattice.emission((c,))[after].log()
        if row < 0:
            logs.append(torch.full_like(emission, -torch.inf))
        elif lattice.is_fresh(c):
            assert following.log_fresh is not None
            logs.append(emission + following.log_fresh[row])
        else:
            assert following.rows is not None
            logs.append(emission + following.rows.values[row][after].log() + following.rows.log_scale[row])
    weights = torch.stack(logs, dim=1)
    which = chooser.among((weights - weights.amax(1, keepdim=True)).exp())
    words = torch.empty_like(after)
    for k in which.unique().tolist():
        here = which == k
        words[here] = chooser.words(lattice, after[here], template.classes[k])
        if lattice.is_fresh(template.classes[k]):
            after[here] = -1
    q_after = automaton.delta[q, np.array(template.classes)[which.cpu().numpy()]]
    return words, after, q_after
