"""The training loop: rows in, optimizer steps out; what watches it are Fabric callbacks.

One optimizer step is one "batch" of Lightning's hook names. Hooks, all with keyword arguments of
which a callback takes those it names:

    on_train_start(fabric, step, num_steps, state, control)
    on_train_batch_start(fabric, step)
    on_before_optimizer_step(fabric, step, model, optimizer)    the step's gradients are there
    on_validation_start(fabric, step), on_validation_end(fabric, step, metrics, control)
    on_train_batch_end(fabric, step, num_steps, metrics, state, optimizer, control)
    on_train_end(fabric, step, num_steps, state)
    on_save_checkpoint(fabric, step, path)    from the callback that saves
    on_exception(fabric)                      instead of on_train_end

`step` counts finished optimizer steps. `metrics` is one dict for all callbacks of a hook: the ones
that measure add to it, so they stand before the ones that write in `Fabric(callbacks=[...])`.
A step has `loss`, `grad_norm`, `epoch`, `num_tokens` (target tokens of all ranks) and
`num_input_tokens` (with prompts and padding), an evaluation `val_loss` and `val_perplexity`.

`control.stop(reason)` ends the training after the step, on all ranks, whichever rank asked; the end
is evaluated and saved as any other. A callback with `state_dict` and `load_state_dict` is part of
checkpoints: those methods belong to rank 0's callback, and every rank loads what it saved.
"""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass
from typing import Any, cast

import torch
from lightning.fabric import Fabric
from torch import Tensor, nn
from torch.optim import Optimizer

from thunder_memsave.callbacks.control import TrainingControl
from thunder_memsave.finetune.config import EvalConfig, LRSchedulerConfig
from thunder_memsave.finetune.data.batches import (
    Sharding,
    make_batch,
    num_steps_per_epoch,
    step_rows,
)
from thunder_memsave.finetune.data.packing import Batch, Rows
from thunder_memsave.finetune.evaluate import evaluate, perplexity
from thunder_memsave.finetune.loss import MaskKind, loss_sum, num_targets
from thunder_memsave.finetune.schedule import lr_factor, set_learning_rate
from thunder_memsave.finetune.stop import NotFiniteError, was_interrupted
from thunder_memsave.strategy import ThunderMemsaveStrategy

EVALUATION_METRICS = ("val_loss", "val_perplexity")

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """Everything that decides what happens in which step."""

    num_steps: int
    sharding: Sharding
    seed: int
    mask: MaskKind
    max_grad_norm: float | None
    lr_scheduler: LRSchedulerConfig
    eval: EvalConfig
    skips_nonfinite: bool = False
    """Whether a step whose loss or gradients are not finite is left out, instead of ending the run."""


def fit(
    fabric: Fabric,
    model: nn.Module,
    optimizer: Optimizer,
    *,
    train_rows: Rows,
    validation_rows: Rows | None,
    plan: Plan,
    state: dict[str, Any],
) -> str | None:
    """Train from `state["step"]` to the end of the plan, or until a callback asks for the end.

    Args:
        fabric: Launched, with the callbacks.
        model: As `fabric.setup` returned it.
        optimizer: As `fabric.setup` returned it.
        train_rows: What is trained on.
        validation_rows: What is evaluated on at the start, every n steps and at the end, if any.
        plan: Everything else.
        state: What checkpoints hold; `step` in it is kept up to date.

    Returns:
        The reason that a callback gave for an end before the plan's.

    Raises:
        NotFiniteError: the loss or the norm of gradients of a step that the plan does not skip, or the validation
            loss, is not finite; on all ranks, and before those gradients change a weight.
    """
    start, num_steps = state["step"], plan.num_steps
    control = TrainingControl()
    about = {"fabric": fabric, "control": control}
    fabric.call("on_train_start", **about, step=start, num_steps=num_steps, state=state)
    if start == 0:
        _validate(fabric, model, validation_rows, plan=plan, step=0, control=control)
    model.train()
    reason = None
    for step in range(start, num_steps):
        if was_interrupted():  # and something swallowed the exception
            raise KeyboardInterrupt
        work = _next_step(fabric, train_rows, plan=plan, step=step, control=control)
        if work.is_stopped:
            reason = control.agreed_reason(fabric)
            break
        fabric.call("on_train_batch_start", fabric=fabric, step=step)
        metrics = _train_step(fabric, model, optimizer, work, plan=plan, step=step)
        metrics["epoch"] = _epoch(train_rows, plan, step)
        state["step"] = step + 1
        if _evaluates_after(step + 1, plan):
            # Before the end of the step, so that a checkpoint of this step lies behind it.
            _validate(fabric, model, validation_rows, plan=plan, step=step + 1, control=control)
        fabric.call(
            "on_train_batch_end",
            **about,
            step=step + 1,
            num_steps=num_steps,
            metrics=metrics,
            state=state,
            optimizer=optimizer,
        )
    end = state["step"]
    if start < end and not _evaluates_after(end, plan):
        _validate(fabric, model, validation_rows, plan=plan, step=end, control=control)
    fabric.call("on_train_end", fabric=fabric, step=end, num_steps=num_steps, state=state)
    return reason


@dataclass(frozen=True, kw_only=True, slots=True)
class _Work:
    """What one optimizer step trains on."""

    batches: list[Batch]
    """This rank's micro-batches."""

    num_tokens: Tensor
    """Target tokens of all ranks."""

    is_stopped: bool
    """A callback of some rank has asked for the end: the step is not to be taken."""


