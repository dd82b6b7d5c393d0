"""The view of an HMM that steering needs: start, emissions by block, and rows of the transition matrix.

Input:  a trained model whose blocks share no states, or the three matrices of a dense HMM (one block).
Output: `SteeringHMM`, with states renumbered so that the K states of each block are contiguous.
"""

import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from vlhmm.errors import QueryError

if TYPE_CHECKING:
    from vlhmm.language_model import HMMLanguageModel
    from vlhmm.steering.lookahead import LookaheadTable
    from vlhmm.steering.token_automaton import TokenAutomaton

DEFAULT_MEMORY = 2 << 30  # bytes of cached transition rows, and again of lookahead tables
_ROWS_AT_ONCE = 1 << 24  # entries of A computed at a time if A is not kept
TILE = 64  # source states of a tile of A: four vector registers of float32


class SteeringHMM:
    """An HMM over token ids. It keeps the transition matrix if that fits in `memory`, else the rows used last."""

    def __init__(
        self,
        start: Tensor,
        emission: Tensor,
        block_of_token: Tensor,
        rows_of_block: Callable[[int], Tensor],
        memory: int = DEFAULT_MEMORY,
        restart_tokens: Iterable[int] = (),
    ) -> None:
        self.restart_tokens = frozenset(restart_tokens)  # after which the chain starts from p(z_1)
        self.start, self.emission, self.block_of_token = start, emission.contiguous(), block_of_token.long()
        self.dtype, self.memory = emission.dtype, memory
        self.vocab_size, self.states_per_block = emission.shape
        self.num_states = len(start)
        self.num_blocks = self.num_states // self.states_per_block
        if self.num_blocks * self.states_per_block != self.num_states:
            raise QueryError(f"{self.num_states} states cannot be divided into blocks of {self.states_per_block}")
        self._make_rows = rows_of_block
        self._rows: OrderedDict[int, Tensor] = OrderedDict()
        self._matrix: Tensor | None = None  # (S, S), of a dense HMM
        self._tiles: Tensor | None = None  # A for the kernels, see tile_parts
        # caches: tables by the automaton's content hash, least recently used first; automata; bytes of tokens
        self.tables: OrderedDict[str, LookaheadTable] = OrderedDict()
        self.automata: dict[str, TokenAutomaton] = {}
        self.pieces_of: weakref.WeakKeyDictionary[object, list[bytes | None]] = weakref.WeakKeyDictionary()

    @classmethod
    def from_model(cls, model: "HMMLanguageModel", memory: int = DEFAULT_MEMORY) -> "SteeringHMM":
        """Build it from a trained model over token ids."""
        distributions = model.distributions
        states = distributions.states_of_block
        order = states.flatten()
        if len(order) != distributions.num_states or len(order.unique()) != len(order):
            raise QueryError(
                "steering needs a model whose blocks share no states; train with --set model.constraint=brown"
            )
        in_order = bool((order == torch.arange(len(order), device=order.device)).all())

        def rows(block: int) -> Tensor:
            made = distributions.normalized_rows(states[block], distributions.dtype)
            return (made if in_order else made[:, order]).cpu()

        restarts = [model.vocabulary.eos] if model.rule == "reset" else []
        return cls(
            distributions.start[order].to(distributions.dtype).cpu(),
            distributions.emission.cpu(),
            distributions.block_of_word.cpu(),
            rows,
            memory,
            restarts,
        )

    @classmethod
    def dense(cls, start: Tensor, transition: Tensor, emission: Tensor, memory: int = DEFAULT_MEMORY) -> "SteeringHMM":
        """Build a dense HMM, where every state may emit every token: start (S,), transition (S, S), emission (S, V)."""
        tokens = torch.zeros(emission.shape[1], dtype=torch.long)
        hmm = cls(start, emission.t(), tokens, lambda block: transition, memory)
        hmm._matrix = transition.contiguous()
        return hmm

    @property
    def _matrix_bytes(self) -> int:
        return self.num_states**2 * self.emission.element_size()

    def _block_slice(self, block: int) -> slice:
        return slice(block * self.states_per_block, (block + 1) * self.states_per_block)

    def rows(self, block: int) -> Tensor:
        """Return p(z' | z) for the states z of a block, (K, S)."""
        if self._matrix is not None:
            return self._matrix[self._block_slice(block)]
        if self._tiles is not None:
            first, end = block * self.states_per_block, (block + 1) * self.states_per_block
            cuts = [first, *range((first // TILE + 1) * TILE, end, TILE), end]
            parts = [
                self._tiles[a // TILE, :, a % TILE : a % TILE + b - a].t() for a, b in zip(cuts, cuts[1:], strict=False)
            ]
            return parts[0] if len(parts) == 1 else torch.cat(parts)
        found = self._rows.get(block)
        if found is None:
            found = self._make_rows(block).contiguous()
            while self._rows and found.nbytes * (len(self._rows) + 1) > self.memory:
                self._rows.popitem(last=False)
            if found.nbytes <= self.memory:
                self._rows[block] = found
        else:
            self._rows.move_to_end(block)
        return found

    def tile_parts(self) -> Iterator[tuple[int, Tensor]]:
        """Yield (first state, tiles from there on): A in one piece if it fits in memory, else recomputed piece by piece.

        A tile (S, 64) has the rows of 64 source states as its columns, the layout that kernels read. The last tile is padded
        with zeros.
        """
        if self._tiles is None and self._matrix_bytes * (1 if self._matrix is None else 2) <= self.memory:
            tiles = torch.zeros(-(-self.num_states // TILE), self.num_states, TILE, dtype=self.dtype)
            for first, rows in self._row_parts():
                _pack(tiles, first, rows)
            self._rows.clear()
            self._tiles = tiles
        if self._tiles is not None:
            yield 0, self._tiles
            return
        for first, rows in self._row_parts():
            tiles = torch.zeros(-(-len(rows) // TILE), self.num_states, TILE, dtype=self.dtype)
            _pack(tiles, 0, rows)
            yield first, tiles

    def _row_parts(self) -> Iterator[tuple[int, Tensor]]:
        """Yield (first state, rows of A from there on)."""
        few = max(1, _ROWS_AT_ONCE // self.num_states)
        if self._matrix is not None:
            for first in range(0, self.num_states, few):
                yield first, self._matrix[first : first + few]
            return
        blocks_at_once = max(1, few // self.states_per_block)
        for begin in range(0, self.num_blocks, blocks_at_once):
            blocks = range(begin, min(begin + blocks_at_once, self.num_blocks))
            parts = [self._make_rows(block) if block not in self._rows else self._rows[block] for block in blocks]
            yield begin * self.states_per_block, torch.cat(parts)

    def forward_step(self, predicted: Tensor, tokens: Tensor) -> Tensor:
        """Return p(z_{t+1} | x_<=t), (n, S), from p(z_t | x_<t), (n, S), and the tokens x_t. O(K S) per row.

        A token of probability zero is ignored, except for its block: the states of the block keep their predicted
        probabilities.
        """
        size = self.states_per_block
        result = torch.empty_like(predicted)
        blocks = self.block_of_token[tokens]
        for block in blocks.unique().tolist():
            chosen = (blocks == block).nonzero().squeeze(1)
            prior = predicted[chosen, block * size : (block + 1) * size]
            alpha = prior * self.emission[tokens[chosen]]
            total = alpha.sum(1, keepdim=True)
            prior = torch.where(prior.sum(1, keepdim=True) > 0, prior, torch.ones_like(prior))
            alpha = torch.where(total > 0, alpha, prior)
            result[chosen] = (alpha / alpha.sum(1, keepdim=True)) @ self.rows(block)
        return result


def _pack(tiles: Tensor, first: int, rows: Tensor) -> None:
    """Copy rows of A, from state `first` on, into tiles."""
    done = 0
    while done < len(rows):
        tile, place = divmod(first + done, TILE)
        some = min(TILE - place, len(rows) - done)
        tiles[tile, :, place : place + some] = rows[done : done + some].t()
        done += some
