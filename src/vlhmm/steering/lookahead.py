"""Compute lookahead tables: the probability that the constraint is met within the remaining tokens.

    beta_l(q, z) = p(the automaton ends within l more tokens | automaton state q, hidden state z)
    beta_l(q, z) = sum_z' A(z, z') gamma_l(q, z'),    gamma_l(q, z') = sum_v p(v | z') beta_{l-1}(delta(q, v), z')

Input:  a `SteeringHMM` and a `TokenAutomaton`.
Output: `LookaheadTable`, with one row per level l and automaton state q, scaled by its largest entry.

Cost: at most 2 Q S^2 per level, for the product with A. Most automaton states lead to the same states by nearly all
tokens, so the product is computed block by block of A, once for all automaton states that agree on the tokens of that
block. The parts are then added along a binary tree; at each node, once for all states that agree on its blocks. All
terms are positive, so nothing cancels. Each row has a logarithmic scale, so nothing underflows.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from vlhmm.errors import QueryError
from vlhmm.inference.numba_backend import kernel, parallel, prefetch
from vlhmm.steering.hmm import SteeringHMM
from vlhmm.steering.token_automaton import DEAD, TokenAutomaton

Progress = Callable[[int, int], None]


def lookahead_table(
    hmm: SteeringHMM, automaton: TokenAutomaton, max_new_tokens: int, progress: Progress | None = None
) -> "LookaheadTable":
    """Return the table of a constraint, from the model's cache if it holds one of at least that length."""
    key = automaton.content_hash
    table = hmm.tables.pop(key, None)
    if table is None or table.max_new_tokens < max_new_tokens:
        table = LookaheadTable(hmm, automaton, max_new_tokens)
        table.check_memory()
        while hmm.tables and sum(kept.nbytes for kept in hmm.tables.values()) + table.nbytes > hmm.memory:
            hmm.tables.popitem(last=False)
        table.fill(progress)
    hmm.tables[key] = table
    return table


@dataclass(frozen=True)
class _Stage:
    """The rows of one level of the tree. Each is the sum of two rows of the level below, or one of them (right = -1)."""

    left: np.ndarray
    right: np.ndarray


