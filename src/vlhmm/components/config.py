"""Which hidden Markov model: its states, who emits what, and how its parameters are made."""

import math
from dataclasses import dataclass
from typing import Literal

from vlhmm.errors import ConfigError
from vlhmm.limits import MAX_STATES, check_ranges

Constraint = Literal["brown", "frequency", "uniform", "none"]
Transition = Literal["softmax", "block-factored"]
Parameterization = Literal["neural", "scalar"]
Embedding = Literal["independent", "factored", "additive"]
Network = Literal["residual", "linear"]
Within = Literal["softmax", "low-rank"]
Allocation = Literal["equal", "tokens"]


# What each number may be, read from a file or given by a user
RANGES: dict[str, tuple[float, float]] = {
    "num_states": (1, MAX_STATES),
    "num_blocks": (1, MAX_STATES),
    "states_per_word": (1, MAX_STATES),
    "exchange_sweeps": (0, 1_000_000),
    "hidden_size": (1, 1 << 16),
    "tile_width": (1, 1 << 16),
    "first_spread": (0, 1e6),
    "slot_code": (0, 1e6),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """The paper's model by default: 2^15 states in 128 Brown blocks, neural, one softmax over all states."""

    num_states: int = 32_768  # |Z|, all states
    num_blocks: int = 128  # M, into which words and states are sorted
    constraint: Constraint = "brown"  # which words a state may emit
    states_per_word: int = 128  # n, for constraint "uniform" only
    allocation: Allocation = "equal"  # "tokens": more states to blocks with more tokens
    exchange_sweeps: int = 10  # refinement of the Brown clusters
    transition: Transition = "softmax"  # over all states at once; "block-factored": the next block, then a state of it
    parameterization: Parameterization = "neural"  # networks on embeddings of the states; "scalar": free numbers
    embedding: Embedding = "independent"  # "factored": the paper's block + state; "additive": block + slot + own
    network: Network = "residual"  # between embeddings and logits; "linear": a matrix in its place
    hidden_size: int = 256  # h, the width of embeddings and networks
    within: Within = "softmax"  # p(z' | z, m') of block-factored transitions; "low-rank": through tile_width channels
    tile_width: int = 64  # width of the within-block logits of block-factored transitions
    first_spread: float = 1.0  # how far apart states begin: factor on the first emission logits (scalar: within 1 of 0)
    slot_code: float = 0.0  # >0: slot j of every block starts as "came from block j", with this strength

    def __post_init__(self) -> None:
        self._check_numbers()
        check_ranges(self, RANGES)
        self._check_combinations()

    def _check_numbers(self) -> None:
        for name in ("num_states", "num_blocks", "states_per_word", "hidden_size", "tile_width"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}={getattr(self, name)} must be at least 1")
        if not 0 <= self.slot_code < math.inf:
            raise ConfigError(f"slot_code={self.slot_code} must be 0 or more, and finite")
        if self.exchange_sweeps < 0:
            raise ConfigError(f"exchange_sweeps={self.exchange_sweeps} must be 0 or more")
        if not 0 < self.first_spread < math.inf:
            raise ConfigError(f"first_spread={self.first_spread} must be above 0: equal states would stay equal")

    def _check_combinations(self) -> None:
        if self.constraint in ("brown", "frequency") and self.num_states % self.num_blocks:
            low = self.num_states - self.num_states % self.num_blocks
            raise ConfigError(
                f"num_states={self.num_states} is not a multiple of num_blocks={self.num_blocks}; every block holds "
                f"equally many states: take {low or self.num_blocks} or {low + self.num_blocks} states"
            )
        if self.constraint == "uniform" and self.states_per_word > self.num_states:
            raise ConfigError(
                f"states_per_word={self.states_per_word} exceeds num_states={self.num_states}; a word can have all at most"
            )
        if self.constraint == "uniform" and self.transition != "softmax":
            raise ConfigError("constraint=uniform has no blocks to factor by; use transition=softmax")
        if self.constraint == "uniform" and (self.parameterization, self.embedding) != (
            "neural",
            "independent",
        ):
            raise ConfigError("constraint=uniform takes parameterization=neural and embedding=independent")
        if self.embedding == "factored" and self.hidden_size % 2:
            raise ConfigError(f"embedding=factored halves hidden_size, got the odd number {self.hidden_size}")
        if self.allocation == "tokens" and self.constraint not in ("brown", "frequency"):
            raise ConfigError(f"allocation=tokens needs blocks; constraint={self.constraint} has none")
        if self.within == "low-rank" and (self.transition, self.parameterization) != ("block-factored", "neural"):
            raise ConfigError("within=low-rank takes transition=block-factored and parameterization=neural")
