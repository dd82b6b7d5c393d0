"""Schemathesis over /openapi.json: thousands of generated requests, valid and not, and no 5xx among the answers."""

import re
import subprocess
import sys

import pytest

pytest.importorskip("starlette")
pytest.importorskip("schemathesis", reason="pip install schemathesis")

pytestmark = pytest.mark.slow
CHECKS = (
    "not_a_server_error,status_code_conformance,content_type_conformance,response_schema_conformance,"
    "unsupported_method,allow_header_conformance"
)


def test_no_generated_request_breaks_the_server(served, tmp_path):
    command = [sys.executable, "-m", "schemathesis.cli", "run", served.address + "/openapi.json", "--no-color"]
    command += ["--phases", "coverage,fuzzing", "--max-examples", "130", "--seed", "1", "--checks", CHECKS]
    command += ["--request-timeout", "30", "--continue-on-failure"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=1500)
    assert done.returncode == 0, done.stdout[-5000:]
    counted = re.search(r"(\d+) generated", done.stdout)
    assert counted is not None and int(counted[1]) >= 2_000, done.stdout[-2000:]
