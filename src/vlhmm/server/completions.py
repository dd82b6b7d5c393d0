"""`POST /v1/completions`: OpenAI's fields, answered exactly. Input: a request's body. Output: JSON or events."""

import itertools
import math
import time
from collections.abc import AsyncIterator, Callable, Sequence
from typing import TYPE_CHECKING, Any

from starlette.requests import Request
from starlette.responses import Response

from vlhmm.server import queries
from vlhmm.server import requests as read
from vlhmm.server.errors import RequestError, about
from vlhmm.server.generation import Generation, Piece, Row, Wishes
from vlhmm.server.responses import event_stream, json_response, off_loop
from vlhmm.server.scheduler import CallJob, GenerateJob, Priority, ScoreJob
from vlhmm.server.scoring import Token

if TYPE_CHECKING:
    from vlhmm.server.app import Server

_ZERO = -9999.0  # stands for minus infinity, which JSON does not have
_counter = itertools.count(1)


class Completion:
    """One request with validated fields."""

    def __init__(self, server: "Server", body: read.Body) -> None:
        self.server, limits = server, server.limits
        self.prompts = _prompts(server, body.get("prompt"))
        self.bare_prompts = [server.tokenizer.bare(prompt) for prompt in self.prompts]
        self.n = read.integer(body, "n", 1, 1, limits.n)
        if read.integer(body, "best_of", self.n, 1, limits.n) != self.n:
            raise RequestError("best_of differs from n; draws here are exact, ask for n", "best_of")
        for name in ("frequency_penalty", "presence_penalty"):
            if read.number(body, name, 0.0, -2, 2) != 0:
                raise RequestError(f"{name} is not supported: draws are from the model's own distribution", name)
        if body.get("logit_bias"):
            raise RequestError("logit_bias is not supported; structured_outputs keeps words out exactly", "logit_bias")
        self.echo = read.boolean(body, "echo", False)
        self.stream = read.boolean(body, "stream", False)
        self.logprobs = read.integer(body, "logprobs", None, 0, limits.logprobs)
        self.suffix = None if body.get("suffix") is None else server.tokenizer.encode(read.text(body, "suffix"))
        self.structured = body.get("structured_outputs")  # read later: an automaton may take seconds
        options = body.get("stream_options")
        if options is not None and not isinstance(options, dict):
            raise RequestError("stream_options takes an object", "stream_options")
        self.include_usage = read.boolean(options or {}, "include_usage", False)
        model = body.get("model")
        if model is not None and model != server.name:
            raise RequestError(
                f"no model {str(model)[:60]!r}, this server has {server.name!r}", "model", 404, "model_not_found"
            )
        top_p = read.number(body, "top_p", 1.0, 0, 1)
        if top_p == 0:
            raise RequestError("top_p is 0, expected more than 0 and at most 1", "top_p")
        self.wishes = Wishes(
            max_tokens=read.integer(body, "max_tokens", 16, 0, limits.max_tokens),
            temperature=read.number(body, "temperature", 1.0, 0, 100),
            top_p=top_p,
            num_top=self.logprobs or 0,
            stop=tuple(read.strings(body, "stop", 4)),
            seed=server.seed(body),
        )
        self.exact = self.suffix is not None or self.structured is not None
        self.low = read.integer(body, "min_tokens", 1 if self.suffix is not None else 0, 0, limits.gap_words)
        if self.exact:
            self._check_exact()
        if self.echo and self.stream:
            raise RequestError("echo is not streamed; drop echo or stream", "echo")
        rows = len(self.prompts) * self.n
        if rows > limits.prompts:
            raise RequestError(f"{rows:,} completions in one request, expected at most {limits.prompts}", "n")
        if rows * self.wishes.max_tokens > limits.prompt_tokens:
            raise RequestError(
                f"{rows:,} completions of {self.wishes.max_tokens:,} tokens, expected at most "
                f"{limits.prompt_tokens:,} tokens in all", "max_tokens",
            )  # fmt: skip
        tokens = sum(map(len, self.prompts)) * (self.n if self.echo else 0)
        if tokens > limits.prompt_tokens:
            raise RequestError(f"{tokens:,} tokens would be echoed, expected at most {limits.prompt_tokens:,}", "n")
        if tokens * (1 + self.wishes.num_top) > limits.alternatives:
            raise RequestError("too many alternatives for so long a prompt; lower logprobs or split it", "logprobs")
        self.id = f"cmpl-{server.created:x}-{next(_counter):x}"
        self.created = int(time.time())

    def _check_exact(self) -> None:
        name = "suffix" if self.suffix is not None else "structured_outputs"
        limits, wishes = self.server.limits, self.wishes
        if wishes.temperature not in (0.0, 1.0) or wishes.top_p != 1:
            raise RequestError(
                f"{name} is answered exactly: temperature 1 (draws) or 0 (best path), and no top_p", name
            )
        if wishes.stop or self.logprobs is not None:
            raise RequestError(f"{name} takes neither stop nor logprobs; /v1/infill gives probabilities", name)
        if wishes.max_tokens > limits.gap_words:
            raise RequestError(
                f"max_tokens is {wishes.max_tokens}, expected at most {limits.gap_words} with {name}", "max_tokens"
            )
        if self.low > wishes.max_tokens:
            raise RequestError(f"min_tokens is {self.low}, expected at most max_tokens", "min_tokens")
        if self.suffix is not None and (not self.suffix or self.suffix[0] == self.server.tokenizer.bos):
            raise RequestError("suffix has no words, expected at least one", "suffix")

    # ---- answers

    def choice(self, index: int, text: str, logprobs: Any, finish: str | None) -> dict[str, Any]:
        return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": finish}

    def envelope(self, choices: list[dict[str, Any]], usage: dict[str, int] | None) -> dict[str, Any]:
        found: dict[str, Any] = {"id": self.id, "object": "text_completion", "created": self.created}
        found |= {"model": self.server.name, "choices": choices}
        return found | ({"usage": usage} if usage is not None else {})

    def usage(self, completed: int) -> dict[str, int]:
        given = sum(map(len, self.prompts))
        return {"prompt_tokens": given, "completion_tokens": completed, "total_tokens": given + completed}

    def logprobs_json(self, tokens: Sequence[Token | None], words: list[str], offset: int) -> dict[str, Any] | None:
        """Return OpenAI's four parallel lists. The first token of a text has no log-probability: null."""
        if self.logprobs is None:
            return None
        logs: list[float | None] = []
        tops: list[dict[str, float] | None] = []
        offsets: list[int] = []
        for token, word in zip(tokens, words, strict=True):
            offsets.append(offset)
            offset += len(word)
            if token is None:
                logs.append(None)
                tops.append(None)
                continue
            logs.append(_number(token.log_prob))
            first = not word.startswith(" ")  # as the token itself is written
            top = {self.server.tokenizer.shown(i, first): _number(value) for i, value in token.top}
            tops.append(top | {word: _number(token.log_prob)})
        return {
            "tokens": words,
            "token_logprobs": logs,
            "top_logprobs": tops if self.logprobs else None,
            "text_offset": offsets,
        }


