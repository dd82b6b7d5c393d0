"""Memory that stays with the process between steps.

A training step makes and frees tables of many megabytes. The C library gives such memory back to the system at once, and
the next step has it filled with zeros, page by page: on the machine this was measured on that took a quarter of a step.
"""

import ctypes
import sys
from collections.abc import Iterator
from contextlib import contextmanager

# of glibc's malloc.h: parameters of mallopt, what training sets, and what the library starts with
M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_MAX = -1, -2, -4
NEVER, NONE, ROOM = -1, 0, 1 << 26
STANDARD, STANDARD_MAX = 128 * 1024, 65_536


@contextmanager
def kept_memory() -> Iterator[None]:
    """Within it freed memory is kept for the next use, where the C library is glibc; elsewhere nothing changes."""
    library = glibc()
    if library is None:
        yield
        return
    library.mallopt(M_MMAP_MAX, NONE)  # large tables come from the heap ...
    library.mallopt(M_TRIM_THRESHOLD, NEVER)  # ... which does not shrink,
    library.mallopt(M_TOP_PAD, ROOM)  # and grows by more than is asked for, as a hole a byte too small is no use
    try:
        yield
    finally:
        library.mallopt(M_MMAP_MAX, STANDARD_MAX)
        library.mallopt(M_TRIM_THRESHOLD, STANDARD)
        library.mallopt(M_TOP_PAD, STANDARD)
        library.malloc_trim(0)


def glibc() -> ctypes.CDLL | None:
    """The C library, if it is one that can be told."""
    if not sys.platform.startswith("linux"):
        return None
    library = ctypes.CDLL(None)
    return library if hasattr(library, "mallopt") and hasattr(library, "malloc_trim") else None
