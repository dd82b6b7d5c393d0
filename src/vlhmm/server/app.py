"""The HTTP application. Input: a loaded model. Output: a Starlette app; `docs/serving.md` lists its routes."""

import asyncio
import contextlib
import hmac
import logging
import random
import time
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, TypeVar

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import FileResponse, JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from vlhmm.errors import VlhmmError
from vlhmm.queries.left_to_right import has_hidden_states, kind_of
from vlhmm.server import completions, queries
from vlhmm.server import requests as read
from vlhmm.server.errors import RequestError, about, refused
from vlhmm.server.explorer import Explorer
from vlhmm.server.limits import Limits
from vlhmm.server.openapi import document
from vlhmm.server.responses import event_stream, json_response, off_loop
from vlhmm.server.scheduler import CallJob, Job, Priority, Scheduler, ScoreJob
from vlhmm.server.tokenizer import SubwordTokenizer, tokenizer_of

PAGE = Path(__file__).parent / "page"
PREPARING_SECONDS = 5.0  # that a request waits for what the explorer prepares, before it is told to come back
LOOPBACK = ("127.0.0.1", "localhost", "[::1]", "testserver")
_FEW_WORDS = 32  # whose posteriors are quick
log = logging.getLogger("vlhmm.server")
T = TypeVar("T")
Handler = Callable[[Request], Awaitable[Response]]

_PAGE_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}
PAGE_FILES = {
    "index.html": "text/html; charset=utf-8",
    "style.css": "text/css; charset=utf-8",
    "elements.js": "text/javascript; charset=utf-8",
    "activities.js": "text/javascript; charset=utf-8",
    "explorer.js": "text/javascript; charset=utf-8",
    "icon.svg": "image/svg+xml",
}


