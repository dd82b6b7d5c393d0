"""The compiled form of `torch_backend` for CPUs: the same recursions as numba kernels on rows of a batch.

A kernel works on a range of rows (or tiles, or words) without the interpreter lock; `parallel`
hands the ranges to one small pool of Python threads, which sleep when idle and so never spin
against torch's own threads. Every sum has a fixed order, whatever the number of threads:
results are the same to the bit on one core or many.

Only reassociation and fused multiply-add are allowed to the compiler (so that dot products use
vector registers); infinities and NaN keep their meaning.
"""

import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any

import numba
import numpy as np
import torch
from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic
from torch import Tensor

from vlhmm.inference.types import Chain, Counts, Forward, Potentials

logger = logging.getLogger(__name__)
SAFE_MATH = {"reassoc", "contract", "nsz", "arcp"}


def kernel(function: Callable) -> Callable:
    """Return `function` compiled to run without the interpreter lock, kept on disk where a folder can be written."""
    try:
        return numba.njit(nogil=True, fastmath=SAFE_MATH, cache=True, error_model="numpy")(function)
    except (RuntimeError, OSError):  # numba found no folder it may write to
        warn_uncached()
        return numba.njit(nogil=True, fastmath=SAFE_MATH, error_model="numpy")(function)


@intrinsic
def prefetch(context, matrix, row, column):  # type: ignore[no-untyped-def]
    """Ask for the cache line of an entry without waiting for it; for use in kernels."""

    def generate(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        kind, integer = signature.args[0], ir.IntType(32)
        array = context.make_array(kind)(context, builder, arguments[0])
        entry = cgutils.get_item_pointer(context, builder, kind, array, list(arguments[1:]))
        address = builder.bitcast(entry, cgutils.voidptr_t)
        shape = ir.FunctionType(ir.VoidType(), [cgutils.voidptr_t, integer, integer, integer])
        instruction = cgutils.get_or_insert_function(builder.module, shape, "llvm.prefetch.p0")
        read, keep, data = integer(0), integer(3), integer(1)
        builder.call(instruction, [address, read, keep, data])
        return context.get_dummy_value()

    return types.void(matrix, row, column), generate


@cache
def warn_uncached() -> None:
    logger.warning(
        "the kernel cache folder cannot be written, so kernels are compiled in every process "
        "(about 15 s); set NUMBA_CACHE_DIR to a folder you can write"
    )


@cache
def pool(num_threads: int) -> ThreadPoolExecutor:
    """Return the threads that run kernels. They, and only they, flush denormal numbers to zero.

    Below 1e-38 in float32 a multiplication takes a hundred times as long, and filtered posteriors are full of such states.
    """
    return ThreadPoolExecutor(
        num_threads, thread_name_prefix="vlhmm", initializer=lambda: torch.set_flush_denormal(True)
    )


def parallel(function: Callable, bounds: np.ndarray, *arguments: Any) -> None:
    """Call function(first, last, *arguments) for every consecutive pair in `bounds`, on torch's number of threads."""
    ranges = [(int(a), int(b)) for a, b in zip(bounds[:-1], bounds[1:], strict=True) if b > a]
    threads = pool(torch.get_num_threads())
    futures = [threads.submit(function, first, last, *arguments) for first, last in ranges]
    for future in futures:
        future.result()


def even_bounds(weights: np.ndarray) -> np.ndarray:
    """Cut 0..n into ranges of about equal total weight, one per thread."""
    total = np.concatenate([[0], np.cumsum(weights)])
    cuts = np.searchsorted(total, np.linspace(0, total[-1], torch.get_num_threads() + 1)[1:-1])
    return np.concatenate([[0], cuts, [len(weights)]])


@kernel
def link_by_tile(first, last, t, lengths, edge_of, head, after, entered):
    """Link the rows that go through the same tile at time t: head[tile], then after[row - first], until -1.

    The first tiles in `entered` are those that have rows; returns how many. Tiles come from memory at a tenth of the
    speed of the arithmetic, so rows that need the same one should take turns at it.
    """
    num_entered = 0
    for b in range(last - 1, first - 1, -1):
        edge = edge_of[b, t] if t < lengths[b] else -1
        if edge >= 0:
            if head[edge] < 0:
                entered[num_entered] = edge
                num_entered += 1
            after[b - first] = head[edge]
            head[edge] = b
    return num_entered


@kernel
def widest(row, first, t, after, widths, emit_of, size):
    """Return how many states the linked rows come from and go to at time t: (left, right)."""
    left = right = 0
    while row >= 0:
        left = max(left, widths[emit_of[row, t - 1]] if t > 0 else size)
        right = max(right, widths[emit_of[row, t]])
        row = after[row - first]
    return left, right


@kernel
def prefetch_rows(matrix, first, last, width):
    """Ask for the first `width` entries of some rows of a contiguous matrix."""
    step = 64 // matrix.itemsize  # entries in a cache line
    for row in range(first, last):
        for column in range(0, width, step):
            prefetch(matrix, row, column)


@kernel
def prefetch_messages(row, first, t, after, messages, time):
    """Ask for the messages of the linked rows at times t - 1 and t; `messages` has a row per token."""
    while row >= 0:
        prefetch_rows(messages, max(0, row * time + t - 1), row * time + t + 1, messages.shape[1])
        row = after[row - first]


@kernel
def forward_rows(first, last, start, emission, widths, tiles, start_of, emit_of, edge_of, lengths, carry, alpha, scale):
    size, zero = emission.shape[1], emission.dtype.type(0)  # a literal 0 would make sums of float32 float64
    tile_rows, alpha_rows = tiles.reshape(-1, size), alpha.reshape(-1, size)
    head = np.full(tiles.shape[0], -1)
    after, entered = np.empty(last - first, np.int64), np.empty(last - first, np.int64)
    for t in range(lengths[first:last].max()):
        for b in range(first, last):
            if t < lengths[b]:
                fresh = edge_of[b, t] < 0
                for j in range(size):
                    alpha[b, t, j] = start[start_of[b, t], j] if fresh else zero
        num_entered = link_by_tile(first, last, t, lengths, edge_of, head, after, entered)
        for n in range(num_entered):
            # a tile is too short for the processor to foresee the next one: it is asked for while this one is multiplied
            edge, following = entered[n], entered[min(n + 1, num_entered - 1)]
            next_left, next_width = widest(head[following], first, t, after, widths, emit_of, size)
            prefetch_messages(head[following], first, t, after, alpha_rows, alpha.shape[1])
            rows, head[edge], next_row = head[edge], -1, following * size
            left, width = widest(rows, first, t, after, widths, emit_of, size)
            even = left - left % 4
            for i in range(0, even, 4):
                prefetch_rows(tile_rows, next_row + i, next_row + min(i + 4, next_left), next_width)
                b = rows
                while b >= 0:
                    before = alpha[b, t - 1] if t > 0 else carry[b]
                    a0, a1, a2, a3 = before[i], before[i + 1], before[i + 2], before[i + 3]
                    for j in range(width):
                        alpha[b, t, j] += (
                            a0 * tiles[edge, i, j]
                            + a1 * tiles[edge, i + 1, j]
                            + a2 * tiles[edge, i + 2, j]
                            + a3 * tiles[edge, i + 3, j]
                        )
                    b = after[b - first]
            prefetch_rows(tile_rows, next_row + even, next_row + next_left, next_width)
            for i in range(even, left):
                b = rows
                while b >= 0:
                    a0 = alpha[b, t - 1, i] if t > 0 else carry[b, i]
                    for j in range(width):
                        alpha[b, t, j] += a0 * tiles[edge, i, j]
                    b = after[b - first]
        for b in range(first, last):
            if t < lengths[b]:
                word, total = emit_of[b, t], zero
                for j in range(size):
                    alpha[b, t, j] *= emission[word, j]
                    total += alpha[b, t, j]
                scale[b, t] = total
                if total > 0:
                    for j in range(size):
                        alpha[b, t, j] /= total


@kernel
def backward_rows(first, last, emission, widths, tiles, emit_of, edge_of, lengths, alpha, scale, posterior, right):
    size, zero, one = emission.shape[1], emission.dtype.type(0), emission.dtype.type(1)
    tile_rows, right_rows = tiles.reshape(-1, size), right.reshape(-1, size)
    head = np.full(tiles.shape[0], -1)
    after, entered = np.empty(last - first, np.int64), np.empty(last - first, np.int64)
    betas = np.ones((last - first, size), emission.dtype)
    for t in range(lengths[first:last].max() - 1, -1, -1):
        for b in range(first, last):
            if t < lengths[b]:
                beta, word = betas[b - first], emit_of[b, t]
                inverse = one / scale[b, t] if scale[b, t] > 0 else zero
                for j in range(size):
                    posterior[b, t, j] = alpha[b, t, j] * beta[j]
                    right[b, t, j] = emission[word, j] * beta[j] * inverse
                if edge_of[b, t] < 0:
                    for i in range(size):
                        beta[i] = one
        num_entered = link_by_tile(first, last, t, lengths, edge_of, head, after, entered)
        for n in range(num_entered):
            # a tile is too short for the processor to foresee the next one: it is asked for while this one is multiplied
            edge, following = entered[n], entered[min(n + 1, num_entered - 1)]
            next_left, next_width = widest(head[following], first, t, after, widths, emit_of, size)
            prefetch_messages(head[following], first, t, after, right_rows, right.shape[1])
            rows, head[edge], next_row = head[edge], -1, following * size
            left, width = widest(rows, first, t, after, widths, emit_of, size)
            even = left - left % 4
            for i in range(0, even, 4):  # four rows of the tile at once share what is read of `right`
                prefetch_rows(tile_rows, next_row + i, next_row + min(i + 4, next_left), next_width)
                t0, t1, t2, t3 = tiles[edge, i], tiles[edge, i + 1], tiles[edge, i + 2], tiles[edge, i + 3]
                b = rows
                while b >= 0:
                    column = right[b, t]
                    s0 = s1 = s2 = s3 = zero
                    for j in range(width):
                        r = column[j]
                        s0 += t0[j] * r
                        s1 += t1[j] * r
                        s2 += t2[j] * r
                        s3 += t3[j] * r
                    beta = betas[b - first]
                    beta[i], beta[i + 1], beta[i + 2], beta[i + 3] = s0, s1, s2, s3
                    b = after[b - first]
            prefetch_rows(tile_rows, next_row + even, next_row + next_left, next_width)
            b = rows
            while b >= 0:
                beta = betas[b - first]
                for i in range(even, left):
                    total = zero
                    for j in range(width):
                        total += tiles[edge, i, j] * right[b, t, j]
                    beta[i] = total
                for i in range(left, size):
                    beta[i] = zero
                b = after[b - first]


@kernel
def count_edges(first, last, positions, begin, words, widths, alpha, carry, time, right, sums):
    """Return sums[p, i, j] += alpha_{t-1}(i) right_t(j) over the tokens that enter through tile p, four at a time."""
    for p in range(first, last):
        s, end = begin[p], begin[p + 1]
        while s < end:
            many = min(4, end - s)
            q0 = positions[s]
            q1 = positions[s + 1] if many > 1 else q0
            q2 = positions[s + 2] if many > 2 else q0
            q3 = positions[s + 3] if many > 3 else q0
            l0 = alpha[q0 - 1] if q0 % time else carry[q0 // time]
            l1 = alpha[q1 - 1] if q1 % time else carry[q1 // time]
            l2 = alpha[q2 - 1] if q2 % time else carry[q2 // time]
            l3 = alpha[q3 - 1] if q3 % time else carry[q3 // time]
            left = width = 0
            for q in (q0, q1, q2, q3):
                left = max(left, widths[words[q - 1]] if q % time else right.shape[1])
                width = max(width, widths[words[q]])
            for i in range(left):
                a0 = l0[i]
                if many == 4:
                    a1, a2, a3 = l1[i], l2[i], l3[i]
                    for j in range(width):
                        sums[p, i, j] += a0 * right[q0, j] + a1 * right[q1, j] + a2 * right[q2, j] + a3 * right[q3, j]
                elif many == 3:
                    a1, a2 = l1[i], l2[i]
                    for j in range(width):
                        sums[p, i, j] += a0 * right[q0, j] + a1 * right[q1, j] + a2 * right[q2, j]
                elif many == 2:
                    a1 = l1[i]
                    for j in range(width):
                        sums[p, i, j] += a0 * right[q0, j] + a1 * right[q1, j]
                else:
                    for j in range(width):
                        sums[p, i, j] += a0 * right[q0, j]
            s += many


@kernel
def count_rows(first, last, share, shares, rows_of, lengths, only_fresh, edge_of, posterior, totals):
    """Return totals[rows_of[b, t]] += posterior[b, t] for the table rows r with r % shares == share."""
    for b in range(first, last):
        for t in range(lengths[b]):
            row = rows_of[b, t]
            if row % shares == share and (not only_fresh or edge_of[b, t] < 0):
                for j in range(totals.shape[1]):
                    totals[row, j] += posterior[b, t, j]


@kernel
def scale_tiles(first, last, tiles, sums):
    for p in range(first, last):
        for i in range(tiles.shape[1]):
            for j in range(tiles.shape[2]):
                sums[p, i, j] *= tiles[p, i, j]


class Workspace:
    """Arrays that are used again for every batch: fresh memory costs more than the arithmetic done in it."""

    def __init__(self) -> None:
        self.arrays: dict[str, np.ndarray] = {}

    def get(self, name: str, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
        """Return an array of that shape with whatever was in it before."""
        size = int(np.prod(shape))
        held = self.arrays.get(name)
        if held is None or held.dtype != dtype or held.size < size:
            held = self.arrays[name] = np.empty(size, dtype)
        return held[:size].reshape(shape)


def arrays_of(chain: Chain) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    return tuple(index.contiguous().numpy() for index in chain)  # type: ignore[return-value]


def carry_array(carry: Tensor | None, batch: int, like: np.ndarray) -> np.ndarray:
    if carry is None:
        return np.zeros((batch, like.shape[1]), like.dtype)
    return np.ascontiguousarray(carry.numpy(), dtype=like.dtype)


def widths_of(emission: np.ndarray) -> np.ndarray:
    """Return how many of its first states can emit each word. In blocks smaller than others, the rest is padding."""
    if (emission[:, -1] > 0).all():
        return np.full(len(emission), emission.shape[1])
    return emission.shape[1] - (emission[:, ::-1] > 0).argmax(axis=1)


def forward(
    potentials: Potentials, chain: Chain, carry: Tensor | None = None, workspace: Workspace | None = None
) -> Forward:
    """Run the forward recursion of `torch_backend.forward`. With a workspace, messages stay valid until its next use."""
    start, emission, tiles = (table.contiguous().numpy() for table in potentials)
    start_of, emit_of, edge_of, lengths = arrays_of(chain)
    shape = (*emit_of.shape, emission.shape[1])
    workspace = workspace or Workspace()
    alpha = workspace.get("alpha", shape, emission.dtype)
    scale = workspace.get("scale", shape[:2], emission.dtype)
    padded = bool((lengths < shape[1]).any())
    if padded:
        alpha[np.arange(shape[1])[None] >= lengths[:, None]] = 0
        scale[np.arange(shape[1])[None] >= lengths[:, None]] = 1
    held = carry_array(carry, shape[0], emission)
    parallel(
        forward_rows, even_bounds(lengths), start, emission, widths_of(emission), tiles,
        start_of, emit_of, edge_of, lengths, held, alpha, scale,
    )  # fmt: skip
    with np.errstate(divide="ignore"):
        log_scale = np.log(scale, dtype=np.float64)
    return Forward(torch.from_numpy(alpha), torch.from_numpy(log_scale))


def backward(
    potentials: Potentials, chain: Chain, forward: Forward, workspace: Workspace | None = None
) -> tuple[Tensor, Tensor]:
    """Run the backward recursion of `torch_backend.backward`."""
    _, emission, tiles = (table.contiguous().numpy() for table in potentials)
    _, emit_of, edge_of, lengths = arrays_of(chain)
    alpha, workspace = forward.alpha.numpy(), workspace or Workspace()
    scale = np.exp(forward.log_scale.numpy()).astype(alpha.dtype)
    posterior = workspace.get("posterior", alpha.shape, alpha.dtype)
    right = workspace.get("right", alpha.shape, alpha.dtype)
    if (lengths < alpha.shape[1]).any():
        beyond = np.arange(alpha.shape[1])[None] >= lengths[:, None]
        posterior[beyond] = 0
        right[beyond] = 0
    parallel(
        backward_rows, even_bounds(lengths), emission, widths_of(emission), tiles,
        emit_of, edge_of, lengths, alpha, scale, posterior, right,
    )  # fmt: skip
    return torch.from_numpy(posterior), torch.from_numpy(right)


def add_edge_sums(
    sums: Tensor, emission: Tensor, chain: Chain, alpha: Tensor, right: Tensor, carry: Tensor | None
) -> None:
    r"""Add $\sum_t \hat\alpha_{t-1} r_t^\top$ over the edges through tile p to sums[p]: the counts, divided by the tile."""
    _, emit_of, edge_of, lengths = arrays_of(chain)
    time, size = edge_of.shape[1], right.shape[2]
    moves = (edge_of >= 0) & (np.arange(time)[None] < lengths[:, None])
    positions = np.flatnonzero(moves.reshape(-1))
    entered = edge_of.reshape(-1)[positions]
    positions = positions[np.argsort(entered, kind="stable")]
    occurrences = np.bincount(entered, minlength=sums.shape[0])
    begin = np.concatenate([[0], np.cumsum(occurrences)])
    flat_alpha, flat_right = alpha.numpy().reshape(-1, size), right.numpy().reshape(-1, size)
    held = carry_array(carry, edge_of.shape[0], flat_right)
    parallel(
        count_edges, even_bounds(occurrences), positions, begin, emit_of.reshape(-1), widths_of(emission.numpy()),
        flat_alpha, held, time, flat_right, sums.numpy(),
    )  # fmt: skip


def add_table_counts(counts: Counts, chain: Chain, posterior: Tensor) -> None:
    """Add the posteriors to the emission rows of their words and to the start rows of fresh starts."""
    start_of, emit_of, edge_of, lengths = arrays_of(chain)
    shares = torch.get_num_threads()
    rows = posterior.numpy()
    jobs = [(emit_of, False, counts.emission.numpy()), (start_of, True, counts.start.numpy())]

    def count(share: int, _: int) -> None:
        for rows_of, only_fresh, totals in jobs:
            count_rows(0, len(lengths), share, shares, rows_of, lengths, only_fresh, edge_of, rows, totals)

    parallel(count, np.arange(shares + 1))


def multiply_tiles(sums: Tensor, tiles: Tensor) -> None:
    """Multiply the sums by the tiles, in place: edge sums become expected counts."""
    bounds = even_bounds(np.ones(tiles.shape[0]))
    parallel(scale_tiles, bounds, tiles.contiguous().numpy(), sums.numpy())
