"""Finds what in the traces of a call forbids graphs of it, by name and with what to do."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

import torch.distributed as dist
from thunder.core import devices
from thunder.core.prims import PrimIDs
from thunder.core.proxies import TensorProxy
from thunder.core.symbol import BoundSymbol
from thunder.core.trace import TraceCtx

from thunder_memsave.ops.added_gradients import added_names
from thunder_memsave.ops.families.collectives import (
    is_all_gather,
    is_all_reduce,
    is_all_reduce_largest,
    is_reduce_scatter,
)
from thunder_memsave.ops.host_copies.symbols import has_copies
from thunder_memsave.ops.host_copies.weights import fetches
from thunder_memsave.ops.table import places_on_host
from thunder_memsave.ops.updated_parameters import updated_names
from thunder_memsave.passes.repeatable import roots
from thunder_memsave.passes.symbols import written_in_place

_CAPTURABLE = "nccl"
"""Backend of process groups whose collectives run on the device alone."""
_REPLAYS = "_replaying"
_NO_WORK = (
    *(PrimIDs.UNPACK_TRIVIAL, PrimIDs.UNPACK_SEQUENCE, PrimIDs.UNPACK_EMPTY_DICT),
    *(PrimIDs.DEL, PrimIDs.RETURN),
)


def reasons(
    forward: TraceCtx,
    backward: TraceCtx,
    *,
    fixed: Collection[str],
    keeps_gradients: bool,
    device_type: str,
) -> Iterator[str]:
    """Yield what cannot be captured.

    Args:
        forward: The trace that runs.
        backward: Its backward.
        fixed: Names of the arguments that stay where they are.
        keeps_gradients: Whether another backward keeps whole gradients between micro-batches.
        device_type: Type of the device of the graphs.
    """
    if keeps_gradients:
        yield (
            "backward keeps unreduced gradients between micro-batches; set strategy.accumulate to reduce_every"
        )
    if added_names(backward):
        yield (
            "backward adds to gradients of earlier micro-batches, wherever these are; strategy.cuda_graphs: true "
            "leaves that to autograd"
        )
    if updated_names(backward):
        yield "backward updates weights (memory.optimizer_in_backward), which a graph would do with one learning rate"
    if has_copies(forward):
        yield "the plan copies values to the host (memory.offload); set that to none, or raise memory.budget"
        return
    if fetches(forward):
        yield "weights are copied from the host (memory.offload_weights), beside what a graph would hold"
        return
    yield from _writes_to_the_batch(forward, {a.name for a in forward.args} - set(fixed))
    symbols = [*forward.bound_symbols, *backward.bound_symbols]
    found = dict.fromkeys(backend for b in symbols for backend in _backends(b))
    for backend in found:
        if backend != _CAPTURABLE:
            yield f"its collectives run on {backend}, which needs the host; only those of nccl can be captured"
    if device_type == "cuda":
        yield from _on_the_host(symbols)
    for name in dict.fromkeys(b.sym.name for b in symbols if b.sym.id is PrimIDs.ITEM):
        yield f"{name} reads a value on the host; keep it in a tensor"


def _writes_to_the_batch(forward: TraceCtx, batch: Collection[str]) -> Iterator[str]:
    """Yield the first write to an argument that is copied: the caller would not see it."""
    memory = roots(forward.bound_symbols)
    for bsym in forward.bound_symbols:
        written = written_in_place(bsym)
        if written is not None and (changed := memory[written] & set(batch)):
            yield f"forward changes {min(changed)} of the batch in place; let it change a copy"
            return


def _on_the_host(symbols: list[BoundSymbol]) -> Iterator[str]:
    """Yield what reads or makes tensors of the host, which a graph would not read again."""
    if any(b.sym.name.endswith(_REPLAYS) for b in symbols):
        yield (
            "backward draws forward's random numbers again from a state on the host; keep what they make "
            "(memory.keep), or raise memory.budget"
        )
        return
    not_read = numbers_of_the_host(symbols)
    for bsym in symbols:
        for value in (*bsym.flat_proxy_args, *bsym.flat_proxy_outs):
            if (
                isinstance(value, TensorProxy)
                and value.name not in not_read
                and value.device.devicetype is devices.DeviceType.CPU
                and bsym.sym.id is not PrimIDs.UNPACK_TRIVIAL
            ):
                yield f"{bsym.sym.name} has a tensor on the CPU ({value.name}); move it to the GPU"
                return


def numbers_of_the_host(symbols: Sequence[BoundSymbol]) -> frozenset[str]:
    """Return the names of tensors on the host that operators take there and that their graphs do not read."""
    found: set[str] = set()
    others: set[str] = set()
    for bsym in symbols:
        places = places_on_host(bsym.sym.name)
        here = {a.name for p in places if isinstance(a := bsym.args[p], TensorProxy)}
        found |= here
        if bsym.sym.id not in _NO_WORK:
            others |= {a.name for a in bsym.flat_proxy_args} - here
    return frozenset(found - others)


_COLLECTIVES = (is_all_gather, is_reduce_scatter, is_all_reduce, is_all_reduce_largest)


def _backends(bsym: BoundSymbol) -> Iterator[str]:
    if any(is_one(bsym) for is_one in _COLLECTIVES):
        groups = (a for a in bsym.flat_args if isinstance(a, dist.ProcessGroup))
        yield from (str(dist.get_backend(group)) for group in groups)
