"""The compiled form of `low_rank_torch` for CPUs; see `numba_backend` for threads, order of sums and compiler flags."""

import numpy as np
import torch
from torch import Tensor

from vlhmm.inference.low_rank_torch import ChannelCounts, ChannelPotentials
from vlhmm.inference.numba_backend import Workspace, arrays_of, carry_array, even_bounds, kernel, parallel
from vlhmm.inference.types import Chain, Forward


@kernel
def row_times(row, matrix, out):
    """Compute out = row @ matrix, four rows of the matrix at a time."""
    size, width = matrix.shape
    even = size - size % 4
    for r in range(width):
        out[r] = 0
    for i in range(0, even, 4):
        a0, a1, a2, a3 = row[i], row[i + 1], row[i + 2], row[i + 3]
        for r in range(width):
            out[r] += a0 * matrix[i, r] + a1 * matrix[i + 1, r] + a2 * matrix[i + 2, r] + a3 * matrix[i + 3, r]
    for i in range(even, size):
        for r in range(width):
            out[r] += row[i] * matrix[i, r]


@kernel
def times_column(matrix, column, out):
    """Compute out = matrix @ column, four rows at a time."""
    size, width = matrix.shape
    even, zero = size - size % 4, matrix.dtype.type(0)  # a literal 0 would make sums of float32 float64
    for i in range(0, even, 4):
        s0 = s1 = s2 = s3 = zero
        for r in range(width):
            c = column[r]
            s0 += matrix[i, r] * c
            s1 += matrix[i + 1, r] * c
            s2 += matrix[i + 2, r] * c
            s3 += matrix[i + 3, r] * c
        out[i], out[i + 1], out[i + 2], out[i + 3] = s0, s1, s2, s3
    for i in range(even, size):
        total = zero
        for r in range(width):
            total += matrix[i, r] * column[r]
        out[i] = total


@kernel
def forward_rows(
    first, last, start, emission, leave, source, target, from_row, to_row,
    start_of, emit_of, edge_of, lengths, carry, alpha, scale, leaving, through,
):  # fmt: skip
    size, zero = source.shape[1], emission.dtype.type(0)
    for b in range(first, last):
        for t in range(lengths[b]):
            edge, word = edge_of[b, t], emit_of[b, t]
            if edge < 0:
                for j in range(size):
                    alpha[b, t, j] = start[start_of[b, t], j]
            else:
                before = alpha[b, t - 1] if t > 0 else carry[b]
                for i in range(size):
                    leaving[b, t, i] = before[i] * leave[edge, i]
                row_times(leaving[b, t], source[from_row[edge]], through[b, t])
                times_column(target[to_row[edge]], through[b, t], alpha[b, t])
            total = zero
            for j in range(size):
                alpha[b, t, j] *= emission[word, j]
                total += alpha[b, t, j]
            scale[b, t] = total
            if total > 0:
                for j in range(size):
                    alpha[b, t, j] /= total


@kernel
def backward_rows(
    first, last, emission, leave, source, target, from_row, to_row,
    emit_of, edge_of, lengths, alpha, scale, leaving, posterior, before, right, back,
):  # fmt: skip
    size, zero, one = source.shape[1], emission.dtype.type(0), emission.dtype.type(1)
    for b in range(first, last):
        beta = np.ones_like(alpha[b, 0])
        for t in range(lengths[b] - 1, -1, -1):
            edge, word = edge_of[b, t], emit_of[b, t]
            inverse = one / scale[b, t] if scale[b, t] > 0 else zero
            for j in range(size):
                posterior[b, t, j] = alpha[b, t, j] * beta[j]
                right[b, t, j] = emission[word, j] * beta[j] * inverse
            if edge < 0:
                for i in range(size):
                    beta[i] = 1
            else:
                row_times(right[b, t], target[to_row[edge]], back[b, t])
                times_column(source[from_row[edge]], back[b, t], beta)
                for i in range(size):
                    before[b, t, i] = leaving[b, t, i] * beta[i]
                    beta[i] *= leave[edge, i]


