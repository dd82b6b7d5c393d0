"""The HMM as a language model: vocabulary and cached tables behind the `LanguageModel` protocol."""

from functools import cached_property

import torch
from jaxtyping import Float, Int
from torch import Tensor

from vlhmm import inference
from vlhmm.components.chain_inputs import Carry, Pairs, last_carry, pair_codes
from vlhmm.data.vocabulary import Vocabulary
from vlhmm.distributions import Tables
from vlhmm.errors import ConfigError
from vlhmm.inference import Chain, Potentials

DEFAULT_MEMORY = 6 << 30  # bytes of transition tiles kept while scoring


class TileCache:
    """Transition tiles of the block pairs met so far, made once each, within a budget of bytes."""

    def __init__(self, tables: Tables, memory: int = DEFAULT_MEMORY) -> None:
        self.tables = tables
        size = tables.states_per_block
        tile_bytes = size * size * tables.emission.element_size()
        self.capacity = int(min(memory // tile_bytes, tables.num_groups**2))
        if self.capacity < 1:
            raise ConfigError(
                f"memory budget of {memory / 1e6:.0f} MB cannot hold one transition tile of {tile_bytes / 1e6:.1f} MB; raise --memory"
            )
        self.slots = 0
        # with very many groups (a group a word) a table of all pairs is too large: nothing is kept between calls
        self.keeps = tables.num_groups**2 <= 1 << 24
        self.slot_of_code = torch.full((tables.num_groups**2 if self.keeps else 0,), -1, dtype=torch.long)

    def take_room_of(self, other: "TileCache") -> None:
        """Uses the memory of a cache that is no longer needed: fresh pages are slow."""
        if other.capacity == self.capacity and other.tables.dtype == self.tables.dtype and "tiles" in vars(other):
            self.tiles = other.tiles

    @cached_property
    def tiles(self) -> Float[Tensor, "pair slot slot"]:
        """Room for `capacity` tiles; the system hands out a page of it when it is first written."""
        size = self.tables.states_per_block
        return torch.empty(self.capacity, size, size, dtype=self.tables.dtype, device=self.tables.device)

    def edges(self, codes: Int[Tensor, "batch time"], live: Tensor) -> Int[Tensor, "batch time"] | None:
        """Where in `tiles` the tile of each live edge lies (-1: fresh start); None if they do not fit."""
        codes = torch.where(live, codes, -1).cpu()
        used = codes[codes >= 0].unique()
        if not self.keeps:
            return self._edges_uncached(codes, used)
        missing = used[self.slot_of_code[used] < 0]
        if self.slots + len(missing) > self.capacity:
            if len(used) > self.capacity:
                return None
            self.slot_of_code.fill_(-1)
            self.slots, missing = 0, used
        if len(missing):
            self._fill(missing, self.slots)
            self.slot_of_code[missing] = torch.arange(self.slots, self.slots + len(missing))
            self.slots += len(missing)
        return torch.where(codes >= 0, self.slot_of_code[codes.clamp(min=0)], -1).to(self.tables.device)

    def _edges_uncached(self, codes: Tensor, used: Tensor) -> Tensor | None:
        if len(used) > self.capacity:
            return None
        self._fill(used, 0)
        found = torch.searchsorted(used, codes.clamp(min=0)) if len(used) else torch.zeros_like(codes)
        return torch.where(codes >= 0, found, -1).to(self.tables.device)

    def _fill(self, codes: Tensor, first: int) -> None:
        codes = codes.to(self.tables.device)
        pairs = Pairs(codes // self.tables.num_groups, codes % self.tables.num_groups)
        self.tables.tiles(*pairs, out=self.tiles[first : first + len(codes)])


class HMMLanguageModel:
    """Exact log p(x_t | x_<t) of an HMM, with its distributional parameters computed once."""

    def __init__(
        self, vocabulary: Vocabulary, tables: Tables, rule: str = "reset", memory: int = DEFAULT_MEMORY
    ) -> None:
        self.vocabulary, self.tables, self.rule = vocabulary, tables, rule
        self.cache = TileCache(tables, memory)
        if len(vocabulary) != tables.vocab_size:
            raise ConfigError(
                f"the vocabulary has {len(vocabulary):,} words, the model {tables.vocab_size:,}; they belong to different runs"
            )

    def start(self, batch_size: int) -> Carry:
        """Before the first token: p(z_1 | z_0) comes next."""
        group = torch.full((batch_size,), -1, dtype=torch.long, device=self.tables.device)
        alpha = torch.zeros(
            batch_size, self.tables.states_per_block, dtype=self.tables.dtype, device=self.tables.device
        )
        return Carry(group, alpha)

    def score(self, tokens: Tensor, lengths: Tensor, carry: Carry) -> tuple[Float[Tensor, "batch time"], Carry]:
        """log p(x_t | x_<t) in float64, and the filtered posterior after each row."""
        tokens, lengths = tokens.to(self.tables.device), lengths.to(self.tables.device)
        chain = self.chain(tokens, lengths, carry)
        if chain is None:  # more tiles than the budget holds: one half of the time at a time
            if tokens.shape[1] == 1:
                raise ConfigError(
                    f"the memory budget holds {self.cache.capacity} transition tiles, but one step of {tokens.shape[0]} "
                    "rows needs more; raise --memory or score fewer rows at once"
                )
            half = tokens.shape[1] // 2
            left, carry = self.score(tokens[:, :half], lengths.clamp(max=half), carry)
            right, carry = self.score(tokens[:, half:], (lengths - half).clamp(min=0), carry)
            return torch.cat([left, right], dim=1), carry
        passed = inference.forward(self.potentials, chain, carry.alpha)
        return passed.log_scale, last_carry(passed.alpha, chain.start_of, lengths, carry)

    @cached_property
    def potentials(self) -> Potentials:
        """What inference reads; its tiles are filled in as texts need them."""
        return Potentials(self.tables.start_of_group, self.tables.emission, self.cache.tiles)

    def chain(self, tokens: Tensor, lengths: Tensor, carry: Carry) -> Chain | None:
        """The tokens as rows of tables; None if their transition tiles exceed the memory budget."""
        groups = self.tables.group_of_word
        restart = torch.zeros_like(tokens, dtype=torch.bool)
        codes = pair_codes(groups, self.tables.num_groups, tokens, restart, carry.group)
        live = torch.arange(tokens.shape[1], device=tokens.device)[None] < lengths[:, None]
        edge_of = self.cache.edges(codes, live)
        return None if edge_of is None else Chain(groups[tokens], tokens, edge_of, lengths)
