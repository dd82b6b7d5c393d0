"""Kinds of transitions with one protocol (`protocol.Transitions`).

`Softmax`        p(z' | z) = softmax over all states of u_z . v_z'              (the paper's model)
`BlockFactored`  p(z' | z) = p(m' | z) p(z' | z, m'), m' the block of z'        (ours)
`LowRank`        the same, with p(z' | z, m') of low rank within blocks

Each is computed from low-rank factors (neural) or from free logits (scalar).
"""

from vlhmm.components.transitions.block_factored import BlockFactored
from vlhmm.components.transitions.low_rank import LowRank
from vlhmm.components.transitions.protocol import Transitions
from vlhmm.components.transitions.softmax import Softmax

__all__ = ["BlockFactored", "LowRank", "Softmax", "Transitions"]
