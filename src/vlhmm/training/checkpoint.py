"""Checkpoints: the position of a run, with everything needed to resume it bit for bit."""

import math
from dataclasses import asdict, dataclass, field

import torch

from vlhmm.components.chain_inputs import FilterState
from vlhmm.errors import CheckpointError
from vlhmm.training.m_step import MStep, NotFinite
from vlhmm.training.run_folder import RunFolder
from vlhmm.training.schedules import Plateau


@dataclass(slots=True)
class Progress:
    """The position of training, without the parameters."""

    step: int = 0
    seconds: float = 0.0  # over all sessions
    plateau: Plateau = field(default_factory=Plateau)
    valid: float | None = None  # perplexity of the last validation
    log_likelihood: float = 0.0  # of the training text since the last validation ...
    tokens: int = 0  # ... and how many tokens that were
    carry: FilterState | None = None  # the state after the last batch, where the next one continues it


def save_checkpoint(folder: RunFolder, at: Progress, m_step: MStep) -> None:
    """Write a checkpoint; NotFinite if a parameter is spoiled, and the last checkpoint is kept."""
    if not all(torch.isfinite(parameter).all() for parameter in m_step.hmm.parameters()):
        raise NotFinite("a parameter")
    tensors = m_step.tensors()
    if at.carry is not None:
        tensors |= {"carry.block": at.carry.block, "carry.alpha": at.carry.alpha}
    best = at.plateau.best if math.isfinite(at.plateau.best) else None
    state = {
        "step": at.step,
        "updates": m_step.updates,
        "seconds": at.seconds,
        "plateau": asdict(at.plateau) | {"best": best},
        "valid": at.valid,
        "log_likelihood": at.log_likelihood,
        "tokens": at.tokens,
        "journal_bytes": folder.journal_size(),
    }
    folder.save_checkpoint(state, tensors)


def restore_checkpoint(folder: RunFolder, m_step: MStep, total_steps: int) -> Progress | None:
    """Restore the last checkpoint. Without one, return None and remove what an earlier run left in the folder."""
    loaded = folder.load_checkpoint()
    if loaded is None:
        folder.truncate_journal(0)
        folder.forget_calibration()
        return None
    state, tensors = loaded
    if state["step"] > total_steps:
        raise CheckpointError(
            f"{folder.checkpoint_path} is at step {state['step']:,}, the run has {total_steps:,}; remove it to start over"
        )
    if state["plateau"]["best"] is not None:
        folder.check_best_model()
    device = next(m_step.hmm.parameters()).device
    try:
        plateau = state["plateau"]
        best = math.inf if plateau["best"] is None else plateau["best"]
        at = Progress(
            step=state["step"],
            seconds=state["seconds"],
            plateau=Plateau(**(plateau | {"best": best})),
            valid=state["valid"],
            log_likelihood=state["log_likelihood"],
            tokens=state["tokens"],
        )
        if "carry.block" in tensors:
            at.carry = FilterState(tensors["carry.block"].to(device), tensors["carry.alpha"].to(device))
        folder.truncate_journal(state["journal_bytes"])
        m_step.restore(tensors, state["updates"])
    except (KeyError, TypeError, RuntimeError) as error:
        raise CheckpointError(
            f"{folder.checkpoint_path} does not fit this run ({error}); remove it to start over"
        ) from None
    return at
