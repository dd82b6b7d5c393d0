"""Leading a batch of sequences: p(constraint | text so far and each next token), step by step.

    p(C | x_<=t) = sum_z p(z_t = z | x_<t) p(x_t | z) beta_l(delta(q, x_t), z) / sum_z p(z_t = z | x_<t) p(x_t | z)

Input:  a lookahead table.
Output: `Guide`; its `GuideState` is a value: the filter and the automaton state of every sequence.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from vlhmm.errors import QueryError
from vlhmm.inference.numba_backend import kernel, parallel
from vlhmm.steering.hmm import SteeringHMM
from vlhmm.steering.lookahead import Progress, lookahead_table
from vlhmm.steering.token_automaton import DEAD, TokenAutomaton

_TOKENS_AT_ONCE = 256  # of one block and class, by a kernel


@dataclass(frozen=True)
class GuideState:
    """Where each sequence stands: p(z | text so far) one step ahead, and the automaton's state."""

    predicted: Tensor  # (n, S)
    automaton: np.ndarray  # (n,) int64; -1 where the constraint cannot be met any more
    remaining: int  # tokens left, the end token included

    def select(self, rows: Sequence[int] | np.ndarray) -> "GuideState":
        """The state of other sequences: each takes that of a given row."""
        index = np.asarray(rows, dtype=np.int64)
        return GuideState(self.predicted[torch.from_numpy(index)], self.automaton[index], self.remaining)


class Guide:
    """An HMM and a constraint: what each next token does to the probability of meeting it within the budget.

    Args:
        hmm: The HMM.
        automaton: The constraint over the HMM's tokens.
        max_new_tokens: The budget, the end token included.
        progress: Called with (level, levels) while the lookahead table is made.

    Raises:
        QueryError: No text of so many tokens meets the constraint, or the table exceeds the memory budget.
    """

    def __init__(
        self, hmm: SteeringHMM, automaton: TokenAutomaton, max_new_tokens: int, progress: Progress | None = None
    ) -> None:
        if max_new_tokens < 1:
            raise QueryError(f"max_new_tokens is {max_new_tokens}, expected at least 1")
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
        self._part_block = sorted_code[self._part_first] // automaton.num_classes
        self._part_class = sorted_code[self._part_first] % automaton.num_classes

    def start(self, contexts: Sequence[Sequence[int]]) -> GuideState:
        """The state before the first generated token of each sequence; the HMM has read its context (may be empty)."""
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
        """The state after one more token per sequence: O(K S) each. Ended sequences stay as they are."""
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
        """(n,) bool: sequences that have neither ended nor left the constraint, and have tokens left."""
        return (state.automaton != DEAD) & (state.automaton != self.automaton.final) & (state.remaining > 0)

    def log_ratios(self, state: GuideState) -> tuple[Tensor, Tensor]:
        """(n, V) log p(C | text, v) - log p(C | text) for each next token v, and (n,) log p(C | text).

        O(K V) per sequence. A token after which the automaton cannot end in time has -inf. Where the HMM holds every
        allowed token impossible, they all get 0: the constraint is met even so. Sequences that are not `open` get 0.
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
            self._part_class, self._order, self.hmm.emission.numpy(), predicted.contiguous().numpy(),
            self.table.values[level].numpy(), table_row, np.where(np.isfinite(scale), scale, -np.inf),
            np.exp(relative), found.numpy(), shift.numpy(), totals,
        )  # fmt: skip
        total = totals.sum(axis=0)
        with np.errstate(divide="ignore"):
            log_probability = np.log(total) + np.where(np.isfinite(top), top, 0)
        logs = found.log_().add_(shift)
        logs.sub_(torch.from_numpy(np.where(total > 0, log_probability, 0)).to(logs.dtype)[:, None])
        for i in np.flatnonzero(~(total > 0)):  # the HMM is at its end; the automaton is not
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
    """Cuts of the parts into a few runs per thread with as many tokens each."""
    runs = max(1, min(4 * torch.get_num_threads(), len(sizes)))
    done = np.cumsum(sizes)
    inner = np.searchsorted(done, np.arange(1, runs) * (done[-1] / runs), side="right")
    return np.concatenate([[0], np.maximum.accumulate(inner), [len(sizes)]]).astype(np.int64)


@kernel
def _ratios(begin, end, part_first, part_end, part_block, part_class, order, emission, predicted, values, table_row, scale, relative, ratio, shift, totals):  # type: ignore[no-untyped-def]
    """p(C | text, v) without its scale, the scale, and sums of p(v | text) p(C | text, v), for runs of tokens v."""
    size, rows = emission.shape[1], len(predicted)
    joint = np.empty(size, dtype=emission.dtype)
    zero = emission.dtype.type(0)
    for part in range(begin, end):
        first = part_block[part] * size
        kind = part_class[part]
        for i in range(rows):
            source = table_row[i, kind]
            if source < 0:
                for position in range(part_first[part], part_end[part]):
                    ratio[i, order[position]] = 0
                    shift[i, order[position]] = 0
                continue
            for slot in range(size):
                joint[slot] = predicted[i, first + slot] * values[source, first + slot]
            known = emission.dtype.type(scale[i, kind])
            total = 0.0
            position = part_first[part]
            while position + 4 <= part_end[part]:
                a, b, c, d = order[position], order[position + 1], order[position + 2], order[position + 3]
                n0, n1, n2, n3 = zero, zero, zero, zero
                d0, d1, d2, d3 = zero, zero, zero, zero
                for slot in range(size):
                    w, p = joint[slot], predicted[i, first + slot]
                    n0 += w * emission[a, slot]
                    n1 += w * emission[b, slot]
                    n2 += w * emission[c, slot]
                    n3 += w * emission[d, slot]
                    d0 += p * emission[a, slot]
                    d1 += p * emission[b, slot]
                    d2 += p * emission[c, slot]
                    d3 += p * emission[d, slot]
                total += n0 + n1 + n2 + n3
                ratio[i, a] = n0 / d0 if d0 > 0 else zero
                ratio[i, b] = n1 / d1 if d1 > 0 else zero
                ratio[i, c] = n2 / d2 if d2 > 0 else zero
                ratio[i, d] = n3 / d3 if d3 > 0 else zero
                shift[i, a], shift[i, b], shift[i, c], shift[i, d] = known, known, known, known
                position += 4
            while position < part_end[part]:
                a = order[position]
                n0, d0 = zero, zero
                for slot in range(size):
                    n0 += joint[slot] * emission[a, slot]
                    d0 += predicted[i, first + slot] * emission[a, slot]
                total += n0
                ratio[i, a] = n0 / d0 if d0 > 0 else zero
                shift[i, a] = known
                position += 1
            totals[part, i] = total * relative[i, kind]
