"""The module that Fabric calls in the model's place."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import torch
from torch import nn
from typing_extensions import override

from thunder_memsave.compiler.pieces.piecewise_module import STEPS, PiecewiseModule
from thunder_memsave.errors import CaptureError, CompileError
from thunder_memsave.fabric.forward_methods import take_redirection
from thunder_memsave.fp8.kernels.te_settings import refuse_contradiction
from thunder_memsave.ops.host_copies.weights import keep_on_host, place_of
from thunder_memsave.optim.on_host import forget_begun
from thunder_memsave.sharding.rank_zero_values import batch_norms, take_rank_zero_statistics

_EAGER = (
    "To run {name}() as it is, in eager PyTorch, call it on every rank with whole weights: "
    "`with torch.no_grad(), fabric.strategy.summon_full(model): model.module.{name}(...)`."
)


class ForwardModule(PiecewiseModule):
    """The module that Fabric calls: runs the compiled `forward`, or the method that Fabric redirects through it."""

    @cached_property
    def _batch_norms(self) -> Sequence[nn.Module]:
        return batch_norms(self.module)

    @override
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        refuse_contradiction(None if self.fp8 is None else self.fp8.recipe)
        forget_begun()
        name = take_redirection(self.module)
        if self.module.training and torch.is_grad_enabled():
            take_rank_zero_statistics(self._batch_norms, self._data_parallel)
        try:
            return self.call(name, *args, **kwargs)
        except (CaptureError, CompileError) as error:
            if name not in STEPS:
                error.advice = _EAGER.format(name=name)
            raise

    def __deepcopy__(self, memo: dict[int, Any]) -> ForwardModule:
        """Copy the model, to be compiled anew: compiled graphs refer to the model that they were captured from."""
        module = copy.deepcopy(self.module, memo)
        for p, original in zip(module.parameters(), self.module.parameters(), strict=True):
            if "unsharded_shape" in vars(original):  # not of a layer that was exchanged since
                vars(p)["unsharded_shape"] = vars(original)["unsharded_shape"]
            if (place := place_of(original)) is not None:
                keep_on_host(p, place)
        planner = None if self.planner is None else self.planner.for_copy()
        fp8 = None if self.fp8 is None else self.fp8.for_copy(module)
        copied = ForwardModule(
            module,
            may_be_split=self._may_be_split,
            config=self._config,
            data_parallel=self._data_parallel,
            planner=planner,
            fp8=fp8,
            updates=self._updates,
        )
        copied.training = self.training
        memo[id(self)] = copied
        return copied
