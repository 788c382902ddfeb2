"""Describes tensors without their values, and makes tensors of a description."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from thunder.core import devices, dtypes
from thunder.core.proxies import FutureTensorProxy, TensorProxy
from torch import Tensor

from thunder_memsave.measure.absent_device import place_for


class Layout(NamedTuple):
    """A tensor without its values."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    """Index of the first element in the storage."""
    dtype: torch.dtype
    device: str
    storage_bytes: int
    """Bytes of the whole storage, as requested from the allocator."""


class Value(NamedTuple):
    """A tensor in a storage; the caller numbers the storages."""

    layout: Layout
    storage: int


def contiguous(proxy: TensorProxy | FutureTensorProxy) -> Layout:
    """Return the layout of a new contiguous tensor like `proxy`."""
    shape = tuple(int(s) for s in proxy.shape)
    dtype = dtypes.to_torch_dtype(proxy.dtype)
    stride: list[int] = []
    size = 1
    for length in reversed(shape):
        stride.insert(0, size)
        size *= max(length, 1)
    nbytes = dtype.itemsize * (0 if 0 in shape else size)
    return Layout(
        shape, tuple(stride), 0, dtype, str(devices.to_torch_device(proxy.device)), nbytes
    )


def layout_of(tensor: Tensor) -> Layout:
    """Return the layout of a real or fake tensor."""
    return Layout(
        tuple(tensor.shape),
        tuple(tensor.stride()),
        int(tensor.storage_offset()),
        tensor.dtype,
        str(tensor.device),
        tensor.untyped_storage().nbytes(),
    )


def on_planned_device(values: Sequence[Value | None], device_type: str) -> Sequence[Layout]:
    """Return the layouts of tensors on the planned device; as they are if no other device is planned for (empty)."""
    layouts = [v.layout for v in values if v is not None]
    return [e._replace(device=device_type) for e in layouts] if device_type else layouts


def numel_of(layout: Layout) -> int:
    """Return the number of elements of a layout."""
    return math.prod(layout.shape)


def is_contiguous(layout: Layout) -> bool:
    """Return whether the elements lie in their order, one after the other, as `Tensor.is_contiguous` says."""
    # A fake tensor would know, and costs more than this.
    expected = 1
    for size, stride in zip(reversed(layout.shape), reversed(layout.stride), strict=True):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True


def make_arguments(values: Sequence[Value | None], *, zeros: bool = False) -> list[Any]:
    """Make tensors with these layouts, which share storages as the values do; 0 for numbers."""
    storages: dict[int, Tensor] = {}
    return [0 if v is None else _tensor(v, storages, zeros=zeros) for v in values]


def _tensor(value: Value, storages: dict[int, Tensor], *, zeros: bool) -> Tensor:
    layout = value.layout
    num_elements = layout.storage_bytes // layout.dtype.itemsize
    if (base := storages.get(value.storage)) is None:
        make = torch.zeros if zeros else torch.empty
        base = make(num_elements, dtype=layout.dtype, device=place_for(layout.device))
        storages[value.storage] = base
    if base.dtype != layout.dtype:
        base = base.view(layout.dtype)
    if layout.offset == 0 and layout[:2] == ((num_elements,), (1,)):
        return base
    return base.as_strided(layout.shape, layout.stride, layout.offset)
