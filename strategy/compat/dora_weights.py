"""peft's DoRA asks for the name of the module of its weight's class, which Dynamo of torch 2.13 does not trace.

`peft.utils.integrations.dequantize_module_weight` (0.21) looks for weights of torchao so, and then returns a plain
parameter as it is ("Dynamo does not know how to trace method `startswith` of class `str`"). While DoRA is captured, a
weight is returned at once; weights of torchao and bitsandbytes, which this package does not train, are not dequantised.

Delete this file when `tests/compat/test_dora_weights.py` says that peft's own code can be captured.
"""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Callable
from typing import Any

import torch

_DORA = "peft.tuners.lora.dora"


def apply_if_imported() -> None:
    """Let DoRA be captured, if peft was imported, without which there is none."""
    if _DORA in sys.modules:
        _apply()


def upstream() -> Callable[..., Any]:
    """Return peft's own function."""
    return _apply()


@functools.cache
def _apply() -> Callable[..., Any]:
    dora: Any = importlib.import_module(_DORA)
    own: Callable[..., Any] = dora.dequantize_module_weight

    def dequantize_module_weight(module: Any) -> Any:
        # Nothing about the weight's class, which Dynamo would guard: a shard's is another than that of its stand-in.
        if torch.compiler.is_compiling() and not hasattr(module, "W_q"):
            return module.weight
        return own(module)

    dora.dequantize_module_weight = dequantize_module_weight
    return own
