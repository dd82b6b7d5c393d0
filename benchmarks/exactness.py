"""The fast path against its reference implementation on a few sentences: no figure is given for a program that is wrong.

The reference writes every potential out and runs the recursion in log space, in float64, under autograd.
"""

from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.errors import ExactnessError
from benchmarks.material import lines_of
from vlhmm.components.chain_inputs import chain_of, distinct_pairs, pair_codes
from vlhmm.components.transitions import BlockFactored, LowRank
from vlhmm.components.transitions.tiles import columns_to_log
from vlhmm.data.batches import Batch, sentence_batches
from vlhmm.data.text import Text
from vlhmm.distributions import HMMDistributions
from vlhmm.hmm import ModelPotentials, Transition
from vlhmm.inference import log_space
from vlhmm.language_model import HMMLanguageModel
from vlhmm.training.e_step import expectation, expected_log_likelihood, prepare

# float32 against float64: what rounding can do, and no more
LOG_LIKELIHOOD_TOLERANCE = 1e-4  # nats a token
GRADIENT_TOLERANCE = 1e-3  # of the largest entry of the same gradient
FACTORS = ("source", "target", "logits", "log_block")  # what a transition is made of


def check_at_most(what: str, difference: float, tolerance: float) -> None:
    """End the benchmark at a difference above the tolerance, or one that is no number."""
    if not difference <= tolerance:
        raise ExactnessError(
            f"{what} differs from the reference implementation by {difference:.2e}, expected at most "
            f"{tolerance:.0e}, so nothing is timed; run the tests, and try VLHMM_KERNELS=0, which leaves the "
            "compiled kernels out"
        )


