r"""Backward messages through a text with gaps, an automaton carried along.

Input:  a `InfillTemplate`, a semiring. Output: `BackwardLattice`.

Let $B_i(q, z)$ be the probability of everything from item i on, given that the chain is in state z and
the automaton in state q. A given word x of block g: $B_i(q, z) = \sum_{z' \in g} p(z'|z)\, p(x|z')\,
B_{i+1}(\delta(q,x), z')$. A gap: $R_0 = B_{i+1}$ and, with $E_{qq'}(z') = \sum_{x: \delta(q,x) = q'}
p(x|z')$, $R_r(q, z) = \sum_{z'} p(z'|z) \sum_{q'} E_{qq'}(z')\, R_{r-1}(q', z')$; then $B_i = \sum_n R_n$
over the gap's lengths n. A fresh start has $p(z_1)$ in place of $p(z'|z)$ and no z: one number per q.

Only a gap needs messages on all S states. A gap of n words costs one pass from K states to S, n - 1 passes
over the S x S transitions (all automaton states in one batch), and one pass from S back to the K states on
its left.
"""

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from vlhmm.distributions import HMMDistributions
from vlhmm.lattice.semiring import SumProduct
from vlhmm.lattice.template import Fixed, Gap, InfillTemplate, MessageSupport


class ScaledVectors(NamedTuple):
    """Vectors with a logarithmic scale each: row i is values[i] * exp(log_scale[i])."""

    values: Tensor  # (n, S or K) float64, largest entry 1 (or a row of zeros, with scale -inf)
    log_scale: Tensor  # (n,) float64


class LatticeMessage(NamedTuple):
    """A message for some automaton states, on the states of its domain and/or for a fresh start."""

    row_of: np.ndarray  # (Q,) the row of an automaton state, -1 for none
    rows: ScaledVectors | None
    log_fresh: Tensor | None  # (n,)


def rescaled(values: Tensor, log_scale: Tensor) -> ScaledVectors:
    """Return the same vectors, each with largest entry 1."""
    top = values.amax(dim=1) if values.shape[1] else values.new_zeros(len(values))
    positive = top > 0
    divisor = torch.where(positive, top, torch.ones_like(top))
    scale = torch.where(positive, log_scale + divisor.log(), torch.full_like(log_scale, -torch.inf))
    return ScaledVectors(values / divisor[:, None], scale)


def row_index(num_states: int, states: np.ndarray) -> np.ndarray:
    """Return (Q,) row numbers of the listed automaton states, -1 for the others."""
    row_of = np.full(num_states, -1, dtype=np.int64)
    row_of[states] = np.arange(len(states))
    return row_of


@dataclass(frozen=True, eq=False)
class GapMessages:
    """What is kept of a gap."""

    remaining: list[LatticeMessage]  # R_r for r = 0 .. high - 1, on all states
    lengths: dict[int, LatticeMessage]  # R_n for every length n, on the domain left of the gap


@dataclass(eq=False)
class BackwardLattice:
    """Backward messages of a template."""

    template: InfillTemplate
    distributions: HMMDistributions
    ring: SumProduct
    gaps: dict[int, GapMessages] = field(default_factory=dict)
    before: dict[int, LatticeMessage] = field(default_factory=dict)  # B_i
    _emission: dict[tuple[int, ...], Tensor] = field(default_factory=dict)

    def log_total(self, start: int) -> float:
        """Return log of everything, the automaton beginning in `start`; -inf where it is impossible."""
        value = self.before[0]
        row = int(value.row_of[start])
        return -np.inf if row < 0 else float(value.log_fresh[row])  # type: ignore[index]

    def emission(self, classes: tuple[int, ...]) -> Tensor:
        """Return (S,) p(a word of these classes | z), or the largest such p(x | z)."""
        if classes not in self._emission:
            words = np.flatnonzero(np.isin(self.template.automaton.class_of_word, classes))
            self._emission[classes] = self.ring.emission(torch.from_numpy(words).to(self.distributions.device))
        return self._emission[classes]

    def arrival(self, following: LatticeMessage, state: int) -> tuple[Tensor, float]:
        """Return (values (S,), log scale) of sum_q' E_qq'(z') R(q', z') for one automaton state q."""
        template, ring = self.template, self.ring
        terms: list[tuple[Tensor, Tensor | None, float]] = []
        for target, classes in self.targets(state).items():
            row = int(following.row_of[target])
            if row < 0:
                continue
            ordinary = tuple(c for c in classes if not self.is_fresh(c))
            if ordinary and following.rows is not None:
                terms.append((self.emission(ordinary), following.rows.values[row], float(following.rows.log_scale[row])))
            if len(ordinary) < len(classes) and following.log_fresh is not None:
                terms.append((self.emission((template.automaton.eos_class,)), None, float(following.log_fresh[row])))
        top = max((scale for *_, scale in terms), default=-np.inf)
        result = torch.zeros(self.distributions.num_states, dtype=torch.float64, device=self.distributions.device)
        if top == -np.inf:
            return result, top
        for emission, values, scale in terms:
            factor = float(np.exp(scale - top))
            if factor:
                term = emission * factor if values is None else emission * values * factor
                result = ring.join(result, term)
        return result, top

    def targets(self, state: int) -> dict[int, tuple[int, ...]]:
        """Return {q': the classes of words that lead from q to q'}."""
        found: dict[int, tuple[int, ...]] = {}
        for c in self.template.classes:
            target = int(self.template.automaton.delta[state, c])
            found[target] = (*found.get(target, ()), c)
        return found

    def is_fresh(self, word_class: int) -> bool:
        """Return whether the chain restarts after a word of this class."""
        return self.distributions.rule == "reset" and word_class == self.template.automaton.eos_class


