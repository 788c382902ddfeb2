"""Functions that move no numbers, as PyTorch means them where Thunder differs or does not know them."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from thunder.core import prims
from thunder.core.proxies import TensorProxy
from torch._functorch.predispatch import lazy_load_decompositions

from thunder_memsave.ops.operation import Call, Operation


def _nothing(call: Call) -> None:
    """Which values need a gradient is read off the values that eager gave."""


def _detach(call: Call) -> TensorProxy:
    return prims.shallow_copy(call.args[0])


def _transposed(call: Call) -> Any:
    """`x.T` and `x.mT` of matrices; all other attributes are as Thunder has them."""
    value, attribute = call.args[:2]
    if attribute not in ("T", "mT") or value.ndim != 2:
        return NotImplemented
    return value.transpose(0, 1)


def _without_legacy_empties(call: Call) -> Call:
    """`torch.cat` skips tensors of shape (0,) whatever the others are; transformers' caches start as such."""
    tensors = call.args[0] if call.args else call.kwargs["tensors"]
    kept = [t for t in tensors if tuple(t.shape) != (0,)] or tensors
    if call.args:
        return dataclasses.replace(call, args=(kept, *call.args[1:]))
    return dataclasses.replace(call, kwargs={**call.kwargs, "tensors": kept})


OPERATIONS = (
    Operation(
        name="nothing",
        functions=(
            torch._C._log_api_usage_once,
            torch._C._set_grad_enabled,
            lazy_load_decompositions,
        ),
        lower=_nothing,
    ),
    Operation(
        name="detach",
        # The last is how Dynamo writes `x.data`.
        functions=(torch.Tensor.detach, torch.detach, torch._C._autograd._get_data_attr),  # type: ignore[attr-defined]
        lower=_detach,
    ),
    Operation(name="transpose", functions=(getattr,), lower=_transposed),
    Operation(name="cat", functions=(torch.cat,), rewrite=_without_legacy_empties),
)
