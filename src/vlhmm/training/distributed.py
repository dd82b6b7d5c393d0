"""One run in several processes: every rank takes a share of each step's rows, and gradients are summed.

The processes are started by `torchrun`, and talk through `torch.distributed` (gloo on CPUs, NCCL on GPUs). The expected
log-likelihood of a step is a sum over its rows, so the sum of the ranks' gradients is its gradient:

    grad Q(theta) = sum_r grad Q_r(theta)

Dropout masks, the order of the text and the first parameters are functions of (seed, step): every rank draws the same
ones. Exchanged are, per update, the gradients (4 bytes per parameter), and per step a few numbers. Log-likelihoods are
added up in float64 in the order of ranks, so that a run is bit-identical for a given number of ranks, and equal up to
rounding for another one. Rank 0 alone writes. All ranks read the same run folder.
"""

import atexit
import os
import socket
import sys
import time
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import NoReturn, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from vlhmm.components.chain_inputs import FilterState
from vlhmm.data.batches import Batch
from vlhmm.data.text import Text
from vlhmm.errors import ConfigError, TrainingError
from vlhmm.training.config import RunConfig
from vlhmm.training.e_step import Expectation
from vlhmm.training.run_folder import RunFolder

TIMEOUT = timedelta(hours=6)  # rank 0 clusters the words while the others wait
PATIENCE = timedelta(seconds=10)  # with the store, when a rank is lost: the machine that has it may be lost too
Result = TypeVar("Result")

_store: dist.Store | None = None  # where the ranks met; under torchrun it is the launcher's, and outlives them


