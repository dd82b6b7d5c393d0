"""The position in a text as an immutable value. Input: a model and words. Output: `Prefix`, which can be stored,
compared, hashed and serialized.

After an <eos> under the rule "reset" the past has no influence: such a prefix has no block and no alpha.
"""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import torch

from vlhmm.data.vocabulary import EOS
from vlhmm.distributions import HMMDistributions
from vlhmm.errors import QueryError
from vlhmm.queries.next_word import WordDistribution, WordProbability, distribution_after

if TYPE_CHECKING:
    from vlhmm.language_model import HMMLanguageModel

_FORMAT = 1


@dataclass(frozen=True, eq=False)
class Prefix:
    r"""The filter $p(z_t | x_{\le t})$ after a text, on its last word's K states, and the text's log-probability."""

    model: "HMMLanguageModel" = field(repr=False)
    block: int | None  # of the last word; None where the chain restarts
    alpha: np.ndarray = field(repr=False)  # (K,) float64, read-only; empty where the chain restarts
    log_prob: float  # nats; -inf after impossible words
    num_words: int  # read so far, <eos> included

    def step(self, word: str | int) -> "Prefix":
        """Return the prefix after one more word; an unknown word is read as <unk>."""
        vocabulary, distributions = self.model.vocabulary, self.model.distributions
        following = vocabulary.id_of.get(word, vocabulary.unk) if isinstance(word, str) else int(word)
        if not 0 <= following < len(vocabulary):
            raise QueryError(f"no such word id: {following}, expected 0 to {len(vocabulary) - 1}")
        arrive = self._arrive(distributions, following) * distributions.emission_of(following).cpu().numpy()
        total = float(arrive.sum())
        log_prob = self.log_prob + (math.log(total) if total > 0 else -math.inf)
        # An impossible past stays impossible, also across a restart: its alpha is zero.
        possible = log_prob > -math.inf
        if distributions.restarts(following):
            return Prefix(self.model, None, _frozen(np.zeros(0)), log_prob, self.num_words + 1)
        alpha = arrive / total if possible else np.zeros_like(arrive)
        return Prefix(self.model, distributions.block(following), _frozen(alpha), log_prob, self.num_words + 1)

    def read_line(self, words: Sequence[str]) -> "Prefix":
        """Return the prefix after the words of a line and the <eos> at its end."""
        state = self
        for word in (*words, EOS):
            state = state.step(word)
        return state

    def first_states(self, word: int) -> torch.Tensor:
        """Return (K,) p(z | text so far) of the next state, on the states that may emit `word`."""
        distributions = self.model.distributions
        return torch.from_numpy(self._arrive(distributions, word)).to(distributions.device)

    def all_states(self) -> torch.Tensor:
        """Return (S,) p(z | text so far) of the next state. One pass over the transitions, unless the chain restarts."""
        distributions = self.model.distributions
        if self.block is None:
            return distributions.start
        return distributions.forward_step_from([self.block], torch.tensor(self.alpha, device=distributions.device)[None])[0]

    def score(self, word: str | int) -> float:
        """Return log p(word | text so far), in nats."""
        following = self.step(word)
        return following.log_prob - self.log_prob if self.log_prob > -math.inf else -math.inf

    def distribution(self) -> WordDistribution:
        """Return p(x | text so far) of every word x."""
        if self.log_prob == -math.inf:
            raise QueryError("the text so far has probability zero under the model: nothing can be asked after it")
        distributions = self.model.distributions
        alpha = None if self.block is None else torch.tensor(self.alpha, device=distributions.device)
        return distribution_after(distributions, self.model.vocabulary, self.block, alpha)

    def next_word(self, top_k: int | None = None) -> list[WordProbability]:
        """Return the most probable next words and their probabilities, all of them unless `top_k` is given."""
        return self.distribution().top(top_k)

    def _arrive(self, distributions: HMMDistributions, following: int) -> np.ndarray:
        """Return (K,) p(z_{t+1} | x_<=t) on the states of the following word."""
        if self.block is None:
            return distributions.start_at(following).cpu().numpy()
        tile = distributions.tiles_of([(self.block, distributions.block(following))])[0].double()
        return (torch.tensor(self.alpha, device=tile.device) @ tile).cpu().numpy()

    def to_json(self) -> str:
        """Return the prefix as one line of JSON, from which `prefix_from_json` restores it exactly."""
        return json.dumps(
            {
                "format": _FORMAT,
                "vocabulary": len(self.model.vocabulary),
                "states": self.model.distributions.num_states,
                "block": self.block,
                "alpha": [value.hex() for value in self.alpha.tolist()],
                "log_prob": self.log_prob.hex(),
                "num_words": self.num_words,
            }
        )

    def _key(self) -> tuple[int | None, bytes, float, int]:
        return self.block, self.alpha.tobytes(), self.log_prob, self.num_words

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Prefix) and self.model is other.model and self._key() == other._key()

    def __hash__(self) -> int:
        return hash(self._key())


def begin(model: "HMMLanguageModel") -> Prefix:
    """Return the empty prefix."""
    return Prefix(model, None, _frozen(np.zeros(0)), 0.0, 0)


def prefix_from_json(model: "HMMLanguageModel", line: str) -> Prefix:
    """Return the prefix that `to_json` wrote, for the same model."""
    try:
        found = json.loads(line)
        block = None if found["block"] is None else int(found["block"])
        alpha = np.array([float.fromhex(value) for value in found["alpha"]], dtype=np.float64)
        log_prob, num_words = float.fromhex(found["log_prob"]), int(found["num_words"])
        made_with = (found["format"], found["vocabulary"], found["states"])
    except (ValueError, KeyError, TypeError) as error:
        raise QueryError(f"not a prefix written by this program ({error}); write it with Prefix.to_json") from None
    distributions = model.distributions
    expected = (_FORMAT, len(model.vocabulary), distributions.num_states)
    if made_with != expected:
        raise QueryError(
            f"the state belongs to another model: its format, vocabulary size and states are {made_with}, "
            f"the model's are {expected}"
        )
    size = 0 if block is None else distributions.states_per_block
    fits = block is None or 0 <= block < distributions.num_blocks
    if not fits or len(alpha) != size or not np.isfinite(alpha).all() or (alpha < 0).any():
        raise QueryError(f"a state of block {block} has {size} probabilities, got {len(alpha)} numbers; it is damaged")
    return Prefix(model, block, _frozen(alpha), log_prob, num_words)


def _frozen(alpha: np.ndarray) -> np.ndarray:
    alpha.setflags(write=False)
    return alpha
