"""The hidden Markov model: parameters -> potentials. Knows blocks of word ids, but no words and no text."""

import math
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from vlhmm.clustering.blocks import Blocks
from vlhmm.components import emissions
from vlhmm.components.config import ModelConfig
from vlhmm.components.fused import blocked_log_softmax, linear_log_softmax, take
from vlhmm.components.networks import Residual, composed, network
from vlhmm.components.transitions import BlockFactored, LowRank, Softmax

Transition = Softmax | BlockFactored | LowRank


class ModelPotentials(NamedTuple):
    """The log-potentials of a model, or of the smaller model that state dropout leaves, attached to the parameters."""

    log_start: Float[Tensor, "block slot"]
    log_emission: Float[Tensor, "word slot"]
    transition: Transition


class DropoutMask(NamedTuple):
    """The states and coordinates that dropout kept: slots of every block, and their number.

    Under the constraint `uniform`, `columns` are the states that may be entered, and the smaller model has these states
    only. `features` scales the coordinates of the kept states' embeddings: 0 where dropped, 1 / (1 - rate) elsewhere.
    """

    slots: Int[Tensor, "block kept"] | None = None
    num_alive: Int[Tensor, " block"] | None = None
    columns: Bool[Tensor, " state"] | None = None
    features: Float[Tensor, "block kept width"] | None = None


class StateEmbedding(nn.Module):
    """E_z of the kept states, (M, K, h): independent, factored (block and state) or additive (block + slot + state)."""

    def __init__(self, kind: str, num_blocks: int, states_per_block: int, size: int) -> None:
        super().__init__()
        self.kind = kind
        own = size // 2 if kind == "factored" else size
        self.state = nn.Parameter(torch.empty(num_blocks, states_per_block, own))
        if kind == "factored":
            self.block = nn.Parameter(torch.empty(num_blocks, 1, size - own))
        elif kind == "additive":
            self.block = nn.Parameter(torch.empty(num_blocks, 1, size))
            self.slot = nn.Parameter(torch.empty(states_per_block, size))

    def initialize(self, generator: torch.Generator, scale: float) -> None:
        """Initialize by Kaiming uniform. Additive parts are scaled so that the states of a block first learn together."""
        if self.kind == "additive":
            for table, deviation in ((self.block, 1.0), (self.slot, 0.5), (self.state, 0.3)):
                nn.init.normal_(table, std=deviation * scale, generator=generator)
            return
        for table in self.parameters():
            kaiming_(table, generator)

    def forward(self, slots: Tensor | None) -> Float[Tensor, "block slot width"]:
        state: Tensor = self.state
        if slots is not None:
            state = take(state, slots)
        if self.kind == "factored":
            return torch.cat([self.block.expand(-1, state.shape[1], -1), state], dim=-1)
        if self.kind == "additive":
            return state + self.block + looked_up(self.slot, slots)
        return state


