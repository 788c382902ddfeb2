"""Properties of the symbols of an executed trace that several passes read."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from thunder.core import prims
from thunder.core.prims import OpTags
from thunder.core.proxies import (
    CollectionProxy,
    FutureTensorProxy,
    Proxy,
    TensorProxy,
)
from thunder.core.symbol import BoundSymbol
from thunder.core.trace import TraceCtx, from_trace
from thunder.executors import torchex


def is_tensor(proxy: object) -> bool:
    """Return whether the proxy stands for a tensor or for the future of one."""
    return isinstance(proxy, TensorProxy | FutureTensorProxy)


def written_in_place(bsym: BoundSymbol) -> str | None:
    """Return the name of the tensor that this symbol overwrites; None if it only makes new ones."""
    # The exact name: `copy_with_setitem_impl` and others that begin alike make a new tensor.
    return str(bsym.args[1].name) if bsym.sym.name == "copy_" else None


def is_cast(bsym: BoundSymbol) -> bool:
    """Return whether an operation only converts a tensor to another dtype."""
    return bsym.sym.executor is torchex.ex and bsym.sym.name == "to"


def makes_copy(bsym: BoundSymbol) -> bool:
    """Return whether it is a cast whose result is new memory in any case."""
    return is_cast(bsym) and bool(bsym.kwargs.get("copy"))


def records_amax(bsym: BoundSymbol) -> bool:
    """Return whether it is a cast that raises a running maximum (fp8/compute/operators.py), and may run many times."""
    return str(bsym.sym.name).startswith("fp8_quantize_delayed_")


def casts_with_amax(bsym: BoundSymbol) -> bool:
    """Return whether it is a cast of a weight's rows by the amax of the whole (fp8/compute/symbols.py)."""
    return str(bsym.sym.name).startswith("fp8_quantize_with_amax_")


def raises_amax(bsym: BoundSymbol) -> bool:
    """Return whether its only write is a running maximum: a cast, or the gradients of a loss, which backward runs."""
    return records_amax(bsym) or bsym.sym.name == "linear_cross_entropy_in_fp8_backward"


def without_recording(bsym: BoundSymbol) -> BoundSymbol:
    """Return the same cast for a rerun, which need not record the maximum again."""
    return bsym.from_bsym(args=(*bsym.args[:-1], False)) if records_amax(bsym) else bsym


def decisive_args(bsym: BoundSymbol) -> Sequence[Proxy]:
    """Return the arguments that decide the result, without the scaling state that it reads and updates."""
    args: Sequence[Proxy] = bsym.flat_proxy_args
    return args[:1] if records_amax(bsym) or casts_with_amax(bsym) else args


def forward_symbols(symbols: Sequence[BoundSymbol]) -> set[int]:
    """Return the ids of the symbols that forward's outputs need, by the rule of Thunder's split; the rest is backward.

    Draws that nothing reads are forward's too.

    Args:
        symbols: The symbols of a joint trace, or of an inference trace, which is all forward.
    """
    if not is_joint(symbols):
        return set(map(id, symbols))
    result = symbols[-1].args[0]
    # The arguments too: the caller sees what is copied into them.
    needed = {
        o.name for o in (*result["fw_flat_out"], *result["flat_args"]) if isinstance(o, Proxy)
    }
    forward = set()
    for bsym in reversed(symbols[:-1]):
        makes_forward = any(o.name in needed for o in bsym.flat_proxy_outs)
        if makes_forward or written_in_place(bsym) in needed or is_unread_draw(bsym):
            forward.add(id(bsym))
            needed.update(a.name for a in bsym.flat_proxy_args)
    return forward


def keep_unread(draw: BoundSymbol) -> None:
    """Tag a draw of random numbers that nothing reads, so that no step drops it: later draws depend on it."""
    draw.tags.add(OpTags.DONT_DCE)


def is_unread_draw(bsym: BoundSymbol) -> bool:
    """Return whether it draws random numbers that nothing reads, by its tags."""
    return OpTags.DONT_DCE in bsym.tags and OpTags.RANDOM_OP in bsym.tags


def is_joint(symbols: Sequence[BoundSymbol]) -> bool:
    """Return whether this is a joint trace, which returns forward's outputs and gradients."""
    if symbols[-1].sym is not prims.python_return:
        return False
    result = symbols[-1].args[0]
    return isinstance(result, dict) and "fw_flat_out" in result


def emptied(trace: TraceCtx) -> TraceCtx:
    """Return a trace like another one, without its symbols.

    Its names are its own: Thunder shares the set of names, and several passes and plans start from the same trace.
    """
    new = from_trace(trace)
    new.names = set(trace.names)
    return new


def with_others(
    trace: TraceCtx, instead: Mapping[int, BoundSymbol], left_out: Collection[int]
) -> TraceCtx:
    """Return the trace with other symbols in the place of some, and without some, by index; if none, the same one."""
    if not instead:
        return trace
    changed = from_trace(trace)
    changed.bound_symbols = [
        instead.get(i, b) for i, b in enumerate(trace.bound_symbols) if i not in left_out
    ]
    return changed


def renamed(
    bsym: BoundSymbol, names: Mapping[str, Proxy], *, skip_output: bool = False
) -> BoundSymbol:
    """Return the same symbol with proxies replaced, by name.

    Does what Thunder's `from_bsym_swap_proxies` does, in a fraction of its time. The very same symbol, which knows its
    flat arguments already, if it has none of them and its output stays.
    """
    if skip_output and not any(a.name in names for a in bsym.flat_proxy_args):
        return bsym
    return bsym.from_bsym(
        args=_swapped(bsym.args, names),
        kwargs=_swapped(bsym.kwargs, names),
        output=bsym.output if skip_output else _swapped(bsym.output, names),
    )


def _swapped(value: Any, names: Mapping[str, Proxy]) -> Any:
    if isinstance(value, Proxy):
        assert not isinstance(value, CollectionProxy), "only unpacking symbols have these"
        return names.get(value.name, value)
    if type(value) in (tuple, list):
        return type(value)(_swapped(v, names) for v in value)
    if type(value) is dict:
        return {key: _swapped(v, names) for key, v in value.items()}
    return value
