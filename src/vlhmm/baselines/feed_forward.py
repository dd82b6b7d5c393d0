"""The feed-forward 5-gram model: h_t = ReLU(W_h [E(x_{t-4}); ...; E(x_{t-1})]). Training is in `training.py`."""

import torch
from torch import Tensor, nn

from vlhmm.baselines.neural import NeuralLanguageModel
from vlhmm.data.vocabulary import Vocabulary


class FeedForward(NeuralLanguageModel):
    """The paper's FF n-gram model, weight-tied; the carry is each row's last order-1 words, (B, order-1).

    `num_layers` counts hidden layers: one as in the paper's formula; more are square layers on top of it.
    """

    def __init__(
        self,
        vocabulary: Vocabulary,
        generator: torch.Generator,
        hidden_size: int = 256,
        dropout: float = 0.3,
        num_layers: int = 1,
        order: int = 5,
    ) -> None:
        super().__init__(vocabulary, hidden_size, dropout)
        self.order = order
        widths = [(order - 1) * hidden_size] + [hidden_size] * (num_layers - 1)
        self.layers = nn.ModuleList(nn.Linear(width, hidden_size) for width in widths)
        self.initialize(generator)

    def start(self, batch_size: int) -> Tensor:
        """Return a context of order-1 times <eos> for each row of a batch."""
        return torch.full((batch_size, self.order - 1), self.vocabulary.eos, dtype=torch.int64)

    def hidden(
        self, tokens: Tensor, lengths: Tensor, carry: Tensor, generator: torch.Generator | None
    ) -> tuple[Tensor, Tensor]:
        """Return h_t from the order-1 words before x_t, (B, T, D); and the last words of each row."""
        time = tokens.shape[1]
        words = torch.cat([carry, tokens], dim=1)
        embedded = self.dropped(nn.functional.embedding(words[:, :-1], self.embedding), generator)
        hidden = torch.cat([embedded[:, j : j + time] for j in range(self.order - 1)], dim=2)
        for layer in self.layers:
            hidden = self.dropped(layer(hidden).relu(), generator)
        last = lengths[:, None] + torch.arange(self.order - 1)
        return hidden, words.gather(1, last)

    def having_said(self, words: Tensor, carry: Tensor) -> Tensor:
        """Return the carry with these words as its rows' last."""
        return torch.cat([carry[:, :-1], words[:, None]], dim=1)
