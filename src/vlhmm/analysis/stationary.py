r"""How much a model uses its states: the long-run share of tokens it would itself generate in each of them.

Input: `HMMDistributions`, the id of <eos>, the context rule. Output: `Usage`, kept in a run's folder.

The share u is the stationary distribution, u = u P, of the chain the model generates text by. Under the rule
"carry" that is P = A. Under "reset" the state after an <eos> is drawn from `start`, whatever came before: with
r_z = p(<eos> | z),

    P(z, z') = (1 - r_z) A(z, z') + r_z start(z').
"""

import hashlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from vlhmm.data.atomic_io import write_atomically
from vlhmm.distributions import HMMDistributions
from vlhmm.errors import DataError

TOLERANCE = 1e-6  # |u P - u|_1 at which u counts as stationary
MAX_ROUNDS = 200
DEFAULT_MEMORY = 6 << 30  # bytes of A that may be kept from round to round, if half of the free memory allows it
CACHE_NAME = "usage.safetensors"
_MIXED = 5  # rounds that the next guess is combined from
_KEYED_BY = ("model.safetensors", "config.json", "blocks.tsv", "calibration.json")

Progress = Callable[[int, float], None]  # rounds done, the last change


class Usage(NamedTuple):
    """The stationary distribution of the states, and how nearly stationary it is."""

    share: Float[Tensor, " state"]  # float64, sums to 1
    rounds: int
    change: float  # |u P - u|_1 in the last round


def restart_probability(distributions: HMMDistributions, eos: int, rule: str) -> Float[Tensor, " state"]:
    """Return p(the chain restarts after z): p(<eos> | z) under "reset", zero under "carry"; float64."""
    restart = torch.zeros(distributions.num_states, dtype=torch.float64, device=distributions.device)
    if rule == "reset":
        restart[distributions.states_of_block[distributions.block_of_word[eos]]] = distributions.emission[eos].double()
    return restart


def stationary(
    distributions: HMMDistributions, eos: int, rule: str, memory: int | None = None, progress: Progress | None = None
) -> Usage:
    """Return u with u P = u, by power iteration. Each round is one product with A: O(S^2 h) unless A fits `memory`.

    Every next guess is the combination of the last rounds whose change is least (Anderson 1965): a third fewer
    rounds than the plain iteration on English text, and it ends on chains that go in circles, too.
    """
    restart, start = restart_probability(distributions, eos, rule), distributions.start.double()
    forward_step = _product(distributions, _spare_memory() if memory is None else memory)
    guess = start / start.sum()
    arrived: list[Tensor] = []
    changes: list[Tensor] = []
    best = Usage(guess, 0, float("inf"))
    for number in range(1, MAX_ROUNDS + 1):
        following = forward_step(guess * (1 - restart)) + (guess @ restart) * start
        following /= following.sum()  # rows of A in float32 sum to one only nearly
        change = float((following - guess).abs().sum())
        if change < best.change:
            best = Usage(following, number, change)
        if progress is not None:
            progress(number, change)
        if change < TOLERANCE:
            break
        arrived, changes = [*arrived, following][-_MIXED:], [*changes, following - guess][-_MIXED:]
        guess = _least_change(arrived, changes)
    return best._replace(rounds=number)


def _least_change(arrived: list[Tensor], changes: list[Tensor]) -> Tensor:
    """Return sum_i w_i arrived_i, where w sums to one and |sum_i w_i changes_i|_2 is least; made a distribution again."""
    if len(arrived) == 1:
        return arrived[0]
    last = changes[-1].cpu()
    differences = torch.stack([last - change.cpu() for change in changes[:-1]], dim=1)
    weights = torch.linalg.lstsq(differences, last[:, None]).solution[:, 0].to(arrived[0].device)
    steps = torch.stack([arrived[-1] - point for point in arrived[:-1]], dim=1)
    guess = (arrived[-1] - steps @ weights).clamp(min=0)
    total = guess.sum()
    return guess / total if bool(torch.isfinite(total) & (total > 0)) else arrived[-1]


