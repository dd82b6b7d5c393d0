r"""The forward messages as a parallel prefix product, in log T depth (Ladner & Fischer 1980).

A chain is a product of matrices $M_t(i, j) = p(z_t = j | z_{t-1} = i) p(x_t | z_t = j)$ in the
(logsumexp, +) semiring, and matrix products are associative. On a machine with enough lanes this
takes O(log T) steps of O(K^3); on two cores the sequential form is faster. Input as in `log_space`.
"""

import torch
from jaxtyping import Float
from torch import Tensor


def log_matmul(a: Float[Tensor, "*#n i j"], b: Float[Tensor, "*#n j k"]) -> Float[Tensor, "*#n i k"]:
    """Return log(exp(a) @ exp(b)), also for entries of -inf."""
    shift_a = a.amax(dim=-1, keepdim=True).clamp(min=torch.finfo(a.dtype).min)
    shift_b = b.amax(dim=-2, keepdim=True).clamp(min=torch.finfo(b.dtype).min)
    product = (a - shift_a).exp() @ (b - shift_b).exp()
    return product.log() + shift_a + shift_b


def prefix_products(log_matrices: Float[Tensor, "batch time k k"]) -> Float[Tensor, "batch time k k"]:
    """Return all prefixes M_1, M_1 M_2, ..., by doubling: after round r every entry spans 2^r factors."""
    products, span = log_matrices, 1
    while span < log_matrices.shape[1]:
        joined = log_matmul(products[:, :-span], products[:, span:])
        products = torch.cat([products[:, :span], joined], dim=1)
        span *= 2
    return products


def forward(
    log_first: Float[Tensor, "batch slot"],
    log_emit: Float[Tensor, "batch time slot"],
    log_edge: Float[Tensor, "batch time slot slot"],
) -> Float[Tensor, "batch time slot"]:
    r"""Return forward messages $\log\alpha_t$, equal to `log_space.forward`, in ceil(log2 T) rounds."""
    first = (log_first + log_emit[:, 0])[:, None]
    if log_emit.shape[1] == 1:
        return first
    steps = prefix_products(log_edge[:, 1:] + log_emit[:, 1:, None, :])
    later = log_matmul(first[:, None], steps)[:, :, 0]
    return torch.cat([first, later], dim=1)
