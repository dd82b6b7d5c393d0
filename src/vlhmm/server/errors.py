"""Errors of requests, as OpenAI's JSON and a status code."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from vlhmm.errors import VlhmmError

_TYPES = {
    401: "authentication_error",
    404: "not_found_error",
    405: "invalid_request_error",
    413: "invalid_request_error",
    429: "rate_limit_error",
    408: "timeout_error",
    503: "service_unavailable_error",
    504: "timeout_error",
}


class RequestError(Exception):
    """A rejected request, with its HTTP status and the parameter that caused it."""

    def __init__(
        self, message: str, param: str | None = None, status: int = 400, code: str | None = None, retry_after: int = 0
    ) -> None:
        super().__init__(message)
        self.message, self.param, self.status, self.code, self.retry_after = message, param, status, code, retry_after

    def body(self) -> dict[str, Any]:
        """Return the JSON body in the form that OpenAI's clients read."""
        kind = _TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    def headers(self) -> dict[str, str]:
        """Return the headers that belong to the status."""
        found = {"Retry-After": str(self.retry_after)} if self.retry_after else {}
        return found | ({"WWW-Authenticate": "Bearer"} if self.status == 401 else {})


def refused(error: VlhmmError, field: str | None = None, status: int = 400) -> RequestError:
    """Return an error of the library as that of a request."""
    return RequestError(" ".join(str(error).split()), field, status)


@contextmanager
def about(field: str, status: int = 400) -> Iterator[None]:
    """Name the field of the request that an error of the library is about: the page shows the error beside it."""
    try:
        yield
    except VlhmmError as error:
        raise refused(error, field, status) from None