def backward(distributions: HMMDistributions, template: InfillTemplate, ring: SumProduct) -> BackwardLattice:
    """Return all backward messages of `template`."""
    lattice = BackwardLattice(template, distributions, ring)
    last = len(template.items)
    lattice.before[last] = _end(distributions, template)
    for i in range(last - 1, -1, -1):
        item = template.items[i]
        if isinstance(item, Fixed):
            lattice.before[i] = _before_word(lattice, i, item)
        else:
            lattice.gaps[i] = _gap(lattice, i, item)
            lattice.before[i] = _before_gap(lattice, i)
        lattice.before.pop(i + 2, None)  # only gaps are asked again
    return lattice


def _end(distributions: HMMDistributions, template: InfillTemplate) -> LatticeMessage:
    """Return the message after the last item: one where the automaton accepts."""
    support, states = template.supports[-1], np.flatnonzero(template.entry[-1])
    size = distributions.num_states if support.every else distributions.states_per_block
    zeros = torch.zeros(len(states), dtype=torch.float64, device=distributions.device)
    rows = (
        ScaledVectors(zeros[:, None].expand(-1, size) + 1, zeros)
        if support.every or support.block is not None
        else None
    )
    return LatticeMessage(row_index(template.automaton.num_states, states), rows, zeros if support.fresh else None)


def _before_word(lattice: BackwardLattice, i: int, item: Fixed) -> LatticeMessage:
    template, distributions, following = lattice.template, lattice.distributions, lattice.before[i + 1]
    states = np.flatnonzero(template.entry[i])
    targets, row = np.unique(template.step(states, item), return_inverse=True)
    source = torch.from_numpy(following.row_of[targets]).to(distributions.device)
    emission = distributions.emission_of(item.word)
    if distributions.restarts(item.word):
        assert following.log_fresh is not None
        arrival = rescaled(emission.expand(len(targets), -1), following.log_fresh[source])
    else:
        assert following.rows is not None
        arrival = rescaled(following.rows.values[source] * emission, following.rows.log_scale[source])
    row_of = np.full(template.automaton.num_states, -1, dtype=np.int64)
    row_of[states] = row.reshape(-1)
    return _pushed(lattice, arrival, distributions.block(item.word), template.supports[i], row_of)


def _gap(lattice: BackwardLattice, i: int, item: Gap) -> GapMessages:
    template, distributions = lattice.template, lattice.distributions
    entry = template.supports[i]
    # R_r, r < high, is read by the slot before it (all states; fresh where an <eos> may be in the gap).
    inside = MessageSupport(None, True, template.supports[i + 1].fresh)
    remaining = [lattice.before[i + 1]]
    lengths = {}
    # One block of memory for all that is kept: small pieces left between large temporaries would keep the
    # allocator from using theirs again.
    kept = sum(int(states.sum()) for states in template.remaining[i][1 : item.high])
    store = torch.empty(kept, distributions.num_states, dtype=torch.float64, device=distributions.device)
    if item.low == 0:
        lengths[0] = _restricted(distributions, remaining[0], entry)
    for r in range(1, item.high + 1):
        states = np.flatnonzero(template.remaining[i][r])
        arrival = _slot(lattice, remaining[r - 1], states)
        row_of = row_index(template.automaton.num_states, states)
        value = _pushed(lattice, arrival, None, inside if r < item.high else entry, row_of)
        if r < item.high:
            value, store = _stored(value, store)
            remaining.append(value)
        if r >= item.low:
            lengths[r] = _restricted(distributions, value, entry) if r < item.high else value
    return GapMessages(remaining, lengths)


