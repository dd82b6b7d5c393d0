r"""A teacher's evidence about the hidden states of the training text, for the E-step.

A neural language model has read the same text; its hidden vector h_t after x_t predicts the following words. The tokens of a
block are clustered by their vectors (k-means) into as many clusters as the block has states, and cluster k becomes
evidence for state k:

    log e_t(k) = -(|h_t - c_k|^2 - min_j |h_t - c_j|^2) / s,    s the mean of min_j |h_t - c_j|^2 over the text

With weight w the E-step takes posteriors under p(x, z) prod_t e_t(z_t)^w, as if states emitted vectors too. The weight
goes to zero before training ends: what is trained is an HMM like any other, and the teacher is not needed to use it.
"""

from typing import NamedTuple

import torch
from jaxtyping import Float, Float16, Int
from torch import Tensor

from vlhmm import inference
from vlhmm.data.batches import Batch
from vlhmm.hmm import DropoutMask
from vlhmm.inference import Chain, ChannelCounts, ChannelPotentials, Counts, Forward, Potentials
from vlhmm.training.distillation.teacher import Teacher

Evidence = Float16[Tensor, "token slot"]
ITERATIONS = 8  # of k-means
LEAST = -1e4  # log evidence for a cluster without tokens; finite, so that no weight makes it NaN


class DistillationTargets(NamedTuple):
    """The evidence of a teacher for one E-step: the `TokenEvidence` of distillation."""

    evidence: list[Evidence]  # for each of its chains, padding included
    kept: DropoutMask
    weight: float

    @property
    def num_bytes(self) -> int:
        """Memory of the evidence."""
        return sum(2 * each.numel() for each in self.evidence)

    def add_expected_counts(
        self,
        number: int,
        counts: Counts | ChannelCounts,
        potentials: Potentials | ChannelPotentials,
        chain: Chain,
        carry: Float[Tensor, "batch slot"] | None,
        workspace,
    ) -> Forward:
        """Add expected counts like `inference.add_expected_counts`, with evidence: every token has its own emissions."""
        words = chain.emit_of.flatten()
        weights = evidence_for_kept(self.evidence[number], chain.start_of.flatten(), self.kept, counts.emission.dtype)
        weights = weights.mul_(self.weight).exp_().mul_(potentials.emission[words])
        of_tokens = counts._replace(emission=torch.zeros_like(weights))
        own_rows = torch.arange(len(words), device=words.device).view_as(chain.emit_of)
        passed = inference.add_expected_counts(
            of_tokens, potentials._replace(emission=weights), chain._replace(emit_of=own_rows), carry, workspace
        )
        counts.emission.index_add_(0, words, of_tokens.emission)
        return passed


def evidence_for_kept(
    evidence: Evidence, block: Int[Tensor, " token"], kept: DropoutMask, dtype: torch.dtype
) -> Float[Tensor, "token kept"]:
    """Return the log evidence for the kept states. The likeliest of them has 0."""
    if kept.slots is not None:
        evidence = evidence.gather(1, kept.slots[block])
    evidence = evidence.to(dtype)
    if kept.num_alive is not None:
        beyond = torch.arange(evidence.shape[1], device=evidence.device) >= kept.num_alive[block, None]
        evidence = evidence.masked_fill(beyond, LEAST)
    return evidence - evidence.max(1, keepdim=True).values


class Clusters(NamedTuple):
    """The clusters of every block's vectors."""

    centres: list[Float[Tensor, "cluster width"]]
    scale: float  # the mean squared distance of a vector to its nearest centre

    def evidence(self, vectors: Float[Tensor, "token width"], block: Int[Tensor, " token"], num_slots: int) -> Evidence:
        """Return the log evidence for the states of each token's block. Block -1 is padding."""
        found = torch.full((len(vectors), num_slots), LEAST, dtype=torch.float16)
        for number, centres in enumerate(self.centres):
            where = (block == number).nonzero()[:, 0]
            if len(where) and len(centres):
                distance = squared_distances(vectors[where], centres)
                relative = (distance.min(1, keepdim=True).values - distance) / self.scale
                found[where, : len(centres)] = relative.clamp_(min=LEAST).half()
        return found


