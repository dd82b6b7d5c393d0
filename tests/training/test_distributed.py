"""Several processes: they train as one does, go on in any number, and end together when one dies."""

import json
import os
import random
import shutil
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from distributed_worker import SCENARIOS, STREAMS, config_of, run, stop_after
from torch.distributed import TCPStore

from vlhmm.components.chain_inputs import FilterState
from vlhmm.config import override
from vlhmm.data.batches import sentence_batches, stream_batches
from vlhmm.data.corpora import load_texts
from vlhmm.data.prepared import prepare
from vlhmm.errors import ConfigError
from vlhmm.training import distributed
from vlhmm.training.distributed import Ranks, check_settings

WORKER = Path(__file__).with_name("distributed_worker.py")


def rank_of(rank: int, size: int) -> Ranks:
    """One of several ranks, without the others."""
    ranks = Ranks()
    ranks.rank, ranks.size = rank, size
    return ranks


def write_texts(folder: Path) -> None:
    draw, words = random.Random(1), [f"w{i}" for i in range(50)]
    for name, count in (("train", 500), ("valid", 40)):
        lines = (" ".join(draw.choices(words[: 20 + i % 30], k=1 + i % 9)) for i in range(count))
        (folder / f"{name}.txt").write_text("".join(f"{line}\n" for line in lines))
    prepare([folder / "train.txt"], folder / "prepared", shard_tokens=1000)


def start(size: int, folder: Path, mode: str) -> tuple[list[subprocess.Popen], TCPStore]:
    """The ranks, and the store they meet at: it lives here, as under torchrun it lives in the launcher."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    common = {
        "WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True", "OMP_NUM_THREADS": "1",
    }  # fmt: skip
    processes = [
        subprocess.Popen(
            [sys.executable, str(WORKER), str(folder), mode],
            env={**os.environ, **common, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(size)
    ]
    return processes, store


def last_check(folder: Path) -> dict:
    events = [json.loads(line) for line in (folder / "journal.jsonl").read_text().splitlines()]
    return [event for event in events if event["event"] == "check"][-1]


def assert_same_training(one: Path, other: Path) -> None:
    """The same log-likelihoods, relative 1e-6. Single parameters differ: Adam turns rounding into steps where the
    gradient is zero."""
    a, b = last_check(one), last_check(other)
    assert a["step"] == b["step"]
    for name in [name for name in a if name.startswith("train") or name == "valid"]:
        assert np.log(a[name]) == pytest.approx(np.log(b[name]), rel=1e-6), name


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A folder with every scenario trained by one, two and three processes."""
    folder = tmp_path_factory.mktemp("ranks")
    write_texts(folder)
    for scenario in SCENARIOS:
        run(folder, scenario, folder / f"{scenario}-1")
    for scenario in ("em", "carry"):
        run(folder, scenario, folder / f"{scenario}-for-2", should_stop=stop_after(8))
        shutil.copytree(folder / f"{scenario}-for-2", folder / f"{scenario}-for-3")
    for size in (2, 3):
        processes, store = start(size, folder, "train")
        for rank, process in enumerate(processes):
            _, errors = process.communicate(timeout=500)
            assert process.returncode == 0, f"rank {rank} of {size}: {errors}"
    return folder


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_processes_train_as_one(runs, scenario, size):
    assert_same_training(runs / f"{scenario}-1", runs / f"{scenario}-{size}")
    assert sorted(path.name for path in (runs / f"{scenario}-{size}").iterdir()) == sorted(
        path.name for path in (runs / f"{scenario}-1").iterdir()
    )


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("scenario", ["em", "carry"])
def test_a_run_goes_on_in_another_number_of_processes(runs, scenario, size):
    assert_same_training(runs / f"{scenario}-1", runs / f"{scenario}-for-{size}")
    stopped = runs / f"{scenario}-stopped-by-{size}"
    assert last_check(stopped)["step"] <= 8
    run(runs, scenario, stopped)
    assert_same_training(runs / f"{scenario}-1", stopped)


@pytest.mark.parametrize("late", [None, 0, 2])
def test_a_dead_rank_ends_the_others_with_one_line(tmp_path, late):
    """Whoever notices late finds others ended that only followed: it must neither name them nor speak."""
    write_texts(tmp_path)
    processes, store = start(3, tmp_path, "die" if late is None else f"die-{late}-late")
    errors = [process.communicate(timeout=300)[1] for process in processes]
    took = time.time() - float((tmp_path / "died").read_text())
    assert [process.returncode for process in processes] == [1, -9, 1]
    (line,) = "".join(errors).splitlines()
    assert line.startswith("vlhmm: rank 1 of 3 has ended; the last checkpoint is kept")
    assert took < 60  # seconds; two on an idle machine, and those that `late` waits


def test_where_the_store_is_lost_the_first_living_rank_speaks(monkeypatch):
    class Gone:
        def set_timeout(self, timeout):
            raise RuntimeError("Broken pipe")

    monkeypatch.setattr(distributed, "_store", Gone())
    assert [rank_of(rank, 3)._noticed_first(1) for rank in (1, 2)] == [True, False]


@pytest.mark.parametrize("size", [2, 3, 5])
def test_every_row_has_one_rank(tmp_path, size):
    write_texts(tmp_path)
    text = load_texts(tmp_path / "train.txt", tmp_path / "valid.txt").train
    for batches in (
        sentence_batches(text, 100),
        sentence_batches(text, 1),
        stream_batches(text, 5, 30, 0, "carry"),
    ):
        rows = [[] for _ in range(size)]
        for rank in range(size):
            ranks = rank_of(rank, size)
            share = ranks.share(batches)
            assert share and ranks.share(batches) is share
            for batch in share:
                rows[rank] += [tuple(row[:n].tolist()) for row, n in zip(batch.tokens, batch.lengths, strict=True) if n]
        everything = [tuple(r[:n].tolist()) for b in batches for r, n in zip(b.tokens, b.lengths, strict=True) if n]
        assert sorted(sum(rows, [])) == sorted(everything)
        tokens = [sum(map(len, part)) for part in rows]
        assert batches[-1].continues or max(tokens) < 1.1 * min(tokens)
    lines = [rank_of(rank, size).lines(text) for rank in range(size)]
    assert sorted(tuple(t.sentence(i)) for t in lines for i in range(t.num_sentences)) == sorted(
        tuple(text.sentence(i)) for i in range(text.num_sentences)
    )


def test_a_single_process_exchanges_nothing():
    ranks = Ranks()
    assert (ranks.rank, ranks.size, ranks.is_first) == (0, 1, True)
    assert ranks.sum(0.1) == 0.1 and ranks.agreed(2) == 2 and ranks.of_first(3.0) == 3.0
    batches = []
    assert ranks.share(batches) is batches
    carry = FilterState(torch.tensor([1, 2, 3]), torch.rand(3, 4))
    assert ranks.whole_carry(carry, streams=False) is carry and ranks.own_carry(carry) is carry
    assert torch.equal(rank_of(1, 2).own_carry(carry).block, torch.tensor([2]))


@pytest.mark.parametrize(
    "changes, message",
    [
        (["training.optimizer=closed-form", "model.parameterization=scalar", "training.state_dropout=0"], "closed-form"),
        (STREAMS, "num_streams=7 is fewer than the 8 ranks"),
    ],
)
def test_what_ranks_cannot_do_is_refused(changes, message):
    config = override(config_of("em"), changes)
    with pytest.raises(ConfigError, match=message):
        check_settings(config, rank_of(0, 8))
    check_settings(config, Ranks())
