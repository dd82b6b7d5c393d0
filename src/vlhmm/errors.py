"""The errors a user can meet: one line each, saying what, got, expected, remedy."""

import re

_LONG = re.compile(r"\S{400,}")  # a word of a damaged file, a number of thousands of digits; paths are shorter

class VlhmmError(Exception):
    """Anything vlhmm refuses; `exit_code` is what the command line answers with."""

    exit_code = 2

    def __init__(self, message: object = "") -> None:
        super().__init__(_LONG.sub(lambda found: found[0][:60] + "...", str(message)))


class DataError(VlhmmError):
    """A text, vocabulary or corpus is not what it should be."""


class ConfigError(VlhmmError):
    """A setting does not exist, does not fit another, or does not fit the machine."""


class CheckpointError(VlhmmError):
    """A run folder cannot be read, written or continued."""


class QueryError(VlhmmError):
    """A question the model cannot answer as asked."""


class TrainingError(VlhmmError):
    """A run failed on its way; what was good is kept."""

    exit_code = 1
