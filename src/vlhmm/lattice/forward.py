r"""Each gap word's distribution, and each gap's length. Input: sum-product `BackwardLattice`. Output:
`GapMarginals` for each gap.

Forward messages $F_j(q, z)$ (j words of the gap used, z the state of the next one) meet the backward ones:
$p(x \text{ at } j, \text{length } n) \propto \sum_{q,z} F_j(q, z)\, p(x|z)\, R_{n-j-1}(\delta(q,x), z)$.
"""

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from vlhmm.lattice.backward import BackwardLattice, LatticeMessage, ScaledVectors, rescaled, row_index
from vlhmm.lattice.semiring import columns_of
from vlhmm.lattice.template import Fixed, Gap


class GapMarginals(NamedTuple):
    """One gap, given everything observed (and the constraint)."""

    lengths: dict[int, float]  # {n: p(the gap holds n words)}
    words: dict[int, np.ndarray]  # {n: (n, V) p(x at each place of the gap | it holds n words)}


def gap_marginals(lattice: BackwardLattice, start: int) -> list[GapMarginals]:
    """Return the marginals of every gap, the automaton beginning in `start`."""
    template, distributions = lattice.template, lattice.distributions
    last = max(i for i, item in enumerate(template.items) if isinstance(item, Gap))
    after = message_at_start(lattice, start)
    block: int | None = None  # of the word just read, if it was a given one
    found = []
    for i, item in enumerate(template.items[: last + 1]):
        if isinstance(item, Fixed):
            after = read_word(lattice, item, after, block)
            block = None if distributions.restarts(item.word) else distributions.block(item.word)
        else:
            marginals, after = _after_gap(lattice, i, item, after, block, go_on=i < last)
            found.append(marginals)
            block = None
    return found


def message_at_start(lattice: BackwardLattice, start: int) -> LatticeMessage:
    """Return the message before the first word: a fresh start, the automaton in the state `start`."""
    row_of = row_index(lattice.template.automaton.num_states, np.array([start]))
    return LatticeMessage(row_of, None, torch.zeros(1, dtype=torch.float64, device=lattice.distributions.device))


def read_word(lattice: BackwardLattice, item: Fixed, before: LatticeMessage, block: int | None) -> LatticeMessage:
    """Return p(words so far, q, z) after a given word."""
    template, distributions = lattice.template, lattice.distributions
    states = np.flatnonzero(before.row_of >= 0)
    targets = template.step(states, item)
    merged = np.unique(targets)
    row_of = row_index(template.automaton.num_states, merged)
    here, emission = distributions.states(item.word), distributions.emission_of(item.word)
    parts: list[tuple[Tensor, Tensor]] = []  # (values (n, K), log scale (n,)) in the order of `states`
    order = torch.from_numpy(before.row_of[states]).to(distributions.device)
    if before.rows is not None:
        values, scale = before.rows.values[order], before.rows.log_scale[order]
        if block is not None:
            arrive = values @ distributions.tiles_of([(block, distributions.block(item.word))])[0].double()
        else:
            arrive = values @ columns_of(distributions, distributions.block(item.word)).T
        parts.append((arrive * emission, scale))
    if before.log_fresh is not None:
        fresh = (distributions.start[here] * emission).expand(len(states), -1)
        parts.append((fresh, before.log_fresh[order]))
    values, scale = _summed(parts, row_of[targets], len(merged))
    if distributions.restarts(item.word):
        return LatticeMessage(row_of, None, values.sum(1).log() + scale)
    return LatticeMessage(row_of, ScaledVectors(values, scale), None)


def _summed(parts: list[tuple[Tensor, Tensor]], target: np.ndarray, count: int) -> ScaledVectors:
    """Return rows added into `count` sums, each part's row i into sum target[i]."""
    device = parts[0][0].device
    index = torch.from_numpy(target).to(device)
    top = torch.full((count,), -torch.inf, dtype=torch.float64, device=device)
    for _, scale in parts:
        top = top.scatter_reduce(0, index, scale, "amax")
    base = torch.where(torch.isfinite(top), top, torch.zeros_like(top))
    total = parts[0][0].new_zeros(count, parts[0][0].shape[1])
    for values, scale in parts:
        total.index_add_(0, index, values * (scale - base[index]).exp()[:, None])
    return rescaled(total, base)


