"""The networks between state embeddings and logits."""

import torch
from torch import Tensor, nn

from vlhmm.components.fused import layer_norm


class LayerNorm(nn.LayerNorm):
    """(x - mean) / sqrt(variance + eps) * weight + bias, with gradients that do not depend on the number of threads.

    torch adds up the gradients of weight and bias per thread; another number of threads rounds them differently.
    """

    def forward(self, x: Tensor) -> Tensor:
        return layer_norm(x, self.weight, self.bias, self.eps)


class Residual(nn.Module):
    """LayerNorm(ReLU(D W2) + D) with D = ReLU(E W1), from the paper's appendix, normalized after the sum."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.first, self.second, self.norm = nn.Linear(size, size), nn.Linear(size, size), LayerNorm(size)

    def forward(self, embedding: Tensor) -> Tensor:
        inner = torch.relu(self.first(embedding))
        return self.norm(torch.relu(self.second(inner)) + inner)


def composed(outer: nn.Linear, inner: nn.Module) -> tuple[Tensor, Tensor]:
    """Return weight and bias of outer(inner(x)), both linear."""
    assert isinstance(inner, nn.Linear)
    return outer.weight @ inner.weight, outer.weight @ inner.bias + outer.bias


def network(kind: str, size: int) -> nn.Module:
    """Return a residual network, or a linear map for any other kind."""
    return Residual(size) if kind == "residual" else nn.Linear(size, size)
