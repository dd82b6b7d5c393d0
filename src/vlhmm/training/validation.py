"""Perplexity on the validation text, for weights that are still being trained."""

import torch
from torch import Tensor

from vlhmm.clustering.blocks import Blocks
from vlhmm.data.corpora import Corpus
from vlhmm.data.prepared import PreparedText
from vlhmm.distributions import HMMDistributions, TileCache
from vlhmm.evaluation.perplexity import Rule, evaluate, perplexity, token_log_probs
from vlhmm.hmm import HMM
from vlhmm.language_model import DEFAULT_MEMORY, HMMLanguageModel
from vlhmm.training.distributed import Ranks


class Validation:
    """The validation text, and the memory for transition tiles that one validation leaves to the next."""

    def __init__(
        self, hmm: HMM, blocks: Blocks, corpus: Corpus, context: Rule, memory: int | None, ranks: Ranks | None = None
    ) -> None:
        self.hmm, self.blocks, self.corpus, self.ranks = hmm, blocks, corpus, ranks or Ranks()
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
        text = self.corpus.valid
        if self.ranks.size > 1 and self.context == "reset" and not isinstance(text, PreparedText):
            lines = self.ranks.lines(text)
            own = float(token_log_probs(model, lines, self.context).sum()) if lines.num_tokens else 0.0
            return perplexity(self.ranks.sum(own), text.num_tokens)
        return self.ranks.of_first(evaluate(model, text, self.context).perplexity)
