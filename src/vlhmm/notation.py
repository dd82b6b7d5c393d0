"""The legend: every axis and name used in this package.

| thing                                | paper      | code                              | axis  |
| ------------------------------------ | ---------- | --------------------------------- | ----- |
| states, blocks, states per block     | |Z|, M, k  | num_states, num_blocks, states_per_block | S M K |
| kept per block under dropout         | (1-λ)k     | num_kept                          | K     |
| vocabulary                           | |X|        | vocab_size                        | V     |
| batch, time, width                   | -, T, h    | batch, time, hidden_size          | B T D |
| distinct (from, to) block pairs      | -          | pairs                             | P     |
| start, emission tables               | π, O       | start (M,K), emission (V,K)       |       |
| transition tile of a block pair      | part of A  | tiles (P,K,K), edges are (from, to) |     |
| messages, posteriors                 | α β γ ξ    | alpha, beta, posterior, edge_posterior | |

State id = block * K + slot. `log_` means natural logarithm; without it a table holds
probabilities. Maps are `y_of_x`. Time is axis 1. All algorithms take K from the tables they
are given, so a model reduced by state dropout is just a model with a smaller K.
"""

from jaxtyping import Float, Int
from torch import Tensor

Start = Float[Tensor, "block slot"]
Emission = Float[Tensor, "word slot"]
Tiles = Float[Tensor, "pair slot_from slot_to"]
Tokens = Int[Tensor, "batch time"]
Lengths = Int[Tensor, "batch"]