def _after_gap(
    lattice: BackwardLattice, i: int, item: Gap, before: LatticeMessage, block: int | None, go_on: bool
) -> tuple[GapMarginals, LatticeMessage]:
    distributions, gap = lattice.distributions, lattice.gaps[i]
    lengths = _length_posterior(gap.lengths, before)
    words: dict[int, np.ndarray] = {
        n: np.zeros((n, distributions.vocab_size)) for n in range(item.low, item.high + 1) if lengths[n] > 0
    }
    used = {0: before}
    for j in range(item.high):
        arrive = step(lattice, used[j], block if j == 0 else None)
        for n in words:
            if n > j:
                words[n][j] = _word_marginal(lattice, arrive, gap.remaining[n - j - 1])
        if j + 1 < item.high or go_on:
            used[j + 1] = read_any_word(lattice, arrive)
        if j > 0 and j < item.low:
            del used[j]
    if not go_on:
        return GapMarginals(lengths, words), before
    kept = [_everywhere(lattice, used[n], block if n == 0 else None) for n in range(item.low, item.high + 1)]
    return GapMarginals(lengths, words), _union(lattice, kept)


def _length_posterior(lengths: dict[int, LatticeMessage], before: LatticeMessage) -> dict[int, float]:
    """Return {n: p(n words)} from the messages on both sides of a gap's left end."""
    logs = {}
    for n, value in lengths.items():
        terms = []
        for q in np.flatnonzero((before.row_of >= 0) & (value.row_of >= 0)):
            left, right = int(before.row_of[q]), int(value.row_of[q])
            if before.rows is not None and value.rows is not None:
                both = (before.rows.values[left] * value.rows.values[right]).sum()
                terms.append(both.log() + before.rows.log_scale[left] + value.rows.log_scale[right])
            if before.log_fresh is not None and value.log_fresh is not None:
                terms.append(before.log_fresh[left] + value.log_fresh[right])
        logs[n] = float(torch.stack(terms).logsumexp(0)) if terms else -np.inf
    top = max(logs.values())
    weights = {n: float(np.exp(log - top)) for n, log in logs.items()}
    total = sum(weights.values())
    return {n: weight / total for n, weight in weights.items()}


def step(lattice: BackwardLattice, before: LatticeMessage, block: int | None) -> LatticeMessage:
    """Return p(words so far, q, z) for the state z of the word to come: one transition further, on all states."""
    distributions = lattice.distributions
    parts: list[tuple[Tensor, Tensor]] = []
    if before.rows is not None:
        values, scale = before.rows
        if block is None:
            moved = distributions.forward_step(values)
        else:
            moved = distributions.forward_step_from([block] * len(values), values)
        parts.append((moved, scale))
    if before.log_fresh is not None:
        parts.append((distributions.start.expand(len(before.log_fresh), -1), before.log_fresh))
    count = len(parts[0][1])
    return LatticeMessage(before.row_of, _summed(parts, np.arange(count), count), None)


def _word_marginal(lattice: BackwardLattice, arrive: LatticeMessage, following: LatticeMessage) -> np.ndarray:
    """Return (V,) the distribution of the word in a slot, given what comes to it from both sides."""
    template, distributions = lattice.template, lattice.distributions
    assert arrive.rows is not None
    weights, tops = [], []
    for c in template.classes:
        total = torch.zeros(distributions.num_states, dtype=torch.float64, device=distributions.device)
        terms = []
        for q in np.flatnonzero(arrive.row_of >= 0):
            left, right = int(arrive.row_of[q]), int(following.row_of[template.automaton.delta[q, c]])
            if right < 0:
                continue
            scale = arrive.rows.log_scale[left]
            if lattice.is_fresh(c):
                if following.log_fresh is not None:
                    terms.append((arrive.rows.values[left], float(scale + following.log_fresh[right])))
            elif following.rows is not None:
                both = arrive.rows.values[left] * following.rows.values[right]
                terms.append((both, float(scale + following.rows.log_scale[right])))
        top = max((scale for _, scale in terms), default=-np.inf)
        if top > -np.inf:
            for vector, log_weight in terms:
                total += vector * float(np.exp(log_weight - top))
        weights.append(total)
        tops.append(top)
    if max(tops) == -np.inf:
        return np.zeros(distributions.vocab_size)
    words = distributions.emit(torch.stack(weights)).cpu().numpy()
    result = np.zeros(distributions.vocab_size)
    for row, top, c in zip(words, tops, template.classes, strict=True):
        members = template.automaton.class_of_word == c
        result[members] = row[members] * np.exp(top - max(tops))
    mass = result.sum()
    return result / mass if mass > 0 else result


