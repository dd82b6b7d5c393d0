import json
import subprocess
import sys

import pytest

from vlhmm.malloc import glibc, kept_memory

SCRIPT = """
import json, resource, torch
from vlhmm.malloc import kept_memory

def faults():  # pages that the system has to hand out for one table of 64 MB, made and freed
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    torch.ones(1 << 24)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

fresh = faults()
with kept_memory():
    first, *later = (faults() for _ in range(20))  # small remainders must fill their own cache first
print(json.dumps([fresh, first, later, faults()]))
"""


@pytest.mark.skipif(glibc() is None, reason="the C library is not glibc")
def test_freed_memory_is_kept_within_and_given_back_after():
    # in a process of its own, whose heap nothing else has touched
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True)
    fresh, first, later, after = json.loads(done.stdout)
    assert later[-1] < fresh / 10 < first
    assert after > fresh / 10


NESTED = SCRIPT.replace("with kept_memory():", "keep_freed_memory()\nwith kept_memory():").replace(
    "import kept_memory", "import keep_freed_memory, kept_memory"
)


@pytest.mark.skipif(glibc() is None, reason="the C library is not glibc")
def test_a_context_does_not_undo_what_the_process_asked_for():
    """The command line keeps freed memory for the whole process; `train` inside it must not end that."""
    done = subprocess.run([sys.executable, "-c", NESTED], capture_output=True, text=True, check=True)
    fresh, _, later, after = json.loads(done.stdout)
    assert later[-1] < fresh / 10 and after < fresh / 10


def test_an_error_within_passes_through():
    with pytest.raises(ZeroDivisionError), kept_memory():
        1 / 0  # noqa: B018
