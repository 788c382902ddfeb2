"""The training loop: rows in, optimizer steps out; everything else is done by Fabric callbacks.

`callbacks/hooks.py` lists the hooks and their arguments. `metrics` is one dict for all callbacks of a
hook: those that measure add to it, so they come before those that write in `Fabric(callbacks=[...])`.
A step has `loss`, `grad_norm`, `epoch` and an evaluation `val_loss`, and both have the objective's
other metrics. Only `LoopPlan.objective` knows what a row means.

A step that the guards leave out has a non-finite `loss` or `grad_norm`, or a loss spike.

Every `LoopPlan.log_every_n_steps` steps, and before anything is evaluated or saved, the host waits for the device and
reads what the steps since then have as `loss` and `grad_norm`. Until then these are tensors on the device, in dicts
which callbacks may keep: the loop writes the numbers into them, or empties those of steps that were not taken.

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
from functools import partial
from typing import Any, cast

import torch
from lightning.fabric import Fabric
from torch import Tensor, nn
from torch.optim import Optimizer

from thunder_memsave.callbacks.control import TrainingControl
from thunder_memsave.callbacks.hooks import saves_after
from thunder_memsave.finetune.data.batches import Order, Sharding, num_steps_per_epoch
from thunder_memsave.finetune.data.row_set import RowSet
from thunder_memsave.finetune.objectives.loss_in_model import put_loss_in
from thunder_memsave.finetune.objectives.objective import Objective
from thunder_memsave.finetune.process import signals
from thunder_memsave.finetune.process.stop import BadStepError, NotFiniteError
from thunder_memsave.finetune.run_file.config import (
    EvalConfig,
    GuardsConfig,
    LRSchedulerConfig,
)
from thunder_memsave.finetune.training.ahead import DataAhead, Work, to_device
from thunder_memsave.finetune.training.ask_model import AskedModel
from thunder_memsave.finetune.training.evaluate import evaluate
from thunder_memsave.finetune.training.generated import Generated
from thunder_memsave.finetune.training.gradients import accumulate, clip
from thunder_memsave.finetune.training.guards import BadStep, count_rollbacks
from thunder_memsave.finetune.training.loop_state import LoopState
from thunder_memsave.finetune.training.schedule import lr_factor, set_learning_rate
from thunder_memsave.finetune.training.step_numbers import Unread, UnreadSteps
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
    log_every_n_steps: int = 1
    """Steps between two after which the device is read."""
    order: Order = "listed"
    """How an epoch's order of rows is made."""
    generated: Generated | None = None
    """What the model answers at evaluations; None: nothing."""


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
    ahead: DataAhead = field(init=False)
    unread: UnreadSteps = field(init=False)

    def __post_init__(self) -> None:
        plan = self.plan
        put_loss_in(cast(nn.Module, self.model.module), plan.objective)
        self.unread = UnreadSteps(
            guards=plan.guards,
            max_nonfinite_skips=plan.max_nonfinite_skips,
            loop_state=self.loop_state,
            state=self.state,
        )
        self.ahead = DataAhead(
            fabric=self.fabric,
            rows=self.train_rows,
            sharding=plan.sharding,
            seed=plan.seed,
            objective=plan.objective,
            order=plan.order,
        )

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
            flags = (self.control.is_asked, signals.received() is not None)
            work = self.ahead.take(self.loop_state.data_position(self.step), flags)
            if work.is_signalled:
                if not self.is_begun:  # something swallowed the exception
                    raise KeyboardInterrupt
                self.unread.read()
                return self._end()
            if work.is_stopped:
                self.unread.read()
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

    def _train(self, work: Work) -> None:
        """Take a step, evaluate if due, and end the step; or leave it out."""
        step = self.step
        self._call("on_train_batch_start")
        taken, bad = self._train_step(work)
        self.is_begun = True
        signals.finish_steps(True)
        if bad is not None and bad.action == "rollback":
            self._go_back(bad, taken)
            return
        taken.metrics["epoch"] = (work.position + 1) / self._steps_per_epoch
        self.state["step"] = step + 1
        if self._reads_after(step + 1):
            self.unread.read()
        if _evaluates_after(step + 1, self.plan):
            # Before the end of the step, so that a checkpoint of this step includes its evaluation.
            self._validate()
        self._call(
            "on_train_batch_end",
            num_steps=self.plan.num_steps,
            metrics=taken.metrics,
            state=self.state,
            optimizer=self.optimizer,
            control=True,
        )

    def _train_step(self, work: Work) -> tuple[Unread, BadStep | None]:
        """Take one optimizer step; a bad one changes no weight."""
        plan, step = self.plan, self.step
        factor = lr_factor(plan.lr_scheduler, step=step, num_steps=plan.num_steps)
        set_learning_rate(self.optimizer, factor)
        taken, bad = self._computed(work), None
        is_judged_later = self.unread.may_grow(self.fabric, self.optimizer)
        self.unread.add(taken)
        if is_judged_later:
            with self.unread.changing_nothing_if_bad(self.optimizer):
                self.optimizer.step()
        if step + 1 < plan.num_steps:
            # Its rows are here by the time that the device is done with this step.
            self.ahead.lay_out(self.loop_state.data_position(step + 1))
        if not is_judged_later:
            bad = self.unread.read()
            if bad is None:
                self.optimizer.step()
            else:
                self._leave_out(bad, taken)
        self.optimizer.zero_grad()
        return taken, bad

    def _computed(self, work: Work) -> Unread:
        """Compute the gradients of a step, and what is known of it, without waiting for the device."""
        fabric, plan = self.fabric, self.plan
        weight = to_device(fabric, work.weight)
        asked = AskedModel(fabric=fabric, model=self.model, is_training=True)
        batches = plan.objective.before_step(work.batches, asked)
        total, sums = accumulate(fabric, self.model, batches, plan.objective, weight=weight)
        self._call("on_before_optimizer_step", model=self.model, optimizer=self.optimizer)
        norm = clip(fabric, self.model, self.optimizer, max_norm=plan.max_grad_norm)
        measured = plan.objective.step_metrics(
            work.batches, weight=float(work.weight), num_ranks=fabric.world_size
        )
        del batches
        work.batches.clear()  # for those of the next step
        return Unread.of(
            fabric,
            total=total,
            weight=weight,
            norm=norm,
            step=self.step,
            lr=self.optimizer.param_groups[0]["lr"],
            is_of_backward=self._updates_in_backward,
            metrics=measured,
            sums=sums,
            measured=partial(plan.objective.measured, weight=float(work.weight)),
        )

    def _reads_after(self, step: int) -> bool:
        plan = self.plan
        is_due = step % plan.log_every_n_steps == 0 or _evaluates_after(step, plan)
        return is_due or any(saves_after(each, step) for each in self.fabric._callbacks)

    def _leave_out(self, bad: BadStep, left_out: Unread) -> None:
        self.loop_state.num_skips += 1
        if self.fabric.is_global_zero:
            _log.warning(left_out.refusal(bad.reason))
        if isinstance(self.fabric.strategy, ThunderMemsaveStrategy):
            self.fabric.strategy.leave_out_step(self.optimizer)

    def _go_back(self, bad: BadStep, left_out: Unread) -> None:
        """Return to the last checkpoint, and skip the data since."""
        step = left_out.step
        if self.roll_back is None:
            reason = f"{bad.reason}, and there is no checkpoint to go back to"
            raise BadStepError(left_out.refusal(reason))
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

    @property
    def _updates_in_backward(self) -> bool:
        strategy = self.fabric.strategy
        if not isinstance(strategy, ThunderMemsaveStrategy):
            return False
        return strategy.updates_in_backward

    @property
    def _steps_per_epoch(self) -> int:
        return num_steps_per_epoch(len(self.train_rows), self.plan.sharding)

    def _validate(self) -> None:
        if self.validation_rows is None:
            return
        self._call("on_validation_start")

        def is_cut_short() -> bool:
            return _agreed_signal(self.fabric) is not None

        metrics = evaluate(
            self.fabric,
            self.model,
            self.validation_rows,
            objective=self.plan.objective,
            sharding=self.plan.sharding,
            max_batches=self.plan.eval.max_batches,
            is_cut_short=is_cut_short,
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
        if self.plan.generated is not None:
            self.plan.generated.at(
                self.fabric, self.model, step=self.step, is_cut_short=is_cut_short
            )

    def _call(self, hook: str, *, control: bool = False, **arguments: Any) -> None:
        if control:
            arguments["control"] = self.control
        self.fabric.call(hook, fabric=self.fabric, step=self.step, **arguments)


def _agreed_signal(fabric: Fabric) -> signal.Signals | None:
    """Return a signal that some rank got. A collective."""
    own = torch.tensor(signals.received() or 0, device=fabric.device)
    number = int(cast(Tensor, fabric.all_reduce(own, reduce_op="max")))
    return signal.Signals(number) if number else None


def _evaluates_after(step: int, plan: LoopPlan) -> bool:
    every = plan.eval.every_n_steps
    return step == plan.num_steps or (every is not None and step % every == 0)
