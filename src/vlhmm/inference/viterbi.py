"""The best path, and paths drawn from the posterior: exact, batched, in log space.

Input as in `types`, but the tables hold log-probabilities. A path is a slot for every token
(the K states of its block); -1 on padding.
"""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from vlhmm.inference.types import Chain


def step_edges(
    t: int, log_start: Tensor, log_tiles: Tensor, chain: Chain, previous: Tensor
) -> Float[Tensor, "batch slot_from slot_to"]:
    """Return previous(i) + log p(z_t = j | z_{t-1} = i); where the chain restarts, it does not depend on i."""
    fresh = log_start[chain.start_of[:, t]][:, None, :].expand(-1, previous.shape[1], -1)
    edge = chain.edge_of[:, t]
    moves = (edge >= 0)[:, None, None]
    edges = torch.where(moves, log_tiles[edge.clamp(min=0)], fresh) if len(log_tiles) else fresh
    return previous[:, :, None] + edges


def first_message(log_start: Tensor, chain: Chain, log_carry: Tensor | None) -> Tensor:
    """Return the message before the first token: the carried posterior, or certainty in an unused state."""
    if log_carry is not None:
        return log_carry
    message = log_start.new_full((len(chain.lengths), log_start.shape[1]), -torch.inf)
    message[:, 0] = 0
    return message


def viterbi(
    log_start: Float[Tensor, "block slot"],
    log_emission: Float[Tensor, "word slot"],
    log_tiles: Float[Tensor, "pair slot slot"],
    chain: Chain,
    log_carry: Float[Tensor, "batch slot"] | None = None,
) -> tuple[Int[Tensor, "batch time"], Float[Tensor, " batch"]]:
    """Return (path, log p(x, path)): argmax over all state paths, in O(T K^2) a sequence.

    With a carry the maximum runs over the states before the first token too.
    """
    batch, time = chain.emit_of.shape
    message = first_message(log_start, chain, log_carry)
    back = torch.zeros(batch, time, message.shape[1], dtype=torch.long, device=message.device)
    live = chain.live
    for t in range(time):
        best = step_edges(t, log_start, log_tiles, chain, message).max(dim=1)
        arrived = best.values + log_emission[chain.emit_of[:, t]]
        message = torch.where(live[:, t, None], arrived, message)
        back[:, t] = best.indices
    score, slot = message.max(dim=1)
    path = torch.full((batch, time), -1, dtype=torch.long, device=message.device)
    for t in range(time - 1, -1, -1):
        path[:, t] = torch.where(live[:, t], slot, path[:, t])
        slot = torch.where(live[:, t], back[:, t].gather(1, slot[:, None])[:, 0], slot)
    return path, score


def sample_posterior(
    log_start: Float[Tensor, "block slot"],
    log_emission: Float[Tensor, "word slot"],
    log_tiles: Float[Tensor, "pair slot slot"],
    chain: Chain,
    generator: torch.Generator,
    log_carry: Float[Tensor, "batch slot"] | None = None,
) -> Int[Tensor, "batch time"]:
    """Return a path drawn from p(z | x) for every row: filter forward, sample backward."""
    batch, time = chain.emit_of.shape
    before = first_message(log_start, chain, log_carry)
    messages, message, live = [], before, chain.live
    for t in range(time):
        messages.append(message)
        arrive = step_edges(t, log_start, log_tiles, chain, message).logsumexp(1)
        message = torch.where(live[:, t, None], arrive + log_emission[chain.emit_of[:, t]], message)

    def draw(log_weights: Tensor) -> Tensor:
        return torch.multinomial(log_weights.softmax(-1), 1, generator=generator)[:, 0]

    slot = draw(message)
    path = torch.full((batch, time), -1, dtype=torch.long, device=message.device)
    for t in range(time - 1, -1, -1):
        path[:, t] = torch.where(live[:, t], slot, path[:, t])
        edges = step_edges(t, log_start, log_tiles, chain, messages[t])
        arrive = edges.gather(2, slot[:, None, None].expand(-1, edges.shape[1], 1))[..., 0]
        slot = torch.where(live[:, t], draw(arrive), slot)
    return path
