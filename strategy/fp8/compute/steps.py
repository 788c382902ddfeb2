"""Updates the scales of fp8 linears after each step of an optimizer that trains their module."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from thunder_memsave.distributed.data_parallel import DataParallel
from thunder_memsave.fp8.compute.linears import Fp8Linears


class Fp8Steps:
    """Receives the steps of all optimizers from torch's hook, and skipped steps from the strategy.

    Between two steps no scale changes: micro-batches, recomputation and second backwards see the same ones. A step
    without a training forward since the last one changes nothing, so that no step is counted twice.
    """

    def __init__(self, data_parallel: DataParallel | None) -> None:
        """Register the hook; `data_parallel`: the ranks that see different data; None: there is one."""
        self._data_parallel = data_parallel
        self._modules: list[tuple[weakref.ref[nn.Module], weakref.ref[Fp8Linears]]] = []
        ended = weakref.WeakMethod(self.ended)

        def after_step(optimizer: Optimizer, *_: Any) -> None:
            if (method := ended()) is not None:
                method(optimizer)

        handle = register_optimizer_step_post_hook(after_step)
        weakref.finalize(self, handle.remove)

    def add(self, module: nn.Module, linears: Fp8Linears) -> None:
        """Update the linears of `module` and of its copies while they live; call it in one order on all ranks."""
        linears.on_copy = self.add
        self._modules.append((weakref.ref(module), weakref.ref(linears)))

    def ended(self, optimizer: Optimizer) -> None:
        """Update the modules that the optimizer trains. A collective if amax is reduced."""
        own = {id(p) for group in optimizer.param_groups for p in group["params"]}
        for references in self._modules:
            module, linears = references[0](), references[1]()
            if module is None or linears is None:
                continue
            if any(id(p) in own for p in module.parameters()):
                linears.update(self._everyone)

    @property
    def _everyone(self) -> torch.distributed.ProcessGroup | None:
        data_parallel = self._data_parallel
        if data_parallel is None or data_parallel.num_ranks == 1:
            return None
        return data_parallel.everyone