async def answer(server: "Server", request: Request, body: read.Body) -> Response:
    """Answer a completion request."""
    wanted = await off_loop(_size_of(body.get("prompt")), lambda: Completion(server, body))
    if wanted.exact:
        server.check_states("suffix" if wanted.suffix is not None else "structured_outputs")
        choices, completed = await _exact(wanted, request)
        if wanted.stream:
            return event_stream(_replayed(wanted, choices, completed))
        return await json_response(wanted.envelope(choices, wanted.usage(completed)))
    if wanted.stream:
        return event_stream(await _streamed(wanted))
    prompts = wanted.bare_prompts
    with server.admitted():
        scored: list[list[Token]] | None = None
        if wanted.echo and wanted.logprobs is not None:
            scored = await server.wait_for(request, ScoreJob(prompts, wanted.logprobs))
        rows: list[Row] = []
        if wanted.wishes.max_tokens:
            generation = Generation(server.model, prompts, wanted.n, wanted.wishes, server.tokenizer)
            await server.wait_for(request, GenerateJob(generation))
            rows = generation.rows
    size = len(prompts) * wanted.n * wanted.wishes.max_tokens
    size += wanted.n * sum(map(len, prompts)) if wanted.echo else 0
    return await json_response(lambda: _whole(wanted, scored, rows), size * (1 + wanted.wishes.num_top))


def _whole(wanted: Completion, scored: list[list[Token]] | None, rows: list[Row]) -> dict[str, Any]:
    """Return the answer to a request without streaming."""
    tokenizer = wanted.server.tokenizer
    choices = []
    for index in range(len(wanted.prompts) * wanted.n):
        row = rows[index] if rows else None
        made: list[Token] = list(row.tokens) if row else []
        text = row.text if row else ""
        finish = row.finish if row else "length"
        place = index // wanted.n
        given = wanted.prompts[place]
        logprobs = None
        if wanted.echo:
            text = tokenizer.decode(given) + text
            if scored is not None:
                before: list[Token | None] = list(scored[place])
                if len(before) < len(given):
                    before = [None, *before]
                elif before:
                    before[0] = None
                # clients that read echoed scores expect the tokens drawn after them, an <eos> too
                if row is not None and row.last is not None:
                    made = [*made, row.last]
                ids = [*given, *(token.id for token in made)]
                logprobs = wanted.logprobs_json([*before, *made], tokenizer.words(ids), 0)
        elif wanted.logprobs is not None:
            words = tokenizer.words([token.id for token in made], not given)
            logprobs = wanted.logprobs_json(made, words, 0)
        choices.append(wanted.choice(index, text, logprobs, finish))
    return wanted.envelope(choices, wanted.usage(sum(len(row.tokens) for row in rows)))


