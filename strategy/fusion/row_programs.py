"""Fuses elementwise operators of what computes wide values tile by tile (`ops/row_tiles.py`): regions of one tile."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterator, Sequence, Set
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from thunder.core import devices, prims
from thunder.core.proxies import TensorProxy
from thunder.core.symbol import BoundSymbol
from thunder.core.trace import TraceCtx, from_trace, tracectx
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from thunder_memsave.budget.extract import Values
from thunder_memsave.fusion.memory import Placed
from thunder_memsave.fusion.region import known as known_region
from thunder_memsave.fusion.runs import fused
from thunder_memsave.measure.absent_device import place_for
from thunder_memsave.measure.layouts import Layout, Value, layout_of, make_arguments
from thunder_memsave.measure.op_profile import OpProfiles
from thunder_memsave.ops import row_tiles
from thunder_memsave.ops.aten_operators import operator_named, operator_symbol, proxy_like
from thunder_memsave.ops.row_tiles import RowProgram, RowStep, Slot

_VIEW = torch.ops.aten.view.default


def fused_in_tiles(trace: TraceCtx, values: Values, *, compiles: bool) -> TraceCtx:
    """Return the trace with regions within what runs in tiles of one size; the very same trace where there are none.

    Args:
        trace: A forward or a backward in its final order.
        values: With all values of the trace.
        compiles: As that of `runs.fused`.

    Raises:
        CompileError: an operation does not run on tensors without data.
    """
    cut: dict[Hashable, RowProgram] = {}
    found = [_fused(bsym, values, cut, compiles=compiles) for bsym in trace.bound_symbols]
    if all(new is bsym for new, bsym in zip(found, trace.bound_symbols, strict=True)):
        return trace
    new = from_trace(trace)
    new.bound_symbols = found
    return new


def _fused(
    bsym: BoundSymbol, values: Values, cut: dict[Hashable, RowProgram], *, compiles: bool
) -> BoundSymbol:
    """Return a symbol with regions within, if it runs in tiles; `cut` has the programs of equal ones before it."""
    program = row_tiles.program_of(bsym.sym.name)
    if program is None:
        return bsym
    rows, shapes, *proxies = bsym.args
    operands = [values.by_name[p.name] for p in proxies]
    key = (program, rows, tuple(value.layout for value in operands))
    if key not in cut:
        cut[key] = _cut(program, rows, proxies, operands, values.known, compiles=compiles)
    if cut[key] is program:
        return bsym
    symbol = row_tiles.symbol_of(cut[key]).bind(rows, shapes, *proxies, output=bsym.output)
    symbol.tags = bsym.tags.copy()
    before, after = (values.known.profile(each, operands) for each in (bsym, symbol))
    return symbol if after.peak_bytes <= before.peak_bytes else bsym


def _cut(
    program: RowProgram,
    rows: int,
    proxies: Sequence[TensorProxy],
    operands: Sequence[Value],
    known: OpProfiles,
    *,
    compiles: bool,
) -> RowProgram:
    """Return a program with regions among its steps; the very same one where there are none."""
    with FakeTensorMode(allow_non_fake_inputs=True):
        wholes = make_arguments(operands)
    num_rows = row_tiles.num_rows_of(program, wholes)
    if num_rows % rows:  # the last tile is another one
        return program
    parts = row_tiles.parts_of(program, wholes, num_rows, slice(0, rows))
    tile = _Tile(program, parts, proxies)
    own = Values(tile.trace.args, {}, {}, known)
    for number, (proxy, part) in enumerate(zip(tile.trace.args, parts, strict=True)):
        own.by_name[proxy.name] = Value(_alone(part, operands[number].layout.device), number)
    totals = row_tiles.totals_of(program) if rows < num_rows else set()
    placing = partial(_with_totals, makers=tile.makers_of(totals))
    found = fused(tile.trace, own, compiles=compiles, placing=placing)
    if found is tile.trace:
        return program
    return program.with_steps(list(tile.steps_of(found.bound_symbols)))


def _with_totals(symbols: Sequence[Placed], makers: Collection[int]) -> list[Placed]:
    """Return the symbols of a tile; those whose products are added to totals, which all tiles share, make nothing."""
    return [replace(p, is_left_out=True) if id(p.bsym) in makers else p for p in symbols]


def _alone(part: Tensor, device: str) -> Layout:
    """Return the layout of a part in a storage of its own."""
    with FakeTensorMode():
        like = torch.empty_strided(
            part.shape, part.stride(), dtype=part.dtype, device=place_for(device)
        )
    return layout_of(like)._replace(device=device)


class _Tile:
    """The trace of a program on a tile; values are named after their slots."""

    def __init__(
        self, program: RowProgram, parts: Sequence[Tensor], like: Sequence[TensorProxy]
    ) -> None:
        """Follow the steps.

        Args:
            program: Its steps run one by one.
            parts: A tile's part of each operand, without numbers.
            like: The operands, on the device on which the program runs.
        """
        self._device = devices.to_torch_device(like[0].device)
        self._steps: dict[int, RowStep] = {}
        """The step of a symbol, by the symbol's identity."""
        self._proxies: dict[int, TensorProxy] = {}
        self._slots: dict[str, int] = {}
        self.trace = TraceCtx()
        with tracectx(self.trace):
            self._follow(program, parts)

    def _follow(self, program: RowProgram, parts: Sequence[Tensor]) -> None:
        fakes = dict(enumerate(parts))
        self.trace.args, self.trace.kwargs = tuple(self._new(dict(fakes))), {}
        for step in program.steps:
            found = row_tiles.run_step(step, fakes)
            results = found if isinstance(found, (tuple, list)) else (found,)
            made = dict(zip(step.makes, results, strict=True))
            fakes.update(made)
            proxies = self._new(made)
            bsym = self._symbol(step, proxies if found is results else proxies[0])
            self._steps[id(bsym)] = step
            self.trace.bound_symbols.append(bsym)
        results = [self._proxies[result.slot] for result in program.results]
        prims.python_return(tuple(results))

    def makers_of(self, slots: Set[int]) -> set[int]:
        """Return the identities of the symbols that make what is in slots."""
        return {made for made, step in self._steps.items() if not slots.isdisjoint(step.makes)}

    def _new(self, tensors: dict[int, Tensor]) -> list[TensorProxy]:
        """Return proxies for the tensors in slots."""
        found = {slot: proxy_like(tensor, self._device) for slot, tensor in tensors.items()}
        self._proxies.update(found)
        self._slots.update((proxy.name, slot) for slot, proxy in found.items())
        return list(found.values())

    def _symbol(self, step: RowStep, output: Any) -> BoundSymbol:
        if step.view is not None:
            shape = list(map(int, output.shape))
            return operator_symbol(_VIEW).bind(self._filled(step.args[0]), shape, output=output)
        symbol = operator_symbol(operator_named(step.operator))
        kwargs = {name: self._filled(value) for name, value in step.kwargs}
        return symbol.bind(*map(self._filled, step.args), **kwargs, output=output)

    def _filled(self, value: Any) -> Any:
        if isinstance(value, Slot):
            return self._proxies[value.number]
        return list(map(self._filled, value)) if isinstance(value, tuple) else value

    def steps_of(self, symbols: Sequence[BoundSymbol]) -> Iterator[RowStep]:
        """Yield the steps of this trace's symbols and of regions of them."""
        for bsym in symbols:
            if (step := self._steps.get(id(bsym))) is not None:
                yield step
            elif (region := known_region(bsym.sym.name)) is not None:
                row_tiles.add_function(region.name, region)
                read = tuple(Slot(self._slots[a.name]) for a in bsym.flat_proxy_args)
                makes = tuple(self._slots[o.name] for o in bsym.flat_proxy_outs)
                yield RowStep(region.name, read, (), makes)
