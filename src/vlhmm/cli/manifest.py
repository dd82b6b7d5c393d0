"""`vlhmm manifest`: the checksums of a run folder, checked, accepted anew, or without the calibration."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from vlhmm.cli.common import verb_parser
from vlhmm.errors import CheckpointError

EPILOG = """\
RUN/manifest.json has a checksum of every file that makes the model. Loading a model checks them; a file that differs is
named and refused. Without an option this command does only that check.

  --accept               record the files as they are now: after editing one on purpose, or for a folder made by hand
  --remove-calibration   remove calibration.json and its entry: the model is then used as it was trained

examples:
  vlhmm manifest runs/mine
  vlhmm manifest runs/mine --remove-calibration
"""


def add_parser(subparsers: Any) -> argparse.ArgumentParser:
    """The parser of this verb, added to `subparsers`."""
    parser = verb_parser(
        subparsers,
        "manifest",
        "check or renew the checksums of a run folder",
        "Check the files of a run folder against their checksums, or record them anew.",
        EPILOG,
    )
    parser.add_argument("run_folder", metavar="RUN", help="a run of vlhmm train or vlhmm baseline")
    choice = parser.add_mutually_exclusive_group()
    choice.add_argument("--accept", action="store_true", help="record the files as they are now")
    choice.add_argument("--remove-calibration", action="store_true", help="use the model without its calibration")
    parser.set_defaults(run=run)
    return parser


def run(args: argparse.Namespace) -> int:
    """0 when the files match, or are recorded; 2 when one is damaged or there is no manifest."""
    from vlhmm.data.atomic_io import claimed
    from vlhmm.data.manifest import MANIFEST, MODEL_FILES, accept_files, check_manifest, read_manifest, remove_listed

    folder = Path(args.run_folder)
    if not (folder / "config.json").is_file():
        raise CheckpointError(f"{folder} is no run: it has no config.json; give a folder made by vlhmm train --out")
    if not (args.accept or args.remove_calibration):
        if not check_manifest(folder):
            return 2
        listed = read_manifest(folder) or {}
        print(f"{folder}: {len([name for name in MODEL_FILES if name in listed])} files match {MANIFEST}")
        return 0
    with claimed(folder) as ours:
        if not ours:
            raise CheckpointError(f"another process is training in {folder}; wait for it")
        if args.accept:
            print(f"{folder}: {MANIFEST} lists {', '.join(accept_files(folder))}")
        else:
            check_manifest(folder, except_for=("calibration.json",))
            was_there = (folder / "calibration.json").exists()
            remove_listed(folder, "calibration.json")
            print(f"{folder}: {'the calibration is removed' if was_there else 'there is no calibration'}; the model is as it was trained")
    return 0
