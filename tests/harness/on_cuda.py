"""Proxies of tensors on a GPU that is not here, and what can be compared of them with tensors."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from thunder.core.devices import Device
from thunder.core.dtypes import to_dtype
from thunder.core.proxies import TensorProxy
from torch import Tensor


def on_cuda(tensor: Tensor) -> TensorProxy:
    """Return a proxy of a tensor on CUDA; call it within `tracectx`."""
    return TensorProxy(
        shape=tuple(tensor.shape), device=Device("cuda:0"), dtype=to_dtype(tensor.dtype)
    )


def facts(results: Iterable[Any]) -> list[tuple[tuple[int, ...], object]]:
    """Return the shapes and dtypes of tensors or proxies."""
    return [(tuple(r.shape), to_dtype(r.dtype)) for r in results]
