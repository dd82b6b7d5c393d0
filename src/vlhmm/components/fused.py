"""Matrix products fused with their softmax, a few rows at a time, so that the operands stay in cache.

Each function equals the plain expression in its first line. The gradient is computed from the result, chunk by chunk,
so that no temporary of all states is written to memory and read again.
"""

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.autograd.function import once_differentiable

from vlhmm import inference

ROWS = 1024  # per chunk: a megabyte of 256-wide vectors
FEW_STATES = 8  # per block: up to here compiled loops are faster than a matrix product per block


def linear_log_softmax(
    hidden: Float[Tensor, "*row width"], weight: Float[Tensor, "out width"], bias: Float[Tensor, " out"]
) -> Float[Tensor, "*row out"]:
    """Return (hidden @ weight.T + bias).log_softmax(-1)."""
    return _LinearLogSoftmax.apply(hidden, weight, bias)


class _LinearLogSoftmax(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, weight, bias):
        rows = hidden.reshape(-1, hidden.shape[-1])
        result = rows.new_empty(len(rows), len(weight))
        for part, out in zip(rows.split(ROWS), result.split(ROWS), strict=True):
            torch.addmm(bias, part, weight.t(), out=out)
            torch.log_softmax(out, -1, out=out)
        ctx.save_for_backward(rows, weight, result)
        ctx.shape = hidden.shape
        return result.view(*hidden.shape[:-1], len(weight))

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient):
        rows, weight, result = ctx.saved_tensors
        d_rows, d_weight = torch.empty_like(rows), torch.zeros_like(weight)
        d_bias = weight.new_zeros(len(weight))
        flat = gradient.reshape(len(rows), -1)
        parts = (tensor.split(ROWS) for tensor in (rows, d_rows, result, flat))
        for part, d_part, log_probs, given in zip(*parts, strict=True):
            d_logits = through_log_softmax(given, log_probs, -1)
            torch.mm(d_logits, weight, out=d_part)
            d_weight.addmm_(d_logits.t(), part)
            d_bias += d_logits.sum(0)
        return d_rows.view(ctx.shape), d_weight, d_bias


def through_log_softmax(gradient: Tensor, log_probs: Tensor, axis: int) -> Tensor:
    """Return the gradient in the logits from the gradient in their log_softmax over `axis`."""
    return log_probs.exp().mul_(-gradient.sum(axis, keepdim=True)).add_(gradient)


def blocked_log_softmax(
    hidden: Float[Tensor, "block slot width"],
    weight: Float[Tensor, "word width"],
    bias: Float[Tensor, " word"],
    words_by_block: Int[Tensor, " word"],
    block_sizes: list[int],
) -> Float[Tensor, "word slot"]:
    """Return, for the words w of each block m, (hidden[m] @ weight[w].T + bias[w]).log_softmax(-1).T, in vocabulary order.

    In training, blocks of few states use compiled loops over the words in their own order: the products are too small for
    a matrix library, and the word vectors, most of a small model, are read once and not copied. Elsewhere the table is
    computed once, and importing the compiler would take longer.
    """
    if torch.is_grad_enabled() and inference.use_kernels(hidden) and hidden.shape[1] <= FEW_STATES:
        return _BlockedByKernels.apply(hidden, weight, bias, words_by_block, block_sizes)
    return _BlockedLogSoftmax.apply(hidden, weight, bias, words_by_block, block_sizes)


class _BlockedLogSoftmax(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, weight, bias, words_by_block, block_sizes):
        sorted_weight, sorted_bias = weight.index_select(0, words_by_block), bias.index_select(0, words_by_block)
        result = hidden.new_empty(len(weight), hidden.shape[1])
        parts = (
            hidden.unbind(0),
            sorted_weight.split(block_sizes),
            sorted_bias.split(block_sizes),
            result.split(block_sizes),
        )
        for state, word, b, out in zip(*parts, strict=True):
            torch.addmm(b[:, None], word, state.t(), out=out)
            torch.log_softmax(out, 0, out=out)
        ctx.save_for_backward(hidden, sorted_weight, result, words_by_block)
        ctx.block_sizes = block_sizes
        return torch.empty_like(result).index_copy_(0, words_by_block, result)

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient):
        hidden, weight, result, words_by_block = ctx.saved_tensors
        sizes = ctx.block_sizes
        d_hidden, d_weight = torch.empty_like(hidden), torch.empty_like(weight)
        d_bias = weight.new_empty(len(weight))
        parts = (
            *(tensor.unbind(0) for tensor in (hidden, d_hidden)),
            *(tensor.split(sizes) for tensor in (weight, d_weight, d_bias, result)),
            gradient.index_select(0, words_by_block).split(sizes),
        )
        for state, d_state, word, d_word, d_b, log_probs, given in zip(*parts, strict=True):
            d_logits = through_log_softmax(given, log_probs, 0)
            torch.mm(d_logits.t(), word, out=d_state)
            torch.mm(d_logits, state, out=d_word)
            torch.sum(d_logits, 1, out=d_b)
        # every word is in one block, so rows are copied, where the gradient of indexing would add
        d_weight, d_bias = (torch.empty_like(d).index_copy_(0, words_by_block, d) for d in (d_weight, d_bias))
        return d_hidden, d_weight, d_bias, None, None


