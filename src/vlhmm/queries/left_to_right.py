"""Exact answers that need no hidden states: scores, the next word, samples of any language model.

Input: a `LanguageModel` (a baseline, a mixture, an HMM) and words. Output: what the HMM's own queries return.
`score_lines`, `next_distribution` and `sample` hand an HMM to its own queries, which are faster.

Under the context rule "reset" the model restarts after an <eos>.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeGuard

import torch

from vlhmm.data.user_text import DEFAULT_MEMORY, Seed, check_sample_memory, encode_sentence, encode_words, generator_of
from vlhmm.errors import QueryError
from vlhmm.queries import next_word as hmm_next_word
from vlhmm.queries import sample as hmm_sample
from vlhmm.queries import score as hmm_score
from vlhmm.queries.next_word import WordDistribution
from vlhmm.queries.sample import Sample, Weighing, sample_of
from vlhmm.queries.score import SentenceScore, TokenScore, sentence_score, token_list

if TYPE_CHECKING:
    from vlhmm.evaluation.protocol import LanguageModel
    from vlhmm.language_model import HMMLanguageModel

_AT_ONCE = 64  # texts drawn side by side: each needs a distribution over the vocabulary


def has_hidden_states(model: object) -> "TypeGuard[HMMLanguageModel]":
    """Return whether the model is an HMM, which answers queries about hidden states."""
    return hasattr(model, "distributions")


def kind_of(model: object) -> str:
    """Return the kind of a model without hidden states: "mixture" or "baseline"."""
    return "mixture" if hasattr(model, "components") else "baseline"


class ReadText(NamedTuple):
    """What reading a text leaves."""

    log_probs: list[float]  # log p(x_t | x_<t), nats
    carry: Any  # the model's state after it


def read(model: "LanguageModel", ids: Sequence[int], carry: Any = None) -> ReadText:
    """Read one text from `carry` on, or from the start; restarting after an <eos>, if the rule says so."""
    vocabulary = model.vocabulary
    carry = model.start(1) if carry is None else carry
    log_probs: list[float] = []
    first = 0
    for end in [i + 1 for i, word in enumerate(ids) if word == vocabulary.eos] + [len(ids)]:
        if end == first:
            continue
        part = torch.tensor([ids[first:end]])
        scored, carry = model.score_batch(part, torch.tensor([end - first]), carry)
        # NaN: after an impossible word nothing is defined
        log_probs += [value if value == value else -math.inf for value in scored[0].tolist()]
        if model.rule == "reset" and ids[end - 1] == vocabulary.eos:
            carry = model.start(1)
        first = end
    return ReadText(log_probs, carry)


def token_scores(model: "LanguageModel", text: str | Sequence[str], eos: bool = True) -> list[TokenScore]:
    """Return log p(x_t | x_<t) of every word of `text` and, by default, of the <eos> after it."""
    words, ids = encode_sentence(model.vocabulary, text, eos)
    return token_list(model.vocabulary, words, ids, read(model, ids).log_probs)


def score_lines(model: "LanguageModel", lines: Iterable[Sequence[str]]) -> Iterator[SentenceScore]:
    """Score lines one by one; under "carry" a line continues from the state of the previous one."""
    if has_hidden_states(model):
        yield from hmm_score.score_lines(model, lines)
        return
    carry: Any = None
    for line in lines:
        words, ids = encode_sentence(model.vocabulary, line, eos=True)
        log_probs, after = read(model, ids, carry)
        yield sentence_score(model.vocabulary, words, ids, log_probs)
        carry = after if model.rule == "carry" else None


def next_distribution(model: "LanguageModel", context: str | Sequence[str] = "") -> WordDistribution:
    """Compute p(x | context) of every word x; words beyond the vocabulary are read as <unk>."""
    if has_hidden_states(model):
        return hmm_next_word.next_distribution(model, context)
    carry = _after(model, encode_words(model.vocabulary, context).ids)
    return WordDistribution(model.vocabulary, model.next_word_probabilities(carry)[0].cpu().numpy())


def _after(model: "LanguageModel", ids: Sequence[int]) -> Any:
    passed = read(model, ids)
    if -math.inf in passed.log_probs:
        raise hmm_next_word.impossible_context()
    return passed.carry


def sample(
    model: "LanguageModel",
    n: int = 1,
    prompt: str | Sequence[str] = "",
    max_tokens: int = 100,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    scores: bool = False,
    seed: Seed = 0,
) -> list[Sample]:
    """Draw `n` texts that begin with `prompt`, word by word from p(x_t | x_<t), each up to its <eos> or `max_tokens` words."""
    if has_hidden_states(model):
        return hmm_sample.sample(model, n, prompt, max_tokens, temperature, top_k, top_p, scores=scores, seed=seed)
    if n < 1 or max_tokens < 1:
        raise QueryError(f"asked for {n} texts of {max_tokens} words at most, expected at least 1 of each")
    check_sample_memory(n, max_tokens, DEFAULT_MEMORY)
    weighing = Weighing(temperature, top_k, top_p)
    vocabulary, generator = model.vocabulary, generator_of(seed)
    given = encode_words(vocabulary, prompt)
    result = []
    for first in range(0, n, _AT_ONCE):
        for ids, log_prob in _draw(model, given.ids, min(_AT_ONCE, n - first), max_tokens, weighing, generator):
            result.append(sample_of(vocabulary, given.words, ids, weighing.exact, log_prob if scores else None))
    return result


def _draw(
    model: "LanguageModel",
    prompt: Sequence[int],
    count: int,
    max_tokens: int,
    weighing: Weighing,
    generator: torch.Generator,
) -> Iterator[tuple[list[int], float]]:
    """Yield the ids of `count` texts, up to and including <eos>, or of `max_tokens` words; and log p of each given the prompt.

    All texts are read to the end of the longest: a carry is opaque, and cannot lose rows.
    """
    carry = carry_after(model, prompt, count)
    texts: list[list[int]] = [[] for _ in range(count)]
    log_probs = [0.0] * count
    going = set(range(count))
    one = torch.ones(count, dtype=torch.int64)
    for _ in range(max_tokens):
        weights = weighing(model.next_word_probabilities(carry).cpu())
        sums = weights.cumsum(dim=1)
        uniform = torch.rand(count, 1, generator=generator, dtype=torch.float64)
        words = torch.searchsorted(sums, uniform * sums[:, -1:], right=True)[:, 0].clamp(max=weights.shape[1] - 1)
        scored, carry = model.score_batch(words[:, None], one, carry)
        for i in sorted(going):
            texts[i].append(int(words[i]))
            log_probs[i] += float(scored[i, 0])
            if int(words[i]) == model.vocabulary.eos:
                going.discard(i)
        if not going:
            break
    yield from zip(texts, log_probs, strict=True)


def carry_after(model: "LanguageModel", ids: Sequence[int], count: int) -> Any:
    """Return the model's state after a text, `count` times; refuse a text of probability zero."""
    _after(model, ids)
    rest, eos, carry = list(ids), model.vocabulary.eos, model.start(count)
    if model.rule == "reset" and eos in rest:  # what came before the last <eos> is forgotten
        rest = rest[len(rest) - rest[::-1].index(eos) :]
    if rest:
        tokens = torch.tensor([rest]).expand(count, -1).contiguous()
        _, carry = model.score_batch(tokens, torch.full((count,), len(rest)), carry)
    return carry


def without_states(model: "LanguageModel", name: str, what: str) -> str:
    """Return an error message: `what` needs hidden states, which this model lacks, and where to ask instead."""
    inside = [str(each) for each in getattr(model, "hmm_folders", ())]
    remedy = f"the HMM inside: {', '.join(inside)}" if inside else "a run of vlhmm train"
    return (
        f"{name} holds a {kind_of(model)}, which has no hidden states: {what} has no exact answer; "
        f"take evaluate, score, next or sample, or {remedy}"
    )
