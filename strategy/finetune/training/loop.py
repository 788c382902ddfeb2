"""The training loop: rows in, optimizer steps out; everything else is done by Fabric callbacks.

`callbacks/hooks.py` lists the hooks and their arguments. `metrics` is one dict for all callbacks of a
hook: those that measure add to it, so they come before those that write in `Fabric(callbacks=[...])`.
A step has `loss`, `grad_norm`, `epoch` and an evaluation `val_loss`, and both have the objective's
other metrics. Only `LoopPlan.objective` knows what a row means.

A step that the guards leave out has a non-finite `loss` or `grad_norm`, or a loss spike.

`control.stop(reason)` ends the training after the step, on all ranks, whichever rank asked; the last step
is then evaluated and saved as usual; after a signal (see `signals`) it is only saved. A callback with
`state_dict` and `load_state_dict` is part of checkpoints: rank 0's callback is saved, and
every rank loads that state.
"""

from __future__ import annotations

import logging
import math
import signal
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from lightning.fabric import Fabric
from torch import Tensor, nn
from torch.optim import Optimizer

from thunder_memsave.callbacks.control import TrainingControl
from thunder_memsave.finetune.data.batches import (
    Sharding,
    make_batch,
    num_steps_per_epoch,
    step_rows,
)
from thunder_memsave.finetune.data.row_set import RowSet
from thunder_memsave.finetune.objectives.objective import Objective
from thunder_memsave.finetune.process import signals
from thunder_memsave.finetune.process.stop import BadStepError, NotFiniteError
from thunder_memsave.finetune.run_file.config import (
    EvalConfig,
    GuardsConfig,
    LRSchedulerConfig,
)
from thunder_memsave.finetune.training.evaluate import evaluate, sum_over_ranks
from thunder_memsave.finetune.training.guards import (
    BadStep,
    count_rollbacks,
    finite_mark,
    judge,
)
from thunder_memsave.finetune.training.loop_state import LoopState
from thunder_memsave.finetune.training.schedule import lr_factor, set_learning_rate
from thunder_memsave.strategy import ThunderMemsaveStrategy

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class LoopPlan:
    """The settings that decide what happens in which step."""

    num_steps: int
    sharding: Sharding
    seed: int
    objective: Objective[Any]
    max_grad_norm: float | None
    lr_scheduler: LRSchedulerConfig
    eval: EvalConfig
    guards: GuardsConfig = field(default_factory=GuardsConfig)
    max_nonfinite_skips: int | None = None
    """Replaces `guards.max_skips` for non-finite steps."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Ending:
    """How the training ended; the same on all ranks."""

    reason: str | None = None
    """Reason of a callback that ended the training early."""

    signal: signal.Signals | None = None
    """Signal that some rank got; the state is saved, if a callback saves it."""


def fit(
    fabric: Fabric,
    model: nn.Module,
    optimizer: Optimizer,
    *,
    train_rows: RowSet[Any],
    validation_rows: RowSet[Any] | None,
    plan: LoopPlan,
    state: dict[str, Any],
    loop_state: LoopState | None = None,
    roll_back: Callable[[], None] | None = None,
) -> Ending:
    """Train from `state["step"]` to the end of the plan, or until a callback or a signal ends the training.

    Args:
        fabric: Launched, with the callbacks.
        model: The result of `fabric.setup`.
        optimizer: The result of `fabric.setup_optimizers`.
        train_rows: The training data.
        validation_rows: The validation data, evaluated at the start, every n steps and at the end, if any.
        plan: The other settings.
        state: The state that checkpoints hold; its `step` is kept up to date.
        loop_state: A part of that state; None at the start of a run.
        roll_back: Restores `state`, with all that it refers to, from the last checkpoint. A collective.

    Raises:
        BadStepError: the guards end the run at a step; on all ranks, and before it changes a weight.
        NotFiniteError: the validation loss is not finite.
        KeyboardInterrupt: a signal came while there was no step to finish.
    """
    loop = _Loop(
        fabric=fabric,
        model=model,
        optimizer=optimizer,
        train_rows=train_rows,
        validation_rows=validation_rows,
        plan=plan,
        state=state,
        loop_state=LoopState() if loop_state is None else loop_state,
        roll_back=roll_back,
    )
    return loop.run()


@dataclass(kw_only=True, slots=True)
class _Loop:
    """One call of `fit`."""

    fabric: Fabric
    model: nn.Module
    optimizer: Optimizer
    train_rows: RowSet[Any]
    validation_rows: RowSet[Any] | None
    plan: LoopPlan
    state: dict[str, Any]
    loop_state: LoopState
    roll_back: Callable[[], None] | None
    control: TrainingControl = field(default_factory=TrainingControl)
    is_begun: bool = False
    """Whether a step was taken or left out, so that there is something to save, even at the step of the start."""

    @property
    def step(self) -> int:
        """Finished optimizer steps."""
        return int(self.state["step"])

    def run(self) -> Ending:
        """Take all steps."""
        try:
            ending = self._run()
        finally:
            signals.finish_steps(False)
        if ending.signal is None and signals.received() is not None:
            raise KeyboardInterrupt  # it came after the ranks had agreed on the end
        return ending

    def _run(self) -> Ending:
        reason = None
        self._start()
        if self.step == 0 or self.loop_state.validation_is_due:
            self._validate()
        self.model.train()
        while self.step < self.plan.num_steps:
            work = self._next_step()
            if work.is_signalled:
                if not self.is_begun:  # something swallowed the exception
                    raise KeyboardInterrupt
                return self._end()
            if work.is_stopped:
                reason = self.control.agreed_reason(self.fabric)
                break
            self._train(work)
        if self.is_begun and not _evaluates_after(self.step, self.plan):
            self._validate()
        return self._end(reason)

    def _start(self) -> None:
        self._call("on_train_start", num_steps=self.plan.num_steps, state=self.state, control=True)

    def _end(self, reason: str | None = None) -> Ending:
        """Save, and only then check for a signal: it may have come during the last evaluation, or the save itself."""
        self._call("on_train_end", num_steps=self.plan.num_steps, state=self.state)
        return Ending(reason=reason, signal=_agreed_signal(self.fabric))

    def _train(self, work: _Work) -> None:
        """Take a step, evaluate if due, and end the step; or leave it out."""
        step = self.step
        self._call("on_train_batch_start")
        metrics, bad = self._train_step(work)
        self.is_begun = True
        signals.finish_steps(True)
        if bad is not None and bad.action == "rollback":
            self._go_back(bad, step=step)
            return
        metrics["epoch"] = (work.position + 1) / self._steps_per_epoch
        self.state["step"] = step + 1
        if _evaluates_after(step + 1, self.plan):
            # Before the end of the step, so that a checkpoint of this step includes its evaluation.
            self._validate()
        self._call(
            "on_train_batch_end",
            num_steps=self.plan.num_steps,
            metrics=metrics,
            state=self.state,
            optimizer=self.optimizer,
            control=True,
        )

    def _train_step(self, work: _Work) -> tuple[dict[str, float], BadStep | None]:
        """Take one optimizer step and return its metrics; a bad one changes no weight."""
        fabric, optimizer, plan, step = self.fabric, self.optimizer, self.plan, self.step
        factor = lr_factor(plan.lr_scheduler, step=step, num_steps=plan.num_steps)
        set_learning_rate(optimizer, factor)
        total = _accumulate(fabric, self.model, work, plan.objective)
        self._call("on_before_optimizer_step", model=self.model, optimizer=optimizer)
        norm = _clip(fabric, self.model, optimizer, max_norm=plan.max_grad_norm)
        # In one collective: non-finite gradients may be on one rank only.
        marked = torch.stack([total, total.new_tensor(finite_mark(norm))])
        total, num_not_finite = sum_over_ranks(fabric, marked)
        loss = float(total / work.weight)
        bad = self._judged(loss, norm, is_finite=math.isfinite(loss) and not num_not_finite)
        if bad is None:
            optimizer.step()
            self.loop_state.note_taken(loss, window=plan.guards.spike_window)
        else:
            self._leave_out(bad)
        optimizer.zero_grad()
        measured = plan.objective.step_metrics(
            work.batches, weight=float(work.weight), num_ranks=fabric.world_size
        )
        return {"grad_norm": norm, "loss": loss, **measured}, bad

    def _judged(self, loss: float, norm: float, *, is_finite: bool) -> BadStep | None:
        try:
            return judge(
                self.plan.guards,
                self.loop_state,
                loss=loss,
                norm=norm,
                is_finite=is_finite,
                max_nonfinite_skips=self.plan.max_nonfinite_skips,
            )
        except BadStepError as error:
            raise type(error)(self._refusal(error.message)) from None

    def _refusal(self, reason: str) -> str:
        lr = self.optimizer.param_groups[0]["lr"]
        return (
            f"step {self.step + 1} was not taken: {reason}; lower the learning rate (optimizer.init_args.lr; it was "
            f"{lr:.3g} in this step), or check the data."
        )

    def _leave_out(self, bad: BadStep) -> None:
        self.loop_state.num_skips += 1
        if self.fabric.is_global_zero:
            _log.warning(self._refusal(bad.reason))
        if isinstance(self.fabric.strategy, ThunderMemsaveStrategy):
            self.fabric.strategy.leave_out_step(self.optimizer)

    def _go_back(self, bad: BadStep, *, step: int) -> None:
        """Return to the last checkpoint, and skip the data since."""
        if self.roll_back is None:
            raise BadStepError(
                self._refusal(f"{bad.reason}, and there is no checkpoint to go back to")
            )
        before, position = self.loop_state.state_dict(), self.loop_state.data_position(step)
        self.roll_back()
        counted = LoopState()
        counted.load_state_dict(before)
        try:
            count = count_rollbacks(self.plan.guards, counted, bad, to_step=self.step)
        except BadStepError as error:
            raise BadStepError(f"step {step + 1} was not taken: {error}.") from None
        self.loop_state.note_rollback(step=self.step, bad_position=position, num_rollbacks=count)
        if self.fabric.is_global_zero:
            first, last = self.loop_state.skipped[-1]
            _log.warning(
                "went back from step %d to step %d, and the data of %d steps (%d to %d) are skipped",
                *(step + 1, self.step, last - first + 1, first + 1, last + 1),
            )
        self._start()

    def _next_step(self) -> _Work:
        """Lay out the step, and agree with the other ranks on its weight and on whether to take it."""
        fabric, rows, plan = self.fabric, self.train_rows, self.plan
        position = self.loop_state.data_position(self.step)
        chosen = step_rows(len(rows), plan.sharding, seed=plan.seed, step=position)
        batches = [fabric.to_device(make_batch(rows, numbers)) for numbers in chosen]
        own = torch.stack([plan.objective.weight(batch) for batch in batches]).sum()
        flags = (self.control.is_asked, signals.received() is not None)
        counted = torch.stack([own, *(torch.full_like(own, int(flag)) for flag in flags)])
        weight, asked, signalled = sum_over_ranks(fabric, counted)
        return _Work(
            position=position,
            batches=batches,
            weight=weight,
            is_stopped=bool(asked),
            is_signalled=bool(signalled),
        )

    @property
    def _steps_per_epoch(self) -> int:
        return num_steps_per_epoch(len(self.train_rows), self.plan.sharding)

    def _validate(self) -> None:
        if self.validation_rows is None:
            return
        self._call("on_validation_start")
        metrics = evaluate(
            self.fabric,
            self.model,
            self.validation_rows,
            objective=self.plan.objective,
            sharding=self.plan.sharding,
            max_batches=self.plan.eval.max_batches,
            is_cut_short=lambda: _agreed_signal(self.fabric) is not None,
        )
        self.loop_state.validation_is_due = metrics is None
        if metrics is None:
            return  # the run ends, and evaluates when it is resumed
        loss = metrics["val_loss"]
        self._call("on_validation_end", metrics=metrics, control=True)
        if not math.isfinite(loss):
            raise NotFiniteError(
                f"the validation loss after step {self.step} is {loss:g}; lower the learning rate "
                "(optimizer.init_args.lr), or check the model and the data."
            )

    def _call(self, hook: str, *, control: bool = False, **arguments: Any) -> None:
        if control:
            arguments["control"] = self.control
        self.fabric.call(hook, fabric=self.fabric, step=self.step, **arguments)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Work:
    """The data of one optimizer step, and whether to take it."""

    position: int
    """Its number among the global batches of the data."""

    batches: list[Any]
    """This rank's micro-batches."""

    weight: Tensor
    """The objective's weight over all ranks."""

    is_stopped: bool
    """Whether a callback of some rank asked for the end, so that the step is not taken."""

    is_signalled: bool
    """Whether some rank got a signal."""


