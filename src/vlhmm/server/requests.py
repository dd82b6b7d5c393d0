"""Validate the fields of a request's JSON. Each function checks one field and names it in its error."""

import difflib
import json
import math
from collections.abc import Collection, Mapping
from typing import Any, overload

from vlhmm.server.errors import RequestError

Body = Mapping[str, Any]


def parse_object(content: bytes) -> dict[str, Any]:
    """Return the JSON object in a request's body."""
    try:
        found = json.loads(content)
    except (ValueError, RecursionError):
        raise RequestError("the body is not JSON; send a JSON object as application/json") from None
    if not isinstance(found, dict):
        raise RequestError(f"the body is a JSON {type(found).__name__}, expected an object")
    return found


def check_fields(body: Body, known: Collection[str]) -> None:
    """Raise a RequestError for unknown fields. A misspelled field would otherwise have no effect."""
    for name in body:
        if name not in known:
            near = difflib.get_close_matches(name, known, 1)
            remedy = f"did you mean {near[0]}?" if near else f"expected {', '.join(known)}"
            raise RequestError(f"no field {name[:60]!r}; {remedy}", name[:60])


@overload
def integer(body: Body, name: str, default: int, low: int, high: int) -> int: ...
@overload
def integer(body: Body, name: str, default: None, low: int, high: int) -> int | None: ...
def integer(body: Body, name: str, default: int | None, low: int, high: int) -> int | None:
    """Return a whole number from `low` to `high`; null counts as absent."""
    value = body.get(name)
    if value is None:
        return default
    if isinstance(value, float) and value.is_integer():  # JSON has one kind of number
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int):
        raise RequestError(f"{name} is {_shown(value)}, expected a whole number", name)
    if not low <= value <= high:
        raise RequestError(f"{name} is {_shown(value)}, expected {low} to {high}", name)
    return value


def number(body: Body, name: str, default: float, low: float, high: float) -> float:
    """Return a number from `low` to `high`."""
    value = body.get(name)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise RequestError(f"{name} is {_shown(value)}, expected a number", name)
    if not low <= value <= high:
        raise RequestError(f"{name} is {_shown(value)}, expected {low} to {high}", name)
    return float(value)


def boolean(body: Body, name: str, default: bool) -> bool:
    """Return true or false."""
    value = body.get(name)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise RequestError(f"{name} is {_shown(value)}, expected true or false", name)
    return value


def text(body: Body, name: str, default: str | None = None) -> str:
    """Return a string. Without a default the field is required."""
    value = body.get(name)
    if value is None and default is not None:
        return default
    if not isinstance(value, str):
        raise RequestError(f"{name} is {_shown(value)}, expected a string", name)
    return value


def choice(body: Body, name: str, default: str, among: tuple[str, ...]) -> str:
    """Return one of the given strings."""
    value = body.get(name)
    if value is None:
        return default
    if value not in among:
        raise RequestError(f"{name} is {_shown(value)}, expected one of {', '.join(among)}", name)
    return str(value)


def strings(body: Body, name: str, most: int) -> list[str]:
    """Return a string or a list of strings as a list of at most `most` non-empty strings."""
    value = body.get(name)
    if value is None:
        return []
    found = [value] if isinstance(value, str) else value
    if not isinstance(found, list) or not all(isinstance(entry, str) and entry for entry in found):
        raise RequestError(f"{name} is {_shown(value)}, expected a string or a list of strings, none empty", name)
    if len(found) > most:
        raise RequestError(f"{name} has {len(found)} entries, expected at most {most}", name)
    return found


def word_range(body: Body, name: str, most: int) -> tuple[int, int | None]:
    """Return [low, high] or [low], with null or nothing for no upper limit."""
    value = body[name]
    if not isinstance(value, list) or not 1 <= len(value) <= 2:
        raise RequestError(f"{name} is {_shown(value)}, expected [low, high] or [low]", name)
    low, high = (integer({name: each}, name, None, 0, most) for each in (*value, None)[:2])
    if high is not None and (low or 0) > high:
        raise RequestError(f"{name} is {_shown(value)}, expected low to be at most high", name)
    return low or 0, high


def _shown(value: Any) -> str:
    written = json.dumps(value) if value is not None else "missing"
    return written if len(written) <= 60 else written[:57] + "..."