class Ranks:
    """The processes of one run. With a single process nothing is exchanged and nothing changes."""

    def __init__(self) -> None:
        started = dist.is_available() and dist.is_initialized()
        self.rank, self.size = (dist.get_rank(), dist.get_world_size()) if started else (0, 1)
        self._shared: tuple[list[Batch], list[Batch]] | None = None
        self._peers: list[tuple[int, int]] = []  # (host, process id) of every rank
        if self.size > 1:
            here = torch.tensor([zlib.crc32(socket.gethostname().encode()), os.getpid()], dtype=torch.int64)
            self._peers = [(int(host), int(pid)) for host, pid in self._gathered(here)]

    @property
    def is_first(self) -> bool:
        """Return whether this process writes and prints."""
        return self.rank == 0

    # ---- what each rank reads

    def share(self, batches: list[Batch]) -> list[Batch]:
        """Return this rank's rows of a step's batches; equal batches give the same objects, in whichever list they come."""
        if self.size == 1:
            return batches
        last = self._shared[0] if self._shared is not None else []
        if self._shared is None or len(last) != len(batches) or any(a is not b for a, b in zip(last, batches, strict=True)):
            parts = [self._part(batch, rows) for batch, rows in zip(batches, self._rows(batches), strict=True)]
            self._shared = batches, [part for part in parts if len(part.lengths)] or [_nothing(batches[0])]
        return self._shared[1]

    def share_of_tokens(self, table: Tensor, number: int, batches: list[Batch]) -> Tensor | None:
        """Return the rows of a table with one row per token (padding included) of `batches[number]` that belong to this
        rank's part of it, as `share` cuts it; None where it has no part."""
        if self.size == 1:
            return table
        batch, rows = batches[number], self._rows(batches)[number]
        part = self._part(batch, rows)
        if not len(part.lengths):
            return None
        width = part.tokens.shape[1]
        return table.unflatten(0, batch.tokens.shape)[rows, :width].flatten(0, 1).clone()

    def _rows(self, batches: list[Batch]) -> list[slice]:
        """Return this rank's rows of each batch."""
        # streams keep their rank, which has their state; sentences take turns, as the first row is the longest
        streams = any(batch.continues for batch in batches)
        return [slice((self.rank + (0 if streams else n)) % self.size, None, self.size) for n in range(len(batches))]

    def _part(self, batch: Batch, rows: slice) -> Batch:
        lengths = batch.lengths[rows]
        width = max(1, int(lengths.max())) if len(lengths) else 1
        return Batch(batch.tokens[rows, :width], lengths, batch.restart[rows, :width], batch.continues)

    def lines(self, text: Text) -> Text:
        """Return this rank's lines of a text; OOV words and bytes are not counted and set to 0."""
        numbers = np.arange(self.rank, text.num_sentences, self.size)
        starts, ends = text.offsets[numbers], text.offsets[numbers + 1]
        tokens = [text.tokens[a:b] for a, b in zip(starts, ends, strict=True)]
        offsets = np.concatenate([[0], np.cumsum(ends - starts)]).astype(np.int64)
        return Text(np.concatenate([text.tokens[:0], *tokens]), offsets, 0, 0, 0)

    # ---- what they exchange

    def sum(self, value: float) -> float:
        """Return the sum over ranks, added up in float64 in their order."""
        if self.size == 1:
            return value
        total = 0.0
        for each in self._gathered(torch.tensor([value], dtype=torch.float64)):
            total += float(each[0])
        return total

    def add_up(self, expected: Expectation) -> Expectation:
        """Return an E-step's result with the log-likelihood and tokens of all ranks; counts stay on each rank."""
        if self.size == 1:
            return expected
        tokens = round(self.sum(expected.tokens))
        return expected._replace(log_likelihood=self.sum(expected.log_likelihood), tokens=tokens)

    def sum_gradients(self, parameters: Iterable[Tensor]) -> None:
        """Replace every gradient by the sum over ranks: one exchange of 4 bytes per parameter."""
        if self.size == 1:
            return
        every = list(parameters)
        has = torch.tensor([float(p.grad is not None) for p in every], device=every[0].device)
        flat = torch.cat([has, *((p.grad if p.grad is not None else torch.zeros_like(p)).flatten() for p in every)])
        self._talk(lambda: dist.all_reduce(flat))
        place = len(every)
        for count, parameter in zip(flat[: len(every)].tolist(), every, strict=True):
            size = parameter.numel()
            if count:  # a parameter that no rank has a gradient for is not updated, as in one process
                parameter.grad = flat[place : place + size].view_as(parameter)
            place += size

    def agreed(self, code: int) -> int:
        """Return the largest number that any rank has: whether to stop, and why."""
        return code if self.size == 1 else max(int(each[0]) for each in self._gathered(torch.tensor([code])))

    def of_first(self, value: float) -> float:
        """Return the number that rank 0 has, for decisions that depend on the clock or on rounding."""
        if self.size == 1:
            return value
        box = torch.tensor([value], dtype=torch.float64)
        self._talk(lambda: dist.broadcast(box, 0))
        return float(box[0])

    @contextmanager
    def first_before_others(self) -> Iterator[None]:
        """Run the block on rank 0 first, then on the others."""
        if not self.is_first:
            self.wait()
        yield
        if self.is_first:
            self.wait()

    def wait(self) -> None:
        """Wait until every rank is here."""
        self.agreed(0)

    def whole_carry(self, carry: FilterState | None, streams: bool) -> FilterState | None:
        """Gather the carried state of all streams from the ranks; sentences carry none."""
        if carry is None or self.size == 1:
            return carry
        if not streams:
            return None
        counts = [int(each[0]) for each in self._gathered(torch.tensor([len(carry.block)]))]
        most = max(counts)
        block = torch.full((most,), -1, dtype=carry.block.dtype)
        alpha = carry.alpha.new_zeros(most, carry.alpha.shape[1])
        block[: len(carry.block)], alpha[: len(carry.block)] = carry.block, carry.alpha
        blocks, alphas = self._gathered(block), self._gathered(alpha)
        whole = FilterState(block.new_full((sum(counts),), -1), alpha.new_zeros(sum(counts), alpha.shape[1]))
        for rank, count in enumerate(counts):
            whole.block[rank :: self.size] = blocks[rank][:count]
            whole.alpha[rank :: self.size] = alphas[rank][:count]
        return whole

    def own_carry(self, carry: FilterState | None) -> FilterState | None:
        """Return this rank's rows of the carried state of all streams."""
        if carry is None or self.size == 1:
            return carry
        return FilterState(carry.block[self.rank :: self.size].clone(), carry.alpha[self.rank :: self.size].clone())

    def _gathered(self, tensor: Tensor) -> list[Tensor]:
        gathered = [torch.empty_like(tensor) for _ in range(self.size)]
        self._talk(lambda: dist.all_gather(gathered, tensor))
        return gathered

    def _talk(self, exchange: Callable[[], Result]) -> Result:
        try:
            return exchange()
        except RuntimeError as error:  # gloo notices at once when the other end of a connection is gone
            self._lost(error)

    # ---- a rank that has died

    def check_peers(self) -> None:
        """Raise if another rank on this machine has ended."""
        if self.size > 1 and self._ended():
            self._lost(None)

    def _ended(self) -> list[int]:
        here = self._peers[self.rank][0] if self._peers else None
        return [r for r, (host, pid) in enumerate(self._peers) if host == here and r != self.rank and not _lives(pid)]

    def _lost(self, error: RuntimeError | None) -> NoReturn:
        ended, since = self._ended(), time.monotonic()
        while not ended and time.monotonic() - since < 5.0:  # a connection may close before its process has ended
            time.sleep(0.05)
            ended = self._ended()
        alive = [rank for rank in range(self.size) if rank not in ended]
        elsewhere = [rank for rank in alive if self._peers and self._peers[rank][0] != self._peers[self.rank][0]]
        if ended:
            names = ", ".join(map(str, ended))
            who = f"rank {names} of {self.size} has ended" if len(ended) == 1 else f"ranks {names} of {self.size} have ended"
        elif elsewhere:
            who = f"the connection to rank {' or '.join(map(str, elsewhere))} of {self.size}, on another machine, is lost"
        else:
            who = f"the connection to another of {self.size} ranks is lost ({str(error).splitlines()[0][:120] if error else ''})"
        message = f"{who}; the last checkpoint is kept, and the same command resumes from there, with any number of ranks"
        atexit.register(_end_at_once)
        if self._noticed_first(min(alive)):
            raise TrainingError(message) from None
        raise SystemExit(TrainingError.exit_code) from None  # one rank says it

    def _noticed_first(self, otherwise: int) -> bool:
        """Return whether no other rank has noticed the loss before. Without an answer, whether this is rank `otherwise`.

        Every rank counts itself after it has looked who has ended, and before it ends. So the first one has not seen any that
        ended because of the loss, however the system orders them.
        """
        if _store is not None:
            try:
                _store.set_timeout(PATIENCE)
                return _store.add(f"vlhmm/lost/{os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}", 1) == 1
            except RuntimeError:  # the store has gone with its process or machine
                pass
        return self.rank == otherwise