def few_sentences(text: Text, tokens: int) -> Text:
    """The first short lines of a text, about that many tokens of them."""
    lengths = np.diff(text.offsets)
    short = np.flatnonzero((lengths >= 3) & (lengths <= max(3, tokens // 2)))
    lines = short if len(short) else np.array([int(lengths.argmin())])
    enough = int(np.searchsorted(np.cumsum(lengths[lines]), tokens)) + 1
    return lines_of(text, lines[:enough])


def plain_log_tiles(transition: Transition, from_block: Tensor, to_block: Tensor) -> Tensor:
    """log A[states of from][:, states of to], (P, K, K), by the definition, differentiable."""
    if isinstance(transition, BlockFactored | LowRank):
        if isinstance(transition, LowRank):
            channels = transition.source[from_block][:, :, None] + transition.target[to_block][:, None]
            scores = channels.logsumexp(-1)
        elif transition.logits is not None:
            scores = transition.logits[from_block, to_block]
        else:
            assert transition.source is not None and transition.target is not None
            scores = transition.source[from_block] @ transition.target[to_block].transpose(1, 2)
        allowed = columns_to_log(transition.enterable, scores.dtype)
        if allowed is not None:
            scores = scores + allowed[to_block][:, None]
        return scores.log_softmax(-1) + transition.log_block[from_block, :, to_block][..., None]
    blocks, row_of_pair = from_block.unique(return_inverse=True)
    states = transition.states_of_block[blocks]
    if transition.logits is not None:
        scores = transition.logits[states]
    else:
        assert transition.source is not None and transition.target is not None
        scores = transition.source[states] @ transition.target.t()
    allowed = columns_to_log(transition.enterable, scores.dtype)
    log_rows = (scores if allowed is None else scores + allowed).log_softmax(-1)  # (G', K, S)
    slots = torch.arange(states.shape[1], device=states.device)
    columns = transition.states_of_block[to_block]
    return log_rows[row_of_pair[:, None, None], slots[None, :, None], columns[:, None, :]]


def leaves(potentials: ModelPotentials, dtype: torch.dtype) -> tuple[ModelPotentials, dict[str, Tensor]]:
    """The same potentials in `dtype`, cut off from their parameters; and those tables, by name."""
    found: dict[str, Tensor] = {}

    def leaf(name: str, table: Tensor) -> Tensor:
        found[name] = table.detach().to(dtype, copy=True).requires_grad_()
        return found[name]

    factors: dict[str, Any] = {
        name: leaf(name, getattr(potentials.transition, name))
        for name in FACTORS
        if getattr(potentials.transition, name, None) is not None
    }
    cut = ModelPotentials(
        leaf("log_start", potentials.log_start),
        leaf("log_emission", potentials.log_emission),
        replace(potentials.transition, **factors),
    )
    return cut, found


def check_step(
    potentials: ModelPotentials, batches: list[Batch], block_of_word: Tensor, num_blocks: int
) -> dict[str, float]:
    """{log_likelihood, gradient}: how far a training step's E-step and gradient are from the reference's.

    The first is in nats a token, the second the largest difference of an entry, relative to the largest
    entry of the gradient in the same table.
    """
    fast, fast_tables = leaves(potentials, potentials.log_emission.dtype)
    prepared = prepare(batches, block_of_word, num_blocks)
    expected = expectation(fast, prepared)
    expected_log_likelihood(fast, expected.counts, expected.pairs).backward()

    plain, plain_tables = leaves(potentials, torch.float64)
    log_tiles = plain_log_tiles(plain.transition, *prepared.pairs)
    total = plain.log_start.new_zeros(())
    for chain in prepared.chains:
        expanded = log_space.expand(plain.log_start, plain.log_emission, log_tiles, chain)
        total = total + log_space.log_likelihood(log_space.forward(*expanded), chain.lengths).sum()
    total.backward()

    tokens = sum(int(chain.lengths.sum()) for chain in prepared.chains)
    found = {
        "log_likelihood": abs(expected.log_likelihood - total.item()) / tokens,
        "gradient": max(
            relative_difference(fast_tables[name].grad, table.grad) for name, table in plain_tables.items()
        ),
    }
    check_at_most("the log-likelihood of a token", found["log_likelihood"], LOG_LIKELIHOOD_TOLERANCE)
    check_at_most("the gradient", found["gradient"], GRADIENT_TOLERANCE)
    return found


def relative_difference(got: Tensor | None, expected: Tensor | None) -> float:
    """max |got - expected| / max |expected|; a table that neither side reads differs by nothing."""
    if got is None or expected is None:
        one = got if got is not None else expected
        return 0.0 if one is None or not one.any() else float("inf")
    largest = expected.abs().max().item()
    difference = (got.double() - expected).abs().max().item()
    return difference / largest if largest else difference


@torch.no_grad()
def plain_token_scores(tables: HMMDistributions, text: Text) -> Tensor:
    """log p(x_t | x_<t) of every token, (N,), each line from the start, in log space and float64."""
    double = tables.double()
    log_start, log_emission = double.start_of_block.log(), double.log_emission
    scores = []
    for line in range(text.num_sentences):
        tokens = torch.from_numpy(text.sentence(line).astype(np.int64))[None]
        lengths = torch.tensor([tokens.shape[1]])
        restart = torch.zeros_like(tokens, dtype=torch.bool)
        restart[:, 0] = True
        codes = pair_codes(double.block_of_word, double.num_blocks, tokens, restart, torch.tensor([-1]))
        known, pairs = distinct_pairs(codes, torch.ones_like(restart), double.num_blocks)
        chain = chain_of(double.block_of_word, tokens, lengths, codes, known)
        log_tiles = plain_log_tiles(double.transition, *pairs)
        log_alpha = log_space.forward(*log_space.expand(log_start, log_emission, log_tiles, chain))
        log_prefix = log_alpha[0].logsumexp(-1)
        scores.append(log_prefix.diff(prepend=log_prefix.new_zeros(1)))
    return torch.cat(scores)


def fast_token_scores(model: HMMLanguageModel, text: Text) -> Tensor:
    """The same from the model's own scoring, lines in one batch."""
    lengths = np.diff(text.offsets)
    order = np.argsort(-lengths, kind="stable")  # as `sentence_batches` puts them
    scores: list[Tensor] = [torch.empty(0)] * len(lengths)
    position = 0
    for batch in sentence_batches(text, 1 << 14):
        log_prob, _ = model.score_batch(batch.tokens, batch.lengths, model.start(len(batch.lengths)))
        for row, length in zip(log_prob, batch.lengths.tolist(), strict=True):
            scores[order[position]] = row[:length]
            position += 1
    return torch.cat(scores)


def check_scores(model: HMMLanguageModel, text: Text) -> float:
    """The largest difference of a token's log-probability between the model's scoring and the reference implementation."""
    difference = (fast_token_scores(model, text) - plain_token_scores(model.tables, text)).abs().max().item()
    check_at_most("the log-probability of a token", difference, LOG_LIKELIHOOD_TOLERANCE)
    return difference
