"""Perplexity on the validation text, for weights that are still being trained."""

import torch
from torch import Tensor

from vlhmm.clustering.blocks import Blocks
from vlhmm.data.corpora import Corpus
from vlhmm.distributions import HMMDistributions, TileCache
from vlhmm.evaluation.perplexity import Rule, evaluate
from vlhmm.hmm import HMM
from vlhmm.language_model import DEFAULT_MEMORY, HMMLanguageModel


class Validation:
    """The validation text, and the memory for transition tiles that one validation leaves to the next."""

    def __init__(self, hmm: HMM, blocks: Blocks, corpus: Corpus, context: Rule, memory: int | None) -> None:
        self.hmm, self.blocks, self.corpus = hmm, blocks, corpus
        self.context, self.memory = context, memory or DEFAULT_MEMORY
        self._cache: TileCache | None = None

    @torch.no_grad()
    def perplexity(self, weights: dict[str, Tensor]) -> float:
        """Evaluate under the context rule of training, in as many streams as every evaluation has."""
        weights = {name: tensor.detach() for name, tensor in weights.items()}
        potentials = torch.func.functional_call(self.hmm, weights, ())
        distributions = HMMDistributions(potentials, self.blocks)
        model = HMMLanguageModel(self.corpus.vocabulary, distributions, self.context, self.memory)
        if self._cache is not None:
            model.cache.take_room_of(self._cache)
        self._cache = model.cache
        return evaluate(model, self.corpus.valid, self.context).perplexity
