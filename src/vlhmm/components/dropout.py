"""State dropout: draw which states of every block are kept in a step. The result indexes a smaller model.

The paper draws (1-λ)K states of each block without replacement. The states with the largest of independent Gumbel
draws are such a sample. Models whose words share states drop columns of the transition matrix instead.
"""

import torch
from jaxtyping import Bool, Int
from torch import Tensor


def num_kept(states_per_block: int, dropout: float) -> int:
    """Return the number of states kept, (1-λ)K rounded, at least one."""
    return max(1, round((1 - dropout) * states_per_block))


def sample_kept(
    num_alive: Int[Tensor, " block"], states_per_block: int, dropout: float, generator: torch.Generator
) -> tuple[Int[Tensor, "block kept"], Int[Tensor, " block"]]:
    """Draw the slots that each block keeps, uniformly without replacement. Return them in slot order, and their number.

    A block with fewer states than others keeps its own share (1-λ)K_m. Its row is padded with slots beyond that number.
    """
    gumbel = -torch.empty(len(num_alive), states_per_block).exponential_(generator=generator).log()
    slot = torch.arange(states_per_block)
    gumbel[slot[None] >= num_alive[:, None].cpu()] = -torch.inf
    shares = {alive: num_kept(alive, dropout) for alive in num_alive.unique().tolist()}
    share = torch.tensor([shares[alive] for alive in num_alive.tolist()])
    order = gumbel.argsort(dim=1, descending=True, stable=True)[:, : int(share.max())]
    counted = torch.arange(order.shape[1])[None] < share[:, None]
    # in slot order, padding last
    kept = torch.where(counted, order, order + states_per_block).sort(dim=1).values % states_per_block
    return kept.to(num_alive.device), share.to(num_alive.device)


def sample_features(shape: tuple[int, ...], dropout: float, generator: torch.Generator) -> Tensor:
    """Draw a dropout mask: 0 with probability `dropout`, else 1 / (1 - dropout), so that its expectation is 1."""
    return (torch.rand(shape, generator=generator) >= dropout).float() / (1 - dropout)


def sample_columns(
    states_of_word: Int[Tensor, "word slot"], num_states: int, dropout: float, generator: torch.Generator
) -> Bool[Tensor, " state"]:
    """Return which states may be entered: the paper's column dropout for the constraint `uniform`.

    A word whose states were all dropped could not be emitted; it keeps the one drawn next.
    """
    rank = torch.randperm(num_states, generator=generator)
    keep = rank < num_kept(num_states, dropout)
    states = states_of_word.cpu()
    nearest = states.gather(1, rank[states].argmin(dim=1, keepdim=True))[:, 0]
    keep[nearest] = True
    return keep


def slots_of_columns(
    states_of_word: Int[Tensor, "word slot"], columns: Bool[Tensor, " state"]
) -> tuple[Int[Tensor, "word kept"], Int[Tensor, " word"]]:
    """Return the slots of every word, those whose states may be entered first, and the number of these."""
    enterable = columns[states_of_word]
    num_alive = enterable.sum(dim=1)
    order = enterable.int().argsort(dim=1, descending=True, stable=True)
    return order[:, : int(num_alive.max())], num_alive
