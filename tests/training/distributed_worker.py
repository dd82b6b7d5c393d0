"""One rank of test_distributed.py: trains every scenario in a folder, or dies on the way."""

import os
import signal
import sys
import time
from pathlib import Path

from vlhmm.config import override
from vlhmm.data.corpora import load_texts
from vlhmm.errors import VlhmmError
from vlhmm.training.distributed import Ranks, join, leave
from vlhmm.training.presets import preset
from vlhmm.training.trainer import train

SMALL = ["model.num_states=32", "model.num_blocks=4", "training.epochs=10", "training.checks_per_epoch=1"]
STREAMS = ["training.method=gradient", "training.batch=streams", "training.num_streams=7", "training.segment_length=90"]
SCENARIOS = {
    "em": [],
    "calibrated": ["training.calibrate=true", "training.epochs=2"],
    "low-rank": ["model.within=low-rank"],
    "softmax": ["model.transition=softmax", *STREAMS],
    "carry": ["training.context=carry", *STREAMS],
    "one-row": ["training.batch_tokens=1", "training.method=gradient", "training.epochs=0.02"],  # ranks without rows
    "prepared": ["training.em_tokens=700", "training.epochs=2"],
}


def config_of(scenario: str):
    return override(preset("tiny"), [*SMALL, "training.calibrate=false", *SCENARIOS[scenario]])


def corpus_of(folder: Path, scenario: str):
    return load_texts(folder / ("prepared" if scenario == "prepared" else "train.txt"), folder / "valid.txt")


def stop_after(steps: int):
    count = iter(range(1_000_000))
    return lambda: next(count) >= steps


def run(folder: Path, scenario: str, out: Path, **more):
    return train(corpus_of(folder, scenario), config_of(scenario), out, **more)


def notice_late() -> None:
    """Look who has ended only when all others have."""
    at_once = Ranks._lost

    def lost(ranks: Ranks, error: RuntimeError | None) -> None:
        since = time.monotonic()
        while len(ranks._ended()) < ranks.size - 1 and time.monotonic() - since < 20:
            time.sleep(0.05)
        at_once(ranks, error)

    Ranks._lost = lost


def main(folder: Path, mode: str) -> int:
    join("cpu")
    ranks = Ranks()
    try:
        if mode.startswith("die"):
            if mode == f"die-{ranks.rank}-late":
                notice_late()

            def die_at_fourth() -> bool:
                if ranks.rank == 1 and next(asked) == 3:
                    (folder / "died").write_text(str(time.time()))
                    os.kill(os.getpid(), signal.SIGKILL)
                return False

            asked = iter(range(100))
            run(folder, "em", folder / "dead", should_stop=die_at_fourth)
        else:
            for scenario in SCENARIOS:
                run(folder, scenario, folder / f"{scenario}-{ranks.size}")
            for scenario in ("em", "carry"):
                run(folder, scenario, folder / f"{scenario}-stopped-by-{ranks.size}", should_stop=stop_after(8))
                run(folder, scenario, folder / f"{scenario}-for-{ranks.size}")  # stopped by one process
        leave()
    except VlhmmError as error:
        print(f"vlhmm: {error}", file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2]))
