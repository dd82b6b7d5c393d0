"""One rank of test_distributed.py: trains every scenario in a folder, or dies on the way."""

import os
import signal
import sys
import time
from pathlib import Path

import torch

from vlhmm.config import override
from vlhmm.data.corpora import load_texts
from vlhmm.data.text import encode
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
    "guided": ["distillation.weight=1"],
    "guided-text": ["distillation.weight=1", "distillation.text=600", "training.extra_tokens=200"],
    "guided-streams": [
        "distillation.weight=1", "training.context=carry", "training.batch=streams", "training.num_streams=7",
        "training.segment_length=90",
    ],
}  # fmt: skip


class Counting:
    """A teacher whose vector after a word tells the word and how often it occurred in the row before."""

    def __init__(self, vocabulary):
        self.vocabulary = vocabulary

    def vectors_after(self, tokens):
        seen = (tokens[:, :, None] == tokens[:, None, :]).tril().sum(-1)
        return torch.stack([(tokens * 0.7).sin(), (tokens * 1.3).cos(), seen.float().sqrt()], dim=-1)

    def sample(self, num_tokens, generator, *, progress):
        words = torch.randint(2, len(self.vocabulary), (num_tokens // 4, 3), generator=generator)
        return encode([[self.vocabulary.words[i] for i in line] for line in words.tolist()], self.vocabulary)


def config_of(scenario: str):
    return override(preset("tiny"), [*SMALL, "training.calibrate=false", *SCENARIOS[scenario]])


def corpus_of(folder: Path, scenario: str):
    return load_texts(folder / ("prepared" if scenario == "prepared" else "train.txt"), folder / "valid.txt")


def stop_after(steps: int):
    count = iter(range(1_000_000))
    return lambda: next(count) >= steps


def run(folder: Path, scenario: str, out: Path, **more):
    corpus = corpus_of(folder, scenario)
    teacher = Counting(corpus.vocabulary) if scenario.startswith("guided") else None
    return train(corpus, config_of(scenario), out, teacher=teacher, **more)


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
