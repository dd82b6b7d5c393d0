"""What can go wrong with a benchmark."""

from vlhmm.errors import VlhmmError


class ExactnessError(VlhmmError):
    """A fast path does not compute what its reference implementation does."""

    exit_code = 1


class WorkerError(VlhmmError):
    """A contestant could not be measured."""

    exit_code = 1
