"""Draw texts word by word, those of all requests in parallel. Input: prompts and settings. Output: tokens, as drawn.

Each step predicts the next word of every open text in one pass. Every request has its own random generator. The
log-probability of a token is the model's own, also if temperature or top-p changed the distribution it was drawn from.
"""

import codecs
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from vlhmm.data.user_text import generator_of
from vlhmm.distributions import HMMDistributions
from vlhmm.lattice.sampling import Draw
from vlhmm.queries import left_to_right
from vlhmm.queries.left_to_right import has_hidden_states
from vlhmm.queries.next_word import after
from vlhmm.queries.sample import Weighing
from vlhmm.server.scoring import Token
from vlhmm.server.tokenizer import Tokenizer

Finish = Literal["stop", "length"]
_ROWS_AT_ONCE = 64


class Wishes(NamedTuple):
    """Sampling settings of a request."""

    max_tokens: int
    temperature: float = 1.0  # 0: the most probable word
    top_p: float = 1.0
    num_top: int = 0
    stop: tuple[str, ...] = ()
    seed: int = 0


class Piece(NamedTuple):
    """What one step adds to one text."""

    row: int
    text: str
    tokens: list[Token]
    finish: Finish | None


@dataclass
class Row:
    """One text that is being generated."""

    prompt: Sequence[int]
    tokenizer: Tokenizer
    stop: tuple[str, ...]
    max_tokens: int
    block: int | None = None
    alpha: Tensor | None = None
    tokens: list[Token] = field(default_factory=list)
    begins: list[int] = field(default_factory=list)  # where each token begins in the text
    text: str = ""
    told: int = 0  # characters handed out
    told_tokens: int = 0
    finish: Finish | None = None
    last: Token | None = None  # the <eos> that ended it
    decoder: codecs.IncrementalDecoder = field(default_factory=lambda: codecs.getincrementaldecoder("utf-8")("replace"))

    def push(self, token: Token, ended: bool) -> None:
        """Add a token. An <eos> or a stop string ends the text and is not part of it.

        A character whose bytes are spread over several tokens is added when it is complete.
        """
        if ended:
            self.finish, self.last = "stop", token
            return
        spelled = self.tokenizer.spelled(token.id, not self.prompt and not self.tokens)
        self.begins.append(len(self.text))
        self.tokens.append(token)
        self.text += self.decoder.decode(spelled)
        found = [place for place in (self.text.find(mark) for mark in self.stop) if place >= 0]
        if found:
            self.text, self.finish = self.text[: min(found)], "stop"
            self.tokens = [kept for kept, begin in zip(self.tokens, self.begins, strict=True) if begin < len(self.text)]
        elif len(self.tokens) >= self.max_tokens:
            self.finish = "length"

    def take(self, row: int) -> Piece:
        """Return the text since the last call. A possible beginning of a stop string is held back."""
        end = len(self.text)
        if self.finish is None:
            end -= max(
                (n for mark in self.stop for n in range(1, len(mark)) if self.text.endswith(mark[:n])), default=0
            )
        text = self.text[self.told : end] if end > self.told else ""
        tokens: list[Token] = []
        if text or self.finish:
            tokens = self.tokens[self.told_tokens :]
            self.told_tokens = len(self.tokens)
        self.told = max(self.told, end)
        return Piece(row, text, tokens, self.finish)


class Generation:
    """One request's texts: `n` for each prompt."""

    def __init__(
        self, model: Any, prompts: Sequence[Sequence[int]], n: int, wishes: Wishes, tokenizer: Tokenizer
    ) -> None:
        self.model, self.wishes, self.eos = model, wishes, model.vocabulary.eos
        self.draw = Draw(generator_of(wishes.seed))
        top_p = wishes.top_p if wishes.top_p < 1 else None
        self.weighing = Weighing(wishes.temperature, None, top_p) if wishes.temperature else None
        self.rows = [Row(prompt, tokenizer, wishes.stop, wishes.max_tokens) for prompt in prompts for _ in range(n)]
        self.n = n
        self.carries: list[Any] = []  # one for each prompt, of a model without hidden states
        self._ready = False

    def prepare(self) -> None:
        """Read the prompts. A prompt of probability zero is rejected."""
        if self._ready:
            return
        for first in range(0, len(self.rows), self.n):
            prompt = self.rows[first].prompt
            if not has_hidden_states(self.model):
                self.carries.append(left_to_right.carry_after(self.model, prompt, self.n))
                continue
            block, alpha = after(self.model.distributions, prompt)
            for row in self.rows[first : first + self.n]:
                row.block, row.alpha = block, alpha
        if self.wishes.max_tokens == 0:
            for row in self.rows:
                row.finish = "length"
        self._ready = True

    @property
    def open_rows(self) -> list[int]:
        return [number for number, row in enumerate(self.rows) if row.finish is None]

    def choose(self, words: Tensor) -> Tensor:
        """Choose a word for each row of next-word distributions, (n, V)."""
        return words.argmax(1) if self.weighing is None else self.draw.among(self.weighing(words))


