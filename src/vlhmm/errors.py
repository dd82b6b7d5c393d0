"""Errors that a user can cause: one line with what is wrong, what was found, what was expected, and the remedy."""

import re

_LONG = re.compile(r"\S{400,}")  # a word of a damaged file, a number of thousands of digits; paths are shorter


class VlhmmError(Exception):
    """Base of all errors of vlhmm; `exit_code` is the exit code of the command line."""

    exit_code = 2

    def __init__(self, message: object = "") -> None:
        super().__init__(_LONG.sub(lambda found: found[0][:60] + "...", str(message)))


class DataError(VlhmmError):
    """A text, vocabulary or corpus is invalid."""


class ConfigError(VlhmmError):
    """A setting does not exist, conflicts with another, or exceeds the machine."""


class CheckpointError(VlhmmError):
    """A run folder cannot be read, written or resumed."""


class QueryError(VlhmmError):
    """A query that the model cannot answer."""


class TrainingError(VlhmmError):
    """Training failed; the last good checkpoint is kept."""

    exit_code = 1