def _size_of(prompt: object) -> int:
    """Return the approximate number of characters or ids of a prompt."""
    if isinstance(prompt, list):
        return sum(len(entry) if isinstance(entry, str | list) else 1 for entry in prompt)
    return len(prompt) if isinstance(prompt, str) else 0


async def _exact(wanted: Completion, request: Request) -> tuple[list[dict[str, Any]], int]:
    """Draw the words between prompt and suffix, or under a constraint, from the exact conditional distribution."""
    server = wanted.server
    prompts = wanted.bare_prompts

    def answers(constraint: Any, given_up: Callable[[], bool]) -> list[dict[str, Any]]:
        choices: list[dict[str, Any]] = []
        for number, prompt in enumerate(prompts):
            if given_up():
                break
            ready = queries.between(
                server.model, prompt, wanted.suffix, wanted.low, wanted.wishes.max_tokens, constraint, server.limits
            )
            if wanted.wishes.temperature == 0:
                fills = [ready.best().fill] * wanted.n
            else:
                fills = ready.sample(wanted.n, wanted.wishes.seed + number)
            for fill in fills:
                text = server.tokenizer.text(fill.gaps[0], not prompt)
                if wanted.echo:
                    text = server.tokenizer.decode(wanted.prompts[number]) + text
                choice = wanted.choice(len(choices), text, None, "stop")
                choices.append(choice | {"log_prob": queries.finite(fill.log_prob), "num_tokens": len(fill.gaps[0])})
        return choices

    with server.admitted():
        constraint = None
        if wanted.structured is not None:
            with about("structured_outputs"):
                constraint = await server.compiled(
                    lambda: queries.structured(server.model, wanted.structured, server.limits)
                )
        choices = await server.wait_for(request, CallJob(lambda given_up: answers(constraint, given_up), Priority.LONG))
    return choices, sum(choice["num_tokens"] for choice in choices)


async def _replayed(wanted: Completion, choices: list[dict[str, Any]], completed: int) -> AsyncIterator[dict[str, Any]]:
    for choice in choices:
        yield wanted.envelope([choice], None)
    if wanted.include_usage:
        yield wanted.envelope([], wanted.usage(completed))


async def _streamed(wanted: Completion) -> AsyncIterator[dict[str, Any]]:
    """Return the events of a completion. Errors in the request are raised before the first event."""
    server = wanted.server
    if wanted.wishes.max_tokens == 0:
        raise RequestError("max_tokens is 0, expected at least 1 for a stream", "max_tokens")
    generation = Generation(server.model, wanted.bare_prompts, wanted.n, wanted.wishes, server.tokenizer)
    pieces: AsyncIterator[Piece] = await server.parts(lambda listen: GenerateJob(generation, listen))

    async def events() -> AsyncIterator[dict[str, Any]]:
        offsets = [0] * len(generation.rows)
        async for piece in pieces:
            if not (piece.text or piece.finish):
                continue
            given = wanted.prompts[piece.row // wanted.n]
            words = server.tokenizer.words([token.id for token in piece.tokens], not given and not offsets[piece.row])
            logprobs = wanted.logprobs_json(piece.tokens, words, offsets[piece.row])
            offsets[piece.row] += sum(map(len, words))
            yield wanted.envelope([wanted.choice(piece.row, piece.text, logprobs, piece.finish)], None)
        if wanted.include_usage:
            yield wanted.envelope([], wanted.usage(sum(len(row.tokens) for row in generation.rows)))

    return events()


def _prompts(server: "Server", value: object) -> list[list[int]]:
    """Return the ids of every prompt. A prompt is a text, a list of texts, ids, or a list of lists of ids."""
    tokenizer, limits, name = server.tokenizer, server.limits, "prompt"
    if value is None:
        return [[]]
    found: list[list[int]]
    if isinstance(value, str):
        found = [tokenizer.encode(value)]
    elif not isinstance(value, list) or not value:
        raise RequestError("prompt takes a string, a list of strings, a list of ids or a list of lists of ids", name)
    elif all(isinstance(entry, str) for entry in value):
        found = [tokenizer.encode(entry) for entry in value]
    elif all(isinstance(entry, list) for entry in value):
        found = [tokenizer.check(entry, name) for entry in value]
    else:
        found = [tokenizer.check(value, name)]
    if len(found) > limits.prompts:
        raise RequestError(f"{len(found):,} prompts in one request, expected at most {limits.prompts}", name)
    server.check_tokens(sum(map(len, found)), name)
    return found


def _number(log_prob: float) -> float:
    return log_prob if math.isfinite(log_prob) else _ZERO