def step(model: Any, generations: Sequence[Generation]) -> list[list[Piece]]:
    """Add one word to every open text of every generation. Return the new pieces of each.

    An HMM predicts all of them in one pass. The states of other models are opaque, so each prompt has a pass of its own.
    """
    if not has_hidden_states(model):
        return [_extend_left_to_right(model, generation) for generation in generations]
    distributions = model.distributions
    open_rows = [(generation, number) for generation in generations for number in generation.open_rows]
    parts = []
    for first in range(0, len(open_rows), _ROWS_AT_ONCE):
        rows = [generation.rows[number] for generation, number in open_rows[first : first + _ROWS_AT_ONCE]]
        parts.append(_advance(distributions, rows))
    if not parts:
        return [[] for _ in generations]
    predicted = torch.cat([part[0] for part in parts])
    words = torch.cat([part[1] for part in parts])
    answers, first = [], 0
    for generation in generations:
        numbers = generation.open_rows
        mine = slice(first, first + len(numbers))
        first += len(numbers)
        answers.append(_extend(distributions, generation, numbers, predicted[mine], words[mine]) if numbers else [])
    return answers


def _advance(distributions: HMMDistributions, rows: Sequence[Row]) -> tuple[Tensor, Tensor]:
    nothing = distributions.start.new_zeros(distributions.states_per_block)
    alpha = torch.stack([nothing if row.alpha is None else row.alpha for row in rows])
    predicted = distributions.predict([-1 if row.block is None else row.block for row in rows], alpha)
    return predicted, distributions.emit(predicted)


def _extend(
    distributions: HMMDistributions, generation: Generation, numbers: list[int], predicted: Tensor, words: Tensor
) -> list[Piece]:
    chosen = generation.choose(words)
    states = distributions.states_of_block[distributions.block_of_word[chosen]]
    alpha = predicted.gather(1, states) * distributions.emission[chosen].double()
    alpha = alpha / distributions.emission_total[states]
    alpha = alpha / alpha.sum(1, keepdim=True)
    for i, (number, token) in enumerate(zip(numbers, chosen.tolist(), strict=True)):
        row = generation.rows[number]
        row.block, row.alpha = distributions.block(token), alpha[i]
    return _push(generation, numbers, words, chosen)


def _extend_left_to_right(model: Any, generation: Generation) -> list[Piece]:
    pieces = []
    for place, carry in enumerate(generation.carries):
        first = place * generation.n
        going = [i for i in range(generation.n) if generation.rows[first + i].finish is None]
        if not going:
            continue
        words = model.next_word_probabilities(carry).cpu()[going]
        chosen = generation.choose(words)
        following = torch.full((generation.n,), generation.eos)  # rows that have ended: their state is not read again
        following[going] = chosen
        _, generation.carries[place] = model.score_batch(
            following[:, None], torch.ones(generation.n, dtype=torch.long), carry
        )
        pieces += _push(generation, [first + i for i in going], words, chosen)
    return pieces


def _push(generation: Generation, numbers: list[int], words: Tensor, chosen: Tensor) -> list[Piece]:
    """Add the chosen words with their log-probabilities and alternatives. Return the new pieces."""
    logs = words.gather(1, chosen[:, None])[:, 0].log().tolist()
    num_top = min(generation.wishes.num_top, words.shape[1])
    best = words.topk(num_top, dim=1) if num_top else None
    pieces = []
    for i, (number, token) in enumerate(zip(numbers, chosen.tolist(), strict=True)):
        top = []
        if best is not None:
            top = list(zip(best.indices[i].tolist(), best.values[i].log().tolist(), strict=True))
        row = generation.rows[number]
        row.push(Token(token, logs[i], top), token == generation.eos)
        pieces.append(row.take(number))
    return pieces