def _product(distributions: HMMDistributions, memory: int) -> Callable[[Tensor], Tensor]:
    """Return alpha -> alpha A for one float64 vector, summed in float64 over runs of rows.

    `HMMDistributions.forward_step` on float32 is off by more than the tolerance at 2^15 states, and on float64 it copies all of A.
    The rows are kept where A fits the memory: making them costs ten times as much as reading them, and more for
    the softmax.
    """
    keeps = len(distributions.entered_states) ** 2 * distributions.emission.element_size() <= memory
    held: dict[int, Tensor] = {}

    def forward_step(alpha: Tensor) -> Tensor:
        entered = alpha.new_zeros(len(distributions.entered_states))
        # scaled, so that small shares are not lost in the model's type
        scale = alpha.max().clamp(min=torch.finfo(alpha.dtype).tiny)
        scaled = (alpha / scale).to(distributions.dtype)
        for number, states in enumerate(distributions.row_chunks()):
            if distributions.interrupt is not None:
                distributions.interrupt()
            rows = held[number] if number in held else distributions.entering_rows(states)
            if keeps:
                held[number] = rows
            entered += scaled[states] @ rows
        return torch.zeros_like(alpha).index_copy_(0, distributions.entered_states, entered * scale)

    return forward_step


def _spare_memory() -> int:
    """Return bytes that may be taken without asking."""
    try:
        free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError):
        return 1 << 30
    return min(DEFAULT_MEMORY, free // 2)


# ---- kept in the run's folder


def usage_of(
    model: Any, run: str | Path | None = None, memory: int | None = None, progress: Progress | None = None
) -> Usage:
    """Return the usage of a model's states: read from its run's folder if it is there, else found and written there."""
    key = fingerprint(run, model.rule) if run is not None else None
    if run is not None and key is not None:
        known = read_usage(Path(run) / CACHE_NAME, key)
        if known is not None and len(known.share) == model.distributions.num_states:
            return known._replace(share=known.share.to(model.distributions.device))
    usage = stationary(model.distributions, model.vocabulary.eos, model.rule, memory, progress)
    if run is not None and key is not None:
        write_usage(Path(run) / CACHE_NAME, usage, key)
    return usage


def fingerprint(run: str | Path, rule: str) -> str | None:
    """Return a checksum of everything the usage depends on; None where a file cannot be read."""
    digest = hashlib.blake2b(rule.encode(), digest_size=16)
    try:
        for name in _KEYED_BY:
            path = Path(run) / name
            digest.update(name.encode())
            if name == "calibration.json" and not path.exists():  # not every model has one
                continue
            with open(path, "rb") as stream:
                digest.update(hashlib.file_digest(stream, "blake2b").digest())
    except OSError:
        return None
    return digest.hexdigest()


def read_usage(path: Path, key: str) -> Usage | None:
    """Return what `write_usage` wrote for the same model; None if it is of another, damaged or not there."""
    try:
        with safe_open(path, framework="pt") as file:
            content = file.metadata() or {}
            share = file.get_tensor("share")
            if content.get("model") != key or content.get("share") != _checksum(share):
                return None
            return Usage(share, int(content["rounds"]), float(content["change"]))
    except (OSError, SafetensorError, KeyError, ValueError):
        return None


def write_usage(path: Path, usage: Usage, key: str) -> None:
    """Write the usage to `path` atomically, with checksums of the model and of itself; do nothing if the folder is read-only."""
    share = usage.share.cpu().contiguous()
    content = {"model": key, "share": _checksum(share), "rounds": str(usage.rounds), "change": repr(usage.change)}
    try:
        write_atomically(path, save({"share": share}, content))
    except DataError:
        pass  # a read-only folder: computed again next time


def _checksum(share: Tensor) -> str:
    return hashlib.blake2b(share.numpy().tobytes(), digest_size=16).hexdigest()
