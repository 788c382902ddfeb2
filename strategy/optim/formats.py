"""How a state is stored: its tensors, and how rows of them become float32 and back.

A state in 8 bits has a byte for each element, in the parameter's shape, and a float32 scale for each block of 256
elements of a row: blocks begin anew in each row, so a rank that holds any rows has their blocks whole. Rows of fewer
than 8 elements, such as those of biases and norms, stay float32: a scale for each would save little, or nothing. Of a
second moment, 8 bits hold the root, which has half the decades, and is what the update divides by; it is rounded
stochastically, as is bfloat16, for the nearest number would stay the same where it should grow or decay slowly.
Decision 0028 has the measurements.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, MutableMapping
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from thunder_memsave.aten.random_bits import uniform
from thunder_memsave.optim import noise, tables

Format = Literal["float32", "bfloat16", "int8", "fp8"]
FORMATS: tuple[Format, ...] = get_args(Format)

BLOCK = 256
LEAST_ROW = 8
"""Elements of the shortest rows that are stored in 8 bits."""

_SMALLEST = torch.finfo(torch.float32).tiny
_FP8 = torch.float8_e4m3fn
FP8_MAX = torch.finfo(_FP8).max
_FP8_LEAST = 2.0**-9
"""The smallest number of e4m3 above 0."""


@dataclass(frozen=True, kw_only=True, slots=True)
class State:
    """One of the states of an optimizer, such as the second moment."""

    name: str
    is_signed: bool
    """False: a mean of squares, never below 0. Where it is above 0, what is stored is too."""

    @property
    def scales(self) -> str:
        """The key of its scales."""
        return f"{self.name}_scales"


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """Where rows of a state lie, and what decides how they are rounded."""

    first_row: int
    """In the whole, unsharded parameter."""
    key: int
    """The key of the random bits; differs from state to state and from step to step."""


def format_of(states: Format, shape: torch.Size) -> Format:
    """Return the format of the states of a parameter of this shape, or of rows of it."""
    is_short = shape[1:].numel() < LEAST_ROW or not shape
    return "float32" if is_short and states in ("int8", "fp8") else states


def layout(
    state: State, states: Format, shape: torch.Size
) -> dict[str, tuple[torch.Size, torch.dtype]]:
    """Return shape and dtype of the tensors of a state by key."""
    found = format_of(states, shape)
    if found in ("float32", "bfloat16"):
        return {state.name: (shape, torch.float32 if found == "float32" else torch.bfloat16)}
    num_blocks = -(-shape[1:].numel() // BLOCK)
    return {
        state.name: (shape, torch.uint8),
        state.scales: (torch.Size((shape[0], num_blocks)), torch.float32),
    }


def read(state: State, stored: Mapping[str, Tensor], states: Format) -> Tensor:
    """Return rows as float32: the stored tensor itself, or a copy."""
    values, kept = stored[state.name], format_of(states, stored[state.name].shape)
    if kept == "float32":
        return values
    if kept == "bfloat16":
        return values.float()
    if kept == "int8":
        numbers = _table(state, values).numbers
        found = numbers.index_select(0, values.view(-1).int()).view(values.shape)
    else:
        found = values.view(_FP8).float()
    for block, scale in _blocks(found, stored[state.scales]):
        block.mul_(scale)
    return found if state.is_signed else found.square_()


def write(
    state: State,
    values: Tensor,
    stored: MutableMapping[str, Tensor],
    states: Format,
    place: Place,
) -> None:
    """Store rows; `values`, which `read` returned, are overwritten."""
    target, kept = stored[state.name], format_of(states, stored[state.name].shape)
    if kept == "bfloat16":
        copy(target, noise.rounded_to_bfloat16(values, key=place.key, first_row=place.first_row))
    elif kept in ("int8", "fp8"):
        _scale(state, values, stored[state.scales], largest=1.0 if kept == "int8" else FP8_MAX)
        if kept == "int8":
            copy(target, _int8_codes(state, values, place))
        else:
            copy(target.view(_FP8), values if state.is_signed else _one_beside(values, place))


def copy(target: Tensor, source: Tensor) -> None:
    """Copy, in a way that a plan for another device can run: `Tensor.copy_` looks for the device."""
    torch.ops.aten.copy_.default(target, source)


def _scale(state: State, values: Tensor, scales: Tensor, *, largest: float) -> None:
    """Divide each block, or its root, by a scale that makes `largest` of its largest number."""
    if not state.is_signed:
        values.sqrt_()
    for block, scale in _blocks(values, scales):
        magnitudes = block.abs() if state.is_signed else block
        copy(scale, magnitudes.amax(dim=-1, keepdim=True))
        if largest != 1:
            scale.div_(largest)
        block.div_(scale.clamp_min(_SMALLEST))


def _int8_codes(state: State, values: Tensor, place: Place) -> Tensor:
    table = _table(state, values)
    codes = torch.bucketize(values, table.bounds, out_int32=True, right=not state.is_signed)
    if state.is_signed:
        # Bytes wrap: numbers below 0 have the last codes.
        return codes.sub_(table.first_code).bitwise_and_(0xFF)
    part = values.sub_(table.numbers.index_select(0, codes.view(-1)).view(values.shape))
    part.mul_(table.per_gap.index_select(0, codes.view(-1)).view(values.shape))
    is_up = uniform(values, key=place.key, first_row=place.first_row) < part
    # What is above 0 stays above 0: there, the number below it is 0.
    return torch.maximum(codes.add_(is_up), (part > 0).int())


def _one_beside(values: Tensor, place: Place) -> Tensor:
    """Round each number to one of the two of e4m3 beside it, at random, so that the mean stays."""
    random = uniform(values, key=place.key, first_row=place.first_row)
    is_above_zero = values > 0
    exponents = values.view(torch.int32).bitwise_and(0x7F800000).view(torch.float32)
    step = exponents.mul_(2.0**-3).clamp_min_(_FP8_LEAST)
    values.div_(step).add_(random).floor_().mul_(step).clamp_max_(FP8_MAX)
    del random, step, exponents
    # What is above 0 stays above 0.
    return torch.maximum(values, is_above_zero * _FP8_LEAST, out=values)


def _table(state: State, like: Tensor) -> tables.Table:
    table = tables.SIGNED if state.is_signed else tables.UNSIGNED
    return table.on_device_of(like)


def _blocks(values: Tensor, scales: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield views of blocks, and of their scales: those of 256 elements of all rows, and the shorter last ones.

    Args:
        values: Shape `[rows, ...]`, contiguous.
        scales: Shape `[rows, blocks]`.
    """
    rows = values.view(len(values), -1)
    num_whole, num_left = divmod(rows.shape[1], BLOCK)
    if num_whole:
        whole = rows.narrow(1, 0, num_whole * BLOCK).unflatten(1, (num_whole, BLOCK))
        yield whole, scales.narrow(1, 0, num_whole).unsqueeze(2)
    if num_left:
        yield rows.narrow(1, num_whole * BLOCK, num_left), scales.narrow(1, num_whole, 1)