def clustered(
    vectors: Float[Tensor, "token width"],
    block: Int[Tensor, " token"],
    num_alive: Int[Tensor, " block"],
    generator: torch.Generator,
) -> Clusters:
    """Cluster each block's vectors into as many clusters as the block has states."""
    found, nearest = [], []
    for number, num_states in enumerate(num_alive.tolist()):
        mine = vectors[block == number]
        centres = k_means(mine, num_states, generator)
        if len(mine):
            nearest.append(squared_distances(mine, centres).min(1).values)
        found.append(centres)
    return Clusters(found, max(1e-30, torch.cat(nearest).mean().item()))


def vectors_of(teacher: Teacher, batches: list[Batch]) -> list[Float[Tensor, "token width"]]:
    """Yield the teacher's vectors after every token of each batch; its state is carried over where batches continue."""
    texts: list[list[Batch]] = []
    for batch in batches:
        if batch.continues:
            texts[-1].append(batch)
        else:
            texts.append([batch])
    found: list[Tensor] = []
    for segments in texts:
        vectors = teacher.vectors_after(torch.cat([batch.tokens.cpu() for batch in segments], dim=1))
        found += (part.flatten(0, 1) for part in vectors.split([batch.tokens.shape[1] for batch in segments], dim=1))
    return found


@torch.no_grad()
def make_evidence(
    teacher: Teacher,
    batches: list[Batch],
    block_of_word: Int[Tensor, " word"],
    num_alive: Int[Tensor, " block"],
    num_slots: int,
    generator: torch.Generator,
) -> tuple[list[Evidence], Clusters]:
    """Return the evidence about every token of the batches, and the clusters behind it."""
    vectors = vectors_of(teacher, batches)
    blocks = [blocks_of(batch, block_of_word) for batch in batches]
    clusters = clustered(torch.cat(vectors), torch.cat(blocks), num_alive, generator)
    found = (clusters.evidence(*each, num_slots) for each in zip(vectors, blocks, strict=True))
    return [each.to(block_of_word.device) for each in found], clusters


@torch.no_grad()
def evidence_about(
    teacher: Teacher, batch: Batch, clusters: Clusters, block_of_word: Int[Tensor, " word"], num_slots: int
) -> Evidence:
    """Return the evidence about every token of a batch that had no part in the clusters."""
    vectors = teacher.vectors_after(batch.tokens.cpu()).flatten(0, 1)
    return clusters.evidence(vectors, blocks_of(batch, block_of_word), num_slots).to(block_of_word.device)


def blocks_of(batch: Batch, block_of_word: Int[Tensor, " word"]) -> Int[Tensor, " token"]:
    """Return the block of every token, on the CPU; -1 is padding."""
    tokens, lengths = batch.tokens.cpu(), batch.lengths.cpu()
    live = torch.arange(tokens.shape[1]) < lengths[:, None]
    return torch.where(live, block_of_word.cpu()[tokens], -1).flatten()


def k_means(
    vectors: Float[Tensor, "token width"], num_clusters: int, generator: torch.Generator
) -> Float[Tensor, "cluster width"]:
    """Find the centres by k-means, initialized with some of the vectors. There are no more centres than vectors."""
    centres = vectors[torch.randperm(len(vectors), generator=generator)[:num_clusters]]
    for _ in range(ITERATIONS if len(vectors) else 0):
        label = squared_distances(vectors, centres).argmin(1)
        size = torch.bincount(label, minlength=len(centres)).to(vectors.dtype)[:, None]
        total = torch.zeros_like(centres).index_add_(0, label, vectors)
        centres = torch.where(size > 0, total / size.clamp(min=1), centres)
    return centres


def squared_distances(vectors: Float[Tensor, "n width"], centres: Float[Tensor, "k width"]) -> Float[Tensor, "n k"]:
    lengths = vectors.square().sum(1, keepdim=True) + centres.square().sum(1)
    return torch.addmm(lengths, vectors, centres.t(), alpha=-2).clamp_(min=0)
