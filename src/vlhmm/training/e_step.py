"""The E-step: expected counts of a list of batches under one (reduced) model.

Gradient training and generalized EM both use it. The counts are the gradient of log p(x) in the
log-potentials; `expected_log_likelihood` pushes them through the parameterization. One E-step and one
optimizer step is a gradient step on the marginal likelihood; more optimizer steps are generalized EM.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor

from vlhmm import inference
from vlhmm.components.chain_inputs import FilterState, Pairs, chain_of, distinct_pairs, last_carry, pair_codes
from vlhmm.components.transitions import LowRank, Softmax
from vlhmm.data.batches import Batch
from vlhmm.data.user_text import gibibytes
from vlhmm.errors import ConfigError
from vlhmm.hmm import ModelPotentials
from vlhmm.inference import Chain, ChannelCounts, ChannelPotentials, Counts, Forward, Potentials


class Prepared(NamedTuple):
    """Batches as chains over one list of block pairs; does not depend on the parameters."""

    chains: list[Chain]
    continues: list[bool]
    pairs: Pairs
    tokens: int


class Expectation(NamedTuple):
    """Expected counts, the log-likelihood they were taken under, and the state after the last batch."""

    counts: Counts | ChannelCounts
    pairs: Pairs
    log_likelihood: float
    tokens: int
    carry: FilterState | None
    tiles: Tensor | None  # the transition tiles of the pairs under the parameters of this E-step, where any were made


@runtime_checkable
class TokenEvidence(Protocol):
    """Evidence about the hidden state of every token in addition to the word: the hook of the E-step."""

    @property
    def num_bytes(self) -> int:
        """Memory that it takes."""

    def add_expected_counts(
        self,
        number: int,
        counts: Counts | ChannelCounts,
        potentials: Potentials | ChannelPotentials,
        chain: Chain,
        carry: Tensor | None,
        workspace: Any,
    ) -> Forward:
        """Do as `inference.add_expected_counts` for the chain of that number, under the evidence about it."""


class Buffers:
    """Memory for tiles and counts that is kept from step to step: fresh pages cost more than the arithmetic."""

    def __init__(self) -> None:
        self.held: dict[str, Tensor] = {}
        self.workspace: Any = None

    def get(self, name: str, shape: tuple[int, ...], like: Tensor) -> Tensor:
        size = int(torch.tensor(shape).prod())
        held = self.held.get(name)
        if held is None or held.numel() < size or held.dtype != like.dtype or held.device != like.device:
            self.held.pop(name, None)
            held = self.held[name] = torch.empty(size + size // 8, dtype=like.dtype, device=like.device)
        return held[:size].view(shape)

    def messages(self, table: Tensor):
        if self.workspace is None and inference.use_kernels(table):
            from vlhmm.inference.numba_backend import Workspace

            self.workspace = Workspace()
        return self.workspace


def prepare(
    batches: Sequence[Batch],
    block_of_word: Tensor,
    num_blocks: int,
    carry_block: Tensor | None = None,
) -> Prepared:
    """Index the batches as chains over the distinct block pairs in them."""
    device = block_of_word.device
    codes, lives, tokens, lengths = [], [], [], []
    for batch in batches:
        row_tokens, row_lengths = batch.tokens.to(device), batch.lengths.to(device)
        if not batch.continues or carry_block is None:
            carry_block = torch.full((len(row_lengths),), -1, dtype=torch.long, device=device)
        code = pair_codes(block_of_word, num_blocks, row_tokens, batch.restart.to(device), carry_block)
        live = torch.arange(row_tokens.shape[1], device=device)[None] < row_lengths[:, None]
        last = block_of_word[row_tokens].gather(1, (row_lengths - 1).clamp(min=0)[:, None])[:, 0]
        carry_block = torch.where(row_lengths > 0, last, carry_block)
        codes.append(code)
        lives.append(live)
        tokens.append(row_tokens)
        lengths.append(row_lengths)
    used = torch.cat([code[live] for code, live in zip(codes, lives, strict=True)])
    known, pairs = distinct_pairs(used, torch.ones_like(used, dtype=torch.bool), num_blocks)
    chains = [chain_of(block_of_word, *parts, known) for parts in zip(tokens, lengths, codes, strict=True)]
    total = sum(int(n.sum()) for n in lengths)
    return Prepared(chains, [batch.continues for batch in batches], pairs, total)


class PreparedBatches:
    """The last prepared batches, kept for the next step: EM on a whole text reads the same ones in every iteration.

    The batches are held with the result, so the same objects are the same batches, in whichever list they come.
    """

    def __init__(self, block_of_word: Tensor, num_blocks: int) -> None:
        self.block_of_word, self.num_blocks = block_of_word, num_blocks
        self._batches: tuple[Batch, ...] = ()
        self._carry_block: Tensor | None = None
        self._prepared: Prepared | None = None

    def get(self, batches: Sequence[Batch], carry_block: Tensor | None = None) -> Prepared:
        """Prepare the batches, unless they are those of the call before."""
        if self._prepared is None or not self._is_last(batches, carry_block):
            self._batches, self._prepared = (), None  # free their memory first
            self._prepared = prepare(batches, self.block_of_word, self.num_blocks, carry_block)
            self._batches, self._carry_block = tuple(batches), carry_block
        return self._prepared

    def _is_last(self, batches: Sequence[Batch], carry_block: Tensor | None) -> bool:
        if len(batches) != len(self._batches) or any(a is not b for a, b in zip(batches, self._batches, strict=True)):
            return False
        if carry_block is None or self._carry_block is None:
            return carry_block is self._carry_block
        return torch.equal(carry_block, self._carry_block)


def predicted_bytes(prepared: Prepared, num_slots: int, num_channels: int | None = None) -> int:
    """Memory of an E-step in float32: tiles and their counts, and the messages of the largest batch."""
    num_pairs, tokens = len(prepared.pairs.from_block), max(chain.emit_of.numel() for chain in prepared.chains)
    if num_channels is not None:  # no tiles; the channels' own tables are no larger than the embeddings
        return 4 * (2 * num_pairs * num_slots + tokens * (5 * num_slots + 2 * num_channels))
    return 4 * (2 * num_pairs * num_slots**2 + 3 * tokens * num_slots)


def expectation(
    potentials: ModelPotentials,
    prepared: Prepared,
    carry: FilterState | None = None,
    buffers: Buffers | None = None,
    memory: int | None = None,
    evidence: TokenEvidence | None = None,
) -> Expectation:
    """Return expected counts of all batches: tiles of the pairs that occur, forward-backward, sums; exact, no gradient.

    Low-rank transitions need no tiles: their counts are those of the channels. With `evidence` the
    posteriors (and the log-likelihood) take it into account.
    """
    buffers, transition = buffers or Buffers(), potentials.transition
    emission = potentials.log_emission.detach().exp()
    num_slots = emission.shape[1]
    needed = predicted_bytes(
        prepared, num_slots, transition.source.shape[-1] if isinstance(transition, LowRank) else None
    )
    if isinstance(transition, Softmax) and not transition.partition:
        needed += 4 * transition.num_states**2  # counts by states
    if evidence is not None:
        needed += evidence.num_bytes
    if memory is not None and needed > memory:
        raise ConfigError(
            f"one E-step needs {gibibytes(needed)} for tiles and counts of {len(prepared.pairs.from_block):,} block pairs, "
            f"the limit is {gibibytes(memory)}; raise --memory, lower training.em_tokens or take fewer states per block"
        )
    start, tiles = potentials.log_start.detach().exp(), None
    table: Potentials | ChannelPotentials
    counts: Counts | ChannelCounts
    if isinstance(transition, LowRank):
        phi, psi = (factor.detach() for factor in transition.factors())
        leave = transition.leave(phi, psi, *prepared.pairs)
        table = ChannelPotentials(start, emission, leave, phi, psi, *prepared.pairs)
        counts = ChannelCounts.zeros_like(table)
    else:
        shape = (len(prepared.pairs.from_block), num_slots, num_slots)
        tiles = transition.tiles(*prepared.pairs, out=buffers.get("tiles", shape, emission))
        table = Potentials(start, emission, tiles)
        sums = buffers.get("counts", shape, emission).zero_()
        counts = Counts(torch.zeros_like(start), torch.zeros_like(emission), sums)
    workspace, total = buffers.messages(emission), 0.0
    for number, (chain, continues) in enumerate(zip(prepared.chains, prepared.continues, strict=True)):
        if not continues or carry is None:
            block = torch.full_like(chain.lengths, -1)
            carry = FilterState(block, emission.new_zeros(len(chain.lengths), num_slots))
        if evidence is None:
            passed = inference.add_expected_counts(counts, table, chain, carry.alpha, workspace)
        else:
            passed = evidence.add_expected_counts(number, counts, table, chain, carry.alpha, workspace)
        total += passed.log_scale.sum().item()
        carry = last_carry(passed.alpha, chain.start_of, chain.lengths, carry)
    counts = inference.finish_counts(counts, table)
    return Expectation(counts, prepared.pairs, total, prepared.tokens, carry, tiles)


def expected_log_likelihood(
    potentials: ModelPotentials,
    counts: Counts | ChannelCounts,
    pairs: Pairs,
    value: bool = True,
    tiles: Tensor | None = None,
    part: int = 0,
    parts: int = 1,
) -> Tensor:
    """Return sum over all counts of count * log-potential, differentiable in the parameters.

    Without `value` the transitions' part of the number is left out, but not of the gradient: a pass less. `tiles` are
    those of the E-step, if the parameters have not changed since. With several `parts` the transitions out of every
    parts-th state of a block represent all: the mean over `part` = 0 .. parts - 1 is the whole sum.
    """

    def dot(count: Tensor, log_table: Tensor) -> Tensor:
        # a state that cannot be entered has log-probability -inf and no counts
        return (count * log_table.clamp(min=torch.finfo(log_table.dtype).min)).sum()

    rest = dot(counts.start, potentials.log_start) + dot(counts.emission, potentials.log_emission)
    transition: Any = potentials.transition
    if isinstance(counts, ChannelCounts):
        return rest + transition.expected_log_likelihood(*pairs, counts, value)
    parts = min(parts, counts.tiles.shape[1])  # no part is empty
    slots = slice(part % parts, None, parts)
    return rest + parts * transition.expected_log_likelihood(*pairs, counts.tiles, value, tiles, slots)