class Server:
    """One model behind HTTP: the app, its worker thread and its counters."""

    def __init__(
        self,
        model: Any,
        name: str,
        run: str | Path | None = None,
        limits: Limits | None = None,
        api_key: str | None = None,
        loopback_only: bool = True,
        prepare_at_start: bool = False,
    ) -> None:
        self.model, self.name, self.limits, self.api_key = model, name, limits or Limits(), api_key
        self.tokenizer = tokenizer_of(model.vocabulary)
        self.scheduler = Scheduler(model, self.limits.batch_tokens)
        self.compiler = ThreadPoolExecutor(1, "vlhmm-compiler")
        self.explorer = Explorer(model, run, self.limits.memory)
        self.loopback_only = loopback_only
        self.created = int(time.time())
        self.prepare_at_start = prepare_at_start
        self.in_flight = 0
        self.stopping = False
        self.answers: Counter[tuple[str, int]] = Counter()
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self.seeds = random.SystemRandom()  # for requests that name no seed
        self.document = document(_version(), self.limits, len(model.vocabulary), api_key is not None)
        self.preparations: dict[str, CallJob] = {}
        post, get = ["POST"], ["GET"]
        routes = [
            Route("/health", self._health, methods=get),
            Route("/metrics", self._guarded(self._metrics), methods=get),
            Route("/openapi.json", self._guarded(self._openapi), methods=get),
            Route("/v1/models", self._guarded(self._models), methods=get),
            Route("/v1/models/{model:path}", self._guarded(self._model), methods=get),
            Route("/v1/completions", self._guarded(self._completions), methods=post),
            Route("/v1/score", self._guarded(self._score), methods=post),
            Route("/v1/next", self._guarded(self._next), methods=post),
            Route("/v1/posteriors", self._guarded(self._posteriors), methods=post),
            Route("/v1/infill", self._guarded(self._infill), methods=post),
            Route("/v1/summary", self._guarded(self._summary), methods=get),
            Route("/v1/map", self._guarded(self._map), methods=get),
            Route("/v1/states/{state}", self._guarded(self._state), methods=get),
            Route("/v1/words/{word:path}", self._guarded(self._word), methods=get),
            Route("/v1/blocks/{block}", self._guarded(self._block), methods=get),
            Route("/tokenizer_info", self._guarded(self._tokenizer_info), methods=get),
            Route("/tokenize", self._guarded(self._tokenize), methods=post),
            Route("/detokenize", self._guarded(self._detokenize), methods=post),
            Route("/", self._page, methods=get),
            *(Route(f"/{name}", self._page, methods=get) for name in PAGE_FILES),
        ]
        self.app = Starlette(
            routes=routes,
            exception_handlers={HTTPException: self._http_error, Exception: self._crash},  # type: ignore[dict-item]
            lifespan=self._lifespan,
        )
        self.app.add_middleware(_HostCheck, server=self)

    @contextlib.asynccontextmanager
    async def _lifespan(self, app: Starlette) -> AsyncIterator[None]:
        self.scheduler.start()
        if self.prepare_at_start and has_hidden_states(self.model):
            self.prepare("states")
            self.prepare("map")
        try:
            yield
        finally:
            self.stopping = True
            self.compiler.shutdown(wait=False, cancel_futures=True)
            await asyncio.to_thread(self.scheduler.close)

    # ---- every request

    def _guarded(self, handler: Handler) -> Handler:
        """Wrap a route with the check of the key, errors as JSON, and counters."""

        async def answer(request: Request) -> Response:
            began = time.perf_counter()
            route = _route(request)
            try:
                self._check_key(request)
                response = await handler(request)
            except RequestError as error:
                response = JSONResponse(error.body(), error.status, headers=error.headers())
            except VlhmmError as error:
                response = JSONResponse(refused(error).body(), 400)
            except ClientDisconnect:
                response = Response(status_code=499)
            except MemoryError:
                too_large = RequestError("the request needs more memory than there is; shorten it")
                response = JSONResponse(too_large.body(), 400)
            self.answers[route, response.status_code] += 1
            self.seconds[route] += time.perf_counter() - began
            return response

        return answer

    def _check_key(self, request: Request) -> None:
        if self.api_key is None:
            return
        kind, _, given = request.headers.get("authorization", "").partition(" ")
        if kind.lower() != "bearer" or not hmac.compare_digest(given.strip().encode(), self.api_key.encode()):
            raise RequestError(
                "the API key is missing or wrong; send Authorization: Bearer KEY", None, 401, "invalid_api_key"
            )

    async def body(self, request: Request) -> dict[str, Any]:
        """Read a JSON body within limits on size and time. Unknown fields are rejected."""
        most = self.limits.body_bytes
        too_large = RequestError(f"the body is larger than {most:,} bytes; send less at once", None, 413)
        declared = request.headers.get("content-length", "0")
        if declared.isdecimal() and int(declared) > most:
            raise too_large
        content = bytearray()
        try:
            async with asyncio.timeout(self.limits.seconds):
                async for part in request.stream():
                    content += part
                    if len(content) > most:
                        raise too_large
        except TimeoutError:
            raise RequestError("the body did not arrive in time", None, 408) from None
        body = await off_loop(len(content), lambda: read.parse_object(bytes(content)))
        schema = self.document["paths"][_route(request)]["post"]["requestBody"]["content"]["application/json"]["schema"]
        read.check_fields(body, schema["properties"])
        return body

    @contextlib.contextmanager
    def admitted(self) -> Iterator[None]:
        """Count a request that will compute. Raise a RequestError with status 429 if there are too many."""
        if self.stopping:
            raise RequestError("the server is stopping", None, 503, retry_after=5)
        if self.in_flight >= self.limits.concurrent:
            raise RequestError(
                f"{self.in_flight} requests are being answered, which is the limit; try again", None, 429,
                "rate_limit_exceeded", retry_after=1,
            )  # fmt: skip
        self.in_flight += 1
        try:
            yield
        finally:
            self.in_flight -= 1

    async def work(self, request: Request, job: Job) -> Any:
        """Submit a job and wait for it. Cancel it if the client disconnects or the time limit is reached."""
        with self.admitted():
            return await self.wait_for(request, job)

    async def wait_for(self, request: Request, job: Job) -> Any:
        self.scheduler.submit(job)
        done = asyncio.ensure_future(asyncio.wrap_future(job.future))
        gone = asyncio.ensure_future(_disconnected(request))
        try:
            await asyncio.wait({done, gone}, timeout=self.limits.seconds, return_when=asyncio.FIRST_COMPLETED)
            if done.done():
                if done.cancelled() or isinstance(done.exception(), RuntimeError) and self.stopping:
                    raise RequestError("the server is stopping", None, 503, retry_after=5)
                return done.result()
            if gone.done():
                raise ClientDisconnect
            raise self.too_slow()
        finally:
            job.give_up()
            done.cancel()
            gone.cancel()
            with contextlib.suppress(asyncio.CancelledError, Exception):
                await gone

    async def compiled(self, call: Callable[[], T]) -> T:
        """Return what `call` compiles, outside the model's thread and one at a time: a client's pattern may take seconds."""
        loop = asyncio.get_running_loop()
        try:
            return await asyncio.wait_for(loop.run_in_executor(self.compiler, call), self.limits.seconds)
        except TimeoutError:
            raise self.too_slow() from None

    async def parts(self, make: Callable[[Callable[[Any], None]], Job]) -> AsyncIterator[Any]:
        """Yield the parts that a job produces. An error before the first part is raised at once.

        `make` is called with the function that takes the parts. The job ends with the iterator.
        """
        loop, queue = asyncio.get_running_loop(), asyncio.Queue[Any]()
        end = object()
        stack = contextlib.ExitStack()
        stack.enter_context(self.admitted())

        def listen(part: Any) -> None:
            loop.call_soon_threadsafe(queue.put_nowait, part)

        job = make(listen)
        stack.callback(job.give_up)
        deadline = loop.time() + self.limits.seconds
        self.scheduler.submit(job)
        job.future.add_done_callback(lambda _: loop.call_soon_threadsafe(queue.put_nowait, end))

        async def take() -> Any:
            try:
                part = await asyncio.wait_for(queue.get(), max(0.0, deadline - loop.time()))
            except TimeoutError:
                raise self.too_slow() from None
            if part is end:
                if job.future.cancelled():
                    raise RequestError("the server is stopping", None, 503, retry_after=5)
                error = job.future.exception()
                if error is not None and not isinstance(error, VlhmmError | RequestError):
                    log.error("a stream failed", exc_info=error)
                    raise RequestError("the server failed; its log says why", None, 500)
                if error is not None:
                    raise refused(error) if isinstance(error, VlhmmError) else error
            return part

        try:
            first = await take()
        except BaseException:
            stack.close()
            raise

        async def rest() -> AsyncIterator[Any]:
            part = first
            with stack:
                while part is not end:
                    yield part
                    part = await take()

        return rest()

    def too_slow(self) -> RequestError:
        return RequestError(
            f"the answer took longer than {self.limits.seconds:g} seconds; ask for less at once", None, 504
        )

    async def ask(
        self, request: Request, call: Callable[[], Any], what: str | None = None, priority: Priority = Priority.QUICK
    ) -> Response:
        """Answer with the result of a function that runs in the worker thread. `what` names a query that needs hidden states."""
        if what is not None:
            self.check_states(what)
        answer = await self.work(request, CallJob(lambda given_up: call(), priority))
        return Response(answer, media_type="application/json") if isinstance(answer, bytes) else await json_response(answer)

    def prepare(self, what: str) -> CallJob:
        """Start the preparation of the state views ("states") or of the map ("map"), once, and return its job."""
        job = self.preparations.get(what)
        if job is None or job.future.done() and (job.future.cancelled() or job.future.exception() is not None):
            call = self.explorer.prepare if what == "states" else self.explorer.prepare_map
            job = self.preparations[what] = CallJob(lambda given_up: call(), Priority.BACKGROUND)
            self.scheduler.submit(job)
        return job

    async def explored(self, request: Request, call: Callable[[], Any], what: str = "states") -> Response:
        """Answer a query about states, words or blocks. Before these are prepared, wait briefly, then answer 503."""
        self.check_states("inspect")
        job = self.prepare(what)
        if not job.future.done():
            with self.admitted():
                await asyncio.wait({asyncio.wrap_future(job.future)}, timeout=PREPARING_SECONDS)
        if not job.future.done():
            message = f"the model is being looked through ({self.explorer.doing}); try again"
            raise RequestError(message, None, 503, "not_ready", retry_after=1)
        return await self.ask(request, call)

    def check_states(self, what: str) -> None:
        """Raise a RequestError if the query needs hidden states and the model is a mixture or a baseline."""
        if not has_hidden_states(self.model):
            kind = kind_of(self.model)
            raise RequestError(
                f"{self.name} is a {kind}, which has no hidden states: {what} has no exact answer; serve an HMM",
                what if what in ("suffix", "structured_outputs") else None,
            )

    # ---- routes

    async def _health(self, request: Request) -> Response:
        return JSONResponse({"status": "stopping" if self.stopping else "ok"}, 503 if self.stopping else 200)

    def card(self) -> dict[str, Any]:
        """Return a description of the model."""
        blocks = self.model.distributions.blocks if has_hidden_states(self.model) else None
        return {
            "id": self.name,
            "object": "model",
            "created": self.created,
            "owned_by": "vlhmm",
            "vocab_size": len(self.model.vocabulary),
            "tokens": "subwords" if isinstance(self.tokenizer, SubwordTokenizer) else "words",
            "context": getattr(self.model, "rule", None),
            "num_states": blocks.num_real_states if blocks is not None else None,
            "num_blocks": blocks.num_blocks if blocks is not None and blocks.partition else None,
        }

    async def _models(self, request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [self.card()]})

    async def _model(self, request: Request) -> Response:
        name = request.path_params["model"]
        if name != self.name:
            raise RequestError(
                f"no model {name[:60]!r}, this server has {self.name!r}", "model", 404, "model_not_found"
            )
        return JSONResponse(self.card())

    async def _openapi(self, request: Request) -> Response:
        return JSONResponse(self.document)

    async def _metrics(self, request: Request) -> Response:
        scheduler = self.scheduler
        lines = ["# TYPE vlhmm_requests_total counter"]
        for (route, status), count in sorted(self.answers.items()):
            lines.append(f'vlhmm_requests_total{{route="{route}",status="{status}"}} {count}')
        lines.append("# TYPE vlhmm_request_seconds_total counter")
        lines += [f'vlhmm_request_seconds_total{{route="{r}"}} {s:.6f}' for r, s in sorted(self.seconds.items())]
        for name, kind, value in (
            ("requests_in_flight", "gauge", self.in_flight),
            ("jobs_waiting", "gauge", scheduler.waiting),
            ("scored_texts_total", "counter", scheduler.scored_texts),
            ("score_passes_total", "counter", scheduler.score_passes),
            ("generated_tokens_total", "counter", scheduler.generated_tokens),
            ("generate_passes_total", "counter", scheduler.generate_passes),
            ("busy_seconds_total", "counter", round(scheduler.busy_seconds, 6)),
        ):
            lines += [f"# TYPE vlhmm_{name} {kind}", f"vlhmm_{name} {value}"]
        return Response("\n".join(lines) + "\n", media_type="text/plain; version=0.0.4")

    async def _completions(self, request: Request) -> Response:
        body = await self.body(request)
        return await completions.answer(self, request, body)

    async def _score(self, request: Request) -> Response:
        body = await self.body(request)
        text, eos = read.text(body, "text"), read.boolean(body, "eos", True)
        vocabulary = self.model.vocabulary
        ids = [*self.tokenizer.bare(await self.encoded(text)), *([vocabulary.eos] if eos else [])]
        self.check_tokens(len(ids), "text")
        (tokens,) = await self.work(request, ScoreJob([ids], 0))
        return await json_response(lambda: queries.scored_text(text, tokens, self.tokenizer), len(ids))

    async def _next(self, request: Request) -> Response:
        body = await self.body(request)
        context = read.text(body, "context", "")
        top_k = read.integer(body, "top_k", 10, 1, max(1000, len(self.model.vocabulary)))
        self.check_tokens(len(await self.encoded(context)), "context")
        return await self.ask(request, lambda: queries.next_words(self.model, self.tokenizer, context, top_k))

    async def _posteriors(self, request: Request) -> Response:
        body = await self.body(request)
        text, eos = read.text(body, "text"), read.boolean(body, "eos", True)
        top_k = read.integer(body, "top_k", 5, 1, self.limits.logprobs)
        states = read.integer(body, "num_states", 8, 1, self.limits.logprobs)
        words = len(await self.encoded(text))
        if not words:
            raise RequestError("text is empty, expected at least one word", "text")
        if words > self.limits.posterior_words:
            raise RequestError(f"text has {words:,} words, expected at most {self.limits.posterior_words}", "text")
        memory = self.limits.memory
        return await self.ask(
            request,
            lambda: queries.text_posteriors(self.model, self.tokenizer, text, eos, top_k, states, memory),
            "posteriors",
            Priority.LONG if words > _FEW_WORDS else Priority.QUICK,
        )

    async def _infill(self, request: Request) -> Response:
        body, limits = await self.body(request), self.limits
        template = read.text(body, "template")
        mode = read.choice(body, "mode", "sample", ("sample", "best", "marginals"))
        scope = read.choice(body, "scope", "text", ("text", "gaps"))
        n = read.integer(body, "n", 1, 1, limits.n)
        top_k = read.integer(body, "top_k", 10, 1, limits.logprobs)
        eos, allow_eos = read.boolean(body, "eos", True), read.boolean(body, "allow_eos", False)
        stream = read.boolean(body, "stream", False)
        seed = self.seed(body)
        self.check_tokens(len(await self.encoded(template)), "template")
        queries.check_template(self.model, self.tokenizer.sentence(template), limits)
        words = len(self.model.vocabulary)  # among which the nearest to an unknown one is looked for
        constraint = await off_loop(words, lambda: queries.constraint_of(self.model, body, limits))
        self.check_states("infill")

        def parts() -> Iterator[dict[str, Any]]:
            return queries.infill_parts(
                self.model, self.tokenizer, template, constraint, scope, eos, allow_eos, mode, n, seed, top_k, limits,
                4 if stream else n,
            )  # fmt: skip

        if not stream:
            return await self.ask(request, lambda: queries.joined(parts()), None, Priority.LONG)

        def make(listen: Callable[[Any], None]) -> Job:
            def call(given_up: Callable[[], bool]) -> None:
                for part in parts():
                    if given_up():
                        return
                    listen(part)

            return CallJob(call, Priority.LONG)

        return event_stream(await self.parts(make))

    async def _summary(self, request: Request) -> Response:
        top = self.top(request, 20)
        return await self.explored(request, lambda: self.explorer.summary(top))

    async def _map(self, request: Request) -> Response:
        return await self.explored(request, lambda: self.explorer.block_map_json, "map")

    async def _state(self, request: Request) -> Response:
        number, top = self.path_number(request, "state"), self.top(request)
        return await self.explored(request, lambda: _or_404("state", lambda: self.explorer.state(number, top)))

    async def _word(self, request: Request) -> Response:
        word, top = request.path_params["word"], self.top(request)
        return await self.explored(request, lambda: _or_404("word", lambda: self.explorer.word(word, top)))

    async def _block(self, request: Request) -> Response:
        number, top = self.path_number(request, "block"), self.top(request)
        return await self.explored(request, lambda: _or_404("block", lambda: self.explorer.block(number, top)))

    async def _tokenizer_info(self, request: Request) -> Response:
        return JSONResponse(self.tokenizer.info())

    async def _tokenize(self, request: Request) -> Response:
        body = await self.body(request)
        prompt = read.text(body, "prompt")
        ids = await self.encoded(prompt)
        if read.boolean(body, "add_special_tokens", False) and ids[:1] != [self.tokenizer.bos]:
            ids = [self.tokenizer.bos, *ids]
        answer = {"tokens": ids, "count": len(ids), "max_model_len": self.limits.prompt_tokens}
        return await json_response(lambda: answer | {"oov": self.tokenizer.num_oov(prompt)}, len(ids))

    async def _detokenize(self, request: Request) -> Response:
        tokens = (await self.body(request)).get("tokens")
        if not isinstance(tokens, list):
            raise RequestError("tokens is missing, expected a list of ids", "tokens")
        return await json_response(
            lambda: {"prompt": self.tokenizer.decode(self.tokenizer.check(tokens, "tokens"))}, len(tokens)
        )

    async def _page(self, request: Request) -> Response:
        name = request.scope["route"].path.removeprefix("/") or "index.html"
        return FileResponse(PAGE / name, media_type=PAGE_FILES[name], headers=_PAGE_HEADERS)

    # ---- what routes share

    def seed(self, body: read.Body) -> int:
        """Return the request's seed, or a random one."""
        found = read.integer(body, "seed", None, -(1 << 63), (1 << 63) - 1)
        return self.seeds.getrandbits(62) if found is None else found

    def check_tokens(self, count: int, param: str) -> None:
        """Raise a RequestError if a request has more tokens than the limit."""
        if count > self.limits.prompt_tokens:
            raise RequestError(f"{param} has {count:,} tokens, expected at most {self.limits.prompt_tokens:,}", param)

    async def encoded(self, text: str) -> list[int]:
        """Return the ids of a text."""
        return await off_loop(len(text), lambda: self.tokenizer.encode(text))

    def top(self, request: Request, default: int = 10) -> int:
        value = request.query_params.get("top", str(default))
        if not value.isdecimal() or not value.isascii() or len(value) > 6 or not 1 <= int(value) <= 100:
            raise RequestError(f"top is {value[:40]!r}, expected 1 to 100", "top")
        return int(value)

    def path_number(self, request: Request, name: str) -> int:
        value = request.path_params[name]
        if not value.isdecimal() or not value.isascii() or len(value) > 12:
            raise RequestError(f"no {name} {value[:40]!r}, expected a number", name, 404)
        return int(value)

    async def _http_error(self, request: Request, error: HTTPException) -> Response:
        path = request.url.path
        message = {404: f"no such page: {path}", 405: f"{path} does not take {request.method}"}
        found = RequestError(message.get(error.status_code, str(error.detail)), None, error.status_code)
        return JSONResponse(found.body(), error.status_code, headers=error.headers)

    async def _crash(self, request: Request, error: Exception) -> Response:
        log.error("%s %s failed", request.method, request.url.path, exc_info=error)
        return JSONResponse(RequestError("the server failed; its log says why", None, 500).body(), 500)


class _HostCheck:
    """Reject requests to a loopback server under other host names, so that no web page can reach it by DNS rebinding."""

    def __init__(self, app: ASGIApp, server: Server) -> None:
        self.app, self.server = app, server

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and self.server.loopback_only:
            host = dict(scope["headers"]).get(b"host", b"").decode("latin-1")
            name = host if host.endswith("]") else host.rsplit(":", 1)[0]
            if name not in LOOPBACK:
                error = RequestError(
                    f"this server answers at 127.0.0.1 only, not as {name[:60]!r}; see --host", None, 403
                )
                await JSONResponse(error.body(), 403)(scope, receive, send)
                return
        await self.app(scope, receive, send)


def _route(request: Request) -> str:
    """Return a request's route as the OpenAPI document writes it."""
    return str(request.scope["route"].path).replace(":path}", "}")


def _or_404(name: str, call: Callable[[], Any]) -> Any:
    with about(name, 404):
        return call()


async def _disconnected(request: Request) -> None:
    """Return when the client has disconnected. The body of its request has been read."""
    message: Message = {"type": ""}
    while message["type"] != "http.disconnect":
        message = await request.receive()


def _version() -> str:
    try:
        return version("vlhmm")
    except PackageNotFoundError:
        return "0"
