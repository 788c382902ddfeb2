"""A compiled module that runs in pieces where it cannot be one graph (`run_pieces.py`)."""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import nn
from typing_extensions import override

from thunder_memsave.compiler.compiled_module import CompiledModule
from thunder_memsave.compiler.pieces.run_pieces import Pieces
from thunder_memsave.errors import CaptureError, CompileError

_log = logging.getLogger(__name__)

_NO_PROMISE = "memory.budget is not promised for it, because what eager code keeps is not planned"
STEPS = ("forward", "training_step", "validation_step", "test_step", "predict_step")
"""`forward`, and the steps of Lightning's modules. Other methods, such as `generate`, may call submodules with other
shapes each time; without gradients, where eager code keeps nothing, their submodules are not compiled."""
_Key = tuple[str, bool, bool]


class PiecewiseModule(CompiledModule):
    """Runs methods as one graph each; those that cannot be one as eager code that calls compiled submodules."""

    def __init__(self, module: nn.Module, *, may_be_split: bool = False, **settings: Any) -> None:
        """Compile nothing yet.

        Args:
            module: Whose methods are compiled when they are called.
            may_be_split: Whether what cannot be one graph runs in pieces; otherwise it is refused.
            **settings: As for `CompiledModule`.
        """
        super().__init__(module, **settings)
        self._may_be_split = may_be_split
        self._pieces: dict[_Key, Pieces] = {}
        self._submodules: dict[nn.Module, _Submodule] = {}
        self._said: set[tuple[type[nn.Module], _Key]] = set()
        """What the log has said; layers of one class are told about once."""

    def call(self, name: str, /, *args: Any, **kwargs: Any) -> Any:
        """Call the bound method `name` of the module.

        Raises:
            CaptureError: it cannot be captured as one graph, and may not be split.
            CompileError: it cannot be compiled to what eager PyTorch computes, and may not be split.
        """
        key = name, self.module.training, torch.is_grad_enabled()
        if key in self._pieces:
            return self._pieces[key].run(self._target(name), args, kwargs)
        try:
            return self.call_method(name, *args, **kwargs)
        except (CaptureError, CompileError) as error:
            if not self._may_be_split:
                raise
            pieces = self._split(key, error)
        # Kept if eager code can run it: a wrong batch is no reason to run the next one in pieces.
        result = pieces.run(self._target(name), args, kwargs)
        self._pieces[key] = pieces
        return result

    def _split(self, key: _Key, reason: Exception) -> Pieces:
        pieces = Pieces(self.module, self._compiled_forward, self._data_parallel)
        name, _, with_gradients = key
        if name not in STEPS and not with_gradients:
            pieces.make_all_eager()
        kind = type(self.module), key
        _log.log(
            logging.DEBUG if kind in self._said else logging.WARNING,
            "%s.%s runs in eager PyTorch, %d of its submodules compiled: %s (strategy.fullgraph refuses this; %s.)",
            type(self.module).__name__,
            name,
            pieces.num_compiled,
            reason,
            _NO_PROMISE,
        )
        self._said.add(kind)
        return pieces

    def _compiled_forward(self, module: nn.Module) -> Any:
        if module not in self._submodules:
            submodule = _Submodule(
                module,
                may_be_split=True,
                config=self._config,
                data_parallel=self._data_parallel,
                planner=self.planner,
            )
            submodule.unreduced, submodule._said = self.unreduced, self._said
            self._submodules[module] = submodule
        return self._submodules[module]

    @property
    @override
    def captures(self) -> Any:
        return (*super().captures, *(c for m in self._submodules.values() for c in m.captures))


class _Submodule(PiecewiseModule):
    """Stands in for a submodule's `forward`: whoever calls the submodule runs its hooks."""

    @override
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.call("forward", *args, **kwargs)

    @override
    def _target(self, name: str) -> Any:
        return getattr(self.module, name)
