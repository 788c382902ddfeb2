"""The hooks that a run calls, with their arguments."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from lightning.fabric import Fabric
from lightning.fabric.strategies import Strategy
from torch import nn
from torch.optim import Optimizer

from thunder_memsave.callbacks.control import TrainingControl


class TrainingHooks(Protocol):
    """All hooks of `thunder-memsave train`; a callback defines those that it needs, without a base class.

    One optimizer step is one "batch" of these names. Arguments are passed by keyword, and a hook names those
    that it needs. `step` counts finished optimizer steps; `metrics` is one dict for all callbacks of a hook.

    `loss` and `grad_norm` of a step are numbers, or tensors on the device where the host has not read them yet
    (`train.log_every_n_steps`): `float(...)` reads one and waits for the device. The run reads them all together later,
    and puts the numbers into the same dict; the dict of a step that was not taken is emptied then. All is read
    before a hook that takes `state`; a callback of which one does may say by `saves_after(step) -> bool` after which
    steps it saves.
    """

    def on_after_setup(self, *, fabric: Fabric, module: nn.Module) -> None:
        """The model is sharded. Called by Fabric itself, after `fabric.setup`."""

    def on_train_start(
        self,
        *,
        fabric: Fabric,
        step: int,
        num_steps: int,
        state: dict[str, Any],
        control: TrainingControl,
    ) -> None:
        """Training begins, also after a rollback."""

    def on_train_batch_start(self, *, fabric: Fabric, step: int) -> None:
        """A step begins."""

    def on_before_optimizer_step(
        self, *, fabric: Fabric, step: int, model: nn.Module, optimizer: Optimizer
    ) -> None:
        """The step's gradients are complete, and not clipped yet."""

    def on_after_optimizer_step(self, *, strategy: Strategy, optimizer: Optimizer) -> None:
        """The weights are updated. Called by Fabric itself, which passes both arguments to every callback."""

    def on_validation_start(self, *, fabric: Fabric, step: int) -> None:
        """An evaluation begins."""

    def on_validation_end(
        self, *, fabric: Fabric, step: int, metrics: dict[str, Any], control: TrainingControl
    ) -> None:
        """An evaluation has ended, before the end of the step that it belongs to."""

    def on_train_batch_end(
        self,
        *,
        fabric: Fabric,
        step: int,
        num_steps: int,
        metrics: dict[str, Any],
        state: dict[str, Any],
        optimizer: Optimizer,
        control: TrainingControl,
    ) -> None:
        """A step has ended, and is counted in `step`."""

    def on_save_checkpoint(self, *, fabric: Fabric, step: int, path: Path) -> None:
        """A checkpoint is complete. Called by the callback that saved it."""

    def on_rollback_start(self, *, fabric: Fabric) -> None:
        """The run is about to go back to a checkpoint."""

    def on_train_end(
        self, *, fabric: Fabric, step: int, num_steps: int, state: dict[str, Any]
    ) -> None:
        """Training has ended normally."""

    def on_exception(self, *, fabric: Fabric) -> None:
        """Training has ended with an exception, instead of `on_train_end`."""


HOOKS: Mapping[str, tuple[str, ...]] = {
    name: tuple(inspect.signature(hook).parameters)[1:]
    for name, hook in vars(TrainingHooks).items()
    if name.startswith("on_")
}
"""Names of each hook's arguments, in the order in which a run calls the hooks."""


def saves_after(callback: object, step: int) -> bool:
    """Tell whether a callback may save the state at the end of a step."""
    hook = getattr(callback, "on_train_batch_end", None)
    takes = () if hook is None else inspect.signature(hook).parameters.values()
    if not any(p.name == "state" or p.kind is p.VAR_KEYWORD for p in takes):
        return False
    asked = getattr(callback, "saves_after", None)
    return True if asked is None else bool(asked(step))