def _next_step(
    fabric: Fabric, rows: Rows, *, plan: Plan, step: int, control: TrainingControl
) -> _Work:
    """Lay out the step, and agree with the other ranks on its tokens and on whether to take it."""
    chosen = step_rows(len(rows), plan.sharding, seed=plan.seed, step=step)
    batches = [make_batch(rows, numbers).to(fabric.device) for numbers in chosen]
    num_tokens = num_targets(batches)
    num_asked = torch.full_like(num_tokens, int(control.is_asked))
    tokens, asked = _sum_over_ranks(fabric, torch.stack([num_tokens, num_asked]))
    return _Work(batches=batches, num_tokens=tokens, is_stopped=bool(asked))


def _train_step(
    fabric: Fabric, model: nn.Module, optimizer: Optimizer, work: _Work, *, plan: Plan, step: int
) -> dict[str, float]:
    """Take one optimizer step and return its metrics, or refuse gradients that are not finite."""
    set_learning_rate(optimizer, lr_factor(plan.lr_scheduler, step=step, num_steps=plan.num_steps))
    loss = float(_accumulate(fabric, model, work, mask=plan.mask))
    fabric.call(
        "on_before_optimizer_step", fabric=fabric, step=step, model=model, optimizer=optimizer
    )
    norm = _clip(fabric, model, optimizer, max_norm=plan.max_grad_norm)
    if math.isfinite(loss) and math.isfinite(norm):
        optimizer.step()
    else:
        _refuse_step(fabric, optimizer, plan=plan, step=step, loss=loss, norm=norm)
    optimizer.zero_grad()
    num_inputs = sum(batch.input_ids.numel() for batch in work.batches) * fabric.world_size
    return {
        "grad_norm": norm,
        "loss": loss,
        "num_input_tokens": float(num_inputs),
        "num_tokens": float(work.num_tokens),
    }


def _refuse_step(
    fabric: Fabric, optimizer: Optimizer, *, plan: Plan, step: int, loss: float, norm: float
) -> None:
    """Leave the step out, or end the run; loss and norm are the same on all ranks."""
    lr = optimizer.param_groups[0]["lr"]
    message = (
        f"step {step + 1} was not taken: its loss is {loss:g} and the norm of its gradients "
        f"{norm:g}; lower the learning rate (optimizer.init_args.lr; it was {lr:.3g} in this "
        "step), or check the data."
    )
    if not plan.skips_nonfinite:
        raise NotFiniteError(message)
    if fabric.is_global_zero:
        _log.warning(message)
    if isinstance(fabric.strategy, ThunderMemsaveStrategy):
        fabric.strategy.leave_out_step(optimizer)


def _clip(
    fabric: Fabric, model: nn.Module, optimizer: Optimizer, *, max_norm: float | None
) -> float:
    """Clip the gradients and return their norm before, which is the same on all ranks."""
    norm = fabric.clip_gradients(
        model,
        optimizer,
        # The norm is needed without clipping too: weights that it makes infinite stay so.
        max_norm=math.inf if max_norm is None else max_norm,
        error_if_nonfinite=False,  # the caller knows the step
    )
    assert isinstance(norm, Tensor)
    return float(norm)


def _accumulate(fabric: Fabric, model: nn.Module, work: _Work, *, mask: MaskKind) -> Tensor:
    """Add up the gradients of the global batch's mean loss per token, and return that loss."""
    # The strategy averages gradients over the ranks, where a mean over all tokens needs their sum.
    scale = fabric.world_size / work.num_tokens
    total = torch.zeros((), device=fabric.device)
    for number, batch in enumerate(work.batches, start=1):
        is_last = number == len(work.batches)
        with fabric.no_backward_sync(model, enabled=not is_last):  # type: ignore[arg-type]
            loss = loss_sum(model, batch, mask=mask)
            fabric.backward(loss * scale)
        total += loss.detach()
    return _sum_over_ranks(fabric, total) / work.num_tokens


def _sum_over_ranks(fabric: Fabric, tensor: Tensor) -> Tensor:
    return cast(Tensor, fabric.all_reduce(tensor, reduce_op="sum"))


def _epoch(rows: Rows, plan: Plan, step: int) -> float:
    return (step + 1) / num_steps_per_epoch(len(rows), plan.sharding)


def _evaluates_after(step: int, plan: Plan) -> bool:
    every = plan.eval.every_n_steps
    return step == plan.num_steps or (every is not None and step % every == 0)


def _validate(
    fabric: Fabric,
    model: nn.Module,
    rows: Rows | None,
    *,
    plan: Plan,
    step: int,
    control: TrainingControl,
) -> None:
    if rows is None:
        return
    fabric.call("on_validation_start", fabric=fabric, step=step)
    loss = evaluate(
        fabric,
        model,
        rows,
        sharding=plan.sharding,
        mask=plan.mask,
        max_batches=plan.eval.max_batches,
    )
    metrics = dict(zip(EVALUATION_METRICS, (loss, perplexity(loss)), strict=True))
    fabric.call("on_validation_end", fabric=fabric, step=step, metrics=metrics, control=control)
    if not math.isfinite(loss):
        raise NotFiniteError(
            f"the validation loss after step {step} is {loss:g}; lower the learning rate "
            "(optimizer.init_args.lr), or check the model and the data."
        )
