"""Compiled loops for the emissions of blocks with few states; `fused.blocked_log_softmax` says when they are used.

Input and output: arrays. Words are read and written in place in the vocabulary. A block is one thread's, and its sums
have a fixed order: the same bits on one core or many.
"""

import numpy as np

from vlhmm.inference.numba_backend import even_bounds, kernel, parallel


@kernel
def log_softmax_of_blocks(first, last, hidden, weight, bias, words, begin, table):
    """Compute table[w, k] = log p(w | state k of its block m) for the words of blocks first .. last - 1."""
    num_states, width = hidden.shape[1], hidden.shape[2]
    zero = hidden.dtype.type(0)
    even = num_states - num_states % 4
    for m in range(first, last):
        for n in range(begin[m], begin[m + 1]):
            word = weight[words[n]]
            scores, b = table[words[n]], bias[words[n]]
            for k in range(0, even, 4):  # four states share what is read of the word
                h0, h1, h2, h3 = hidden[m, k], hidden[m, k + 1], hidden[m, k + 2], hidden[m, k + 3]
                s0 = s1 = s2 = s3 = zero
                for j in range(width):
                    x = word[j]
                    s0 += x * h0[j]
                    s1 += x * h1[j]
                    s2 += x * h2[j]
                    s3 += x * h3[j]
                scores[k], scores[k + 1], scores[k + 2], scores[k + 3] = s0 + b, s1 + b, s2 + b, s3 + b
            for k in range(even, num_states):
                h0, s0 = hidden[m, k], zero
                for j in range(width):
                    s0 += word[j] * h0[j]
                scores[k] = s0 + b
        for k in range(num_states):
            top = -np.inf
            for n in range(begin[m], begin[m + 1]):
                top = max(top, table[words[n], k])
            total = 0.0
            for n in range(begin[m], begin[m + 1]):
                total += np.exp(table[words[n], k] - top)
            normalizer = top + np.log(total)
            for n in range(begin[m], begin[m + 1]):
                table[words[n], k] -= normalizer


@kernel
def gradients_of_blocks(
    first, last, hidden, weight, words, begin, table, gradient, d_hidden, d_weight, d_bias
):  # fmt: skip
    """Return the gradient in the states, the words and their biases from that in the table."""
    num_states, width = hidden.shape[1], hidden.shape[2]
    zero = hidden.dtype.type(0)
    even = num_states - num_states % 4
    given = np.empty(num_states, hidden.dtype)
    d = np.empty(num_states, hidden.dtype)
    for m in range(first, last):
        given[:] = zero
        d_hidden[m] = zero
        for n in range(begin[m], begin[m + 1]):
            for k in range(num_states):
                given[k] += gradient[words[n], k]
        for n in range(begin[m], begin[m + 1]):
            w = words[n]
            word, d_word, d_b = weight[w], d_weight[w], zero
            for k in range(num_states):
                d[k] = gradient[w, k] - np.exp(table[w, k]) * given[k]
                d_b += d[k]
            d_bias[w] = d_b
            if even == 0:
                d_word[:] = zero
            for k in range(0, even, 4):
                h0, h1, h2, h3 = hidden[m, k], hidden[m, k + 1], hidden[m, k + 2], hidden[m, k + 3]
                e0, e1, e2, e3 = d_hidden[m, k], d_hidden[m, k + 1], d_hidden[m, k + 2], d_hidden[m, k + 3]
                d0, d1, d2, d3 = d[k], d[k + 1], d[k + 2], d[k + 3]
                if k == 0:
                    for j in range(width):
                        x = word[j]
                        d_word[j] = d0 * h0[j] + d1 * h1[j] + d2 * h2[j] + d3 * h3[j]
                        e0[j] += d0 * x
                        e1[j] += d1 * x
                        e2[j] += d2 * x
                        e3[j] += d3 * x
                else:
                    for j in range(width):
                        x = word[j]
                        d_word[j] += d0 * h0[j] + d1 * h1[j] + d2 * h2[j] + d3 * h3[j]
                        e0[j] += d0 * x
                        e1[j] += d1 * x
                        e2[j] += d2 * x
                        e3[j] += d3 * x
            for k in range(even, num_states):
                h0, e0, d0 = hidden[m, k], d_hidden[m, k], d[k]
                for j in range(width):
                    d_word[j] += d0 * h0[j]
                    e0[j] += d0 * word[j]


def log_softmax(
    hidden: np.ndarray,
    weight: np.ndarray,
    bias: np.ndarray,
    words: np.ndarray,
    table: np.ndarray,
    block_sizes: list[int],
) -> None:
    """Fill the (V, K) `table` with log p(x | z)."""
    begin, bounds = _ranges(block_sizes)
    parallel(log_softmax_of_blocks, bounds, hidden, weight, bias, words, begin, table)


def gradients(
    hidden: np.ndarray,
    weight: np.ndarray,
    words: np.ndarray,
    table: np.ndarray,
    gradient: np.ndarray,
    d_hidden: np.ndarray,
    d_weight: np.ndarray,
    d_bias: np.ndarray,
    block_sizes: list[int],
) -> None:
    """Fill `d_hidden`, `d_weight` and `d_bias` with the gradients, given that in the table."""
    begin, bounds = _ranges(block_sizes)
    parallel(
        gradients_of_blocks, bounds, hidden, weight, words, begin, table, gradient, d_hidden, d_weight, d_bias
    )


def _ranges(block_sizes: list[int]) -> tuple[np.ndarray, np.ndarray]:
    """Return where each block's words begin, and the blocks cut into ranges of about as many words for every thread."""
    sizes = np.asarray(block_sizes, dtype=np.int64)
    return np.concatenate([[0], np.cumsum(sizes)]), even_bounds(sizes)
