import resource

import pytest
import torch

from vlhmm.memory import glibc, kept_memory

MEGABYTES = 64


def faults_of_a_step() -> int:
    """Pages that the system had to hand out for one large table, made and freed."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    torch.ones(MEGABYTES << 18)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


@pytest.mark.skipif(glibc() is None, reason="the C library is not glibc")
def test_freed_memory_is_kept_within_and_given_back_after():
    fresh = faults_of_a_step()
    with kept_memory():
        faults_of_a_step()
        assert faults_of_a_step() < fresh / 2
    assert faults_of_a_step() > fresh / 2


@pytest.mark.skipif(glibc() is None, reason="the C library is not glibc")
def test_an_error_within_restores_what_was():
    fresh = faults_of_a_step()
    with pytest.raises(ZeroDivisionError), kept_memory():
        1 / 0  # noqa: B018
    assert faults_of_a_step() > fresh / 2
