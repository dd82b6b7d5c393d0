"""Ranges of the numbers that users and files give, and limits on the cost of one request.

A number is checked before any work is done with it: text of more than `MAX_DIGITS` digits is refused unread.
"""

import math

from vlhmm.errors import ConfigError

MAX_DIGITS = 15
MAX_STATES = 1 << 24  # hidden states, blocks, states per word
MAX_COUNT = 10**9  # samples, words shown, streams, tokens: what a request may ask for in a single number
MAX_NEW_TOKENS = 100_000  # of a text that a language model writes: the levels of a lookahead table
MAX_THREADS = 1024  # more than that ends some systems' processes
MAX_SEED = (1 << 31) - 1
MAX_BYTES = 1 << 50
MAX_SECONDS = 10 * 365 * 86_400.0
MAX_HOURS = 1.0  # a request that is seen to take longer is refused with its estimate

Number = int | float


def shortened(value: object, length: int = 60) -> str:
    """Return a value for an error line, cut to `length` characters."""
    try:
        text = str(value) if isinstance(value, Exception) else repr(value)
    except ValueError:  # an integer of thousands of digits
        text = "a number of thousands of digits"
    return text if len(text) <= length else text[: length - 3] + "..."


def digits(text: str) -> int | None:
    """Return the whole number that ASCII digits write; None for any other text, or for more than `MAX_DIGITS` of them."""
    if not (text.isascii() and text.isdigit()) or len(text.lstrip("0")) > MAX_DIGITS:
        return None
    return int(text[-MAX_DIGITS:])


def whole_number(text: str, name: str, low: int = 0, high: int = MAX_COUNT) -> int:
    """Return the whole number that a user wrote, from `low` to `high`; a ConfigError names what was expected."""
    sign, rest = (-1, text[1:]) if text.startswith("-") else (1, text)
    found = digits(rest.strip().replace("_", ""))
    if found is None or not low <= sign * found <= high:
        raise ConfigError(f"{name} {shortened(text)}: expected a whole number from {low:,} to {high:,}")
    return sign * found


def word_range(text: str, name: str) -> tuple[int, int | None]:
    """Return (least, most) of "A-B", "A-" (no upper limit) or "A" (exactly)."""
    low, dash, high = text.partition("-")
    least, most = digits(low), digits(high)
    if least is None or (high and most is None):
        raise ConfigError(f"{name} {shortened(text)}: expected a number, A-B or A-")
    return least, most if dash else least


def check_range(name: str, value: Number | None, low: Number, high: Number) -> None:
    """Raise a ConfigError unless low <= value <= high, or the value is None."""
    if value is not None and not low <= value <= high:  # which NaN fails too
        bounds = f"from {low:,} to {high:,}" if high < math.inf else f"of at least {low:,}"
        raise ConfigError(f"{name}={shortened(value)} is out of range, expected a number {bounds}")


def check_ranges(owner: object, ranges: dict[str, tuple[Number, Number]]) -> None:
    """Apply `check_range` to some attributes of a configuration."""
    for name, (low, high) in ranges.items():
        check_range(name, getattr(owner, name), low, high)


def time_of(seconds: float) -> str:
    """Format an estimated time: '40 s', '12 min', '5.0 hours', '3 days'."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    if seconds < 7200:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} hours" if seconds < 2 * 86_400 else f"{seconds / 86_400:,.0f} days"


def counted(number: int, thing: str) -> str:
    """Format a number of things: '1 line', '2,000 lines'."""
    return f"{number:,} {thing}" + ("" if number == 1 else "s")
