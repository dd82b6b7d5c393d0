"""What every `LanguageModel` must satisfy, checked through `start` and `score_batch` alone. Imports no model."""

import numpy as np
import torch

from vlhmm.evaluation.protocol import LanguageModel


def check_language_model(
    model: LanguageModel,
    rng: np.random.Generator,
    *,
    atol: float = 1e-9,
    rounds: int = 3,
    max_time: int = 8,
    max_words: int = 2_000,
) -> None:
    """Raise an AssertionError where the model breaks a law, which its message names.

    `atol` is for log-probabilities: 1e-9 suits a float64 model, 1e-4 a float32 one. The sum over the
    vocabulary is taken where that has `max_words` words at most.
    """
    assert isinstance(model, LanguageModel), "the model lacks a part of the LanguageModel protocol"
    for _ in range(rounds):
        tokens, lengths = _random_rows(model, rng, max_time)
        log_prob = _check_shape(model, tokens, lengths)
        _check_padding(model, rng, tokens, lengths, log_prob, atol)
        _check_batch(model, rng, tokens, lengths, log_prob, atol)
        _check_carry(model, rng, tokens, lengths, log_prob, atol)
    if len(model.vocabulary) <= max_words:
        _check_sum(model, rng, max_time, atol)


def _random_rows(model, rng, max_time):
    """Rows of words and some <eos>, of lengths 1 to the longest, at least one of them the longest."""
    batch, time = int(rng.integers(2, 6)), int(rng.integers(2, max_time + 1))
    tokens = _random_words(model, rng, (batch, time))
    lengths = rng.integers(1, time + 1, batch)
    lengths[rng.integers(batch)] = time
    return tokens, torch.from_numpy(lengths)


def _random_words(model, rng, shape):
    words = rng.integers(0, len(model.vocabulary), shape)
    return torch.from_numpy(np.where(rng.random(shape) < 0.2, model.vocabulary.eos, words))


def _score(model, tokens, lengths, carry=None):
    carry = model.start(len(tokens)) if carry is None else carry
    return model.score_batch(tokens, lengths, carry)


def _inside(tokens, lengths):
    return torch.arange(tokens.shape[1]) < lengths[:, None]


def _same(got, expected, atol, law):
    torch.testing.assert_close(got, expected, rtol=0, atol=atol, msg=lambda detail: f"{law}: {detail}")


def _check_shape(model, tokens, lengths):
    log_prob, _ = _score(model, tokens, lengths)
    assert log_prob.shape == tokens.shape, f"log_prob has shape {tuple(log_prob.shape)}, expected that of tokens"
    assert log_prob.dtype == torch.float64, f"log_prob is {log_prob.dtype}, expected float64"
    assert not log_prob.isnan().any(), "log_prob has NaN"
    assert (log_prob <= 1e-6).all(), "a probability above one"
    outside = ~_inside(tokens, lengths)
    assert (log_prob[outside] == 0).all(), "log_prob is not zero beyond the lengths"
    return log_prob


def _check_padding(model, rng, tokens, lengths, log_prob, atol):
    """Neither what stands in the padding nor more of it changes a score, or the carry."""
    inside = _inside(tokens, lengths)
    refilled = torch.where(inside, tokens, _random_words(model, rng, tokens.shape))
    wider = torch.cat([refilled, _random_words(model, rng, (len(tokens), 3))], dim=1)
    following = _random_words(model, rng, (len(tokens), 2))
    full = torch.full((len(tokens),), 2)
    _, carry = _score(model, tokens, lengths)
    after, _ = model.score_batch(following, full, carry)
    for padded in (refilled, wider):
        got, carry = _score(model, padded, lengths)
        _same(got[:, : tokens.shape[1]], log_prob, atol, "padding changes a score")
        assert (got[:, tokens.shape[1] :] == 0).all(), "padding is scored"
        _same(model.score_batch(following, full, carry)[0], after, atol, "padding changes the carry")


def _check_batch(model, rng, tokens, lengths, log_prob, atol):
    """A row's scores depend neither on the rows beside it nor on their order."""
    order = torch.from_numpy(rng.permutation(len(tokens)))
    permuted, _ = _score(model, tokens[order], lengths[order])
    _same(permuted, log_prob[order], atol, "the order of the batch changes a score")
    for row in range(len(tokens)):
        length = int(lengths[row])
        alone, _ = _score(model, tokens[row : row + 1, :length], lengths[row : row + 1])
        _same(alone[0], log_prob[row, :length], atol, "a row alone is scored otherwise than in a batch")


def _check_carry(model, rng, tokens, lengths, log_prob, atol):
    """Scoring a + b equals scoring a, then b with the carry; also where rows end early, or are empty."""
    time = tokens.shape[1]
    cut = int(rng.integers(1, time))
    first_lengths = lengths.clamp(max=cut)
    first, carry = _score(model, tokens[:, :cut], first_lengths)
    second, _ = model.score_batch(tokens[:, cut:], lengths - first_lengths, carry)
    _same(torch.cat([first, second], dim=1), log_prob, atol, "a then b is not a + b")
    again, _ = model.score_batch(tokens[:, cut:], lengths - first_lengths, carry)
    _same(again, second, atol, "score altered the carry it was given")

    # An own cut for every row: the second call finds rows that stopped at different places.
    cuts = torch.from_numpy(rng.integers(0, lengths.numpy() + 1))
    _, carry = _score(model, tokens, cuts)
    rest = torch.zeros_like(tokens)
    for row in range(len(tokens)):
        rest[row, : lengths[row] - cuts[row]] = tokens[row, cuts[row] : lengths[row]]
    second, _ = model.score_batch(rest, lengths - cuts, carry)
    for row in range(len(tokens)):
        expected = log_prob[row, cuts[row] : lengths[row]]
        _same(second[row, : len(expected)], expected, atol, "the carry is not that of each row's own length")


def _check_sum(model, rng, max_time, atol):
    """The probabilities of all words sum to one: at the start, after an <eos>, after anything."""
    size = len(model.vocabulary)
    eos = torch.tensor([model.vocabulary.eos])
    prefixes = [eos[:0], eos, *(_random_words(model, rng, (n,)) for n in (1, 2, max_time, max_time))]
    for prefix in prefixes:
        rows = torch.cat([prefix.expand(size, -1), torch.arange(size)[:, None]], dim=1)
        log_prob, _ = _score(model, rows, torch.full((size,), rows.shape[1]))
        total = log_prob[:, -1].exp().sum()
        _same(
            total,
            torch.ones_like(total),
            max(atol, 1e-12) * 10,
            f"p(. | {prefix.tolist()}) does not sum to one",
        )
