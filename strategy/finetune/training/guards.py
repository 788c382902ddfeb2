"""Decides what happens to a step with a bad loss or bad gradients, from what all ranks know."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median
from typing import Literal

from thunder_memsave.finetune.process.stop import BadStepError, LossSpikeError, NotFiniteError
from thunder_memsave.finetune.run_file.config import GuardsConfig
from thunder_memsave.finetune.training.loop_state import LoopState

Action = Literal["skip", "rollback"]

_LEAST_DEVIATION = 0.01
"""Smallest deviation, as a fraction of the median: otherwise any loss would be a spike after near-constant ones."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BadStep:
    """A step that must not be taken, and what to do instead."""

    action: Action
    reason: str
    """Description of its loss or gradients."""


def judge(
    guards: GuardsConfig,
    state: LoopState,
    *,
    loss: float,
    norm: float,
    is_finite: bool,
    max_nonfinite_skips: int | None = None,
) -> BadStep | None:
    """Judge whether a step may be taken; None means yes.

    Args:
        guards: The settings.
        state: Earlier losses and skips; unchanged.
        loss: Loss over all ranks.
        norm: Norm of the gradients, for the message.
        is_finite: Whether the loss and the gradients are finite on all ranks.
        max_nonfinite_skips: Replaces `guards.max_skips` for non-finite steps.

    Raises:
        NotFiniteError: they are not, and the setting is to stop.
        LossSpikeError: the loss is a spike, and the setting is to stop.
    """
    if not is_finite:
        reason = f"its loss is {loss:g} and the norm of its gradients {norm:g}"
        limit = guards.max_skips if max_nonfinite_skips is None else max_nonfinite_skips
        return _bad(guards.nonfinite, reason, state, NotFiniteError, max_skips=limit)
    highest = spike_limit(guards, state)
    if highest is None or loss <= highest:
        return None
    assert guards.loss_spike is not None
    reason = (
        f"its loss is {loss:g}, above {highest:g}, the median of the last {guards.spike_window} losses and "
        f"{guards.spike_threshold:g} times their median deviation"
    )
    return _bad(guards.loss_spike, reason, state, LossSpikeError, max_skips=guards.max_skips)


def spike_limit(guards: GuardsConfig, state: LoopState) -> float | None:
    """Return the largest loss that is not a spike; None with too few losses, or if spikes are not detected."""
    if guards.loss_spike is None or len(state.losses) < guards.spike_window:
        return None
    center = median(state.losses)
    deviation = median(abs(loss - center) for loss in state.losses)
    return center + guards.spike_threshold * max(deviation, _LEAST_DEVIATION * abs(center))


def _bad(
    action: Action | Literal["stop"],
    reason: str,
    state: LoopState,
    error: type[BadStepError],
    *,
    max_skips: int,
) -> BadStep:
    if action == "stop":
        raise error(reason)
    if action == "skip" and state.num_skips >= max_skips:
        raise error(
            f"{reason}, as were those of the {state.num_skips} steps before (guards.max_skips)"
        )
    return BadStep(action=action, reason=reason)


def count_rollbacks(guards: GuardsConfig, state: LoopState, bad: BadStep, *, to_step: int) -> int:
    """Count the rollbacks to a checkpoint, including the one that is due.

    Raises:
        BadStepError: the limit was reached.
    """
    count = 1 + (state.num_rollbacks if state.rolled_back_to == to_step else 0)
    if count > guards.max_skips:
        raise BadStepError(
            f"{bad.reason}, and the run went back to step {to_step} {guards.max_skips} times already (guards.max_skips)"
        )
    return count


def decides_later(guards: GuardsConfig, *, max_nonfinite_skips: int | None) -> bool:
    """Tell whether a bad step may be found after later ones: it ends the run, and they change no weight either."""
    return guards.nonfinite == "stop" and guards.loss_spike is None and max_nonfinite_skips is None
