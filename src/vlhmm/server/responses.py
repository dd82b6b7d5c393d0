"""Serialize answers without blocking the event loop. Input: JSON values. Output: responses."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from typing import Any, TypeVar

from starlette.responses import Response, StreamingResponse

from vlhmm.server.errors import RequestError

T = TypeVar("T")
_SMALL = 4096  # characters or entries that the event loop itself may handle


async def off_loop(size: int, call: Callable[[], T]) -> T:
    """Return the result of a function, which runs outside the event loop unless the work is small."""
    return await asyncio.to_thread(call) if size > _SMALL else call()


def written(value: Any, large: bool) -> bytes:
    """Return a value as JSON. Large values are serialized by Python's own encoder.

    It releases the interpreter to the event loop between its steps; the encoder in C does not.
    """
    if not large:
        return json.dumps(value, allow_nan=False, separators=(",", ":")).encode()
    return "".join(json.JSONEncoder(allow_nan=False, separators=(",", ":")).iterencode(value)).encode()


async def json_response(content: Any, size: int = 0) -> Response:
    """Answer with a JSON value, or with the result of a function of about `size` entries; a large one in a thread."""

    def write() -> bytes:
        return written(content() if callable(content) else content, size > _SMALL)

    return Response(await off_loop(size, write), media_type="application/json")


def event_stream(events: AsyncIterator[Any]) -> StreamingResponse:
    """Send JSON values as server-sent events, then [DONE]. An error is sent as the last event before it."""

    async def lines() -> AsyncIterator[bytes]:
        try:
            async for event in events:
                yield f"data: {json.dumps(event)}\n\n".encode()
        except RequestError as error:
            yield f"data: {json.dumps(error.body())}\n\n".encode()
        yield b"data: [DONE]\n\n"

    return StreamingResponse(lines(), media_type="text/event-stream", headers={"Cache-Control": "no-cache"})
