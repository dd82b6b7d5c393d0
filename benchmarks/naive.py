r"""The naive program a user would write: every table dense, autograd through the recursion.

log_softmax of all |Z| x |Z| transition logits, log_softmax of |Z| x V masked emission logits, the forward
recursion in log space, `backward()`, AdamW. The model is the paper's, without state dropout.

The recursion comes in two variants, both kinder than the textbook's logsumexp over (B, |Z|, |Z|), which holds
no useful size: `dense` multiplies messages over all states by the matrix, one stabilized product a time step;
`blocked` knows that a word allows the states of its block only, and gathers (K, K) of the matrix a token.
"""

import time
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_

from benchmarks.exactness import check_at_most, few_sentences
from benchmarks.extrapolation import extrapolated_seconds, operations
from benchmarks.machine import available_gb, limit_memory, peak_gb
from benchmarks.material import read_corpus
from vlhmm.clustering.assignments import frequency_blocks
from vlhmm.components.networks import Residual
from vlhmm.data.batches import Batch, sentence_batches

Variant = Literal["dense", "blocked"]


class NaiveHMM(nn.Module):
    """The paper's parameterization, its distributions as dense tables."""

    def __init__(self, block_of_word: Tensor, num_blocks: int, states_per_block: int, width: int) -> None:
        super().__init__()
        num_states = num_blocks * states_per_block
        self.block_of_word, self.states_per_block = block_of_word, states_per_block
        block_of_state = torch.arange(num_states) // states_per_block
        self.allowed = block_of_state[:, None] == block_of_word[None]  # (S, V)
        self.state = nn.Parameter(torch.empty(num_states, width).uniform_(-(width**-0.5), width**-0.5))
        self.start_network, self.source_network, self.emission_network = (Residual(width) for _ in range(3))
        self.start_score, self.word = nn.Linear(width, 1), nn.Linear(width, len(block_of_word))

    def tables(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return (log π (S,), log A (S, S), log O (S, V))."""
        log_start = self.start_score(self.start_network(self.state))[:, 0].log_softmax(0)
        log_transition = (self.source_network(self.state) @ self.state.t()).log_softmax(-1)
        scores = self.word(self.emission_network(self.state)).masked_fill(~self.allowed, -torch.inf)
        return log_start, log_transition, scores.log_softmax(-1)

    def log_likelihood(self, tokens: Tensor, lengths: Tensor, variant: Variant) -> Tensor:
        """Return log p of all rows together."""
        recursion = dense_recursion if variant == "dense" else self.blocked_recursion
        return recursion(*self.tables(), tokens, lengths).logsumexp(-1).sum()

    def blocked_recursion(
        self, log_start: Tensor, log_transition: Tensor, log_emission: Tensor, tokens: Tensor, lengths: Tensor
    ) -> Tensor:
        """Return the last message of every row, (B, K), on the states of its token's block."""
        size = self.states_per_block
        states = self.block_of_word[tokens][..., None] * size + torch.arange(size)  # (B, T, K)
        log_emit = log_emission[states, tokens[..., None]]
        log_edge = log_transition[states[:, :-1, :, None], states[:, 1:, None, :]]  # (B, T-1, K, K)
        log_alpha = log_start[states[:, 0]] + log_emit[:, 0]
        for t in range(1, tokens.shape[1]):
            after = (log_alpha[:, :, None] + log_edge[:, t - 1]).logsumexp(1) + log_emit[:, t]
            log_alpha = torch.where((t < lengths)[:, None], after, log_alpha)
        return log_alpha


def dense_recursion(
    log_start: Tensor, log_transition: Tensor, log_emission: Tensor, tokens: Tensor, lengths: Tensor
) -> Tensor:
    """Return the last message of every row, (B, S), over all states."""
    log_emit = log_emission.t()[tokens]  # (B, T, S)
    transition = log_transition.exp()
    log_alpha = log_start + log_emit[:, 0]
    for t in range(1, tokens.shape[1]):
        largest = log_alpha.detach().amax(1, keepdim=True)
        after = ((log_alpha - largest).exp() @ transition).log() + largest + log_emit[:, t]
        log_alpha = torch.where((t < lengths)[:, None], after, log_alpha)
    return log_alpha


def needed_gb(variant: Variant, num_states: int, states_per_block: int, cells: int, vocab_size: int) -> float:
    """Predicted memory of one step: what autograd keeps, and the gradients beside it."""
    messages = 8 * num_states if variant == "dense" else 4 * states_per_block**2
    tables = (5 if variant == "dense" else 3) * num_states**2 + 4.25 * num_states * vocab_size
    return 4e-9 * (tables + cells * messages)


class Naive:
    """One step at each size, from small to large, until memory or time ends it."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self.settings, self.variant = settings, settings["variant"]
        self.corpus = read_corpus(Path(settings["folder"]))
        self.counts = np.bincount(self.corpus.train.tokens, minlength=len(self.corpus.vocabulary))
        batches = sentence_batches(self.corpus.train, settings["batch_tokens"])
        self.batch: Batch = batches[len(batches) // 2]  # rows of about the median length
        self.cells = self.batch.tokens.numel()
        self.waiting, self.began = list(settings["naive_states"]), time.perf_counter()
        self.done: list[dict[str, Any]] = []
        free = available_gb()
        self.limit_gb = min(settings["naive_gb"], 0.8 * free if free else settings["naive_gb"])
        if settings.get("own_process"):
            limit_memory(self.limit_gb)

    def model(self, num_states: int) -> NaiveHMM:
        torch.manual_seed(self.settings["seed"])  # nn.Linear draws from the global generator; this is our process
        size = min(num_states, self.settings["naive_states_per_block"])
        num_blocks = num_states // size
        block_of_word = torch.from_numpy(frequency_blocks(self.counts, num_blocks))
        return NaiveHMM(block_of_word, num_blocks, size, self.settings["hidden_size"])

    def prepare(self) -> dict[str, Any]:
        """Return the difference of the two recursions' log-likelihoods a token at the smallest size."""
        text = few_sentences(self.corpus.train, 24)
        model = self.model(self.waiting[0])
        (batch,) = sentence_batches(text, 1 << 14)
        with torch.no_grad():
            dense, blocked = (model.log_likelihood(batch.tokens, batch.lengths, v).item() for v in ("dense", "blocked"))
        difference = abs(dense - blocked) / text.num_tokens
        check_at_most("the naive log-likelihood of a token", difference, 1e-4)
        self.timed(self.waiting[0], batch)  # warms up
        return {
            "check": {"log_likelihood": difference},
            "tokens": int(self.batch.lengths.sum()),
            "limit_gb": self.limit_gb,
        }

    def step(self) -> dict[str, Any]:
        """Return {num_states, seconds, tokens, operations} at the next size, or {ended: why}."""
        if not self.waiting:
            return {"ended": "it held every size asked for"}
        num_states, settings = self.waiting.pop(0), self.settings
        tokens, vocab_size = int(self.batch.lengths.sum()), len(self.counts)
        wanted = operations(self.variant, num_states, tokens, vocab_size, settings["hidden_size"])
        size = settings["naive_states_per_block"]
        memory = needed_gb(self.variant, num_states, size, self.cells, vocab_size)
        if memory > self.limit_gb:
            return {"ended": f"{num_states} states need about {memory:.0f} GB, the limit is {self.limit_gb:.0f}"}
        left = settings["naive_seconds"] - (time.perf_counter() - self.began)
        if len(self.done) > 1 and extrapolated_seconds(self.done, wanted) > left:  # two are needed to extrapolate
            return {"ended": f"{num_states} states would take more than the {max(0, left):.0f} s left"}
        try:
            seconds = self.timed(num_states, self.batch)
        except (MemoryError, RuntimeError) as error:
            if isinstance(error, RuntimeError) and "memory" not in str(error):
                raise
            return {"ended": f"{num_states} states did not fit in {self.limit_gb:.0f} GB"}
        found = {
            "num_states": num_states,
            "seconds": seconds,
            "tokens": tokens,
            "operations": wanted,
            "peak_gb": peak_gb(),
        }
        self.done.append(found)
        return found

    def timed(self, num_states: int, batch: Batch) -> float:
        """Return seconds of one step of a fresh model."""
        model = self.model(num_states)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
        began = time.perf_counter()
        loss = -model.log_likelihood(batch.tokens, batch.lengths, self.variant) / int(batch.lengths.sum())
        loss.backward()
        clip_grad_norm_(model.parameters(), 5.0)
        optimizer.step()
        return time.perf_counter() - began
