"""Compress: values of forward that a plan stores in fp8 are made again of that in backward.

`with_choices` writes the choice into a joint trace, for a plan to make. Before, with `t1` chosen:

    t1 = aten_mm(x, w)
    t2 = aten_silu(t1)
    ...
    t8 = aten_silu_backward(t7, t1)                             # backward

After:

    t1 = aten_mm(x, w)
    t1_same, t1_fp8, t1_scale = compress_to_fp8(t1)             # t1_same is t1
    t1_again = decompress_from_fp8(t1_fp8, t1_scale, ...)
    t2 = aten_silu(t1_again)
    ...
    t8 = aten_silu_backward(t7, t1_again)

So a plan may keep `t1_again` whole, keep the numbers in fp8 and recompute it of them, or recompute all, and what it
recomputes of `t1_again` in backward reads the same numbers as backward does. `as_planned`, after `recompute`, leaves of
this what the plan chose: forward always reads `t1` itself. Only where the plan keeps the numbers in fp8 and not
`t1_again` does backward read what they make:

    t1 = aten_mm(x, w)
    t1_same, t1_fp8, t1_scale = compress_to_fp8(t1)
    t2 = aten_silu(t1_same)
    ...
    bw_t1_again = decompress_from_fp8(t1_fp8, t1_scale, ...)
    t8 = aten_silu_backward(t7, bw_t1_again)

Forward reads `t1_same`, so that what compresses is forward's by the rule of Thunder's split.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

from thunder.core import dtypes
from thunder.core.proxies import Proxy, TensorProxy
from thunder.core.symbol import BoundSymbol
from thunder.core.trace import TraceCtx, TraceProvenance, tracectx

from thunder_memsave.fp8.compressed import compress, decompress
from thunder_memsave.passes.drop_unread import drop_unread
from thunder_memsave.passes.recompute import PREFIX
from thunder_memsave.passes.symbols import emptied, forward_symbols, renamed
from thunder_memsave.planner.actions import Action, Actions


@dataclass(frozen=True, slots=True)
class Compressible:
    """A value of forward that may be stored in fp8."""

    name: str
    views: frozenset[str]
    """Names of the views of it."""
    exact: frozenset[int]
    """Ids of the symbols of forward that read it or its views, and that backward must not run on other numbers."""


def with_choices(trace: TraceCtx, values: Collection[Compressible]) -> TraceCtx:
    """Write into a joint trace that these values may be stored in fp8; without values, the same trace."""
    if not values:
        return trace
    new = emptied(trace)
    names = {each.name for each in values}
    views = frozenset().union(*(each.views for each in values))
    exact = frozenset().union(*(each.exact for each in values))
    again: dict[str, Proxy] = {}
    """Proxies that stand for a value or a view of it where other numbers may be read, by its name."""
    same: dict[str, Proxy] = {}
    """Proxies that stand for a value everywhere else."""
    symbols: list[BoundSymbol] = []
    with tracectx(new):
        for bsym in trace.bound_symbols[:-1]:
            is_view = any(o.name in views for o in bsym.flat_proxy_outs)
            reads = same if is_view or id(bsym) in exact else again
            symbols.append(renamed(bsym, reads, skip_output=True))
            if is_view:
                symbols.append(_view_again(bsym, again))
            for value in (o for o in bsym.flat_proxy_outs if o.name in names):
                stores, makes = _stored(bsym, value)
                symbols += (stores, makes)
                same[value.name], again[value.name] = stores.output[0], makes.output
    new.bound_symbols = [*symbols, trace.bound_symbols[-1]]
    new.set_provenance(TraceProvenance("Joint pass compress"))
    return drop_unread(new)  # views that only what stands for them was read for


def _stored(producer: BoundSymbol, value: Proxy) -> tuple[BoundSymbol, BoundSymbol]:
    """Return what stores a value, and what makes it again."""
    assert isinstance(value, TensorProxy)
    _, quantized, scale_inv = compress.meta(value)
    parts = (
        quantized.replace_name(f"{value.name}_fp8"),
        scale_inv.replace_name(f"{value.name}_scale"),
    )
    stores = compress.bind(value, output=(value.replace_name(f"{value.name}_same"), *parts))
    makes = decompress.bind(
        *parts,
        tuple(value.shape),
        dtypes.to_torch_dtype(value.dtype),
        output=value.replace_name(f"{value.name}_again"),
    )
    for bsym in (stores, makes):
        bsym.tags.update(producer.tags)
        bsym.source_filename = producer.source_filename
    return stores, makes


def _view_again(bsym: BoundSymbol, again: dict[str, Proxy]) -> BoundSymbol:
    """Return the same view of what stands for a value."""
    new = {o.name: o.replace_name(f"{o.name}_again") for o in bsym.flat_proxy_outs}
    view = renamed(bsym, {**again, **new})
    again.update(new)
    return view


def as_planned(trace: TraceCtx, actions: Actions) -> tuple[TraceCtx, Actions]:
    """Leave of the choices in a trace what a plan made of them.

    Args:
        trace: A joint trace after `recompute`; one without choices is returned unchanged.
        actions: By names of its values.

    Returns:
        The trace, and actions for what is left of its values.
    """
    symbols = trace.bound_symbols
    if not any(bsym.sym.id == compress.id for bsym in symbols):
        return trace, actions
    forward = forward_symbols(symbols)
    defined = {o.name: o for b in symbols for o in b.flat_proxy_outs}
    in_forward: dict[str, Proxy] = {}
    of_clones: dict[str, Proxy] = {}
    moved: dict[str, Action] = {}
    """Actions of the values themselves, where they would have been made again."""
    for each in _choices([b for b in symbols if id(b) in forward]):
        recomputed = defined.get(f"{PREFIX}{each.value.name}", each.value)
        of_clones[f"{PREFIX}{each.same.name}"] = recomputed
        if each.is_stored(actions):
            in_forward[each.again.name] = each.same
            continue
        in_forward[each.again.name] = in_forward[each.same.name] = each.value
        of_clones[f"{PREFIX}{each.again.name}"] = recomputed
        if each.again.name in actions:
            moved[each.value.name] = actions[each.again.name]
    in_backward = {**in_forward, **of_clones}
    new = emptied(trace)
    new.bound_symbols = [
        renamed(b, in_forward if id(b) in forward else in_backward, skip_output=True)
        for b in symbols
    ]
    new.set_provenance(TraceProvenance("Joint pass compress"))
    return drop_unread(new), Actions({**actions, **moved})


@dataclass(frozen=True, slots=True)
class _Choice:
    value: Proxy
    same: Proxy
    stored: tuple[Proxy, Proxy]
    again: Proxy

    def is_stored(self, actions: Actions) -> bool:
        """Return whether a plan keeps the numbers in fp8, and not what they make."""
        kept = actions.kept
        return all(p.name in kept for p in self.stored) and self.again.name not in kept


def _choices(forward: Sequence[BoundSymbol]) -> Iterator[_Choice]:
    """Yield the choices of a trace, from the symbols of forward alone."""
    made = {b.flat_proxy_args[0].name: b.output for b in forward if b.sym.id == decompress.id}
    for bsym in forward:
        if bsym.sym.id == compress.id:
            same, *stored = bsym.output
            quantized, scale_inv = stored
            yield _Choice(bsym.args[0], same, (quantized, scale_inv), made[quantized.name])
