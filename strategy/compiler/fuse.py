"""The step that fuses elementwise operators of the traces that run, where the settings ask for it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from thunder.core.proxies import TensorProxy
from thunder.core.trace import TraceCtx

from thunder_memsave.budget.extract import Fuses, Values, nothing_fuses
from thunder_memsave.compiler.state import State
from thunder_memsave.fusion import inductor
from thunder_memsave.fusion.row_programs import fused_in_tiles
from thunder_memsave.fusion.runs import follow, fused, fuses, most_held
from thunder_memsave.fusion.written_out import may_be_written_out, with_kernels_written_out


def fuse(state: State) -> State:
    """Fuse each trace for itself; nothing changes where the settings, or a missing compiler, say so.

    What is planned for another device is cut as there, and nothing is compiled.
    """
    facts = state.facts
    if facts.fusion is None or state.forward is None:
        return state
    device_type = _device_type(state.forward)
    if facts.is_run and (reason := inductor.why_unavailable(device_type)) is not None:
        inductor.warn_unavailable(reason)
        return state
    traces = [t for t in (state.forward, state.backward, state.keeping) if t is not None]
    if any(may_be_written_out(bsym) for trace in traces for bsym in trace.bound_symbols):
        most, written = _most_held(state)
        found = _all_fused(written)
        if all(a <= b for a, b in zip(_most_held(found)[0], most, strict=True)):
            return found
    return _all_fused(state)


def fuses_as_planned(state: State) -> Fuses:
    """Return which symbols of the joint trace `fuse` will fuse, for the plan."""
    facts = state.facts
    if facts.fusion is None:
        return nothing_fuses
    if facts.is_run and inductor.why_unavailable(_device_type(state.joint)) is not None:
        return nothing_fuses
    return fuses


def _all_fused(state: State) -> State:
    return _each(state, lambda trace, values: _fused(state, trace, values))


def _most_held(state: State) -> tuple[list[int], State]:
    """Return the most bytes that each trace holds beside what it finds, and the traces with kernels written out."""
    found = []

    def measured(trace: TraceCtx, values: Values) -> TraceCtx:
        found.append(most_held(trace, values))
        return with_kernels_written_out(trace, values)

    written = _each(state, measured)
    return found, written


def _each(state: State, change: Callable[[TraceCtx, Values], TraceCtx]) -> State:
    """Change the forward, the backward and the one that keeps the graph, each with the values that it finds."""
    assert state.forward is not None
    values = _values(state)
    forward = change(state.forward, values)
    if state.backward is None:
        return replace(state, forward=forward)
    backward = change(state.backward, _with_cotangents(values, state.backward))
    keeping = state.keeping
    if keeping is not None:
        others = _values(state)
        follow(state.forward, others)
        keeping = change(keeping, _with_cotangents(others, keeping))
    return replace(state, forward=forward, backward=backward, keeping=keeping)


def _values(state: State) -> Values:
    assert state.forward is not None
    assert state.facts.fusion is not None
    arguments = state.facts.arguments
    return Values(state.forward.args, arguments.kinds, arguments.tensors, state.facts.fusion)


def _with_cotangents(values: Values, backward: TraceCtx) -> Values:
    for proxy in backward.args[1]:
        if isinstance(proxy, TensorProxy):
            values.add_cotangent(proxy)
    return values


def _fused(state: State, trace: TraceCtx, values: Values) -> TraceCtx:
    compiles = state.facts.is_run
    found = fused(trace, values, compiles=compiles)
    return fused_in_tiles(found, values, compiles=compiles)


def _device_type(trace: TraceCtx) -> str:
    """Return the type of the first tensor's device that is no CPU; `cpu` if all are."""
    types = [a.device.type for a in trace.args if isinstance(a, TensorProxy)]
    return next((t for t in types if t != "cpu"), "cpu")
