"""`vlhmm manifest`: check the checksums of a run folder, update them, or remove the calibration."""

from __future__ import annotations

import argparse
from pathlib import Path

from vlhmm.errors import CheckpointError

DESCRIPTION = "Check the files of a run folder against their checksums, or update the checksums."
EPILOG = """\
RUN/manifest.json has a checksum of every file that the model is loaded from. Loading compares them and refuses a file
that differs. Without an option, this command makes the same check.

  --accept               update the checksums, e.g. after editing a file on purpose, or for a folder made by hand
  --remove-calibration   remove calibration.json and its entry, to use the model as it was trained

examples:
  vlhmm manifest runs/mine
  vlhmm manifest runs/mine --remove-calibration
"""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of this verb."""
    parser.add_argument("run_folder", metavar="RUN", help="run folder of vlhmm train or baseline")
    choice = parser.add_mutually_exclusive_group()
    choice.add_argument("--accept", action="store_true", help="update the checksums to the files as they are")
    choice.add_argument("--remove-calibration", action="store_true", help="remove the calibration")


def run(args: argparse.Namespace) -> int:
    """Check or update the manifest; return 0, or 2 if a file is damaged or there is no manifest."""
    from vlhmm.data.atomic_io import claimed
    from vlhmm.data.manifest import MANIFEST, MODEL_FILES, accept_files, check_manifest, read_manifest, remove_listed

    folder = Path(args.run_folder)
    if not (folder / "config.json").is_file():
        raise CheckpointError(f"{folder} is not a run folder: it has no config.json; give a folder made by vlhmm train --out")
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
