"""PyTorch's fakes take the statistics of norms to be of the input's dtype, where a CPU's kernels keep them in float32.

They do so where weights are float32 and the input has 16 bits, as under autocast (`is_mixed_type` in
ATen/native/cpu/mixed_data_type.h); the Python rules (torch/_refs and torch/_decomp) do not know it:

    # input bfloat16, weight float32; dtype of the mean
    torch.native_layer_norm(x, [16], weight, bias, 1e-5)[1].dtype      # eager: float32, fake: bfloat16

A plan then counts half of the bytes that they take. Those of BatchNorm are answered before rules of single operators
are asked for, so that `FakeTensorMode` is told that it has no such answer.

Delete this file when `tests/compat/test_fake_norm_statistics.py` says that both give the same dtypes.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor
from torch._decomp import decomposition_table
from torch._subclasses import fake_impls, fake_tensor
from torch._subclasses.fake_tensor import (
    FakeTensor,
    FakeTensorMode,
    in_kernel_invocation_manager,
)

_aten = torch.ops.aten
_BATCH_NORMS = (
    _aten.native_batch_norm.default,
    _aten._native_batch_norm_legit.default,
    _aten._native_batch_norm_legit.no_stats,
    _aten._native_batch_norm_legit_functional.default,
    _aten._batch_norm_with_update.default,
    _aten._batch_norm_with_update_functional.default,
    _aten._batch_norm_no_update.default,
)
_NORMS = (_aten.native_layer_norm.default, _aten.native_group_norm.default, *_BATCH_NORMS)
"""Operators whose second and third results are the mean and the inverse deviation."""
_HALVES = (torch.bfloat16, torch.float16)
_rules = {norm: fake_impls.op_implementations_dict.get(norm) for norm in _NORMS}
_is_decomposed: Any = fake_tensor.torch_decomp_decompositions


def apply() -> None:
    """Let statistics have the dtype of the kernel's."""
    fake_impls.op_implementations_dict.update(dict.fromkeys(_NORMS, _norm))
    fake_tensor.torch_decomp_decompositions = _others_decomposed
    FakeTensorMode.cache_clear()


def remove() -> None:
    """Give PyTorch its own rules back."""
    for norm, rule in _rules.items():
        if rule is None:
            fake_impls.op_implementations_dict.pop(norm, None)
        else:
            fake_impls.op_implementations_dict[norm] = rule
    fake_tensor.torch_decomp_decompositions = _is_decomposed
    FakeTensorMode.cache_clear()


@functools.lru_cache(None)
def _others_decomposed(op: Any) -> bool:
    return op not in _NORMS and bool(_is_decomposed(op))


def _norm(mode: FakeTensorMode, norm: Any, *args: Any, **kwargs: Any) -> Any:
    results = _pytorchs(mode, norm, *args, **kwargs)
    value, *others = (a for a in (*args, *kwargs.values()) if isinstance(a, Tensor))
    is_mixed = value.dtype in _HALVES and any(t.dtype == torch.float32 for t in others)
    if not (is_mixed and value.device.type == "cpu"):
        return results
    first, mean, deviation, *rest = results
    return (first, mean.to(torch.float32), deviation.to(torch.float32), *rest)


def _pytorchs(mode: FakeTensorMode, norm: Any, *args: Any, **kwargs: Any) -> Any:
    """Return what PyTorch's own rule gives."""
    if (rule := _rules[norm]) is not None:
        return rule(mode, norm, *args, **kwargs)
    if norm in _BATCH_NORMS:
        with mode:
            return decomposition_table[norm](*args, **kwargs)
    with in_kernel_invocation_manager(mode):
        results = norm(*args, **kwargs)
    device = args[0].fake_device
    return tuple(FakeTensor(mode, result, device) for result in results)
