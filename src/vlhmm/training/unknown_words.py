r"""Hold out rare words as <unk>, so that a model learns where unseen words occur.

Where every word of the training text is in the vocabulary, <unk> does not occur in it, and a model gives <unk> next to
no probability. With n_j the number of words that occur j times among N tokens, Good and Turing expect n_1 tokens of
words never seen before in N tokens of new text, and (j + 1) n_{j+1} / n_j occurrences of a word seen j times. So every
epoch reads an occurrence of a word seen j <= 8 times as <unk> with probability

    r_j = s max(0, 1 - (j + 1) n_{j+1} / (j n_j)),    s such that sum_j r_j j n_j = n_1

and draws again in the next epoch: no word is lost. Where r_1 is not above 0 (odd texts) it is 0.5, and the others are 0.
A text that already has an <unk> is not changed, nor are the ids of a tokenizer, which has no unknown words (see
unseen_tokens.py).
"""

from dataclasses import replace

import numpy as np
import torch

from vlhmm.data.text import Text
from vlhmm.data.tokenizer import TokenVocabulary
from vlhmm.data.vocabulary import Vocabulary
from vlhmm.training.config import TrainingConfig

RAREST = 8  # words that occur at most so often are held out at times
FALLBACK = 0.5  # for words seen once, where the counts of counts allow no estimate, as in Kneser-Ney
MOST = 0.8  # of a word's occurrences, at most: each word is to be learned too


def unknown_rates(tokens: np.ndarray, vocabulary: Vocabulary) -> np.ndarray:
    """Return r_j (V,): the probability that an occurrence of word j is read as <unk>. O(N)."""
    counts = np.bincount(tokens, minlength=len(vocabulary))
    rates = np.zeros(len(counts))
    if isinstance(vocabulary, TokenVocabulary) or counts[vocabulary.unk]:
        return rates
    seen = np.minimum(np.delete(counts, (vocabulary.unk, vocabulary.eos)), RAREST + 2)
    n = np.bincount(seen, minlength=RAREST + 3)[: RAREST + 2].astype(np.float64)
    if not n[1]:
        return rates
    j = np.arange(1, RAREST + 1)
    expected = (j + 1) * n[2:] / np.maximum(n[1:-1], 1)
    by_count = np.minimum.accumulate(np.clip(1 - expected / j, 0, 1))  # few words per count make it uneven
    if not by_count[0]:
        by_count[0] = FALLBACK
    else:
        by_count = np.minimum(MOST, by_count * n[1] / (by_count * j * n[1:-1]).sum())
    rare = (counts > 0) & (counts <= RAREST)
    rare[vocabulary.eos] = False
    rates[rare] = by_count[counts[rare] - 1]
    return rates


class UnknownWords:
    """The training text with some of its rare words held out, another choice in every epoch."""

    def __init__(self, text: Text, vocabulary: Vocabulary, settings: TrainingConfig) -> None:
        self.text, self.unk, self.seed = text, vocabulary.unk, settings.seed
        self.rates = np.zeros(len(vocabulary))
        if settings.unknown_words == "held-out":
            self.rates = unknown_rates(text.tokens, vocabulary)
        self.places, self.probability = np.zeros(0, np.int64), torch.zeros(0, dtype=torch.float64)
        if self.rates.any():
            self.places = np.flatnonzero(self.rates[text.tokens])
            self.probability = torch.from_numpy(self.rates[text.tokens[self.places]])

    @property
    def any(self) -> bool:
        """Whether any word is held out."""
        return len(self.places) > 0

    def at(self, epoch: int) -> Text:
        """Return the text of an epoch, a function of (seed, epoch). O(N)."""
        if not self.any:
            return self.text
        generator = torch.Generator().manual_seed((self.seed * 1_000_003 + 7) * 1_000_003 + epoch)
        chosen = torch.rand(len(self.places), generator=generator, dtype=torch.float64) < self.probability
        tokens = self.text.tokens.copy()
        tokens[self.places[chosen.numpy()]] = self.unk
        return replace(self.text, tokens=tokens)

    def for_clustering(self) -> np.ndarray | Text:
        """Return the tokens to cluster: the text, and a copy with words held out, in which <unk> has neighbours."""
        return np.concatenate([self.text.tokens, self.at(0).tokens]) if self.any else self.text

    def expected_counts(self) -> np.ndarray:
        """Return how often each word is read in an epoch, on average, (V,)."""
        counts = np.bincount(self.text.tokens, minlength=len(self.rates)).astype(np.float64)
        counts *= 1 - self.rates
        counts[self.unk] += float(self.probability.sum())
        return counts