def _agreed_signal(fabric: Fabric) -> signal.Signals | None:
    """Return a signal that some rank got. A collective."""
    own = torch.tensor(signals.received() or 0, device=fabric.device)
    number = int(cast(Tensor, fabric.all_reduce(own, reduce_op="max")))
    return signal.Signals(number) if number else None


def _clip(
    fabric: Fabric, model: nn.Module, optimizer: Optimizer, *, max_norm: float | None
) -> float:
    """Clip the gradients and return their norm before, the same on all ranks."""
    norm = fabric.clip_gradients(
        model,
        optimizer,
        # The norm is needed without clipping too: weights that become infinite stay so.
        max_norm=math.inf if max_norm is None else max_norm,
        error_if_nonfinite=False,  # the caller knows the step
    )
    assert isinstance(norm, Tensor)
    return float(norm)


def _accumulate(fabric: Fabric, model: nn.Module, work: _Work, objective: Objective[Any]) -> Tensor:
    """Accumulate the gradients of the global batch's mean loss, and return this rank's summed loss."""
    # The strategy averages gradients over the ranks, but a mean over all rows needs their sum.
    scale = fabric.world_size / work.weight
    total = torch.zeros((), device=fabric.device)
    for number, batch in enumerate(work.batches, start=1):
        is_last = number == len(work.batches)
        with fabric.no_backward_sync(model, enabled=not is_last):  # type: ignore[arg-type]
            loss = objective.loss(objective.output(model, batch), batch)
            fabric.backward(loss * scale)
        total += loss.detach()
    return total


def _evaluates_after(step: int, plan: LoopPlan) -> bool:
    every = plan.eval.every_n_steps
    return step == plan.num_steps or (every is not None and step % every == 0)
