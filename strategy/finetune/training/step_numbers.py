"""Loss and gradients' norm of steps that were computed: they stay on the device until they are read, all at once."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch
from lightning.fabric import Fabric
from torch import Tensor
from torch.optim import Optimizer

from thunder_memsave.fabric.nonfinite import has_scaler
from thunder_memsave.finetune.process.stop import BadStepError
from thunder_memsave.finetune.run_file.config import GuardsConfig
from thunder_memsave.finetune.training.ask_model import sum_over_ranks
from thunder_memsave.finetune.training.guards import BadStep, decides_later, judge
from thunder_memsave.finetune.training.loop_state import LoopState
from thunder_memsave.finetune.training.optimizer import can_skip_on_device, skipped_if


@dataclass(kw_only=True, slots=True)
class Unread:
    """The numbers of one step that no host has read."""

    step: int
    """Finished steps before it."""

    lr: float
    loss: Tensor
    norm: Tensor
    num_not_finite: Tensor
    """Ranks whose gradients are not finite."""

    sums: Tensor
    """What the objective measures, summed over the ranks; may be empty."""

    measured: Callable[[Sequence[float]], Mapping[str, float]]
    """Makes metrics of these sums."""

    is_of_backward: bool
    """Whether backward has updated the weights."""

    metrics: dict[str, Any]
    """The metrics that the step's callbacks get: loss and norm are these tensors until they are read, then numbers."""

    @classmethod
    def of(
        cls,
        fabric: Fabric,
        *,
        total: Tensor,
        weight: Tensor,
        norm: Tensor,
        step: int,
        lr: float,
        is_of_backward: bool = False,
        metrics: Mapping[str, float],
        sums: Tensor | None = None,
        measured: Callable[[Sequence[float]], Mapping[str, float]] = lambda sums: {},
    ) -> Unread:
        """Combine what the ranks know of a step. A collective.

        Args:
            fabric: Its ranks share the step.
            total: This rank's summed loss.
            weight: The weight over all ranks.
            norm: Norm of the gradients.
            step: Finished steps before it.
            lr: Its learning rate.
            is_of_backward: Whether backward has updated the weights.
            metrics: The step's other metrics.
            sums: What this rank's batches sum up to beside the loss.
            measured: Makes metrics of the ranks' sums.
        """
        # In one collective: non-finite gradients may be on one rank only.
        marked = torch.stack([total, (~torch.isfinite(norm)).to(total)])
        if sums is not None:
            marked = torch.cat([marked, sums.to(total)])
        total, num_not_finite, *others = sum_over_ranks(fabric, marked)
        loss = total / weight
        return cls(
            step=step,
            lr=lr,
            is_of_backward=is_of_backward,
            loss=loss,
            norm=norm,
            num_not_finite=num_not_finite,
            sums=torch.stack(others) if others else total.new_zeros(0),
            measured=measured,
            metrics={"grad_norm": norm, "loss": loss, **metrics},
        )

    @property
    def is_bad(self) -> Tensor:
        """Whether loss or gradients are not finite on any rank: 1 or 0 in float32, on the device."""
        return (~torch.isfinite(self.loss) | (self.num_not_finite > 0)).float()

    @property
    def _what_became_of_it(self) -> str:
        if self.is_of_backward:
            return "has updated weights (memory.optimizer_in_backward), which are not saved"
        return "was not taken"

    def refusal(self, reason: str) -> str:
        """Return a message that says why the step was not taken, or is not saved where backward took it."""
        return (
            f"step {self.step + 1} {self._what_became_of_it}: {reason}; lower the learning rate "
            f"(optimizer.init_args.lr; it was {self.lr:.3g} in this step), or check the data."
        )


@dataclass(kw_only=True, slots=True)
class UnreadSteps:
    """The steps since the host has last read the device: taken unless they are bad, which their numbers say."""

    guards: GuardsConfig
    max_nonfinite_skips: int | None
    loop_state: LoopState
    state: dict[str, Any]
    """The state that checkpoints hold."""
    _steps: list[Unread] = field(default_factory=list)
    _is_bad: Tensor | None = None
    """1 on the device if one of the steps is bad, else 0."""

    def may_grow(self, fabric: Fabric, optimizer: Optimizer) -> bool:
        """Tell whether the optimizer may take a step before the host knows if it is bad."""
        return (
            decides_later(self.guards, max_nonfinite_skips=self.max_nonfinite_skips)
            and can_skip_on_device(_inner(optimizer))
            and not has_scaler(fabric.strategy.precision)
        )

    def add(self, step: Unread) -> None:
        """Add a step that was computed."""
        self._steps.append(step)

    def changing_nothing_if_bad(self, optimizer: Optimizer) -> AbstractContextManager[None]:
        """Let the optimizer inside change nothing on the device, if one of the steps is bad."""
        last = self._steps[-1].is_bad
        self._is_bad = last if self._is_bad is None else torch.maximum(self._is_bad, last)
        return skipped_if(_inner(optimizer), self._is_bad)

    def read(self) -> BadStep | None:
        """Read the numbers of the steps and judge them; the judgement that is returned is the last one's.

        Raises:
            BadStepError: the guards end the run at one of them; the state is as of the step before.
        """
        steps, self._steps, self._is_bad, bad = self._steps, [], None, None
        for number, (step, numbers) in enumerate(zip(steps, _read(steps), strict=True)):
            measured = step.measured(numbers.sums)
            step.metrics.update(grad_norm=numbers.norm, loss=numbers.loss, **measured)
            try:
                bad = self._judged(step, numbers)
            except BadStepError:
                for not_taken in steps[number:]:
                    not_taken.metrics.clear()
                self.state["step"] = step.step
                raise
            if bad is None:
                self.loop_state.note_taken(numbers.loss, window=self.guards.spike_window)
        return bad

    def _judged(self, step: Unread, numbers: _Numbers) -> BadStep | None:
        try:
            return judge(
                self.guards,
                self.loop_state,
                loss=numbers.loss,
                norm=numbers.norm,
                is_finite=numbers.is_finite,
                max_nonfinite_skips=self.max_nonfinite_skips,
            )
        except BadStepError as error:
            raise type(error)(step.refusal(error.message)) from None


@dataclass(frozen=True, kw_only=True, slots=True)
class _Numbers:
    """The numbers of one step."""

    loss: float
    norm: float
    is_finite: bool
    """Whether they are on all ranks, and all gradients."""

    sums: Sequence[float]
    """What the objective measures."""


def _read(steps: Sequence[Unread]) -> Iterator[_Numbers]:
    """Yield the numbers of steps, read in one transfer: the host waits for the device, once."""
    if not steps:
        return
    # float64: it holds each of them exactly, and a norm may have more bits than a loss.
    of_steps = [
        torch.stack([t.double() for t in (s.loss, s.norm, s.num_not_finite, *s.sums)])
        for s in steps
    ]
    for loss, norm, num_not_finite, *sums in torch.stack(of_steps).tolist():
        is_finite = math.isfinite(loss) and not num_not_finite
        yield _Numbers(loss=loss, norm=norm, is_finite=is_finite, sums=sums)


def _inner(optimizer: Optimizer) -> Optimizer:
    """Return what Fabric wrapped."""
    return getattr(optimizer, "optimizer", optimizer)
