"""Settings of the C allocator. Only this module changes them.

A training step allocates and frees tables of many megabytes. By default glibc returns such memory to the system at once,
and the kernel zeroes every page again for the next step: measured at a quarter of a step's time. Keeping freed memory in
the process avoids that.
"""

import ctypes
import sys
from collections.abc import Iterator
from contextlib import contextmanager

# Parameters of glibc's mallopt (malloc.h), the values set here, and glibc's defaults.
M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_MAX = -1, -2, -4
NEVER, NONE, ROOM = -1, 0, 1 << 26
STANDARD, STANDARD_MAX = 128 * 1024, 65_536

_requests = 0  # callers that want freed memory kept; the defaults return when the last one leaves


def keep_freed_memory() -> None:
    """Keep freed memory in this process until it ends. Has no effect where the C library is not glibc."""
    global _requests
    _requests += 1
    library = glibc()
    if library is None or _requests > 1:
        return
    library.mallopt(M_MMAP_MAX, NONE)  # large tables come from the heap,
    library.mallopt(M_TRIM_THRESHOLD, NEVER)  # which does not shrink,
    library.mallopt(M_TOP_PAD, ROOM)  # and grows in large steps: a hole one byte too small cannot be reused


def _release() -> None:
    """Withdraw one request; after the last one, restore the defaults and return freed memory to the system."""
    global _requests
    _requests -= 1
    library = glibc()
    if library is None or _requests:
        return
    library.mallopt(M_MMAP_MAX, STANDARD_MAX)
    library.mallopt(M_TRIM_THRESHOLD, STANDARD)
    library.mallopt(M_TOP_PAD, STANDARD)
    library.malloc_trim(0)


@contextmanager
def kept_memory() -> Iterator[None]:
    """Keep freed memory within this context. Contexts may be nested; an outer request outlasts an inner one."""
    keep_freed_memory()
    try:
        yield
    finally:
        _release()


def glibc() -> ctypes.CDLL | None:
    """Return the C library if it is glibc, else None."""
    if not sys.platform.startswith("linux"):
        return None
    library = ctypes.CDLL(None)
    return library if hasattr(library, "mallopt") and hasattr(library, "malloc_trim") else None
