"""Row-wise operators as one operation that computes a tile of rows at a time: what is between them never exists whole.

Each row of tokens goes through the operators alone, so a tile has the numbers of the whole. Sums over rows, such as a
weight's gradient, are added up over the tiles in float32, in float64 for float64; on CUDA a product is added within it.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import torch
from thunder.core import dtypes
from thunder.core.proxies import TensorProxy
from thunder.core.symbol import Symbol
from torch import Tensor

from thunder_memsave.aten.record import turns_of
from thunder_memsave.ops.aten_operators import function_of
from thunder_memsave.ops.kernel_calls import own_executor
from thunder_memsave.ops.launches.wide_products import add_wide_product, wide_product

TILE_BYTES = 256 * 2**20
"""Bytes that the values of a tile may take."""
LEAST_ROWS = 1024
"""Rows of a tile at least, so that its products are as fast as whole ones."""
_ROUND_ROWS = 64
_PRODUCT = "aten_mm"
_NARROW = (torch.bfloat16, torch.float16)


@dataclass(frozen=True, slots=True)
class Slot:
    """Stands for a tensor in a step's arguments."""

    number: int


@dataclass(frozen=True, slots=True)
class RowStep:
    """One operator on a tile."""

    operator: str
    """Name of its symbol in a trace."""
    args: tuple[Any, ...]
    """With slots for tensors, as are `kwargs`."""
    kwargs: tuple[tuple[str, Any], ...]
    makes: tuple[int, ...]
    """Slots of its results."""
    frees: tuple[int, ...] = ()
    """Slots that nothing reads after it."""
    view: tuple[int, tuple[int, ...]] | None = None
    """Of a view: how many dims the rows have, and the dims of a row; its size is of the tile then."""


@dataclass(frozen=True, slots=True)
class RowOperand:
    """A tensor that the operation reads."""

    kind: Literal["rows", "columns", "whole"]
    """Its rows are its first dims; or, of a matrix, its columns; or every tile reads all of it."""
    dims: int = 0
    """How many dims the rows have."""


@dataclass(frozen=True, slots=True)
class RowResult:
    """A tensor that the operation makes."""

    slot: int
    kind: Literal["rows", "sum"]
    dtype: torch.dtype
    dims: int = 0
    """How many dims the rows have."""


@dataclass(frozen=True, slots=True)
class RowProgram:
    """Steps on a tile. Slots are numbered: operands first. Equal programs of all lengths are one symbol."""

    operands: tuple[RowOperand, ...]
    steps: tuple[RowStep, ...]
    results: tuple[RowResult, ...]
    is_on_cuda: bool = False
    """Whether it runs on CUDA, or is planned to."""

    @property
    def name(self) -> str:
        """The symbol's name, the same in every process."""
        digest = hashlib.sha256(repr(self).encode()).hexdigest()[:12]
        return f"rows_in_tiles_{digest}"

    def with_steps(self, steps: Sequence[RowStep]) -> RowProgram:
        """Return a program of the same operands and results; each step frees what is read there last."""
        seen = {result.slot for result in self.results}
        found = []
        for step in reversed(steps):
            slots = dict.fromkeys((*_slots(step.args), *_slots(step.kwargs), *step.makes))
            found.append(replace(step, frees=tuple(s for s in slots if s not in seen)))
            seen.update(slots)
        return replace(self, steps=tuple(reversed(found)))


_symbols: dict[str, Symbol] = {}
_programs: dict[str, RowProgram] = {}
_functions: dict[str, Callable[..., Any]] = {}
"""Functions of steps that are no operators, by their names."""


def symbol_of(program: RowProgram) -> Symbol:
    """Return the symbol `(rows_per_tile, shapes of the results, *operands) -> results`; each is registered once."""
    name = program.name
    if name not in _symbols:
        _programs[name] = program
        _symbols[name] = own_executor.register_operator(
            name, meta=partial(_meta, program), fn=partial(run_in_tiles, program)
        )
    return _symbols[name]


def program_of(name: str) -> RowProgram | None:
    """Return the program of a symbol; None: it runs none."""
    return _programs.get(name)


def add_function(name: str, function: Callable[..., Any]) -> None:
    """Let steps call a function of tensors by a name."""
    _functions[name] = function


