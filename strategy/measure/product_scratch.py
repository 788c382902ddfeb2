"""Finds the bytes that matrix products of an optimizer's update take inside, on the CPU, which FakeTensors do not show.

Products of bfloat16 and float16 are computed there by kernels that copy their operands.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from thunder_memsave.aten.record import storage_id
from thunder_memsave.measure.layouts import Value, layout_of
from thunder_memsave.measure.op_profile import Operation, OpProfile
from thunder_memsave.measure.scratch import measured_scratch

_aten = torch.ops.aten
_PRODUCTS = (_aten.mm.default, _aten.addmm.default, _aten.bmm.default, _aten.baddbmm.default)
_WITH_SCRATCH = (torch.bfloat16, torch.float16)


def product_scratch(
    func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: object
) -> int:
    """Return the bytes at the peak of an ATen operator beyond its result: 0 unless it is such a product on the CPU.

    Args:
        func: The operator.
        args: Its arguments; tensors may be without data.
        kwargs: Those that are named.
        result: What it gave for them.
    """
    if func not in _PRODUCTS or not isinstance(result, Tensor):
        return 0
    if result.device.type != "cpu" or result.dtype not in _WITH_SCRATCH:
        return 0
    numbers: dict[int, int] = {}
    values = [Value(layout_of(t), numbers.setdefault(storage_id(t), len(numbers))) for t in args]
    nbytes = result.untyped_storage().nbytes()
    found = OpProfile(
        results=(Value(layout_of(result), len(numbers)),),
        num_argument_storages=len(numbers),
        made_bytes=(nbytes,),
        peak_bytes=nbytes,
        key=f"{func}{values}{dict(kwargs)}",
    )
    operation = Operation(partial(func, **kwargs), values, can_run_alone=True)
    with _disable_current_modes():
        return max(measured_scratch()(operation, found), 0)
