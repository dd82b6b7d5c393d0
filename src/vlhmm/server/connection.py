"""An HTTP connection with a time limit on the head of a request. Input: bytes of a client. Output: uvicorn's handling.

uvicorn waits indefinitely for the head of a request. Clients that send single bytes slowly would keep their
connections open until the process has no file descriptors left.
"""

import asyncio
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

HEAD_SECONDS = 20.0  # for the head of a request to arrive, from its first byte or from the start of the connection


class Connection(H11Protocol):
    """Close a connection whose request does not begin in time."""

    _head_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._expect_head()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.conn.their_state is h11.IDLE and self.conn.trailing_data[0]:
            self._expect_head()
        elif self.conn.their_state is not h11.IDLE:
            self._stop_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        super().connection_lost(exc)

    def _expect_head(self) -> None:
        if self._head_timer is None:
            self._head_timer = self.loop.call_later(HEAD_SECONDS, self._give_up)

    def _stop_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _give_up(self) -> None:
        if not self.transport.is_closing():
            self.transport.close()
