"""Regather (ZeRO-3): a gathered parameter is live while consecutive operations read it; a later reader gathers it anew.

Before, a weight is gathered once, at its first use, and lives until backward has read it:

    ft1 = all_gather_rows(w, group, torch.float32)
    t2 = torch_wait_prim_impl(ft1)                  # forward
    t3 = aten_mm(x, t2)
    ...
    t9 = aten_mm(g, t2)                        # backward

After, each reader has its own copy, gathered right before it:

    ft1_0 = all_gather_rows(w, group, torch.float32)
    t2_0 = torch_wait_prim_impl(ft1_0)              # forward
    t3 = aten_mm(x, t2_0)
    ...
    ft1_1 = all_gather_rows(w, group, torch.float32)   # backward
    t2_1 = torch_wait_prim_impl(ft1_1)
    t9 = aten_mm(g, t2_1)

The same holds for every value computed from one gathered parameter alone: its rows without padding, a transpose, a
cast. Keeping those would keep the weight, or a copy of it. Thunder's split, which runs later, then saves the shards,
which are live anyway. A weight that forward reads in distant places, such as a tied embedding, is gathered for each.

`regather_forward` does this in forward alone: backward reads the value of forward's last reader. The plan then decides
whether to keep or to regather it: with a planner, `sharding: zero3` always regathers, `auto` decides by the budget.

A weight stored as bytes is dequantised by `nf4_dequantized` or the like, and its copies are made anew in the same way,
from the bytes that are gathered or, unsharded, are an argument. `dequantize_at_use` does that alone, where bytes stay
gathered or are not.

Source: ZeRO, stage 3 (Rajbhandari et al. 2020). Thunder 0.2.6 has such a mode in name only.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any, Literal

from thunder.core import prims
from thunder.core.proxies import (
    Proxy,
    variableify,
)
from thunder.core.symbol import BoundSymbol
from thunder.core.trace import TraceCtx, TraceProvenance, tracectx

from thunder_memsave.ops.families.collectives import is_all_gather
from thunder_memsave.ops.random_ops import draws_random_numbers
from thunder_memsave.passes.symbols import (
    decisive_args,
    emptied,
    forward_symbols,
    is_tensor,
    written_in_place,
)
from thunder_memsave.stored_weights.symbols import is_dequantized

_Phase = Literal["forward", "backward"]


def regather(trace: TraceCtx) -> TraceCtx:
    """Give every run of consecutive readers of a gathered parameter a gather of its own.

    Args:
        trace: A joint or an inference trace, with operations claimed by executors.

    Returns:
        A trace in which no gathered value outlives the consecutive operations that read it, unless it is returned to
        the caller.
    """
    return _regathered(trace, {"forward", "backward"}, name="regather")


def regather_forward(trace: TraceCtx) -> TraceCtx:
    """Do the same in forward only; backward reads the last gather of forward.

    Args:
        trace: As for `regather`, which gives the same result on an inference trace.

    Returns:
        A trace in which no gathered value outlives the consecutive operations of forward that read it, unless backward
        reads it or it is returned to the caller.
    """
    return _regathered(trace, {"forward"}, name="regather_forward")


def dequantize_at_use(trace: TraceCtx, *, in_backward: bool) -> TraceCtx:
    """Give every run of consecutive readers of a dequantised weight a copy of its own, from the same bytes.

    Args:
        trace: A joint or an inference trace, with operations claimed by executors.
        in_backward: Whether backward makes copies of its own; else it reads the last of forward.

    Returns:
        A trace in which no copy outlives the consecutive operations that read it, unless backward reads it or it is
        returned to the caller.
    """
    phases: Set[_Phase] = {"forward", "backward"} if in_backward else {"forward"}
    return _regathered(trace, phases, name="dequantize_at_use", of_gathers=False)


def _regathered(
    trace: TraceCtx, phases: Set[_Phase], *, name: str, of_gathers: bool = True
) -> TraceCtx:
    gathered = _gathered_values(trace.bound_symbols, of_gathers=of_gathers)
    if not gathered:
        return trace
    new = emptied(trace)
    with tracectx(new):
        new.bound_symbols = list(_rewritten(trace.bound_symbols, gathered, phases))
    new.set_provenance(TraceProvenance(f"Joint pass {name}"))
    return new


@dataclass(frozen=True, slots=True)
class _Gathered:
    """A value that one gathered, or dequantised, parameter alone decides."""

    shard: str
    """Name of the parameter's shard, or bytes."""
    producer: BoundSymbol


