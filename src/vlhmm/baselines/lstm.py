"""The recurrent model: h_t = LSTM(E(x_1), ..., E(x_{t-1})). Training is in `training.py`."""

from typing import NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from vlhmm.baselines.neural import NeuralLanguageModel
from vlhmm.data.vocabulary import Vocabulary


class LSTMCarry(NamedTuple):
    """The last word, which the network has not read yet, and the network's state before it."""

    last: Tensor  # (B,) int64
    output: Tensor  # (L, B, D)
    cell: Tensor  # (L, B, D)


class LSTM(NeuralLanguageModel):
    """The paper's LSTM, weight-tied, with dropout before, between and after its layers."""

    def __init__(
        self,
        vocabulary: Vocabulary,
        generator: torch.Generator,
        hidden_size: int = 256,
        dropout: float = 0.3,
        num_layers: int = 2,
        drops_segments: bool = False,
    ) -> None:
        super().__init__(vocabulary, hidden_size, dropout, drops_segments)
        # One nn.LSTM a layer: the dropout within one takes no generator; and they are as fast.
        self.layers = nn.ModuleList(nn.LSTM(hidden_size, hidden_size, batch_first=True) for _ in range(num_layers))
        self.initialize(generator)

    def start(self, batch_size: int) -> LSTMCarry:
        """Return an <eos> about to be read in the zero state, `batch_size` times."""
        zero = self.embedding.new_zeros(len(self.layers), batch_size, self.embedding.shape[1])
        return LSTMCarry(torch.full((batch_size,), self.vocabulary.eos), zero, zero.clone())

    def hidden(
        self, tokens: Tensor, lengths: Tensor, carry: LSTMCarry, generator: torch.Generator | None
    ) -> tuple[Tensor, LSTMCarry]:
        """Return the top layer's output after x_{t-1}, (B, T, D); and the carry, cut off from the gradient."""
        words = torch.cat([carry.last[:, None], tokens], dim=1)
        activations = self.dropped(nn.functional.embedding(words[:, :-1], self.embedding), generator)
        output, cell = [], []
        for layer, *before in zip(self.layers, carry.output, carry.cell, strict=True):
            activations, after = _run(cast(nn.LSTM, layer), activations, lengths, *before)
            activations = self.dropped(activations, generator)
            output.append(after[0])
            cell.append(after[1])
        last = words.gather(1, lengths[:, None])[:, 0]
        return activations, LSTMCarry(last, torch.stack(output).detach(), torch.stack(cell).detach())

    def having_said(self, words: Tensor, carry: LSTMCarry) -> LSTMCarry:
        """Return the carry with these words as its rows' last."""
        return carry._replace(last=words)


def _run(
    layer: nn.LSTM, inputs: Tensor, lengths: Tensor, output: Tensor, cell: Tensor
) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """Return a layer's outputs (B, T, D), and its state (B, D) twice, after each row's own length."""
    time = inputs.shape[1]
    if (lengths == time).all():  # the fast way, three times as fast as packed
        outputs, (after, cell_after) = layer(inputs, (output[None], cell[None]))
        return outputs, (after[0], cell_after[0])
    # Packing refuses empty rows: they are given one step, and their state is put back.
    packed = pack_padded_sequence(inputs, lengths.clamp(min=1), batch_first=True, enforce_sorted=False)
    packed_outputs, (after, cell_after) = layer(packed, (output[None], cell[None]))
    outputs, _ = pad_packed_sequence(packed_outputs, batch_first=True, total_length=time)
    empty = (lengths == 0)[:, None]
    return outputs, (torch.where(empty, output, after[0]), torch.where(empty, cell, cell_after[0]))