def _end_at_once() -> None:
    """End this process without destructors: those of gloo's threads abort it now and then once a connection is lost."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(TrainingError.exit_code)


def _lives(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            return file.read().rpartition(")")[2].split()[0] not in ("Z", "X")
    except FileNotFoundError:
        return not os.path.isdir("/proc/self")  # without /proc nothing is known
    except OSError:
        return True


def _nothing(like: Batch) -> Batch:
    """Return one row without tokens, for a rank that a short step leaves without any."""
    restart = torch.ones(1, 1, dtype=torch.bool)
    return Batch(like.tokens.new_zeros(1, 1), like.lengths.new_zeros(1), restart, continues=False)


def under_torchrun() -> bool:
    """Return whether this process is one of several that torchrun has started."""
    return int(os.environ.get("WORLD_SIZE", "1")) > 1 and "RANK" in os.environ and "MASTER_ADDR" in os.environ


def join(device: str) -> None:
    """Join the processes that torchrun has started; nothing without it, or a second time."""
    global _store
    if not under_torchrun() or dist.is_initialized():
        return
    try:
        _store, rank, size = next(dist.rendezvous("env://", timeout=TIMEOUT))
        backend = "nccl" if device.startswith("cuda") else "gloo"
        dist.init_process_group(backend, store=dist.PrefixStore("vlhmm", _store), rank=rank, world_size=size, timeout=TIMEOUT)
    except (RuntimeError, ValueError) as error:
        address = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
        raise TrainingError(f"cannot reach the other ranks at {address}: {str(error).splitlines()[0][:160]}") from None


def leave() -> None:
    """Close the connections; nothing where there are none."""
    global _store
    _store = None
    if dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()


def check_settings(config: RunConfig, ranks: Ranks) -> None:
    """Refuse what several processes cannot train together."""
    if ranks.size == 1:
        return
    training = config.training
    if training.optimizer == "closed-form":
        raise ConfigError(
            "training.optimizer=closed-form needs the counts of all ranks at once; start it without torchrun, or take adamw"
        )
    if training.batch == "streams" and training.num_streams < ranks.size:
        raise ConfigError(
            f"training.num_streams={training.num_streams} is fewer than the {ranks.size} ranks, which share the streams; "
            f"start at most {training.num_streams}"
        )


class OtherRunFolder(RunFolder):
    """The run's folder for the ranks that only read it."""

    def save_model(self, weights: dict[str, Tensor]) -> None:
        pass

    def save_calibration(self, factors: object) -> None:
        pass

    def forget_calibration(self) -> None:
        pass

    def save_checkpoint(self, state: dict[str, object], tensors: dict[str, Tensor]) -> None:
        pass

    def journal(self, event: dict[str, object]) -> None:
        pass

    def truncate_journal(self, size: int) -> None:
        pass