def _gathered_values(symbols: Sequence[BoundSymbol], *, of_gathers: bool) -> dict[str, _Gathered]:
    values: dict[str, _Gathered] = {}
    for bsym in symbols:
        is_of_bytes = is_dequantized(bsym) and bsym.args[0].name not in values
        is_first = of_gathers and is_all_gather(bsym) and bsym.args[0].name not in values
        if is_of_bytes or is_first:
            shard = bsym.args[0].name
        else:
            inputs = [values.get(a.name) for a in decisive_args(bsym) if is_tensor(a)]
            shards = {value.shard if value else None for value in inputs}
            if len(shards) != 1 or None in shards or not _can_be_repeated(bsym):
                continue
            (shard,) = shards
        values.update((o.name, _Gathered(shard, bsym)) for o in bsym.flat_proxy_outs)
    return values


def _can_be_repeated(bsym: BoundSymbol) -> bool:
    """Return False for operations that must run once: random, in-place, and those that return a value."""
    returns = bsym.sym in (prims.python_return, prims.get_grad)
    return not (returns or draws_random_numbers(bsym) or written_in_place(bsym) is not None)


def _rewritten(
    symbols: Sequence[BoundSymbol], gathered: Mapping[str, _Gathered], phases: Set[_Phase]
) -> Iterator[BoundSymbol]:
    """Yield the symbols, each reader after the gathers that are made for it."""
    originals, forward = _needed_originals(symbols, gathered), forward_symbols(symbols)
    rows = _Rows(phases)
    for number, bsym in enumerate(symbols):
        if any(o.name in gathered for o in bsym.flat_proxy_outs):
            if id(bsym) in originals:
                yield bsym
            continue
        if bsym.sym in (prims.python_return, prims.get_grad):
            yield bsym
            continue
        read = [a.name for a in bsym.flat_proxy_args if a.name in gathered]
        made = rows.for_reader(
            {gathered[name].shard for name in read},
            phase="forward" if id(bsym) in forward else "backward",
        )
        for name in read:
            yield from _made(name, gathered, made[gathered[name].shard], suffix=str(number))
        swaps = {old: new for values in made.values() for old, new in values.items()}
        yield bsym.from_bsym_swap_proxies(swaps, skip_output=True)


_Values = dict[Any, Proxy]
"""The current proxies of the values of one parameter, by their original ones."""


class _Rows:
    """The live values of each parameter, for runs of consecutive operations that read it."""

    def __init__(self, phases: Set[_Phase]) -> None:
        self._phases = phases
        self._row: dict[str, _Values] = {}
        self._last: dict[str, _Values] = {}
        self._phase: _Phase = "forward"

    def for_reader(self, shards: Set[str], *, phase: _Phase) -> dict[str, _Values]:
        """Return the live values of these parameters for the next operation; the caller adds what it gathers."""
        if phase not in self._phases:
            return {shard: self._last.setdefault(shard, {}) for shard in shards}
        # Values that the previous operation has read and this one does not are freed here. Backward reuses no value
        # of forward, even where the two are adjacent.
        before = self._row if phase == self._phase else {}
        self._row = {shard: before.get(shard, {}) for shard in shards}
        self._phase = phase
        self._last.update(self._row)
        return self._row


def _needed_originals(
    symbols: Sequence[BoundSymbol], gathered: Mapping[str, _Gathered]
) -> set[int]:
    """Return the ids of the producers of gathered values that are returned to the caller."""
    needed: set[int] = set()
    names = [a.name for a in symbols[-1].flat_proxy_args if a.name in gathered]
    while names:
        producer = gathered[names.pop()].producer
        needed.add(id(producer))
        names += [a.name for a in producer.flat_proxy_args if a.name in gathered]
    return needed


def _made(
    name: str, gathered: Mapping[str, _Gathered], made: _Values, *, suffix: str
) -> Iterator[BoundSymbol]:
    """Yield the symbols that make the value anew, unless it is live; `made` gets its new proxy."""
    producer = gathered[name].producer
    if all(variableify(o) in made for o in producer.flat_proxy_outs):
        return
    for argument in producer.flat_proxy_args:
        if argument.name in gathered:
            yield from _made(argument.name, gathered, made, suffix=suffix)
    for output in producer.flat_proxy_outs:
        made[variableify(output)] = output.replace_name(f"{output.name}_{suffix}")
    yield producer.from_bsym_swap_proxies(made)
