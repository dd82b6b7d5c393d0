r"""A teacher's evidence about the hidden states of the training text, for the E-step.

A neural language model has read the same text; its hidden vector h_t after x_t tells what is to come. The tokens of a
block are clustered by their vectors (k-means) into as many clusters as the block has states, and cluster k becomes
evidence for state k:

    log e_t(k) = -(|h_t - c_k|^2 - min_j |h_t - c_j|^2) / s,    s the mean of min_j |h_t - c_j|^2 over the text

With weight w the E-step takes posteriors under p(x, z) prod_t e_t(z_t)^w, as if states emitted vectors too. The weight
goes to zero before training ends: what is trained is an HMM like any other, and the teacher is not needed to use it.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from jaxtyping import Float, Float16, Int
from torch import Tensor

from vlhmm import inference
from vlhmm.inference import Chain, ChannelCounts, ChannelPotentials, Counts, Forward, Potentials
from vlhmm.model.hmm import Kept

Teacher = Callable[[Int[Tensor, "row time"]], Float[Tensor, "row time width"]]  # lines of words -> a vector after each
Evidence = Float16[Tensor, "token slot"]
ITERATIONS = 8  # of k-means
LEAST = -1e4  # log evidence for a cluster without tokens; finite, so that no weight makes it NaN


class Guided(NamedTuple):
    """What an E-step takes of a teacher."""

    evidence: list[Evidence]  # for each of its chains, padding included
    kept: Kept
    weight: float

    def add_expected_counts(
        self,
        number: int,
        counts: Counts | ChannelCounts,
        potentials: Potentials | ChannelPotentials,
        chain: Chain,
        carry: Float[Tensor, "batch slot"] | None,
        workspace,
    ) -> Forward:
        """As `inference.add_expected_counts`, under this evidence: every token reads emissions of its own."""
        words = chain.emit_of.flatten()
        told = evidence_for_kept(self.evidence[number], chain.start_of.flatten(), self.kept, counts.emission.dtype)
        told = told.mul_(self.weight).exp_().mul_(potentials.emission[words])
        of_tokens = counts._replace(emission=torch.zeros_like(told))
        own_rows = torch.arange(len(words), device=words.device).view_as(chain.emit_of)
        passed = inference.add_expected_counts(
            of_tokens, potentials._replace(emission=told), chain._replace(emit_of=own_rows), carry, workspace
        )
        counts.emission.index_add_(0, words, of_tokens.emission)
        return passed


def evidence_for_kept(
    evidence: Evidence, group: Int[Tensor, " token"], kept: Kept, dtype: torch.dtype
) -> Float[Tensor, "token kept"]:
    """Log evidence for the kept states alone; the likeliest of them has 0."""
    if kept.slots is not None:
        evidence = evidence.gather(1, kept.slots[group])
    evidence = evidence.to(dtype)
    if kept.num_alive is not None:
        beyond = torch.arange(evidence.shape[1], device=evidence.device) >= kept.num_alive[group, None]
        evidence = evidence.masked_fill(beyond, LEAST)
    return evidence - evidence.max(1, keepdim=True).values


@torch.no_grad()
def make_evidence(
    teacher: Teacher,
    tokens: list[Int[Tensor, "row time"]],
    chains: list[Chain],
    num_alive: Int[Tensor, " group"],
    num_slots: int,
    generator: torch.Generator,
) -> list[Evidence]:
    """The evidence about rows of `tokens`, each the beginning of a line, and the `chains` made of them."""
    device = chains[0].emit_of.device
    vectors = torch.cat([teacher(rows.cpu()).flatten(0, 1) for rows in tokens])
    group = torch.cat([torch.where(chain.live, chain.start_of, -1).flatten() for chain in chains]).cpu()
    found = []
    for number, num_states in enumerate(num_alive.tolist()):
        where = (group == number).nonzero()[:, 0]
        found.append((where, distances_to_clusters(vectors[where], num_states, generator)))
    nearest = torch.cat([distance.min(1).values for where, distance in found if len(where)])
    evidence = torch.full((len(vectors), num_slots), LEAST, dtype=torch.float16)
    for where, distance in found:
        if len(where):
            relative = (distance.min(1, keepdim=True).values - distance) / nearest.mean().clamp(min=1e-30)
            evidence[where, : distance.shape[1]] = relative.clamp_(min=LEAST).half()
    return list(evidence.to(device).split([chain.emit_of.numel() for chain in chains]))


def distances_to_clusters(
    vectors: Float[Tensor, "token width"], num_clusters: int, generator: torch.Generator
) -> Float[Tensor, "token cluster"]:
    """Squared distances to the centres that k-means finds, beginning with some of the vectors; fewer centres than asked
    for where there are fewer vectors."""
    centres = vectors[torch.randperm(len(vectors), generator=generator)[:num_clusters]]
    for _ in range(ITERATIONS):
        label = (
            squared_distances(vectors, centres).argmin(1) if len(vectors) else vectors.new_zeros(0, dtype=torch.long)
        )
        size = torch.bincount(label, minlength=len(centres)).to(vectors.dtype)[:, None]
        total = torch.zeros_like(centres).index_add_(0, label, vectors)
        centres = torch.where(size > 0, total / size.clamp(min=1), centres)
    return squared_distances(vectors, centres)


def squared_distances(vectors: Float[Tensor, "n width"], centres: Float[Tensor, "k width"]) -> Float[Tensor, "n k"]:
    lengths = vectors.square().sum(1, keepdim=True) + centres.square().sum(1)
    return torch.addmm(lengths, vectors, centres.t(), alpha=-2).clamp_(min=0)
