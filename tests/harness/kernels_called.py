"""Which of our kernels a function of tensors calls, found without numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_map

from thunder_memsave.aten.whole_calls import whole_calls
from thunder_memsave.ops.cuda_device import Capability, planned_for

TORCHS_OWN = "PyTorch's own"


def kernel_called(
    function: Callable[..., Tensor],
    *args: Any,
    capability: Capability | None = None,
    **kwargs: Any,
) -> str:
    """Return the name of the kernel that `function` calls on a GPU that is not here; tensors may be on any device."""

    def fake(value: Any) -> Any:
        return torch.empty(value.shape, dtype=value.dtype) if isinstance(value, Tensor) else value

    on_gpu = planned_for(torch.device("cuda:0"), capability)
    with FakeTensorMode(), whole_calls() as rules, on_gpu:
        args, kwargs = tree_map(fake, (args, kwargs))
        result = function(*args, **kwargs)
        assert result.shape == args[0].shape
    if not rules:
        return TORCHS_OWN
    (rule,) = rules
    return str(rule.kernel.name)  # type: ignore[attr-defined]
