"""peft adapts a parameter that is no linear's, such as the experts of a mixture, by a parametrization for each call.

`peft.tuners.lora.layer.ParamWrapper` (0.21) registers a parametrization of the module's parameter before it calls the
module, and removes it afterwards. No tracer follows that ("Getting an inplace view on a graph input is not supported").
While it is captured, the module gets the adapted weight, by the same formula, in the place of the parameter instead.

Delete this file when `tests/compat/test_wrapped_parameters.py` says that peft's own code can be captured.
"""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

_LAYERS = "peft.tuners.lora.layer"


def apply_if_imported() -> None:
    """Let modules with adapted parameters be captured, if peft was imported, without which there are none."""
    if _LAYERS in sys.modules:
        _apply()


def upstream() -> Callable[..., Any]:
    """Return peft's own context around a call."""
    return _apply()


@functools.cache
def _apply() -> Callable[..., Any]:
    layers = importlib.import_module(_LAYERS)
    own: Callable[..., Any] = layers.ParamWrapper._activate_lora

    @contextmanager
    def activate(self: Any, active_adapters: list[str]) -> Iterator[None]:
        adapters = [a for a in active_adapters if a in self.lora_A]
        if not adapters or not torch.compiler.is_compiling():
            with own(self, active_adapters):
                yield
            return
        module, name = self.get_base_layer(), self.parameter_name
        # An attribute hides the parameter of its name: that is looked up last.
        module.__dict__[name] = _adapted(self, adapters, layers)
        try:
            yield
        finally:
            del module.__dict__[name]

    layers.ParamWrapper._activate_lora = activate
    return own


def _adapted(wrapper: Any, adapters: list[str], layers: Any) -> Tensor:
    """Return the weight as `_activate_lora` computes it."""
    weight: Tensor = wrapper.get_param()
    is_small = any(getattr(torch, name, None) == weight.dtype for name in layers.UPCAST_DTYPES)
    if len(adapters) == 1 and wrapper.num_experts > 1 and not is_small:
        return layers._LoraFactorsProxy(*wrapper.get_delta_factors(adapters[0]))(weight)  # type: ignore[no-any-return]
    delta = wrapper.get_delta_weight(adapters[0])
    for adapter in adapters[1:]:
        delta = delta + wrapper.get_delta_weight(adapter)
    return layers._LoraParameterProxy(delta)(weight)  # type: ignore[no-any-return]
