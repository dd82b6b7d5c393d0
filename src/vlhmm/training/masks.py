"""Dropout of a step: which states it keeps, and what that does to a state carried over from the step before."""

import torch

from vlhmm.clustering.blocks import Blocks
from vlhmm.components.chain_inputs import FilterState
from vlhmm.components.dropout import sample_columns, sample_features, sample_kept, slots_of_columns
from vlhmm.hmm import HMM, DropoutMask
from vlhmm.training.config import TrainingConfig
from vlhmm.training.plan import generator_for


def sample_mask(hmm: HMM, blocks: Blocks, settings: TrainingConfig, step: int) -> DropoutMask:
    """Draw the states that a step keeps, and the coordinates of their embeddings: a function of (seed, step)."""
    device = hmm.num_alive.device
    mask, dropout = DropoutMask(), settings.state_dropout
    generator = generator_for(settings.seed, "dropout", step)
    if dropout and not blocks.partition:
        columns = sample_columns(hmm.states_of_block, blocks.num_states, dropout, generator).to(device)
        mask = DropoutMask(*slots_of_columns(hmm.states_of_block, columns), columns=columns)
    elif dropout:
        slots, alive = sample_kept(hmm.num_alive, blocks.states_per_block, dropout, generator)
        mask = DropoutMask(slots=slots, num_alive=alive)
    if settings.embedding_dropout:
        num_blocks, num_states = hmm.embedding.state.shape[:2]
        if mask.slots is not None and blocks.partition:
            num_states = mask.slots.shape[1]
        shape = (num_blocks, num_states, hmm.config.hidden_size)
        features = sample_features(shape, settings.embedding_dropout, generator)
        mask = mask._replace(features=features.to(device))
    return mask


def expand_carry(carry: FilterState | None, mask: DropoutMask, states_per_block: int) -> FilterState | None:
    """Expand a carried posterior to all slots of its block. Dropped slots have probability zero."""
    if carry is None or mask.slots is None:
        return carry
    alpha = carry.alpha.new_zeros(len(carry.block), states_per_block)
    return FilterState(carry.block, alpha.scatter_(1, mask.slots[carry.block.clamp(min=0)], carry.alpha))


def reduce_carry(carry: FilterState | None, mask: DropoutMask) -> FilterState | None:
    """Condition a carried posterior on the states kept now. It is uniform if none of its states was kept.

    Masks differ from step to step, so a segment of a stream begins in states its predecessor may not have had.
    """
    if carry is None or mask.slots is None:
        return carry
    alpha = carry.alpha.gather(1, mask.slots[carry.block.clamp(min=0)])
    total = alpha.sum(1, keepdim=True)
    uniform = torch.full_like(alpha, 1 / alpha.shape[1])
    return FilterState(carry.block, torch.where(total > 1e-6, alpha / total.clamp(min=1e-30), uniform))
