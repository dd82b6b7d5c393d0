"""The M-step: move the parameters toward the maximum of the expected log-likelihood.

One AdamW update per E-step is a gradient step on the marginal likelihood, several are generalized EM. A model with
free parameters (scalar) can be set to the maximum in closed form.
"""

from typing import Any

import torch
from torch import Tensor

from vlhmm.hmm import HMM, DropoutMask, ModelPotentials
from vlhmm.inference import Counts
from vlhmm.training.closed_form import maximize
from vlhmm.training.config import TrainingConfig
from vlhmm.training.distributed import Ranks
from vlhmm.training.e_step import Expectation, expected_log_likelihood
from vlhmm.training.unseen_tokens import UnseenTokens


class NotFinite(ArithmeticError):
    """A loss, a gradient or a parameter is not a finite number; the text names it."""


class MStep:
    """The optimizer of a run with the moving average of its weights: what a checkpoint holds beside the model."""

    def __init__(
        self, hmm: HMM, settings: TrainingConfig, unseen: UnseenTokens | None = None, ranks: Ranks | None = None
    ) -> None:
        self.hmm, self.settings, self.unseen, self.ranks = hmm, settings, unseen, ranks or Ranks()
        self.updates = 0
        self.average: dict[str, Tensor] | None = None
        if settings.average:
            self.average = {name: p.detach().clone() for name, p in hmm.named_parameters()}
        # one fused update over all parameters: the same arithmetic in a tenth of the time
        self.optimizer = torch.optim.AdamW(
            decay_groups(hmm, settings), lr=settings.rate, betas=(0.9, settings.beta2), fused=True
        )

    def weights(self) -> dict[str, Tensor]:
        """The weights to evaluate and to save: the averaged ones if there are any."""
        return self.average if self.average is not None else dict(self.hmm.named_parameters())

    def take(self, potentials: ModelPotentials, mask: DropoutMask, expected: Expectation, step: int, rate: float) -> None:
        """Update the parameters from expected counts; `potentials` are those of the E-step under the same mask."""
        settings = self.settings
        if settings.optimizer == "closed-form":
            assert isinstance(expected.counts, Counts)  # low-rank transitions are never scalar
            maximize(self.hmm, expected.counts, expected.pairs, settings.smoothing)
            return
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        num_updates, parts = (settings.m_step_updates, settings.m_step_row_parts) if settings.method == "em" else (1, 1)
        for update in range(num_updates):
            if update:
                potentials = self.hmm.potentials(mask)
            gained = expected_log_likelihood(
                potentials,
                expected.counts,
                expected.pairs,
                value=False,
                tiles=expected.tiles if update == 0 else None,  # later updates have moved the parameters
                part=step * num_updates + update,
                parts=parts,
            )
            self._descend(-gained / expected.tokens)

    def _descend(self, loss: Tensor) -> None:
        """Take one AdamW step along a clipped gradient."""
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        self.ranks.sum_gradients(self.hmm.parameters())
        if self.unseen is not None:
            self.unseen.share_gradients(self.hmm)
        norm = torch.nn.utils.clip_grad_norm_(self.hmm.parameters(), self.settings.clip)
        if not torch.isfinite(norm):
            raise NotFinite("the gradient")
        self.optimizer.step()
        if self.unseen is not None:
            self.unseen.copy_parameters(self.hmm)
        self.updates += 1
        self._update_average()

    @torch.no_grad()
    def _update_average(self) -> None:
        if self.average is None:
            return
        decay = min(self.settings.average, (1 + self.updates) / (10 + self.updates))  # young averages forget faster
        for name, parameter in self.hmm.named_parameters():
            self.average[name].lerp_(parameter, 1 - decay)

    # ---- checkpoint

    def tensors(self) -> dict[str, Tensor]:
        """All tensors that it takes to go on: weights, averages, moments."""
        found: dict[str, Tensor] = {f"model.{name}": p for name, p in self.hmm.named_parameters()}
        if self.average is not None:
            found |= {f"average.{name}": p for name, p in self.average.items()}
        for name, parameter in self.hmm.named_parameters():
            held = self.optimizer.state.get(parameter, {})
            found |= {f"optimizer.{key}.{name}": torch.as_tensor(value) for key, value in held.items()}
        return found

    @torch.no_grad()
    def restore(self, tensors: dict[str, Tensor], updates: int) -> None:
        """Go back to what `tensors` returned; KeyError or RuntimeError if they are another model's."""
        self.updates = updates
        for name, parameter in self.hmm.named_parameters():
            parameter.copy_(tensors[f"model.{name}"])
            if self.average is not None:
                self.average[name].copy_(tensors[f"average.{name}"])
            if f"optimizer.step.{name}" in tensors:
                self.optimizer.state[parameter] = {
                    key: tensors[f"optimizer.{key}.{name}"].to(parameter.device)
                    for key in ("step", "exp_avg", "exp_avg_sq")
                }


def decay_groups(hmm: HMM, settings: TrainingConfig) -> list[dict[str, Any]]:
    """Group the parameters by weight decay: matrices decay, biases and norms do not."""
    groups: dict[float, list[Tensor]] = {}
    for parameter in hmm.parameters():
        decay = settings.weight_decay if parameter.ndim > 1 else 0.0
        groups.setdefault(decay, []).append(parameter)
    return [{"params": parameters, "weight_decay": decay} for decay, parameters in groups.items()]
