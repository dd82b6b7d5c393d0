"""Settings of the model: its states, which words they emit, and how its parameters are computed."""

from dataclasses import dataclass
from typing import Literal

from vlhmm.config import setting
from vlhmm.errors import ConfigError
from vlhmm.limits import MAX_STATES, check_ranges

Constraint = Literal["brown", "frequency", "uniform", "none"]
Transition = Literal["softmax", "block-factored"]
Parameterization = Literal["neural", "scalar"]
Embedding = Literal["independent", "factored", "additive"]
Network = Literal["residual", "linear"]
Within = Literal["softmax", "low-rank"]
Allocation = Literal["equal", "tokens"]


# The range of each number, read from a file or given by a user
RANGES: dict[str, tuple[float, float]] = {
    "num_states": (1, MAX_STATES),
    "num_blocks": (1, MAX_STATES),
    "states_per_word": (1, MAX_STATES),
    "exchange_sweeps": (0, 1_000_000),
    "hidden_size": (1, 1 << 16),
    "tile_width": (1, 1 << 16),
    "emission_init_scale": (0, 1e6),
    "source_block_init": (0, 1e6),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Settings of the model. The defaults are the paper's: 2^15 states in 128 Brown blocks, neural, one softmax."""

    num_states: int = setting(32_768, "Number of hidden states |Z|.", "states and blocks")
    num_blocks: int = setting(128, "Number of blocks M that words and states are divided into.", "states and blocks")
    constraint: Constraint = setting(
        "brown",
        "Which words a state may emit: those of its Brown cluster (brown), those of its share of the frequency list (frequency), those that drew it at random (uniform), or all (none).",
        "states and blocks",
    )
    states_per_word: int = setting(
        128, "States that a word may be emitted by, with constraint=uniform.", "states and blocks"
    )
    allocation: Allocation = setting(
        "equal",
        "How states are divided among blocks: equally (equal), or more to blocks with more tokens (tokens).",
        "states and blocks",
    )
    exchange_sweeps: int = setting(
        10, "Sweeps of the exchange algorithm that refine the Brown clusters.", "states and blocks"
    )
    transition: Transition = setting(
        "softmax",
        "How p(z' given z) is made: one softmax over all states (softmax), or the next block and then a state of it (block-factored).",
        "transitions",
    )
    parameterization: Parameterization = setting(
        "neural",
        "Whether logits come from networks on embeddings of the states (neural) or are free numbers (scalar).",
        "parameters",
    )
    embedding: Embedding = setting(
        "independent",
        "Embeddings of the states: one per state (independent), the paper's block with state (factored), or the sum of block, slot and state (additive).",
        "parameters",
    )
    network: Network = setting(
        "residual",
        "The network between embeddings and logits: residual layers (residual) or one matrix (linear).",
        "parameters",
    )
    hidden_size: int = setting(256, "Width of embeddings and networks.", "parameters")
    within: Within = setting(
        "softmax",
        "How a state of the next block is chosen with transition=block-factored: by a softmax (softmax), or through tile_width channels (low-rank).",
        "transitions",
    )
    tile_width: int = setting(64, "Width of the logits within a block, with transition=block-factored.", "transitions")
    emission_init_scale: float = setting(
        1.0,
        "Factor on the first emission logits: how far apart states begin. Free numbers (scalar) begin within 1 of 0.",
        "parameters",
    )
    source_block_init: float = setting(
        0.0,
        "Above 0, slot j of every block starts as the state that came from block j, with this strength.",
        "parameters",
    )

    def __post_init__(self) -> None:
        check_ranges(self, RANGES)
        if not self.emission_init_scale:
            raise ConfigError("emission_init_scale=0 must be above 0: equal states would stay equal")
        if self.constraint in ("brown", "frequency") and self.num_states % self.num_blocks:
            low = self.num_states - self.num_states % self.num_blocks
            take = f"{low} or {low + self.num_blocks}" if low else f"{self.num_blocks}"
            raise ConfigError(
                f"num_states={self.num_states} is not a multiple of num_blocks={self.num_blocks}; every block holds "
                f"equally many states: take {take} states"
            )
        if self.constraint == "uniform" and self.states_per_word > self.num_states:
            raise ConfigError(
                f"states_per_word={self.states_per_word} exceeds num_states={self.num_states}; a word can have all at most"
            )
        if self.constraint == "uniform" and self.transition != "softmax":
            raise ConfigError("constraint=uniform has no blocks to factor by; use transition=softmax")
        if self.constraint == "uniform" and (self.parameterization, self.embedding) != ("neural", "independent"):
            raise ConfigError("constraint=uniform takes parameterization=neural and embedding=independent")
        if self.embedding == "factored" and self.hidden_size % 2:
            raise ConfigError(f"embedding=factored halves hidden_size, got the odd number {self.hidden_size}")
        if self.allocation == "tokens" and self.constraint not in ("brown", "frequency"):
            raise ConfigError(f"allocation=tokens needs blocks; constraint={self.constraint} has none")
        if self.within == "low-rank" and (self.transition, self.parameterization) != ("block-factored", "neural"):
            raise ConfigError("within=low-rank takes transition=block-factored and parameterization=neural")
