"""Keeps what a trial showed: `python docs/record_trial.py RUN exp-NAME 'COMMAND' 'NOTE'` -> results/trials/exp-NAME.json, .jsonl.

Numbers come from the run's own journal and settings, the command and the note from you. Run it in the checkout that
trained the run, for the commit's sake.
"""

import json
import sys
from pathlib import Path

from benchmarks.machine import commit, describe
from vlhmm.data.atomic_io import write_atomically

RESULTS = Path(__file__).resolve().parent.parent / "results" / "trials"


def trial(run: Path, name: str, command: str, note: str) -> dict:
    """Return the record of a run folder, finished or not."""
    config = json.loads((run / "config.json").read_text(encoding="utf-8"))
    events = [json.loads(line) for line in (run / "journal.jsonl").read_text(encoding="utf-8").splitlines()]
    checks = [event for event in events if event["event"] == "check"]
    last = {event["event"]: event for event in events}
    calibrated, machine = last.get("calibrated", {}), describe(None)
    return {
        "name": name,
        "command": command,
        "commit": commit(),
        "seed": config["training"]["seed"],
        "machine": f"{machine['processor']}, {machine['cores']} cores",
        "num_states": config["model"]["num_states"],
        "num_blocks": config["model"]["num_blocks"],
        "context": config["training"]["context"],
        "valid": min(check["valid"] for check in checks),
        "valid_calibrated": calibrated.get("valid"),
        "calibration": {factor: calibrated[factor] for factor in ("emission", "transition", "within") if factor in calibrated} or None,
        "train_under_dropout": checks[-1].get("train_under_dropout"),
        "steps": checks[-1]["step"],
        "finished": "finished" in last,
        "wall_seconds": checks[-1]["seconds"],
        "note": note,
    }  # fmt: skip


if __name__ == "__main__":
    folder, name, command, note = sys.argv[1:]
    record = trial(Path(folder), name, command, note)
    write_atomically(RESULTS / f"{name}.json", (json.dumps(record, indent=1, ensure_ascii=False) + "\n").encode())
    write_atomically(RESULTS / f"{name}.jsonl", (Path(folder) / "journal.jsonl").read_bytes())
