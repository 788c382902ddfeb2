"""Functions that Thunder takes apart, and PyTorch has a kernel for each way: they run as torch's own operators.

Taken apart, BatchNorm's gradient is 20 passes over memory, and a convolution's pads, transposes and flips what it
reads. Whole, gradients have eager's bits (docs/decisions/0018).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.nn.functional as F

from thunder_memsave.ops.operation import Operation

Functions = Iterable[Callable[..., Any]]

_ACTIVATIONS = (
    *("hardswish", "hardsigmoid", "hardtanh", "relu6", "leaky_relu", "elu", "selu", "celu"),
    *("mish", "softplus", "logsigmoid", "softshrink", "hardshrink", "prelu"),
)
_POOLS = ("avg_pool", "max_pool", "adaptive_avg_pool", "adaptive_max_pool")


def _named(names: Sequence[str]) -> Functions:
    """Return the functions of these names, in all of torch's modules that have one, each once."""
    found = (getattr(module, name, None) for name in names for module in (F, torch))
    return dict.fromkeys(function for function in found if function is not None)


def _in_all_dims(names: Sequence[str]) -> Functions:
    return _named([f"{name}{dims}d" for name in names for dims in (1, 2, 3)])


OPERATIONS = (
    Operation(
        name="convolution",
        functions=(*_in_all_dims(("conv", "conv_transpose")), torch.convolution),
        has_whole_derivative=True,  # without gradients, Thunder's is torch's kernel too
    ),
    *(
        Operation(
            name=name, functions=tuple(functions), has_whole_derivative=True, runs_torchs_own=True
        )
        for name, functions in (
            ("pool", _in_all_dims(_POOLS)),
            ("batch_norm", _named(["batch_norm"])),
            ("group_norm", _named(["group_norm"])),
            ("instance_norm", _named(["instance_norm"])),
            ("bilinear", _named(["bilinear"])),
            ("piecewise_activation", _named(_ACTIVATIONS)),
        )
    ),
)