class HMM(nn.Module):
    """p(x, z) = prod_t p(z_t | z_t-1) p(x_t | z_t), with parameters shared among states as the configuration says."""

    words_by_block: Tensor
    num_alive: Tensor
    states_of_block: Tensor

    def __init__(
        self,
        config: ModelConfig,
        blocks: Blocks,
        seed: int = 0,
        word_counts: np.ndarray | None = None,
        start_counts: np.ndarray | None = None,
    ) -> None:
        """Create the parameters. `word_counts` and `start_counts` (V,) of the training text set initial biases."""
        super().__init__()
        self.config, self.partition = config, blocks.partition
        self.vocab_size, self.num_states = blocks.vocab_size, blocks.num_states
        num_blocks, num_slots = blocks.num_blocks, blocks.states_per_block
        order, sizes = blocks.words_by_block
        self.register_buffer("words_by_block", torch.from_numpy(order.astype(np.int64)), persistent=False)
        self.register_buffer("num_alive", torch.from_numpy(blocks.num_alive.astype(np.int64)), persistent=False)
        self.register_buffer("states_of_block", torch.from_numpy(blocks.states_of_block), persistent=False)
        self.block_sizes = sizes.tolist()
        generator = torch.Generator().manual_seed(seed)
        if config.parameterization == "scalar":
            self._make_scalar(num_blocks, num_slots, generator)
        else:
            self._make_neural(num_blocks, num_slots, generator)
        if config.transition == "block-factored":
            self._set_biases(blocks, word_counts, start_counts)

    # ---- parameters

    def _make_scalar(self, num_blocks: int, num_slots: int, generator: torch.Generator) -> None:
        def logits(*shape: int, spread: float = 1.0) -> nn.Parameter:
            return nn.Parameter(torch.empty(*shape).uniform_(-spread, spread, generator=generator))

        self.start_logits = logits(num_blocks, num_slots)
        self.emission_logits = logits(self.vocab_size, num_slots, spread=self.config.emission_init_scale)
        if self.config.transition == "softmax":
            self.transition_logits = logits(self.num_states, self.num_states)
        else:
            self.block_logits = logits(num_blocks, num_slots, num_blocks)
            self.tile_logits = logits(num_blocks, num_blocks, num_slots, num_slots)

    def _make_neural(self, num_blocks: int, num_slots: int, generator: torch.Generator) -> None:
        config, size = self.config, self.config.hidden_size
        if not self.partition:  # states belong to no block: one table of them all
            num_blocks, num_slots = 1, self.num_states
        self.embedding = StateEmbedding(config.embedding, num_blocks, num_slots, size)
        if config.embedding == "factored":
            self.compose = nn.ModuleDict({side: Residual(size) for side in ("start", "source", "target", "emission")})
        factored = config.transition == "block-factored"
        sides = ("source", "emission") if factored else ("start", "source", "emission")
        self.networks = nn.ModuleDict({side: network(config.network, size) for side in sides})
        self.start_score = nn.Linear(size, 1)
        self.word = nn.Linear(size, self.vocab_size)
        if factored:
            self.next_block = nn.Linear(size, num_blocks)
            self.tile_source = nn.Linear(size, config.tile_width)
            self.tile_target = nn.Linear(size, config.tile_width)
            self.start_block = nn.Parameter(torch.zeros(num_blocks))
            if config.source_block_init:
                self.source_code = nn.Parameter(torch.empty(num_blocks, 1, config.tile_width))
                self.target_code = nn.Parameter(torch.empty(num_slots, config.tile_width))
        for module in self.modules():
            if isinstance(module, nn.Linear):
                kaiming_(module.weight, generator)
                bound = 1 / math.sqrt(module.in_features)
                nn.init.uniform_(module.bias, -bound, bound, generator=generator)
        with torch.no_grad():
            self.word.weight.mul_(config.emission_init_scale)
        # embeddings are the raw target side of a softmax over all states: its first logits must be about 1, not 16
        self.embedding.initialize(generator, 1.0 if factored else 1 / math.sqrt(size))
        if factored:
            self._scale_down_initial_logits(generator)

    @torch.no_grad()
    def _scale_down_initial_logits(self, generator: torch.Generator) -> None:
        """Scale down the initial logits, and add codes by which slot j of every block means 'came from block j'."""
        self.tile_source.weight.mul_(0.1)
        self.tile_target.weight.mul_(0.1)
        self.word.weight.mul_(0.5)
        if self.config.source_block_init:
            num_blocks, num_slots = self.source_code.shape[0], self.target_code.shape[0]
            code = first_code(self.config, num_blocks, generator)
            self.source_code.copy_(code[:, None])
            self.target_code.copy_(code[torch.arange(num_slots) % num_blocks])

    @torch.no_grad()
    def _set_biases(self, blocks: Blocks, word_counts: np.ndarray | None, start_counts: np.ndarray | None) -> None:
        """Set biases to log frequencies: the initial model is a unigram model of blocks, and of words within them."""

        def log_frequency(counts: np.ndarray) -> Tensor:
            logs = torch.from_numpy(counts + 0.5).log()
            return (logs - logs.mean()).float()

        def per_block(counts: np.ndarray) -> Tensor:
            return log_frequency(np.bincount(blocks.block_of_word, counts, minlength=blocks.num_blocks))

        if word_counts is not None:
            if self.config.parameterization == "neural":
                self.word.bias.copy_(log_frequency(word_counts))
                self.next_block.bias.copy_(per_block(word_counts))
            else:
                self.emission_logits.add_(log_frequency(word_counts)[:, None])
                self.block_logits.add_(per_block(word_counts))
        if start_counts is not None:
            if self.config.parameterization == "neural":
                self.start_block.copy_(per_block(start_counts))
            else:
                self.start_logits.add_(per_block(start_counts)[:, None])

    # ---- potentials

    def forward(self) -> ModelPotentials:
        """Return the potentials of all states."""
        return self.potentials()

    def potentials(self, kept: DropoutMask | None = None) -> ModelPotentials:
        """Return the log-potentials of the model reduced to the kept states; of all states without `kept`."""
        kept = kept or DropoutMask()
        if not self.partition:
            return self._overlapping_potentials(kept)
        slots = kept.slots
        alive = kept.num_alive if kept.num_alive is not None else self.num_alive
        num_slots = self.states_of_block.shape[1] if slots is None else slots.shape[1]
        enterable = None
        if bool((alive < num_slots).any()):
            enterable = torch.arange(num_slots, device=alive.device)[None] < alive[:, None]
        if self.config.parameterization == "scalar":
            start, log_emission, transition = self._scalar_potentials(slots, enterable)
        else:
            start, log_emission, transition = self._neural_potentials(slots, enterable, kept.features)
        if enterable is not None:
            start = start.masked_fill(~enterable, -torch.inf)
        log_start = start.flatten().log_softmax(0).view_as(start)
        return ModelPotentials(log_start, log_emission, transition)

    def _grid(self, num_slots: int) -> Tensor:
        """Return states_of_block of the (reduced) partition: m * K + slot."""
        num_blocks = len(self.block_sizes)
        return torch.arange(num_blocks * num_slots, device=self.num_alive.device).view(num_blocks, num_slots)

    def _neural_potentials(
        self, slots: Tensor | None, enterable: Tensor | None, features: Tensor | None
    ) -> tuple[Tensor, Tensor, Transition]:
        embedding = self.embedding(slots)
        if features is not None:
            embedding = embedding * features
        grid = embedding.shape[:2]
        rows = None if enterable is None else enterable.flatten().nonzero()[:, 0]
        if rows is not None:  # networks run over the states only, not over the padding of smaller blocks
            embedding = embedding.flatten(0, 1).index_select(0, rows)
        if self.config.embedding == "factored":
            sides = {side: compose(embedding) for side, compose in self.compose.items()}
        else:
            sides = dict.fromkeys(("start", "source", "target", "emission"), embedding)
        # a linear map before another is their product: it runs over the few outputs instead of all states
        folded = self.config.transition == "block-factored" and self.config.network == "linear"
        hidden = {
            side: self.networks[side](x) if side in self.networks and not folded else x for side, x in sides.items()
        }

        def last(layer: nn.Linear, side: str) -> tuple[Tensor, Tensor]:
            """Return the layer's weight and bias, composed with the linear map before it."""
            return composed(layer, self.networks[side]) if folded else (layer.weight, layer.bias)

        def by_block(values: Tensor, padding: float = 0.0) -> Tensor:
            """Return the rows of the states as (M, K, ...)."""
            if rows is None:
                return values
            whole = values.new_full((grid.numel(), *values.shape[1:]), padding)
            return whole.index_copy(0, rows, values).unflatten(0, grid)

        start = by_block(self.start_score(hidden["start"]))[..., 0]
        log_emission = blocked_log_softmax(
            by_block(hidden["emission"]), *last(self.word, "emission"), self.words_by_block, self.block_sizes
        )
        if self.config.transition == "softmax":
            flat = None if enterable is None else enterable.flatten()
            source, target = by_block(hidden["source"]).flatten(0, 1), by_block(hidden["target"]).flatten(0, 1)
            return start, log_emission, Softmax(source, target, None, flat, self._grid(grid[1]))
        source = by_block(nn.functional.linear(hidden["source"], *last(self.tile_source, "source")))
        target = by_block(self.tile_target(hidden["target"]))
        if self.config.source_block_init:
            source = source + self.source_code
            target = target + looked_up(self.target_code, slots)
        log_block = linear_log_softmax(hidden["source"], *last(self.next_block, "source"))
        log_block = by_block(log_block, padding=-math.log(log_block.shape[-1]))
        start = start + self.start_block[:, None]
        if self.config.within == "low-rank":
            return start, log_emission, LowRank(log_block, source, target, enterable)
        return start, log_emission, BlockFactored(log_block, source, target, None, enterable)

    def _scalar_potentials(self, slots: Tensor | None, enterable: Tensor | None) -> tuple[Tensor, Tensor, Transition]:
        start: Tensor = self.start_logits
        emission: Tensor = self.emission_logits
        if slots is None:
            states = None
        else:
            blocks = torch.arange(slots.shape[0], device=slots.device)[:, None]
            states = (blocks * start.shape[1] + slots).flatten()
            start = start.gather(1, slots)
            slots_of_word = slots.repeat_interleave(torch.tensor(self.block_sizes, device=slots.device), dim=0)
            emission = emission.gather(1, emissions.restore_order(slots_of_word, self.words_by_block))
        log_emission = emissions.blocked_scalar(emission, self.words_by_block, self.block_sizes)
        if self.config.transition == "softmax":
            logits: Tensor = self.transition_logits
            if states is not None:
                logits = logits[states][:, states]
            flat = None if enterable is None else enterable.flatten()
            return start, log_emission, Softmax(None, None, logits, flat, self._grid(start.shape[1]))
        block_logits: Tensor = self.block_logits
        tile_logits: Tensor = self.tile_logits
        if slots is not None:
            kept = slots.shape[1]
            block_logits = block_logits.gather(1, slots[..., None].expand(-1, -1, block_logits.shape[2]))
            num_blocks, whole = tile_logits.shape[0], tile_logits.shape[2]
            tile_logits = tile_logits.gather(2, slots[:, None, :, None].expand(-1, num_blocks, -1, whole))
            tile_logits = tile_logits.gather(3, slots[None, :, None, :].expand(num_blocks, -1, kept, -1))
        log_block = block_logits.log_softmax(-1)
        return start, log_emission, BlockFactored(log_block, None, None, tile_logits, enterable)

    def _overlapping_potentials(self, kept: DropoutMask) -> ModelPotentials:
        """Return the potentials under the constraint `uniform`, where each word has its own subset of all states."""
        columns, states, dead = kept.columns, self.states_of_block, None
        embedding = self.embedding(None)[0]
        if kept.features is not None:
            embedding = embedding * kept.features[0]
        if columns is not None and kept.slots is not None and kept.num_alive is not None:
            place = (columns.cumsum(0) - 1).clamp(min=0)
            states = place[states.gather(1, kept.slots)]
            dead = torch.arange(states.shape[1], device=states.device) >= kept.num_alive[:, None]
            embedding, columns = embedding[columns], None
        start = self.start_score(self.networks["start"](embedding))[..., 0]
        if columns is not None:
            start = start.masked_fill(~columns, -torch.inf)
        log_start = start.log_softmax(0)[states]
        log_emission = emissions.overlapping(
            self.networks["emission"](embedding), self.word.weight, self.word.bias, states, dead
        )
        source = self.networks["source"](embedding)
        transition = Softmax(source, embedding, None, columns, states, partition=False)
        return ModelPotentials(log_start, log_emission, transition)


def first_code(config: ModelConfig, num_blocks: int, generator: torch.Generator) -> Float[Tensor, "block width"]:
    """Return one code vector per block, for leaving it and for the slots that remember it. Together they add `source_block_init`."""
    if config.within == "low-rank":  # blocks share channels in turn
        channel = torch.arange(num_blocks) % config.tile_width
        return nn.functional.one_hot(channel, config.tile_width) * (config.source_block_init / 2)
    code = torch.empty(num_blocks, config.tile_width).normal_(generator=generator)
    return code * (math.sqrt(config.source_block_init) / code.norm(dim=1, keepdim=True))


def looked_up(table: Float[Tensor, "slot width"], slots: Int[Tensor, "block kept"] | None) -> Tensor:
    """Return table[slots], or the whole table. An embedding lookup sums its gradient in a fixed order, for any number of threads."""
    return table if slots is None else nn.functional.embedding(slots, table)


@torch.no_grad()
def kaiming_(table: Tensor, generator: torch.Generator) -> None:
    """Initialize as torch's linear layers: U(-1/sqrt(h), 1/sqrt(h)) for width h."""
    bound = 1 / math.sqrt(table.shape[-1])
    table.uniform_(-bound, bound, generator=generator)
