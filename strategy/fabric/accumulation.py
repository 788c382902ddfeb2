"""Fabric's `no_backward_sync`: gradients of several micro-batches, reduced each time or once."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager

from lightning.fabric.strategies.strategy import _BackwardSyncControl
from torch import nn
from torch.optim import Optimizer
from typing_extensions import override

from thunder_memsave.fabric.forward_module import ForwardModule
from thunder_memsave.optim.in_backward import KEY, UpdatesInBackward


class Accumulation(_BackwardSyncControl):
    """Reduces the gradients of every micro-batch, or keeps them whole until the last one, as configured.

    Thunder's own `no_sync` drops the gradients of sharded parameters.
    """

    def __init__(self, updates: UpdatesInBackward) -> None:
        self._updates = updates
        self.was_used = False
        """Whether a backward may find gradients of earlier micro-batches."""

    @override
    def no_backward_sync(self, module: nn.Module, enabled: bool) -> AbstractContextManager[None]:
        if not isinstance(module, ForwardModule):
            raise TypeError(
                "no_backward_sync() needs a model that fabric.setup() returned, but got a "
                f"{type(module).__name__}."
            )
        if enabled and self._updates.is_on:
            raise RuntimeError(
                f"gradients cannot be accumulated with {KEY}, which updates weights in each backward: make the batch "
                "one micro-batch, or leave that key out."
            )
        self.was_used |= enabled
        return module.unreduced.keeping(enabled=enabled)


def refuse_unreduced(optimizer: Optimizer, modules: Iterable[ForwardModule]) -> None:
    """Refuse a step that would silently lack the gradients of the last micro-batches."""
    waiting = {id(p) for module in modules for p in module.unreduced.parameters()}
    own = [p for group in optimizer.param_groups for p in group["params"]]
    num_waiting = sum(id(p) in waiting for p in own)
    if num_waiting:
        raise RuntimeError(
            f"the gradients of {num_waiting} parameters are not reduced over the ranks yet: every "
            "backward since the last step ran inside fabric.no_backward_sync; run the last "
            "micro-batch's with enabled=False, or call optimizer.zero_grad() to drop them."
        )