def read_any_word(lattice: BackwardLattice, arrive: LatticeMessage) -> LatticeMessage:
    """Return p(words so far, q, z) after one more word of the gap, whatever word."""
    template, distributions = lattice.template, lattice.distributions
    assert arrive.rows is not None
    parts: dict[int, list[tuple[Tensor, float]]] = {}
    fresh: dict[int, list[Tensor]] = {}
    for q in np.flatnonzero(arrive.row_of >= 0):
        row = int(arrive.row_of[q])
        vector, scale = arrive.rows.values[row], arrive.rows.log_scale[row]
        for target, classes in lattice.targets(int(q)).items():
            if not template.automaton.alive[target]:
                continue
            ordinary = tuple(c for c in classes if not lattice.is_fresh(c))
            if ordinary:
                parts.setdefault(target, []).append((vector * lattice.emission(ordinary), float(scale)))
            if len(ordinary) < len(classes):
                mass = (vector * lattice.emission((template.automaton.eos_class,))).sum().log() + scale
                fresh.setdefault(target, []).append(mass)
    states = np.array(sorted({*parts, *fresh}), dtype=np.int64)
    values = torch.zeros(len(states), distributions.num_states, dtype=torch.float64, device=distributions.device)
    scales = torch.zeros(len(states), dtype=torch.float64, device=distributions.device)
    log_fresh = torch.full_like(scales, -torch.inf)
    for row, q in enumerate(states.tolist()):
        terms = parts.get(q, [])
        top = max((scale for _, scale in terms), default=-np.inf)
        if top > -np.inf:
            scales[row] = top
            for term, log_weight in terms:
                values[row] += term * float(np.exp(log_weight - top))
        if q in fresh:
            log_fresh[row] = torch.stack(fresh[q]).logsumexp(0)
    return LatticeMessage(
        row_index(template.automaton.num_states, states), rescaled(values, scales), log_fresh if fresh else None
    )


def _everywhere(lattice: BackwardLattice, value: LatticeMessage, block: int | None) -> LatticeMessage:
    """Return the same message, written on all states."""
    distributions = lattice.distributions
    if value.rows is None or block is None:
        return value
    values = torch.zeros(
        len(value.rows.values), distributions.num_states, dtype=torch.float64, device=distributions.device
    )
    values.index_add_(1, distributions.states_of_block[block], value.rows.values)
    return LatticeMessage(value.row_of, ScaledVectors(values, value.rows.log_scale), value.log_fresh)


def _union(lattice: BackwardLattice, values: list[LatticeMessage]) -> LatticeMessage:
    """Return the sum of messages on all states."""
    distributions = lattice.distributions
    states = np.flatnonzero(np.any([value.row_of >= 0 for value in values], axis=0))
    row_of = row_index(lattice.template.automaton.num_states, states)
    dense, fresh = [], []
    for value in values:
        own = np.flatnonzero(value.row_of >= 0)
        order = torch.from_numpy(value.row_of[own]).to(distributions.device)
        if value.rows is not None:
            dense.append((own, value.rows.values[order], value.rows.log_scale[order]))
        if value.log_fresh is not None:
            logs = torch.full((len(states),), -torch.inf, dtype=torch.float64, device=distributions.device)
            logs[torch.from_numpy(row_of[own]).to(distributions.device)] = value.log_fresh[order]
            fresh.append(logs)
    rows = None
    if dense:
        index = torch.from_numpy(np.concatenate([row_of[own] for own, *_ in dense])).to(distributions.device)
        stacked = torch.cat([v for _, v, _ in dense]), torch.cat([s for *_, s in dense])
        rows = _summed([stacked], index.cpu().numpy(), len(states))
    return LatticeMessage(row_of, rows, torch.stack(fresh).logsumexp(0) if fresh else None)
