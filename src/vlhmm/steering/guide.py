"""Compute p(constraint | text so far, next token) for a batch of sequences, step by step.

    p(C | x_<=t) = sum_z p(z_t = z | x_<t) p(x_t | z) beta_l(delta(q, x_t), z) / sum_z p(z_t = z | x_<t) p(x_t | z)

Input:  a lookahead table.
Output: `Guide`. Its `GuideState` is an immutable value: the filter and the automaton state of every sequence.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from vlhmm.inference.numba_backend import kernel, parallel
from vlhmm.limits import MAX_NEW_TOKENS, check_range
from vlhmm.steering.hmm import SteeringHMM
from vlhmm.steering.lookahead import Progress, lookahead_table
from vlhmm.steering.token_automaton import DEAD, TokenAutomaton

_TOKENS_AT_ONCE = 256  # of one block and class, processed together by a kernel


@dataclass(frozen=True)
class GuideState:
    """The filter and the automaton state of each sequence: p(z_t | x_<t) and q."""

    predicted: Tensor  # (n, S)
    automaton: np.ndarray  # (n,) int64; -1 where the constraint cannot be met any more
    remaining: int  # tokens left, the end token included

    def select(self, rows: Sequence[int] | np.ndarray) -> "GuideState":
        """Return the states of the given rows. A row may occur several times."""
        index = np.asarray(rows, dtype=np.int64)
        return GuideState(self.predicted[torch.from_numpy(index)], self.automaton[index], self.remaining)


class Guide:
    """A constraint as seen by an HMM: the effect of each next token on the probability of meeting it within the budget.

    Args:
        hmm: The HMM.
        automaton: The constraint over the HMM's tokens.
        max_new_tokens: The token budget, the end token included.
        progress: Called with (level, levels) while the lookahead table is computed.

    Raises:
        QueryError: No text within the budget satisfies the constraint, or the table exceeds the memory budget.
        ConfigError: `max_new_tokens` is out of range.
    """

    def __init__(
        self, hmm: SteeringHMM, automaton: TokenAutomaton, max_new_tokens: int, progress: Progress | None = None
    ) -> None:
        check_range("max_new_tokens", max_new_tokens, 1, MAX_NEW_TOKENS)
        automaton.check_budget(max_new_tokens)
        self.hmm, self.automaton, self.max_new_tokens = hmm, automaton, max_new_tokens
        self.table = lookahead_table(hmm, automaton, max_new_tokens, progress)
        classes = torch.from_numpy(automaton.class_of_token[: hmm.vocab_size]).long()
        code = hmm.block_of_token * automaton.num_classes + classes
        self._order = code.argsort(stable=True).numpy()  # tokens by block, then by class
        sorted_code = code.numpy()[self._order]
        cuts = np.flatnonzero(np.diff(sorted_code, prepend=-1))
        ends = np.append(cuts[1:], len(sorted_code))
        starts = [np.arange(a, b, _TOKENS_AT_ONCE) for a, b in zip(cuts, ends, strict=True)]
        self._part_first = np.concatenate(starts)
        self._part_end = np.minimum(
            self._part_first + _TOKENS_AT_ONCE, np.repeat(ends, [len(some) for some in starts])
        )
        # emissions of a part as (K, tokens): sums over states then run along the tokens, without horizontal additions
        self._packed = np.empty(hmm.vocab_size * hmm.states_per_block, dtype=hmm.emission.numpy().dtype)
        _pack(self._part_first, self._part_end, self._order, hmm.emission.numpy(), self._packed)
        self._part_block = sorted_code[self._part_first] // automaton.num_classes
        self._part_class = sorted_code[self._part_first] % automaton.num_classes

    def start(self, contexts: Sequence[Sequence[int]]) -> GuideState:
        """Return the state before the first generated token of each sequence. Its context may be empty."""
        unique = list(dict.fromkeys(tuple(context) for context in contexts))
        number = {context: i for i, context in enumerate(unique)}
        predicted = torch.stack([self._read(context) for context in unique])
        rows = torch.tensor([number[tuple(context)] for context in contexts])
        return GuideState(predicted[rows], np.zeros(len(rows), dtype=np.int64), self.max_new_tokens)

    def _read(self, context: Sequence[int]) -> Tensor:
        predicted = self.hmm.start
        for token in context:
            if token in self.hmm.restart_tokens:
                predicted = self.hmm.start
            elif 0 <= token < self.hmm.vocab_size:
                predicted = self.hmm.forward_step(predicted[None], torch.tensor([token]))[0]
        return predicted

    def step(self, state: GuideState, tokens: Sequence[int] | np.ndarray) -> GuideState:
        """Return the state after one more token per sequence. O(K S) per sequence. Finished sequences do not change."""
        ids = np.asarray(tokens, dtype=np.int64)
        before = state.automaton
        known = (ids >= 0) & (ids < self.hmm.vocab_size)
        going = (before != DEAD) & (before != self.automaton.final)
        classes = self.automaton.class_of_token[np.where(known, ids, 0)]
        after = np.where(known, self.automaton.delta[before, classes], DEAD)
        after = np.where(going, after, before)
        moving = np.flatnonzero(going & known & (after != DEAD) & (after != self.automaton.final))
        predicted = state.predicted
        if len(moving):
            rows = torch.from_numpy(moving)
            stepped = self.hmm.forward_step(predicted[rows], torch.from_numpy(ids[moving]))
            predicted = stepped if len(moving) == len(ids) else predicted.index_copy(0, rows, stepped)
        return GuideState(predicted, after.astype(np.int64), state.remaining - 1)

    def open(self, state: GuideState) -> np.ndarray:
        """Return which sequences may continue, (n,) bool: unfinished, with tokens left, and able to meet the constraint."""
        return (state.automaton != DEAD) & (state.automaton != self.automaton.final) & (state.remaining > 0)

    def log_ratios(self, state: GuideState) -> tuple[Tensor, Tensor]:
        """Return log p(C | text, v) - log p(C | text) for each next token v, (n, V), and log p(C | text), (n,).

        O(K V) per sequence. A token after which the constraint cannot be met in time has -inf. If the HMM gives probability
        zero to every allowed token, all of them get 0, so the constraint is met all the same. Sequences that are not `open`
        get 0.
        """
        count, vocab = len(state.automaton), self.hmm.vocab_size
        ratio = torch.zeros(count, vocab, dtype=self.hmm.dtype)
        probability = torch.zeros(count, dtype=torch.float64)
        rows = np.flatnonzero(self.open(state))
        if not len(rows):
            return ratio, probability
        level = state.remaining - 1
        scale_of, row_of = self.table.log_scale[level], self.table.row_of[level]
        targets = self.automaton.delta[state.automaton[rows]]  # (n, C)
        scale = np.where(targets == DEAD, -np.inf, scale_of[targets])
        top = scale.max(axis=1)
        table_row = np.where(np.isfinite(scale), row_of[targets], -1)
        found = torch.empty(len(rows), vocab, dtype=self.hmm.dtype)
        shift = torch.empty(len(rows), vocab, dtype=self.hmm.dtype)
        totals = np.zeros((len(self._part_first), len(rows)))
        with np.errstate(invalid="ignore"):
            relative = np.where(np.isfinite(scale), scale - top[:, None], 0)
        predicted = state.predicted if len(rows) == count else state.predicted[torch.from_numpy(rows)]
        parallel(
            _ratios, _even(self._part_end - self._part_first), self._part_first, self._part_end, self._part_block,
            self._part_class, self._order, self._packed, self.hmm.states_per_block, predicted.contiguous().numpy(),
            self.table.values[level].numpy(), table_row, np.where(np.isfinite(scale), scale, -np.inf),
            np.exp(relative), found.numpy(), shift.numpy(), totals,
        )  # fmt: skip
        total = totals.sum(axis=0)
        with np.errstate(divide="ignore"):
            log_probability = np.log(total) + np.where(np.isfinite(top), top, 0)
        logs = found.log_().add_(shift)
        logs.sub_(torch.from_numpy(np.where(total > 0, log_probability, 0)).to(logs.dtype)[:, None])
        for i in np.flatnonzero(~(total > 0)):  # the HMM gives zero to every allowed token
            allowed = (targets[i] != DEAD) & (self.automaton.distance[targets[i]] <= level)
            classes = self.automaton.class_of_token[:vocab]
            logs[i] = torch.from_numpy(np.where(allowed[classes], 0.0, -np.inf)).to(logs.dtype)
            log_probability[i] = -np.inf
        index = torch.from_numpy(rows)
        probability[index] = torch.from_numpy(log_probability)
        if len(rows) == count:
            return logs, probability
        ratio[index] = logs
        return ratio, probability


def _even(sizes: np.ndarray) -> np.ndarray:
    """Divide the parts into a few runs per thread with about equally many tokens."""
    runs = max(1, min(4 * torch.get_num_threads(), len(sizes)))
    done = np.cumsum(sizes)
    inner = np.searchsorted(done, np.arange(1, runs) * (done[-1] / runs), side="right")
    return np.concatenate([[0], np.maximum.accumulate(inner), [len(sizes)]]).astype(np.int64)


@kernel
def _pack(part_first, part_end, order, emission, packed):  # type: ignore[no-untyped-def]
    size = emission.shape[1]
    for part in range(len(part_first)):
        first, count = part_first[part], part_end[part] - part_first[part]
        for t in range(count):
            for slot in range(size):
                packed[first * size + slot * count + t] = emission[order[first + t], slot]


@kernel
def _ratios(begin, end, part_first, part_end, part_block, part_class, order, packed, size, predicted, values, table_row, scale, relative, ratio, shift, totals):  # type: ignore[no-untyped-def]
    """Compute p(C | text, v), its scale, and sums of p(v | text) p(C | text, v), for runs of tokens v."""
    rows, dtype = len(predicted), predicted.dtype
    joint = np.empty(size, dtype=dtype)
    above = np.empty(256, dtype=dtype)  # _TOKENS_AT_ONCE: sum_z p(z) p(v | z) beta(z), for each token of the part
    below = np.empty(256, dtype=dtype)  # sum_z p(z) p(v | z)
    for part in range(begin, end):
        block, kind = part_block[part] * size, part_class[part]
        first, count = part_first[part], part_end[part] - part_first[part]
        emission = packed[first * size : (first + count) * size].reshape(size, count)
        for i in range(rows):
            source = table_row[i, kind]
            if source < 0:
                for position in range(first, first + count):
                    ratio[i, order[position]] = 0
                    shift[i, order[position]] = 0
                continue
            for slot in range(size):
                joint[slot] = predicted[i, block + slot] * values[source, block + slot]
            for t in range(count):
                above[t] = 0
                below[t] = 0
            slot = 0
            while slot + 4 <= size:
                w0, w1, w2, w3 = joint[slot], joint[slot + 1], joint[slot + 2], joint[slot + 3]
                p0, p1 = predicted[i, block + slot], predicted[i, block + slot + 1]
                p2, p3 = predicted[i, block + slot + 2], predicted[i, block + slot + 3]
                e0, e1, e2, e3 = emission[slot], emission[slot + 1], emission[slot + 2], emission[slot + 3]
                for t in range(count):
                    a, b, c, d = e0[t], e1[t], e2[t], e3[t]
                    above[t] += w0 * a + w1 * b + w2 * c + w3 * d
                    below[t] += p0 * a + p1 * b + p2 * c + p3 * d
                slot += 4
            while slot < size:
                w0, p0 = joint[slot], predicted[i, block + slot]
                for t in range(count):
                    above[t] += w0 * emission[slot, t]
                    below[t] += p0 * emission[slot, t]
                slot += 1
            known = dtype.type(scale[i, kind])
            total = 0.0
            for t in range(count):
                token = order[first + t]
                total += above[t]
                ratio[i, token] = above[t] / below[t] if below[t] > 0 else dtype.type(0)
                shift[i, token] = known
            totals[part, i] = total * relative[i, kind]
