"""Schemathesis against a server: thousands of generated requests, valid and not. Input: a run. Output: counts as JSON.

    python -m benchmarks.serving_schema --run runs/demo [--record benchmarks/results/serving-schema.json]

Every answer is checked: no 5xx, a status and a content type that the OpenAPI document lists, a body of its schema. Needs
the extras serve and serve-test.
"""

import argparse
import json
import re
import subprocess
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

from vlhmm.data.atomic_io import write_atomically

CHECKS = (
    "not_a_server_error,status_code_conformance,content_type_conformance,response_schema_conformance,"
    "unsupported_method,allow_header_conformance"
)


def check_schema(address: str, examples: int = 130, seed: int = 1) -> dict[str, Any]:
    """Return how many requests were made of a running server, and what was wrong with the answers."""
    command = [sys.executable, "-m", "schemathesis.cli", "run", address + "/openapi.json", "--no-color"]
    command += ["--phases", "coverage,fuzzing", "--max-examples", str(examples), "--seed", str(seed)]
    command += ["--checks", CHECKS, "--request-timeout", "70", "--continue-on-failure"]
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:  # schemathesis keeps what it found in its working directory
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=3000)
    counted = re.search(r"(\d+) generated(?:, (\d+) found (\d+) unique failures?)?", done.stdout)
    return {
        "cases": int(counted[1]) if counted else 0,
        "passed": done.returncode == 0,
        "failures": "" if done.returncode == 0 else done.stdout[-5000:],
        "checks": CHECKS.split(","),
        "seconds": round(time.perf_counter() - began, 1),
        "schemathesis": version("schemathesis"),
        "seed": seed,
    }


def main() -> int:
    """Return 0 if every answer was as the document says."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.serving_schema", description=__doc__.splitlines()[0])
    parser.add_argument("--run", required=True, help="a run of vlhmm train")
    parser.add_argument("--examples", type=int, default=130, help="generated per route (default: 130)")
    parser.add_argument("--record", metavar="FILE.json")
    args = parser.parse_args()
    from benchmarks.serving import serving

    with serving(args.run) as (port, _):
        row = check_schema(f"http://127.0.0.1:{port}", args.examples) | {"run": Path(args.run).name}
    written = json.dumps(row, indent=2) + "\n"
    sys.stdout.write(written)
    if args.record:
        write_atomically(args.record, written.encode())
    return 0 if row["passed"] else 1


if __name__ == "__main__":
    sys.exit(main())
