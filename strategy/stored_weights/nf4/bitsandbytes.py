"""Reads weights in NF4 as bitsandbytes keeps them in files, without quantising again.

Of a weight `w` a file has, as transformers writes it:

    w                 uint8, the codes of two elements in each byte, in the order of elements
    w.absmax          uint8, codes of the scales of blocks of 64
    w.nested_absmax   float32, the scale of 256 of these
    w.quant_map, w.nested_quant_map       float32, the tables of both
    w.quant_state.bitsandbytes__nf4       uint8, JSON: block sizes, dtype, shape, and the offset of scales

Our bytes have the same codes and scales, group by group (`layout.py`).

Source: bitsandbytes 0.50.2, `functional.QuantState.as_dict(packed=True)`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from thunder_memsave.stored_weights.format import QuantizedFilesError
from thunder_memsave.stored_weights.nf4 import tables
from thunder_memsave.stored_weights.nf4.layout import (
    BLOCK,
    GROUP,
    SCALES,
    groups_of,
    num_bytes,
    offset_of,
    spans,
)

STATE = ".quant_state.bitsandbytes__"
"""Between a weight's name and its format's, in the name of its JSON."""
_MARKS = (STATE, ".absmax", ".nested_absmax", ".quant_map", ".nested_quant_map")
_OF_INT8 = (".SCB", ".weight_format")
_GROUPS_AT_ONCE = 256


@dataclass(frozen=True, kw_only=True, slots=True)
class Nf4State:
    """What the JSON of a weight says, checked."""

    shape: torch.Size
    offset: float
    """The mean of all scales, a float32 number."""


def quantized_names(names: Iterable[str]) -> dict[str, str]:
    """Return, by the name of each quantised weight, the name of its JSON.

    Raises:
        QuantizedFilesError: One is not in NF4.
    """
    found: dict[str, str] = {}
    for name in names:
        weight, mark, kind = name.partition(STATE)
        if mark and kind != "nf4":
            raise _not_read(weight, f"is in {kind}", key="bnb_4bit_quant_type is 'nf4'")
        if mark:
            found[weight] = name
        elif name.endswith(_OF_INT8):
            weight = f"{name.rpartition('.')[0]}.weight"
            raise _not_read(weight, "is in bitsandbytes' 8 bits", key="load_in_4bit is true")
    return found


def belongs_to(name: str) -> str | None:
    """Return the name of the weight that this entry of a file may be scales, a table or JSON of; None: of none."""
    for mark in _MARKS:
        weight, found, rest = name.rpartition(mark)
        if found and (mark == STATE or not rest):
            return weight
    return None


def checked_state(name: str, packed: Tensor) -> Nf4State:
    """Read the JSON of a weight.

    Args:
        name: The weight's name.
        packed: The JSON's bytes: uint8.

    Raises:
        QuantizedFilesError: Its blocks are of other sizes, or its scales are not quantised.
    """
    state: dict[str, Any] = json.loads(packed.numpy().tobytes())
    if "nested_blocksize" not in state:
        raise _not_read(
            name,
            "has scales that are not quantised themselves",
            key="bnb_4bit_use_double_quant is true",
        )
    for key, size, unit in (
        ("blocksize", BLOCK, "elements"),
        ("nested_blocksize", SCALES, "scales"),
    ):
        if state[key] != size:
            raise _not_read(name, f"has blocks of {state[key]} {unit}", key=f"they have {size}")
    return Nf4State(shape=torch.Size(state["shape"]), offset=float(state["nested_offset"]))


def refuse_other_tables(name: str, numbers: Tensor, scale_numbers: Tensor) -> None:
    """Refuse a weight whose codes stand for other numbers than ours.

    Raises:
        QuantizedFilesError: They do.
    """
    ours = (tables.numbers(numbers), tables.scale_numbers(scale_numbers))
    if not all(map(torch.equal, (numbers, scale_numbers), ours)):
        raise _not_read(name, "has other tables of numbers", key="they are those of NF4")


@dataclass(frozen=True, kw_only=True, slots=True)
class Parts:
    """Codes and scales of a weight, or of some of its groups, as files have them."""

    numbers: Tensor
    """uint8, flat: codes of two elements each."""
    scales: Tensor
    """uint8, flat: codes of the scales of blocks."""
    scale: Tensor
    """float32, flat: the scale of the scales of each group."""


def assembled(parts: Parts, num_elements: int, offset: float) -> Tensor:
    """Return our bytes of a weight, or of some whole groups of it and perhaps the last.

    Args:
        parts: Its codes and scales.
        num_elements: Of the weight, or of the groups.
        offset: Of the whole weight.
    """
    stored = torch.empty(num_bytes(num_elements), dtype=torch.uint8)
    offset_of(stored).fill_(offset)
    for first, last in spans(num_elements, num_groups=_GROUPS_AT_ONCE):
        groups = groups_of(stored, num_elements, first=first, last=last)
        groups.scale.copy_(parts.scale[first:last])
        groups.scales.copy_(parts.scales[first * SCALES : last * SCALES].view_as(groups.scales))
        halves = slice(first * GROUP // 2, last * GROUP // 2)
        groups.numbers.copy_(parts.numbers[halves].view_as(groups.numbers))
    return stored


def _not_read(name: str, fact: str, *, key: str) -> QuantizedFilesError:
    return QuantizedFilesError(
        f"{name} of the weight files {fact}, which is not read; quantise the model again so that {key} (NF4 with "
        "double quantisation, blocks of 64), or name the model that it was made from, which frozen_weights: nf4 "
        "quantises.",
        key="model.name_or_path",
    )
