"""log p of a text. Input: words. Output: nats per text or per token, exactly."""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from vlhmm.data.user_text import encode_sentence
from vlhmm.data.vocabulary import UNK, Vocabulary
from vlhmm.queries.sequence import read
from vlhmm.results import Result

if TYPE_CHECKING:
    from vlhmm.language_model import HMMLanguageModel


@dataclass(frozen=True, slots=True)
class TokenScore(Result):
    """One token's log p(x_t | x_<t), in nats."""

    word: str  # as written
    id: int
    log_prob: float
    oov: bool  # read as <unk>


@dataclass(frozen=True, slots=True)
class SentenceScore(Result):
    """One line's log-probability, in nats, and what was counted on the way."""

    log_prob: float
    num_tokens: int  # <eos> included
    num_oov: int
    num_unk: int  # literal <unk>
    tokens: list[TokenScore]


def token_scores(model: "HMMLanguageModel", text: str | Sequence[str], eos: bool = True) -> list[TokenScore]:
    """Return log p(x_t | x_<t) of every word of `text` and, by default, of the <eos> after it."""
    vocabulary = model.vocabulary
    words, ids = encode_sentence(vocabulary, text, eos)
    return token_list(vocabulary, words, ids, read(model.distributions, ids).log_probs)


def score(model: "HMMLanguageModel", text: str | Sequence[str], eos: bool = True) -> float:
    """Return log p(text), in nats, the <eos> after it included by default; -inf if it is impossible."""
    _, ids = encode_sentence(model.vocabulary, text, eos)
    return score_ids(model, ids)


def score_ids(model: "HMMLanguageModel", ids: Sequence[int]) -> float:
    """Return log p of a sequence of word ids, without adding an <eos>."""
    return total(read(model.distributions, ids).log_probs)


def total(log_probs: Iterable[float]) -> float:
    """Return the sum of log-probabilities; -inf if one of them is."""
    logs = list(log_probs)
    return -math.inf if -math.inf in logs else math.fsum(logs)


def score_lines(model: "HMMLanguageModel", lines: Iterable[Sequence[str]]) -> Iterator[SentenceScore]:
    """Yield the scores of each line; under "carry" a line continues from the state of the previous one."""
    distributions, vocabulary = model.distributions, model.vocabulary
    previous: int | None = None
    carry: Tensor | None = None
    for line in lines:
        words, ids = encode_sentence(vocabulary, line, eos=True)
        passed = read(distributions, ids, previous, carry)
        yield sentence_score(vocabulary, words, ids, passed.log_probs)
        if distributions.rule == "carry":
            previous, carry = ids[-1], passed.alpha


def token_list(vocabulary: Vocabulary, words: list[str], ids: list[int], log_probs: list[float]) -> list[TokenScore]:
    """Pair the words of a text with their log-probabilities."""
    return [
        TokenScore(word, i, log_prob, word not in vocabulary)
        for word, i, log_prob in zip(words, ids, log_probs, strict=True)
    ]


def sentence_score(vocabulary: Vocabulary, words: list[str], ids: list[int], log_probs: list[float]) -> SentenceScore:
    """Sum up the log-probabilities of a line."""
    tokens = token_list(vocabulary, words, ids, log_probs)
    return SentenceScore(
        log_prob=total(log_probs),
        num_tokens=len(tokens),
        num_oov=sum(t.oov for t in tokens),
        num_unk=sum(t.word == UNK for t in tokens),
        tokens=tokens,
    )
