r"""The reference implementation: log-space recursions on expanded potentials, differentiable, slow, obvious.

Everything fast is tested against this module, and this module against enumeration.
Input:  log_emit (B, T, K), log_edge (B, T, K, K) where log_edge[:, t] leads from t-1 to t, and
        log_first (B, K) for the first token.
"""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from vlhmm.inference.types import Chain


def expand(
    log_start: Float[Tensor, "block slot"],
    log_emission: Float[Tensor, "word slot"],
    log_tiles: Float[Tensor, "pair slot slot"],
    chain: Chain,
    log_carry: Float[Tensor, "batch slot"] | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return (log_first, log_emit, log_edge): every potential of a chain written out, O(B T K^2) memory.

    An edge that restarts leads from any state to p(z_1 | z_0): it forgets where it came from.
    """
    log_emit = log_emission[chain.emit_of]
    fresh = log_start[chain.start_of]  # (B, T, K)
    restarts = chain.edge_of < 0
    if log_tiles.shape[0]:
        tiles = log_tiles[chain.edge_of.clamp(min=0)]
        log_edge = torch.where(restarts[..., None, None], fresh[:, :, None, :], tiles)
    else:  # a chain of single tokens has no tile to read
        log_edge = fresh[:, :, None, :].expand(-1, -1, fresh.shape[-1], -1)
    log_first = fresh[:, 0]
    if log_carry is not None:
        arrived = (log_carry[:, :, None] + log_edge[:, 0]).logsumexp(1)
        log_first = torch.where(restarts[:, :1], log_first, arrived)
    return log_first, log_emit, log_edge


def forward(
    log_first: Float[Tensor, "batch slot"],
    log_emit: Float[Tensor, "batch time slot"],
    log_edge: Float[Tensor, "batch time slot slot"],
) -> Float[Tensor, "batch time slot"]:
    r"""Return forward messages $\log\alpha_t(j) = \log p(x_{1:t}, z_t = j)$. O(T K^2) per sequence."""
    log_alpha = log_first + log_emit[:, 0]
    messages = [log_alpha]
    for t in range(1, log_emit.shape[1]):
        arrive = log_alpha[:, :, None] + log_edge[:, t]  # (B, K, K): i -> j
        log_alpha = arrive.logsumexp(dim=1) + log_emit[:, t]
        messages.append(log_alpha)
    return torch.stack(messages, dim=1)


def backward(
    log_emit: Float[Tensor, "batch time slot"],
    log_edge: Float[Tensor, "batch time slot slot"],
    lengths: Int[Tensor, " batch"],
) -> Float[Tensor, "batch time slot"]:
    r"""Return backward messages $\log\beta_t(i) = \log p(x_{t+1:T} | z_t = i)$; zero at a row's last token and beyond."""
    log_beta = torch.zeros_like(log_emit[:, 0])
    messages = [log_beta]
    for t in range(log_emit.shape[1] - 1, 0, -1):
        leave = log_edge[:, t] + (log_emit[:, t] + log_beta)[:, None, :]
        inside = (t < lengths)[:, None]
        log_beta = torch.where(inside, leave.logsumexp(dim=2), torch.zeros_like(log_beta))
        messages.append(log_beta)
    return torch.stack(messages[::-1], dim=1)


def log_likelihood(log_alpha: Float[Tensor, "batch time slot"], lengths: Int[Tensor, " batch"]) -> Tensor:
    """Return log p(x) of every row: the last forward message, summed over states."""
    last = (lengths - 1).clamp(min=0)[:, None, None].expand(-1, 1, log_alpha.shape[2])
    total = log_alpha.gather(1, last)[:, 0].logsumexp(-1)
    return torch.where(lengths > 0, total, torch.zeros_like(total))


def posteriors(
    log_first: Float[Tensor, "batch slot"],
    log_emit: Float[Tensor, "batch time slot"],
    log_edge: Float[Tensor, "batch time slot slot"],
    lengths: Int[Tensor, " batch"],
) -> tuple[Tensor, Tensor]:
    r"""Return (log p(z_t | x), log p(z_{t-1}, z_t | x)) for every row; the second is meaningless at t = 0."""
    log_alpha = forward(log_first, log_emit, log_edge)
    log_beta = backward(log_emit, log_edge, lengths)
    total = log_likelihood(log_alpha, lengths)
    log_posterior = log_alpha + log_beta - total[:, None, None]
    from_previous = torch.cat([log_alpha[:, :1], log_alpha[:, :-1]], dim=1)
    log_edge_posterior = from_previous[..., None] + log_edge + (log_emit + log_beta)[:, :, None, :]
    return log_posterior, log_edge_posterior - total[:, None, None, None]
