"""What the feed-forward model and the LSTM share: tied embeddings, dropout, scoring. Subclasses give h_t.

    p(x_t | x_<t) = softmax(E h_t + b),  E (V, D) being the input embeddings too

All weights start Kaiming-uniform. Dropout acts where a generator is given and nowhere else: there is no
mode to switch.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from vlhmm.baselines.softmax import cross_entropy, draw, target_log_prob
from vlhmm.data.text import Text
from vlhmm.data.vocabulary import Vocabulary
from vlhmm.errors import QueryError


class NeuralLanguageModel(nn.Module, ABC):
    """A `LanguageModel` with weights to learn."""

    rule = "reset"  # the context rule it was trained with

    def __init__(self, vocabulary: Vocabulary, hidden_size: int, dropout: float, drops_segments: bool = False) -> None:
        super().__init__()
        self.vocabulary = vocabulary
        self.dropout = dropout
        self.drops_segments = drops_segments  # one mask for all steps of a row (B, T, D), not one per step
        self.embedding = nn.Parameter(torch.empty(len(vocabulary), hidden_size))  # E
        self.bias = nn.Parameter(torch.zeros(len(vocabulary)))  # b

    @abstractmethod
    def start(self, batch_size: int) -> Any:
        """Return the carry before the first token: a context of <eos>, as after a line."""

    @abstractmethod
    def hidden(self, tokens: Tensor, lengths: Tensor, carry: Any, generator: torch.Generator | None) -> tuple:
        """Return h_t for tokens[:, t], (B, T, D), garbage beyond `lengths`; and the carry after each row."""

    @abstractmethod
    def having_said(self, words: Tensor, carry: Any) -> Any:
        """Return the carry with these words (B,) as its rows' last."""

    def loss(
        self, tokens: Tensor, lengths: Tensor, carry: Any, generator: torch.Generator | None = None
    ) -> tuple[Tensor, Any]:
        """Return the mean of -log p(x_t | x_<t), under dropout if there is a generator; and the carry."""
        hidden, carry = self.hidden(tokens, lengths, carry, generator)
        inside = _inside(tokens, lengths)
        return cross_entropy(hidden[inside], self.embedding, self.bias, tokens[inside]), carry

    @torch.no_grad()
    def score_batch(self, tokens: Tensor, lengths: Tensor, carry: Any) -> tuple[Tensor, Any]:
        """Return log p(x_t | x_<t), float64 (B, T), zero beyond `lengths`; and the carry after each row."""
        log_prob = torch.zeros(tokens.shape, dtype=torch.float64)
        inside = _inside(tokens, lengths)
        if not inside.any():
            return log_prob, carry
        words = tokens[inside]
        if not 0 <= words.min() <= words.max() < len(self.vocabulary):
            raise QueryError(
                f"word ids run from {words.min()} to {words.max()}, expected 0 to "
                f"{len(self.vocabulary) - 1}; encode the text with this model's vocabulary"
            )
        hidden, carry = self.hidden(tokens.where(inside, 0), lengths, carry, None)
        log_prob[inside] = target_log_prob(hidden[inside], self.embedding, self.bias, words).double()
        return log_prob, carry

    @torch.no_grad()
    def vectors_after(self, tokens: Tensor) -> Tensor:
        """Return h after each token of rows that begin a text, (B, T, D), from which the next word is predicted."""
        anything = tokens.new_zeros(len(tokens), 1)  # h_t does not see the word it predicts
        longer = torch.cat([tokens, anything], dim=1)
        lengths = torch.full((len(longer),), longer.shape[1])
        return self.hidden(longer, lengths, self.start(len(longer)), None)[0][:, 1:]

    @torch.no_grad()
    def next_word_probabilities(self, carry: Any) -> Tensor:
        """Return p(x | text so far) of every word x, float64 (B, V)."""
        batch = carry[0].shape[0] if isinstance(carry, tuple) else len(carry)
        anything = torch.zeros(batch, 1, dtype=torch.int64)  # h_t does not see the word it predicts
        hidden, _ = self.hidden(anything, torch.ones(batch, dtype=torch.int64), carry, None)
        logits = torch.addmm(self.bias, hidden[:, 0], self.embedding.t())
        return logits.double().softmax(1)

    @torch.no_grad()
    def sample(
        self,
        num_tokens: int,
        generator: torch.Generator,
        num_streams: int = 512,
        progress: Callable[[int, int], None] | None = None,
    ) -> Text:
        """Return about `num_tokens` tokens of whole lines, drawn in parallel streams that run on over line ends."""
        length, carry = -(-num_tokens // num_streams), self.start(num_streams)
        drawn = torch.empty(num_streams, length, dtype=torch.int64)
        one, anything = torch.ones(num_streams, dtype=torch.int64), torch.zeros(num_streams, 1, dtype=torch.int64)
        for t in range(length):
            hidden, carry = self.hidden(anything, one, carry, None)  # h_t does not see the word that is to be drawn
            uniform = torch.rand(num_streams, 1, generator=generator)
            drawn[:, t : t + 1] = draw(hidden[:, 0], self.embedding, self.bias, uniform)
            carry = self.having_said(drawn[:, t], carry)
            if progress is not None:
                progress(t + 1, length)
        return whole_lines(drawn.numpy(), self.vocabulary)

    @property
    def num_parameters(self) -> int:
        """Number of weights. The embeddings, which are also the output layer, count once."""
        return sum(parameter.numel() for parameter in self.parameters())

    def initialize(self, generator: torch.Generator) -> None:
        """Draw every matrix uniformly within 1 / sqrt(number of columns), and set every bias to zero."""
        with torch.no_grad():
            for parameter in self.parameters():
                if parameter.ndim > 1:
                    bound = parameter.shape[-1] ** -0.5
                    parameter.uniform_(-bound, bound, generator=generator)
                else:
                    parameter.zero_()

    def dropped(self, activations: Tensor, generator: torch.Generator | None) -> Tensor:
        """Return the activations, each zeroed with probability `dropout`, else scaled up; all, if no generator."""
        if generator is None or self.dropout == 0:
            return activations
        masked = activations[:, :1] if self.drops_segments else activations
        kept = torch.empty_like(masked).bernoulli_(1 - self.dropout, generator=generator)
        return activations * kept.div_(1 - self.dropout)


def whole_lines(streams: np.ndarray, vocabulary: Vocabulary) -> Text:
    """Return the lines of each stream up to its last <eos>, one stream after another."""
    ends = [np.flatnonzero(stream == vocabulary.eos) for stream in streams]
    parts = [stream[: end[-1] + 1] for stream, end in zip(streams, ends, strict=True) if len(end)]
    tokens = np.concatenate([*parts, np.zeros(0, np.int64)]).astype(np.int32)
    offsets = np.concatenate([[0], np.flatnonzero(tokens == vocabulary.eos) + 1]).astype(np.int64)
    unk = np.flatnonzero(tokens == vocabulary.unk)
    return Text(tokens, offsets, 0, len(unk), 0, unk)


def _inside(tokens: Tensor, lengths: Tensor) -> Tensor:
    return torch.arange(tokens.shape[1]) < lengths[:, None]
