"""Products and their softmax in one pass, a few rows at a time: what a step does to every state, while it is in cache.

Each function equals the plain expression in its first line; the gradient is taken from the result, chunk by chunk,
so that no temporary of all states is written to memory and read again.
"""

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.autograd.function import once_differentiable

ROWS = 1024  # at a time: a megabyte of 256-wide vectors


def linear_log_softmax(
    hidden: Float[Tensor, "*row width"], weight: Float[Tensor, "out width"], bias: Float[Tensor, " out"]
) -> Float[Tensor, "*row out"]:
    """(hidden @ weight.T + bias).log_softmax(-1)"""
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
    """The gradient in the logits, from that in their log_softmax over the axis."""
    return log_probs.exp().mul_(-gradient.sum(axis, keepdim=True)).add_(gradient)


def blocked_log_softmax(
    hidden: Float[Tensor, "block slot width"],
    weight: Float[Tensor, "word width"],
    bias: Float[Tensor, " word"],
    block_sizes: list[int],
) -> Float[Tensor, "word slot"]:
    """For block m with its words w: (hidden[m] @ weight[w].T + bias[w]).log_softmax(-1).T, one block's below another's."""
    return _BlockedLogSoftmax.apply(hidden, weight, bias, block_sizes)


class _BlockedLogSoftmax(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, weight, bias, block_sizes):
        result = hidden.new_empty(len(weight), hidden.shape[1])
        parts = (hidden.unbind(0), weight.split(block_sizes), bias.split(block_sizes), result.split(block_sizes))
        for state, word, b, out in zip(*parts, strict=True):
            torch.addmm(b[:, None], word, state.t(), out=out)
            torch.log_softmax(out, 0, out=out)
        ctx.save_for_backward(hidden, weight, result)
        ctx.block_sizes = block_sizes
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient):
        hidden, weight, result = ctx.saved_tensors
        sizes = ctx.block_sizes
        d_hidden, d_weight = torch.empty_like(hidden), torch.empty_like(weight)
        d_bias = weight.new_empty(len(weight))
        parts = (
            *(tensor.unbind(0) for tensor in (hidden, d_hidden)),
            *(tensor.split(sizes) for tensor in (weight, d_weight, d_bias, result, gradient)),
        )
        for state, d_state, word, d_word, d_b, log_probs, given in zip(*parts, strict=True):
            d_logits = through_log_softmax(given, log_probs, 0)
            torch.mm(d_logits.t(), word, out=d_state)
            torch.mm(d_logits, state, out=d_word)
            torch.sum(d_logits, 1, out=d_b)
        return d_hidden, d_weight, d_bias, None


def take(
    table: Float[Tensor, "block slot width"], slots: Int[Tensor, "block kept"]
) -> Float[Tensor, "block kept width"]:
    """table.gather(1, slots) on whole vectors; no slot twice."""
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