def _stored(value: LatticeMessage, store: Tensor) -> tuple[LatticeMessage, Tensor]:
    """Return (the message, moved to the first rows of `store`; the rows that are left)."""
    assert value.rows is not None
    count = len(value.rows.values)
    store[:count] = value.rows.values
    return value._replace(rows=ScaledVectors(store[:count], value.rows.log_scale)), store[count:]


def _slot(lattice: BackwardLattice, following: LatticeMessage, states: np.ndarray) -> ScaledVectors:
    """Return what arrives in the state of a gap's word, for each listed automaton state before that word."""
    distributions = lattice.distributions
    values = torch.empty(len(states), distributions.num_states, dtype=torch.float64, device=distributions.device)
    scales = []
    for row, state in enumerate(states):
        values[row], scale = lattice.arrival(following, int(state))
        scales.append(scale)
    return rescaled(values, torch.tensor(scales, dtype=torch.float64, device=distributions.device))


def _before_gap(lattice: BackwardLattice, i: int) -> LatticeMessage:
    """Return the sum (or best) of the gap's lengths."""
    template, ring, lengths = lattice.template, lattice.ring, lattice.gaps[i].lengths
    states = np.flatnonzero(template.entry[i])
    support = template.supports[i]
    found = [value for value in lengths.values() if (value.row_of[states] >= 0).any()]
    rows = log_fresh = None
    if support.every or support.block is not None:
        values, scales = zip(*(_rows_at(value, states) for value in found), strict=True)
        top = torch.stack(scales).amax(0)
        base = torch.where(torch.isfinite(top), top, torch.zeros_like(top))
        joined = torch.zeros_like(values[0])
        for value, scale in zip(values, scales, strict=True):
            joined = ring.join(joined, value * (scale - base).exp()[:, None])
        rows = rescaled(joined, base)
    if support.fresh:
        log_fresh = ring.join_logs(torch.stack([_fresh_at(value, states) for value in found]))
    return LatticeMessage(row_index(template.automaton.num_states, states), rows, log_fresh)


def _rows_at(value: LatticeMessage, states: np.ndarray) -> tuple[Tensor, Tensor]:
    """Return (values, log scales) of the listed automaton states; zero and -inf where there is no message."""
    assert value.rows is not None
    row = torch.from_numpy(value.row_of[states]).to(value.rows.values.device)
    inside = row >= 0
    if not len(value.rows.values):
        size = value.rows.values.shape[1]
        return value.rows.values.new_zeros(len(row), size), value.rows.log_scale.new_full((len(row),), -torch.inf)
    values = value.rows.values[row.clamp(min=0)] * inside[:, None]
    return values, torch.where(inside, value.rows.log_scale[row.clamp(min=0)], -torch.inf)


def _fresh_at(value: LatticeMessage, states: np.ndarray) -> Tensor:
    """Return log values for a fresh start of the listed automaton states; -inf where there is no message."""
    assert value.log_fresh is not None
    row = torch.from_numpy(value.row_of[states]).to(value.log_fresh.device)
    if not len(value.log_fresh):
        return value.log_fresh.new_full((len(row),), -torch.inf)
    return torch.where(row >= 0, value.log_fresh[row.clamp(min=0)], -torch.inf)


def _restricted(distributions: HMMDistributions, value: LatticeMessage, support: MessageSupport) -> LatticeMessage:
    """Return a message on all states, on a smaller domain."""
    rows = value.rows
    if rows is not None and not support.every:
        rows = (
            None
            if support.block is None
            else rescaled(rows.values[:, distributions.states_of_block[support.block]], rows.log_scale)
        )
    return LatticeMessage(value.row_of, rows, value.log_fresh if support.fresh else None)


def _pushed(
    lattice: BackwardLattice, arrival: ScaledVectors, block: int | None, support: MessageSupport, row_of: np.ndarray
) -> LatticeMessage:
    """Return the message before a transition, from that of the state it leads to (`arrival`).

    `arrival` lives on the states of `block`, or on all states (None).
    """
    distributions, ring = lattice.distributions, lattice.ring
    values, log_scale = arrival
    rows = log_fresh = None
    if support.every:
        moved = ring.backward_step(values) if block is None else ring.backward_step_to(block, values)
        rows = rescaled(moved, log_scale)
    elif support.block is not None:
        if block is None:
            moved = ring.backward_step_at(support.block, values)
        else:
            moved = ring.backward_step_tile(distributions.tiles_of([(support.block, block)])[0].double(), values)
        rows = rescaled(moved, log_scale)
    if support.fresh:
        start = distributions.start if block is None else distributions.start[distributions.states_of_block[block]]
        log_fresh = ring.total(values * start).log() + log_scale
    return LatticeMessage(row_of, rows, log_fresh)