def rows_per_tile(num_rows: int, row_bytes: int) -> int:
    """Return the rows of a tile: as many as `TILE_BYTES` allow, in tiles of one size, or of about one.

    Args:
        num_rows: Of all tiles.
        row_bytes: What the values of a row take at most.
    """
    most = max(LEAST_ROWS, TILE_BYTES // max(1, row_bytes))
    fewest = math.ceil(num_rows / most)
    for num_tiles in range(fewest, 2 * fewest):
        rows, rest = divmod(num_rows, num_tiles)
        if not rest and rows % _ROUND_ROWS == 0 and rows >= LEAST_ROWS:
            return rows
    rows = math.ceil(num_rows / fewest)
    return min(num_rows, math.ceil(rows / _ROUND_ROWS) * _ROUND_ROWS)


def run_in_tiles(
    program: RowProgram, rows_per_tile: int, shapes: Sequence[Sequence[int]], *operands: Tensor
) -> tuple[Tensor, ...]:
    """Run the steps on each tile.

    Args:
        program: The steps.
        rows_per_tile: Rows of every tile but the last.
        shapes: Those of the results.
        operands: As the program says.
    """
    num_rows = num_rows_of(program, operands)
    totals = _Totals(program) if rows_per_tile < num_rows else None
    device = operands[0].device
    made: list[Tensor | None] = [
        torch.empty(tuple(shape), dtype=r.dtype, device=device) if r.kind == "rows" else None
        for r, shape in zip(program.results, shapes, strict=True)
    ]
    for start in turns_of(range(0, num_rows, rows_per_tile), operands[0]):
        rows = slice(start, min(start + rows_per_tile, num_rows))
        is_last = rows.stop == num_rows
        tile = _tile(program, operands, num_rows, rows, totals)
        for number, result in enumerate(program.results):
            value = tile.pop(result.slot)
            if totals is None or result.slot not in totals.of:
                made[number] = _joined(made[number], value, result, num_rows, rows, is_last=is_last)
            elif is_last:
                made[number] = totals.of.pop(result.slot).to(result.dtype)
            del value
    return tuple(t for t in made if t is not None)


def totals_of(program: RowProgram) -> set[int]:
    """Return the slots of results that are added up over several tiles within the products that make them."""
    sums = {r.slot for r in program.results if r.kind == "sum" and r.dtype in _NARROW}
    products = {s.makes[0] for s in program.steps if s.operator == _PRODUCT}
    return sums & products if program.is_on_cuda else set()


class _Totals:
    """Sums over rows that products of matrices are added to as they are computed."""

    def __init__(self, program: RowProgram) -> None:
        """Find the results that are such sums."""
        self.slots = totals_of(program)
        self.of: dict[int, Tensor] = {}
        """The totals by their slots, in float32."""

    def add(self, slot: int, left: Tensor, right: Tensor) -> Tensor:
        """Return the total with the product of a tile."""
        if slot in self.of:
            add_wide_product(self.of[slot], left, right)
        else:
            self.of[slot] = wide_product(left, right)
        return self.of[slot]


def num_rows_of(program: RowProgram, operands: Sequence[Tensor]) -> int:
    """Return the rows of all tiles."""
    for operand, tensor in zip(program.operands, operands, strict=True):
        if operand.kind == "rows":
            return math.prod(tensor.shape[: operand.dims])
        if operand.kind == "columns":
            return tensor.shape[1]
    raise AssertionError("a program reads rows")


def _tile(
    program: RowProgram,
    operands: Sequence[Tensor],
    num_rows: int,
    rows: slice,
    totals: _Totals | None,
) -> dict[int, Tensor]:
    """Return the results of one tile by their slots; those that are totals have the tiles before it in them."""
    values = dict(enumerate(parts_of(program, operands, num_rows, rows)))
    for step in program.steps:
        if totals is not None and step.makes[0] in totals.slots:
            found: Any = totals.add(step.makes[0], *(_filled(a, values) for a in step.args))
        else:
            found = run_step(step, values)
        results = found if isinstance(found, (tuple, list)) else (found,)
        values.update(zip(step.makes, results, strict=True))
        del found, results
        for slot in step.frees:
            del values[slot]
    return values


def run_step(step: RowStep, values: dict[int, Tensor]) -> Any:
    """Return what a step makes of the values in its slots."""
    if step.view is not None:
        dims, row = step.view
        return values[step.args[0].number].reshape(*_leading(dims), *row)
    function = _functions.get(step.operator) or function_of(step.operator)
    args = [_filled(a, values) for a in step.args]
    return function(*args, **{name: _filled(a, values) for name, a in step.kwargs})


def parts_of(
    program: RowProgram, operands: Sequence[Tensor], num_rows: int, rows: slice
) -> list[Tensor]:
    """Return what a tile of rows reads of each operand."""
    pairs = zip(program.operands, operands, strict=True)
    return [_part(operand, tensor, num_rows, rows) for operand, tensor in pairs]


def _leading(dims: int) -> tuple[int, ...]:
    """Return the first dims of a tile: one after the other, all but the last have one element."""
    return (*[1] * (dims - 1), -1)


def _part(operand: RowOperand, tensor: Tensor, num_rows: int, rows: slice) -> Tensor:
    if operand.kind == "whole":
        return tensor
    if operand.kind == "columns":
        return tensor[:, rows]
    row = tensor.shape[operand.dims :]
    return tensor.reshape(num_rows, *row)[rows].reshape(*_leading(operand.dims), *row)


def _filled(value: Any, values: dict[int, Tensor]) -> Any:
    if isinstance(value, Slot):
        return values[value.number]
    if isinstance(value, tuple):
        return [_filled(v, values) for v in value]
    return value


def _slots(value: Any) -> list[int]:
    """Return the numbers of the slots in arguments."""
    if isinstance(value, Slot):
        return [value.number]
    return [s for v in value for s in _slots(v)] if isinstance(value, tuple) else []


def _joined(
    made: Tensor | None,
    value: Tensor,
    result: RowResult,
    num_rows: int,
    rows: slice,
    *,
    is_last: bool,
) -> Tensor:
    """Return a result with one more tile."""
    if result.kind == "rows":
        assert made is not None
        row = made.shape[result.dims :]
        made.view(num_rows, *row)[rows] = value.reshape(-1, *row)
        return made
    is_first = rows.start == 0
    if not (is_first and is_last):
        wide = torch.float64 if result.dtype is torch.float64 else torch.float32
        value = value.to(wide) if made is None else made.add_(value)
    return value.to(result.dtype) if is_last else value


def _meta(
    program: RowProgram, rows_per_tile: int, shapes: Sequence[Sequence[int]], *operands: TensorProxy
) -> tuple[TensorProxy, ...]:
    return tuple(
        TensorProxy(shape=tuple(shape), device=operands[0].device, dtype=dtypes.to_dtype(r.dtype))
        for r, shape in zip(program.results, shapes, strict=True)
    )
