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

from vlhmm.inference import Chain

Teacher = Callable[[Int[Tensor, "row time"]], Float[Tensor, "row time width"]]  # lines of words -> a vector after each
ITERATIONS = 8  # of k-means
LEAST = -1e4  # log evidence for a cluster without tokens; finite, so that no weight makes it NaN


class Guided(NamedTuple):
    """What an E-step takes of a guide."""

    guide: "Guide"
    slots: Int[Tensor, "group kept"] | None  # the states it keeps; None: all
    weight: float


class Guide(NamedTuple):
    """Evidence for every token of a list of chains, padding included."""

    evidence: Float16[Tensor, "token slot"]
    group: Int[Tensor, " token"]
    word: Int[Tensor, " token"]
    chains: list[Chain]  # they read one row of emissions a token, not one a word

    def emission(
        self, table: Float[Tensor, "word kept"], slots: Int[Tensor, "group kept"] | None, weight: float
    ) -> Float[Tensor, "token kept"]:
        """p(x_t | z) e_t(z)^weight for the kept states; the likeliest of them has evidence 1."""
        evidence = self.evidence if slots is None else self.evidence.gather(1, slots[self.group])
        evidence = evidence.to(table.dtype)
        evidence -= evidence.max(1, keepdim=True).values
        return evidence.mul_(weight).exp_().mul_(table[self.word])

    def by_word(self, counts: Float[Tensor, "token kept"], num_words: int) -> Float[Tensor, "word kept"]:
        """Expected counts of tokens, added up by their words."""
        return counts.new_zeros(num_words, counts.shape[1]).index_add_(0, self.word, counts)


@torch.no_grad()
def make_guide(
    teacher: Teacher,
    tokens: list[Int[Tensor, "row time"]],
    chains: list[Chain],
    num_alive: Int[Tensor, " group"],
    num_slots: int,
    generator: torch.Generator,
) -> Guide:
    """The evidence about rows of `tokens`, each the beginning of a line, and `chains` made of them."""
    vectors = torch.cat([teacher(rows).flatten(0, 1) for rows in tokens])
    group, word, live = (
        torch.cat([part.flatten() for part in parts])
        for parts in zip(*((chain.start_of, chain.emit_of, chain.live) for chain in chains), strict=True)
    )
    evidence = torch.full((len(vectors), num_slots), LEAST)
    nearest, seen = 0.0, 0
    for number, num_states in enumerate(num_alive.tolist()):
        where = ((group == number) & live).nonzero()[:, 0]
        distance = distances_to_clusters(vectors[where], num_states, generator)
        least = distance.min(1, keepdim=True).values if len(where) else distance
        nearest, seen = nearest + least.sum().item(), seen + len(where)
        evidence[where, : distance.shape[1]] = least - distance
    evidence = (evidence / max(nearest / max(seen, 1), 1e-30)).clamp_(min=LEAST).half()
    return Guide(evidence, group, word, numbered(chains))


def numbered(chains: list[Chain]) -> list[Chain]:
    """The same chains, each token reading a row of its own."""
    first, read = 0, []
    for chain in chains:
        rows = torch.arange(first, first + chain.emit_of.numel(), device=chain.emit_of.device)
        read.append(chain._replace(emit_of=rows.view_as(chain.emit_of)))
        first += len(rows)
    return read


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