@kernel
def count_outer(first, last, positions, begin, left, right, sums):
    """Return sums[g, i, r] += left[q, i] right[q, r] over the positions q of row g, four at a time."""
    size, width = left.shape[1], right.shape[1]
    for g in range(first, last):
        s, end = begin[g], begin[g + 1]
        while s + 4 <= end:
            q0, q1, q2, q3 = positions[s], positions[s + 1], positions[s + 2], positions[s + 3]
            for i in range(size):
                a0, a1, a2, a3 = left[q0, i], left[q1, i], left[q2, i], left[q3, i]
                for r in range(width):
                    sums[g, i, r] += a0 * right[q0, r] + a1 * right[q1, r] + a2 * right[q2, r] + a3 * right[q3, r]
            s += 4
        while s < end:
            q0 = positions[s]
            for i in range(size):
                a0 = left[q0, i]
                for r in range(width):
                    sums[g, i, r] += a0 * right[q0, r]
            s += 1


@kernel
def count_rows(first, last, positions, begin, values, totals):
    """Return totals[g] += values[q] over the positions q of row g."""
    for g in range(first, last):
        for s in range(begin[g], begin[g + 1]):
            for j in range(totals.shape[1]):
                totals[g, j] += values[positions[s], j]


def add_expected_counts(
    counts: ChannelCounts,
    potentials: ChannelPotentials,
    chain: Chain,
    carry: Tensor | None = None,
    workspace: Workspace | None = None,
) -> Forward:
    """Add expected counts as `low_rank_torch` does. With a workspace, messages stay valid until its next use."""
    start, emission, leave, source, target, from_row, to_row = (table.contiguous().numpy() for table in potentials)
    start_of, emit_of, edge_of, lengths = arrays_of(chain)
    batch, time = emit_of.shape
    size, width = source.shape[1:]
    workspace = workspace or Workspace()
    names = ("alpha", "posterior", "right", "leaving", "before")
    alpha, posterior, right, leaving, before = (workspace.get(n, (batch, time, size), emission.dtype) for n in names)
    through, back = (workspace.get(n, (batch, time, width), emission.dtype) for n in ("through", "back"))
    scale = workspace.get("scale", (batch, time), emission.dtype)
    inside = np.arange(time)[None] < lengths[:, None]
    if not inside.all():
        alpha[~inside], scale[~inside] = 0, 1
    held, bounds = carry_array(carry, batch, emission), even_bounds(lengths)
    tables = (emission, leave, source, target, from_row, to_row)
    parallel(
        forward_rows, bounds, start, *tables, start_of, emit_of, edge_of, lengths, held, alpha, scale, leaving, through
    )
    parallel(
        backward_rows, bounds, *tables, emit_of, edge_of, lengths, alpha, scale, leaving, posterior, before, right, back
    )  # fmt: skip
    moves, fresh = inside & (edge_of >= 0), inside & (edge_of < 0)
    edges = np.where(moves, edge_of, 0)

    def flat(rows: np.ndarray) -> np.ndarray:
        return rows.reshape(batch * time, -1)

    sums = (
        (count_rows, emit_of, inside, (flat(posterior),), counts.emission),
        (count_rows, start_of, fresh, (flat(posterior),), counts.start),
        (count_rows, edge_of, moves, (flat(before),), counts.leave),
        (count_outer, from_row[edges] if len(from_row) else edges, moves, (flat(leaving), flat(back)), counts.source),
        (count_outer, to_row[edges] if len(to_row) else edges, moves, (flat(right), flat(through)), counts.target),
    )
    for count, rows_of, chosen, values, totals in sums:
        positions = np.flatnonzero(chosen.reshape(-1))
        rows = rows_of.reshape(-1)[positions]
        occurrences = np.bincount(rows, minlength=len(totals))
        begin = np.concatenate([[0], np.cumsum(occurrences)])
        positions = positions[np.argsort(rows, kind="stable")]
        parallel(count, even_bounds(occurrences), positions, begin, *values, totals.numpy())
    with np.errstate(divide="ignore"):
        log_scale = np.log(scale, dtype=np.float64)
    return Forward(torch.from_numpy(alpha), torch.from_numpy(log_scale))