class _BlockedByKernels(torch.autograd.Function):
    """The same as `_BlockedLogSoftmax`, by compiled loops."""

    @staticmethod
    def forward(ctx, hidden, weight, bias, words_by_block, block_sizes):
        from vlhmm.inference import emission_numba

        result = hidden.new_empty(len(weight), hidden.shape[1])
        arrays = [t.detach().contiguous().numpy() for t in (hidden, weight, bias, words_by_block, result)]
        emission_numba.log_softmax(*arrays, block_sizes)
        ctx.save_for_backward(hidden, weight, result, words_by_block)
        ctx.block_sizes = block_sizes
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient):
        from vlhmm.inference import emission_numba

        hidden, weight, result, words_by_block = ctx.saved_tensors
        d_hidden, d_weight = torch.empty_like(hidden), torch.empty_like(weight)
        d_bias = weight.new_empty(len(weight))
        given = [t.detach().contiguous().numpy() for t in (hidden, weight, words_by_block, result, gradient)]
        emission_numba.gradients(*given, *(t.numpy() for t in (d_hidden, d_weight, d_bias)), ctx.block_sizes)
        return d_hidden, d_weight, d_bias, None, None


def layer_norm(
    x: Float[Tensor, "*row width"], weight: Float[Tensor, " width"], bias: Float[Tensor, " width"], eps: float
) -> Float[Tensor, "*row width"]:
    """(x - mean) / sqrt(variance + eps) * weight + bias over the last axis; all sums have a fixed order."""
    return _LayerNorm.apply(x, weight, bias, eps)


class _LayerNorm(torch.autograd.Function):
    """torch's own, but the gradients of weight and bias, which it adds up in an order that depends on the threads."""

    @staticmethod
    def forward(ctx, x, weight, bias, eps):
        result, mean, scale = torch.native_layer_norm(x, x.shape[-1:], weight, bias, eps)
        ctx.save_for_backward(x, mean, scale, weight, bias)
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient):
        x, mean, scale, weight, bias = ctx.saved_tensors
        given, width = gradient.contiguous(), x.shape[-1:]
        only_x = (True, False, False)
        d_x = torch.ops.aten.native_layer_norm_backward(given, x, width, mean, scale, weight, bias, only_x)[0]
        d_weight, d_bias = torch.zeros_like(weight), torch.zeros_like(bias)
        parts = (tensor.reshape(-1, tensor.shape[-1]).split(ROWS) for tensor in (x, mean, scale, given))
        for part, m, s, g in zip(*parts, strict=True):
            d_weight += ((part - m) * s).mul_(g).sum(0)
            d_bias += g.sum(0)
        return d_x, d_weight, d_bias, None


def take(
    table: Float[Tensor, "block slot width"], slots: Int[Tensor, "block kept"]
) -> Float[Tensor, "block kept width"]:
    """Return table.gather(1, slots) for whole vectors. No slot may occur twice."""
    return _Take.apply(table, slots)


class _Take(torch.autograd.Function):
    @staticmethod
    def forward(ctx, table, slots):
        num_blocks, num_slots, width = table.shape
        first = num_slots * torch.arange(num_blocks, device=slots.device)[:, None]
        rows = (first + slots).flatten()
        ctx.save_for_backward(rows)
        ctx.shape = table.shape
        return table.reshape(-1, width).index_select(0, rows).view(*slots.shape, width)

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient):
        (rows,) = ctx.saved_tensors
        result = gradient.new_zeros(ctx.shape)
        result.view(-1, ctx.shape[-1]).index_copy_(0, rows, gradient.reshape(len(rows), -1))
        return result, None
