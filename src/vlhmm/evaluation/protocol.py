"""The protocol of all language models: score tokens left to right, with a carried state."""

from typing import Any, Protocol, runtime_checkable

from torch import Tensor

from vlhmm.data.vocabulary import Vocabulary

FilterState = Any  # each model's own state between two calls of `score_batch`; opaque to callers


@runtime_checkable
class LanguageModel(Protocol):
    """log p(x_t | x_<t) for the HMM and for every baseline."""

    vocabulary: Vocabulary

    @property
    def rule(self) -> str:
        """The context rule it was trained with: "reset" or "carry"."""
        ...

    def start(self, batch_size: int) -> FilterState:
        """Return the state before the first token of a text, `batch_size` times."""
        ...

    def score_batch(self, tokens: Tensor, lengths: Tensor, carry: FilterState) -> tuple[Tensor, FilterState]:
        """Return log p(x_t | x_<t) in float64, (B, T), zero beyond `lengths`; and the state after each row."""
        ...

    def next_word_probabilities(self, carry: FilterState) -> Tensor:
        """Return p(x | text so far) of every word x, float64 (B, V)."""
        ...
