"""How the command line reads numbers: each has a range, checked before any work. Used as argparse's `type=`."""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Callable

from vlhmm.limits import MAX_BYTES, MAX_COUNT, MAX_SECONDS, MAX_SEED, digits, shortened


def count(low: int = 0, high: int = MAX_COUNT) -> Callable[[str], int]:
    """Return how argparse reads a whole number from `low` to `high`."""

    def read(text: str) -> int:
        found = digits(text.removeprefix("-"))
        if found is None or not low <= (value := -found if text.startswith("-") else found) <= high:
            raise argparse.ArgumentTypeError(f"{shortened(text)}: expected a whole number from {low:,} to {high:,}")
        return value

    return read


def real(low: float, high: float) -> Callable[[str], float]:
    """Return how argparse reads a number from `low` to `high`."""

    def read(text: str) -> float:
        try:
            value = float(text) if text.isascii() else math.nan
        except ValueError:
            value = math.nan
        if not low <= value <= high:  # which what is no number fails too
            raise argparse.ArgumentTypeError(f"{shortened(text)}: expected a number from {low:g} to {high:g}")
        return value

    return read


def duration(text: str) -> float:
    """Return seconds, from 90, 90s, 15m, 1.5h or 1h30m."""
    parts = re.fullmatch(r"(?:([0-9]+(?:\.[0-9]+)?)h)?(?:([0-9]+(?:\.[0-9]+)?)m)?(?:([0-9]+(?:\.[0-9]+)?)s?)?", text.strip())
    if not text.strip() or parts is None:
        raise argparse.ArgumentTypeError(f"{shortened(text)} is no duration; write 90s, 15m, 1.5h or 1h30m")
    hours, minutes, seconds = (float(part or 0) for part in parts.groups())
    total = hours * 3600 + minutes * 60 + seconds
    if not total <= MAX_SECONDS:
        raise argparse.ArgumentTypeError(f"{shortened(text)} is longer than ten years; leave it out for no limit")
    return total


def byte_size(text: str) -> int:
    """Return bytes, from 500M, 4G or a plain number."""
    parts = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)\s*([kmgt]?)i?b?", text.strip().lower())
    if parts is None:
        raise argparse.ArgumentTypeError(f"{shortened(text)} is no size; write 500M or 4G")
    size = float(parts[1]) * 1024 ** " kmgt".index(parts[2] or " ")
    if size < 1:
        raise argparse.ArgumentTypeError("a budget of 0 bytes holds nothing; write 500M or 4G, or leave it out")
    if size > MAX_BYTES:
        raise argparse.ArgumentTypeError(f"{shortened(text)} is more than 1024T; write 500M or 4G, or leave it out")
    return int(size)


def seed(text: str) -> int:
    """Return a seed: a whole number that every generator takes."""
    found = digits(text)
    if found is None or found > MAX_SEED:
        raise argparse.ArgumentTypeError(f"{shortened(text)} is no seed; take a whole number from 0 to {MAX_SEED:,}")
    return found


def tokens(text: str) -> int:
    """Return a number of tokens, from 500k, 8M or a plain number."""
    parts = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)\s*([km]?)", text.strip().lower().replace(",", "").replace("_", ""))
    number = float(parts[1]) * 1000 ** " km".index(parts[2] or " ") if parts else 0
    if not 1 <= number <= 1e12:
        raise argparse.ArgumentTypeError(f"{shortened(text)} is no number of tokens; write 500k or 8M")
    return int(number)
