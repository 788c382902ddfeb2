"""The step that fuses elementwise operators of the traces that run, where the settings ask for it."""

from __future__ import annotations

from dataclasses import replace

from thunder.core.proxies import TensorProxy
from thunder.core.trace import TraceCtx

from thunder_memsave.budget.extract import Values
from thunder_memsave.compiler.state import State
from thunder_memsave.fusion import inductor
from thunder_memsave.fusion.row_programs import fused_in_tiles
from thunder_memsave.fusion.runs import follow, fused


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
    values = _values(state)
    forward = _fused(state, state.forward, values)
    if state.backward is None:
        return replace(state, forward=forward)
    backward = _fused_backward(state, state.backward, values)
    keeping = state.keeping
    if keeping is not None:
        others = _values(state)
        follow(state.forward, others)
        keeping = _fused_backward(state, keeping, others)
    return replace(state, forward=forward, backward=backward, keeping=keeping)


def _values(state: State) -> Values:
    assert state.forward is not None
    assert state.facts.fusion is not None
    arguments = state.facts.arguments
    return Values(state.forward.args, arguments.kinds, arguments.tensors, state.facts.fusion)


def _fused_backward(state: State, backward: TraceCtx, values: Values) -> TraceCtx:
    for proxy in backward.args[1]:
        if isinstance(proxy, TensorProxy):
            values.add_cotangent(proxy)
    return _fused(state, backward, values)


def _fused(state: State, trace: TraceCtx, values: Values) -> TraceCtx:
    compiles = state.facts.is_run
    found = fused(trace, values, compiles=compiles)
    return fused_in_tiles(found, values, compiles=compiles)


def _device_type(trace: TraceCtx) -> str:
    """Return the type of the first tensor's device that is no CPU; `cpu` if all are."""
    types = [a.device.type for a in trace.args if isinstance(a, TensorProxy)]
    return next((t for t in types if t != "cpu"), "cpu")
