"""Schemathesis over /openapi.json: thousands of generated requests, valid and not, and no 5xx among the answers."""

import pytest

pytest.importorskip("starlette")
pytest.importorskip("schemathesis", reason="pip install schemathesis")

from benchmarks.serving_schema import check_schema  # noqa: E402

pytestmark = pytest.mark.slow


def test_no_generated_request_breaks_the_server(served):
    found = check_schema(served.address)
    assert found["passed"], found["failures"]
    assert found["cases"] >= 2_000
