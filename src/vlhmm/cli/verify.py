"""`vlhmm verify`: check that the answers of a trained model are exact."""

from __future__ import annotations

import argparse
from pathlib import Path

from vlhmm.cli.common import log_to
from vlhmm.cli.numbers import count
from vlhmm.cli.options import ResultWriter, add_query_options, load_model

DESCRIPTION = "Check on a trained model that its answers are exact."
EPILOG = """\
First, the files of the run are compared with manifest.json. Each check then computes one number in two ways that share
as little code as possible, on texts drawn from the model: next-word probabilities sum to one; the chain rule gives the
score; posteriors and best paths equal those from enumerating all paths of a short string; word posteriors equal
rescoring; backward messages agree with forward ones; float32 agrees with float64. The largest deviation of each check
is printed. The exit code is 1 if one is out of bounds.

examples:
  vlhmm verify runs/mine
  vlhmm verify runs/mine --texts 10 --seed 7 --format json
"""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of this verb."""
    add_query_options(parser, "text", "json")
    parser.add_argument("--texts", type=count(1, 10_000), default=3, metavar="N", help="number of texts to check on (default: 3)")


def run(args: argparse.Namespace) -> int:
    """Run the checks; return 0 if all are within bounds, else 1."""
    from vlhmm.analysis.verify import verify
    from vlhmm.data.manifest import read_manifest

    folder, log = Path(args.run_folder), log_to(args.quiet)
    model = load_model(args)  # which checks them, and refuses a damaged one
    listed = read_manifest(folder)
    files = {"manifest": listed is not None, "files": sorted(listed or {})}
    said = f"ok    {len(listed):,} files match manifest.json" if listed else "none  no manifest.json: files not checked"
    checks = verify(model, args.texts, args.seed, lambda name: log(f"checking: {name}"))
    passed = all(check.passed for check in checks)
    record = {"passed": passed, **files, "checks": [{**check._asdict(), "passed": check.passed} for check in checks]}
    lines = [
        f"{'ok  ' if check.passed else 'FAIL'}  {check.name:<52}  largest deviation {check.deviation:.2e}  "
        f"bound {check.bound:.0e}  {check.cases:,} numbers"
        for check in checks
    ]
    ResultWriter(args.format, single=True)(record, [said, *lines, "all exact" if passed else "OUT OF BOUNDS"])
    return 0 if passed else 1
