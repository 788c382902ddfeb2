"""The formats in which frozen weights can be stored."""

from __future__ import annotations

import torch

from thunder_memsave.stored_weights import int8, mxfp4
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

MXFP4_TRANSPOSED = StoredFormat(
    name="mxfp4_transposed",
    title="MXFP4",
    is_by_rows=True,
    stored_shape=mxfp4.stored_shape,
    quantize=mxfp4.quantize_transposed,
    dequantize=mxfp4.dequantize_transposed,
    block=mxfp4.BLOCK,
)

MXFP4 = StoredFormat(
    name="mxfp4",
    title="MXFP4",
    is_by_rows=True,
    stored_shape=mxfp4.stored_shape,
    quantize=mxfp4.quantize,
    dequantize=mxfp4.dequantize,
    block=mxfp4.BLOCK,
    transposed=MXFP4_TRANSPOSED,
)

_BY_NAME: dict[str, StoredFormat] = {f.name: f for f in (NF4, INT8, MXFP4, MXFP4_TRANSPOSED)}


def format_named(name: str) -> StoredFormat:
    """Return the format of this name, such as `model.frozen_weights` names."""
    return _BY_NAME[name]


def all_formats() -> tuple[StoredFormat, ...]:
    """Return all of them."""
    return tuple(_BY_NAME.values())
