"""The formats in which frozen weights can be stored."""

from __future__ import annotations

import torch

from thunder_memsave.stored_weights import int8
from thunder_memsave.stored_weights.format import StoredFormat
from thunder_memsave.stored_weights.nf4 import layout, numbers

NF4 = StoredFormat(
    name="nf4",
    title="NF4",
    is_by_rows=False,
    stored_shape=lambda shape: torch.Size([layout.num_bytes(shape.numel())]),
    quantize=numbers.quantize,
    dequantize=numbers.dequantize,
)

INT8 = StoredFormat(
    name="int8",
    title="int8",
    is_by_rows=True,
    stored_shape=int8.stored_shape,
    quantize=int8.quantize,
    dequantize=int8.dequantize,
)

_BY_NAME: dict[str, StoredFormat] = {f.name: f for f in (NF4, INT8)}


def format_named(name: str) -> StoredFormat:
    """Return the format that `model.frozen_weights` names."""
    return _BY_NAME[name]


def all_formats() -> tuple[StoredFormat, ...]:
    """Return all of them."""
    return tuple(_BY_NAME.values())