class LookaheadTable:
    """beta_l(q, z) for l < max_new_tokens, as `values[l]` (rows, S) and `log_scale[l]` (Q,). A row's largest entry is 1.

    `row_of[l]` (Q,) is the row of an automaton state. It is -1 for states that need no row: those that tokens cannot
    reach from the initial state within max_new_tokens - l, or that cannot end within l more tokens (log_scale is -inf).
    """

    def __init__(self, hmm: SteeringHMM, automaton: TokenAutomaton, max_new_tokens: int) -> None:
        if len(automaton.class_of_token) < hmm.vocab_size:
            raise QueryError(
                f"the tokenizer has {len(automaton.class_of_token):,} tokens, the HMM {hmm.vocab_size:,}; "
                "distill the HMM from this language model"
            )
        self.hmm, self.automaton, self.max_new_tokens = hmm, automaton, max_new_tokens
        self.values: list[Tensor] = []
        self.log_scale: list[np.ndarray] = []
        self.row_of: list[np.ndarray] = []

    def needed(self, level: int) -> np.ndarray:
        """Return which states can be reached in time and can still end within `level` tokens, (Q,) bool."""
        reached = self.automaton.reached <= self.max_new_tokens - level
        return reached & (self.automaton.distance <= level)

    @property
    def nbytes(self) -> int:
        """Return the size of the whole table in bytes."""
        rows = sum(int(self.needed(level).sum()) for level in range(self.max_new_tokens))
        return rows * self.hmm.num_states * self.hmm.emission.element_size()

    def check_memory(self) -> None:
        """Raise a QueryError if the table exceeds the model's memory budget."""
        if self.nbytes > self.hmm.memory:
            raise QueryError(
                f"the lookahead table of {self.automaton.num_states:,} automaton states and {self.max_new_tokens} tokens "
                f"takes {self.nbytes / 1e9:.1f} GB, the budget is {self.hmm.memory / 1e9:.1f} GB; raise memory, relax the "
                "constraint or take fewer tokens"
            )

    def fill(self, progress: Progress | None = None) -> None:
        """Compute every level: for each block, one product per set of states that agree on its tokens."""
        self._pairs()
        self._tree()
        final = self.automaton.final
        scale = np.full(self.automaton.num_states, -np.inf)
        scale[final] = 0
        row_of = np.full(self.automaton.num_states, -1)
        row_of[final] = 0
        self.values.append(torch.ones(1, self.hmm.num_states, dtype=self.hmm.dtype))
        self.log_scale.append(scale)
        self.row_of.append(row_of)
        for level in range(1, self.max_new_tokens):
            if progress is not None:
                progress(level, self.max_new_tokens)
            self._add_level(level)

    # ---- what does not depend on the level

    def _pairs(self) -> None:
        """Find the pairs (block, class of tokens) and sum their emissions over the tokens."""
        hmm, automaton = self.hmm, self.automaton
        classes = torch.from_numpy(automaton.class_of_token[: hmm.vocab_size]).long()
        code = hmm.block_of_token * automaton.num_classes + classes
        pairs, pair_of_token = code.unique(return_inverse=True)
        self._pair_block = (pairs // automaton.num_classes).numpy()
        self._pair_class = (pairs % automaton.num_classes).numpy()
        total = torch.zeros(len(pairs), hmm.states_per_block, dtype=torch.float64)
        self._pair_emission = total.index_add_(0, pair_of_token, hmm.emission.double()).to(hmm.dtype).numpy()

    def _tree(self) -> None:
        """Build the tree. Leaves are the distinct tuples of targets of each block; inner rows are distinct pairs of rows."""
        delta = self.automaton.delta
        columns, first_leaf, pair_first, pair, target, leaf_block = [], [0], [0], [], [], []
        for block in range(self.hmm.num_blocks):
            of_block = np.flatnonzero(self._pair_block == block)
            targets, row = np.unique(delta[:, self._pair_class[of_block]], axis=0, return_inverse=True)
            for some in targets:
                going = np.flatnonzero(some != DEAD)
                pair.append(of_block[going])
                target.append(some[going])
                pair_first.append(pair_first[-1] + len(going))
            columns.append(first_leaf[-1] + row.reshape(-1))
            leaf_block.append(np.full(len(targets), block))
            first_leaf.append(first_leaf[-1] + len(targets))
        self._leaf_pair_first = np.array(pair_first)
        self._leaf_pair, self._leaf_target = np.concatenate(pair), np.concatenate(target).astype(np.int64)
        self._leaf_block = np.concatenate(leaf_block)
        self._stages: list[_Stage] = []
        # blocks that partition the states alike are added first: their sums need no more rows
        columns.sort(key=lambda column: (len(np.unique(column)), (column - column.min()).tobytes()))
        while len(columns) > 1:
            merged, left, right, count = [], [], [], 0
            for a, b in zip(columns[::2], columns[1::2], strict=False):
                _, first, row = np.unique(a * (int(b.max()) + 1) + b, return_index=True, return_inverse=True)
                left.append(a[first])
                right.append(b[first])
                merged.append(count + row.reshape(-1))
                count += len(first)
            if len(columns) % 2:
                kept, row = np.unique(columns[-1], return_inverse=True)
                left.append(kept)
                right.append(np.full(len(kept), -1))
                merged.append(count + row.reshape(-1))
            self._stages.append(_Stage(np.concatenate(left), np.concatenate(right)))
            columns = merged
        self._root = columns[0]

    # ---- one level

    def _add_level(self, level: int) -> None:
        hmm, automaton = self.hmm, self.automaton
        needed = self.needed(level)
        needed[automaton.final] = False
        scale_before = self.log_scale[-1]
        # scales from the leaves up: a sum is relative to the larger of its parts
        leaf_scale = _largest(scale_before[self._leaf_target], self._leaf_pair_first)
        scales = [leaf_scale]
        for stage in self._stages:
            of_left, of_right = scales[-1][stage.left], np.append(scales[-1], -np.inf)[stage.right]
            scales.append(np.maximum(of_left, of_right))
        # which rows are needed, from the root down
        wanted = np.zeros(len(scales[-1]), dtype=bool)
        wanted[self._root[needed]] = True
        active = [wanted & np.isfinite(scales[-1])]
        for stage, scale in zip(reversed(self._stages), reversed(scales[:-1]), strict=True):
            below = np.zeros(len(scale) + 1, dtype=bool)
            below[stage.left[active[0]]] = True
            below[stage.right[active[0]]] = True
            active.insert(0, below[:-1] & np.isfinite(scale))
        leaves = np.flatnonzero(active[0])
        with np.errstate(invalid="ignore"):  # -inf - -inf: the kernel skips factors that are not above zero
            factor = np.exp(scale_before[self._leaf_target] - np.repeat(leaf_scale, np.diff(self._leaf_pair_first)))
        gamma = np.zeros((len(leaves), hmm.states_per_block), dtype=self._pair_emission.dtype)
        parallel(
            _gamma, _bounds(len(leaves)), leaves, self._leaf_pair_first, self._leaf_pair, self._leaf_target,
            factor, self._leaf_block, self._pair_emission, self.values[-1].numpy(), self.row_of[-1], gamma,
        )  # fmt: skip
        # rows of the tree, renumbered over the active ones
        number = np.cumsum(active[0]) - 1
        plan_left, plan_right, left_factor, right_factor, first_row = [], [], [], [], [0]
        for stage, on, below, above in zip(self._stages, active[1:], scales[:-1], scales[1:], strict=True):
            rows = np.flatnonzero(on)
            left, right = stage.left[rows], stage.right[rows]
            f_left = np.exp(below[left] - above[rows])
            f_right = np.exp(np.append(below, -np.inf)[right] - above[rows])
            plan_left.append(number[left])
            plan_right.append(np.where(f_right > 0, number[right], 0))
            plan_left[-1][f_left == 0] = 0
            left_factor.append(f_left)
            right_factor.append(f_right)
            first_row.append(first_row[-1] + len(rows))
            number = np.cumsum(on) - 1
        kept = np.flatnonzero(needed)
        roots = self._root[kept]
        alive = active[-1][roots]
        result = torch.zeros(len(kept) + 1, hmm.num_states, dtype=hmm.dtype)
        block_first = np.searchsorted(self._leaf_block[leaves], np.arange(hmm.num_blocks + 1))
        for first, tiles in hmm.tile_parts():
            parallel(
                _product, _bounds(len(tiles)), tiles.numpy(), gamma, block_first,
                _joined(plan_left, np.int64), _joined(plan_right, np.int64), _joined(left_factor, gamma.dtype),
                _joined(right_factor, gamma.dtype), np.array(first_row), np.where(alive, number[roots], -1), first,
                result.numpy(),
            )  # fmt: skip
        peak = result.amax(dim=1)
        result /= torch.where(peak > 0, peak, torch.ones_like(peak))[:, None]
        result[-1] = 1  # the final state
        scale = np.full(automaton.num_states, -np.inf)
        with np.errstate(divide="ignore"):
            scale[kept] = np.log(peak[:-1].double().numpy()) + np.where(alive, scales[-1][roots], -np.inf)
        scale[automaton.final] = 0
        row_of = np.full(automaton.num_states, -1)
        row_of[kept] = np.arange(len(kept))
        row_of[automaton.final] = len(kept)
        self.values.append(result)
        self.log_scale.append(scale)
        self.row_of.append(row_of)


def _largest(values: np.ndarray, first: np.ndarray) -> np.ndarray:
    """Return the largest of each run values[first[i] : first[i + 1]], -inf for an empty run."""
    result = np.full(len(first) - 1, -np.inf)
    filled = np.flatnonzero(np.diff(first))
    if len(filled):
        result[filled] = np.maximum.reduceat(values, first[filled])
    return result


def _joined(parts: list[np.ndarray], dtype: np.dtype | type) -> np.ndarray:
    return np.concatenate([np.zeros(0), *parts]).astype(dtype)


def _bounds(count: int) -> np.ndarray:
    """Divide `count` items into a few runs per thread."""
    runs = max(1, min(4 * torch.get_num_threads(), count))
    return np.linspace(0, count, runs + 1).astype(np.int64)


@kernel
def _gamma(begin, end, leaves, pair_first, pair, target, factor, leaf_block, emission, before, row_of, gamma):  # type: ignore[no-untyped-def]
    """Compute sum over classes of tokens c of p(c | z') beta_{l-1}(delta(q, c), z'), one row per leaf."""
    size = emission.shape[1]
    for row in range(begin, end):
        leaf = leaves[row]
        first = leaf_block[leaf] * size
        for i in range(pair_first[leaf], pair_first[leaf + 1]):
            if not factor[i] > 0:
                continue
            scale = emission.dtype.type(factor[i])
            source = row_of[target[i]]
            for slot in range(size):
                gamma[row, slot] += scale * emission[pair[i], slot] * before[source, first + slot]


@kernel
def _product(begin, end, tiles, gamma, block_first, left, right, left_factor, right_factor, first_row, root, first, result):  # type: ignore[no-untyped-def]
    """Compute result[q, z] = sum over blocks of A[z, block] gamma[leaf of q], for some tiles of 64 source states z.

    Two leaves at a time, so that each loaded entry of A is used twice. The next block's part of A is prefetched: A is read
    from memory once per level, which would otherwise take as long as the arithmetic.
    """
    size, dtype = gamma.shape[1], gamma.dtype
    most = 0
    for stage in range(len(first_row) - 1):
        most = max(most, first_row[stage + 1] - first_row[stage])
    below = np.empty((max(len(gamma), most), 64), dtype=dtype)
    above = np.empty((max(len(gamma), most), 64), dtype=dtype)
    lines = 4 * size  # of 16 entries, in a block's part of a tile
    for tile in range(begin, end):
        for block in range(len(block_first) - 1):
            low, high = block_first[block], block_first[block + 1]
            if low == high:
                continue
            packed = tiles[tile, block * size : (block + 1) * size]
            after = min(block + 1, len(block_first) - 2)
            following = tiles[tile, after * size : (after + 1) * size]
            for leaf in range(low, high, 2):
                other = min(leaf + 1, high - 1)  # with an odd number, the last one is computed twice
                done, count = leaf - low, high - low
                for line in range(done * lines // count, min(done + 2, count) * lines // count):
                    prefetch(following, line // 4, line % 4 * 16)
                for z in range(64):
                    below[leaf, z] = 0
                    below[other, z] = 0
                slot = 0
                while slot + 8 <= size:
                    g0, g1, g2, g3 = gamma[leaf, slot], gamma[leaf, slot + 1], gamma[leaf, slot + 2], gamma[leaf, slot + 3]
                    g4, g5, g6, g7 = gamma[leaf, slot + 4], gamma[leaf, slot + 5], gamma[leaf, slot + 6], gamma[leaf, slot + 7]
                    h0, h1, h2, h3 = gamma[other, slot], gamma[other, slot + 1], gamma[other, slot + 2], gamma[other, slot + 3]
                    h4, h5, h6, h7 = gamma[other, slot + 4], gamma[other, slot + 5], gamma[other, slot + 6], gamma[other, slot + 7]
                    for z in range(64):
                        a0, a1, a2, a3 = packed[slot, z], packed[slot + 1, z], packed[slot + 2, z], packed[slot + 3, z]
                        a4, a5, a6, a7 = packed[slot + 4, z], packed[slot + 5, z], packed[slot + 6, z], packed[slot + 7, z]
                        x = below[leaf, z] + (
                            g0 * a0 + g1 * a1 + g2 * a2 + g3 * a3 + g4 * a4 + g5 * a5 + g6 * a6 + g7 * a7
                        )
                        y = below[other, z] + (
                            h0 * a0 + h1 * a1 + h2 * a2 + h3 * a3 + h4 * a4 + h5 * a5 + h6 * a6 + h7 * a7
                        )
                        below[leaf, z] = x
                        below[other, z] = y
                    slot += 8
                while slot < size:
                    g0, h0 = gamma[leaf, slot], gamma[other, slot]
                    for z in range(64):
                        x, y = below[leaf, z] + g0 * packed[slot, z], below[other, z] + h0 * packed[slot, z]
                        below[leaf, z] = x
                        below[other, z] = y
                    slot += 1
        for stage in range(len(first_row) - 1):
            for row in range(first_row[stage], first_row[stage + 1]):
                a, b, f, g = left[row], right[row], left_factor[row], right_factor[row]
                to = row - first_row[stage]
                for z in range(64):
                    above[to, z] = f * below[a, z] + g * below[b, z]
            below, above = above, below
        some = min(64, result.shape[1] - first - 64 * tile)  # the padding of a part is overwritten by the next one
        for q in range(len(root)):
            if root[q] >= 0:
                for z in range(some):
                    result[q, first + 64 * tile + z] = below[root[q], z]
