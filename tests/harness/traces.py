"""Counts the bytes that an executed trace communicates, holds live and saves, exactly and without running it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from thunder.core import prims
from thunder.core.proxies import FutureTensorProxy, Proxy, TensorProxy
from thunder.core.symbol import BoundSymbol
from thunder.core.trace import TraceCtx

from thunder_memsave.budget.memory_planner import MemoryPlanner
from thunder_memsave.budget.target import device as target_device
from thunder_memsave.config import MemoryConfig
from thunder_memsave.distributed.data_parallel import DataParallel
from thunder_memsave.measure.devices import device_at
from thunder_memsave.ops.families.collectives import gathers


@contextmanager
def fake_ranks(world_size: int, *, mode: str = "zero3") -> Iterator[DataParallel]:
    """Make this process rank 0 of a fake group, whose collectives compute nothing."""
    with target_device.fake_ranks(world_size):
        assert dist.group.WORLD is not None
        yield DataParallel(mode=mode, group=dist.group.WORLD)  # type: ignore[arg-type]


def unlimited_planner(memory: MemoryConfig, data_parallel: DataParallel) -> MemoryPlanner:
    """Return the planner of the strategy on the CPU without a budget."""
    return MemoryPlanner(
        memory,
        device=device_at(torch.device("cpu")),
        budget_bytes=None,
        data_parallel=data_parallel,
    )


@dataclass(frozen=True, slots=True)
class Collective:
    """One collective of a trace."""

    kind: str
    """`all_gather`, `reduce_scatter` or `all_reduce`."""
    name: str
    """Name of the input tensor in the trace, where a parameter's dots are underscores."""
    nbytes: int
    """Bytes of the unsharded tensor: the output of a gather, the input of a reduction."""


def collectives(trace: TraceCtx) -> list[Collective]:
    """Return every collective in the order of the trace; one with several tensors has an entry for each."""
    kinds = ("all_gather", "reduce_scatter", "all_reduce")
    found = []
    for bsym in trace.bound_symbols:
        kind = next((k for k in kinds if k in bsym.sym.name), None)
        if kind is not None:
            inputs = [a for a in bsym.flat_proxy_args if isinstance(a, TensorProxy)]
            whole = bsym.flat_proxy_outs if kind == "all_gather" else inputs
            found += [
                Collective(kind, i.name, nbytes(w)) for i, w in zip(inputs, whole, strict=True)
            ]
    return found


def num_calls(trace: TraceCtx, kind: str) -> int:
    """Count the collectives of a kind; one with several tensors counts once."""
    return sum(kind in b.sym.name for b in trace.bound_symbols)


@dataclass(frozen=True, slots=True)
class LiveAt:
    """Gathered parameters at one symbol of a trace, by the names of their shards."""

    symbol: str
    live: dict[str, int]
    """Bytes of those that are live while the symbol runs."""
    read: frozenset[str]
    """Names of those that it reads."""


def live_gathered(trace: TraceCtx) -> list[LiveAt]:
    """Return the gathered parameters live at each symbol that computes, without gathers, waits and views."""
    shard_of: dict[str, str] = {}
    sizes: dict[str, int] = {}
    alive: set[str] = set()
    result = []
    for bsym in trace.bound_symbols:
        if bsym.sym is prims.python_del:
            alive -= {a.name for a in bsym.flat_proxy_args}
            continue
        inputs = [a for a in bsym.flat_proxy_args if a.name in alive]
        shards = {shard_of[a.name] for a in inputs}
        if gathered := gathers(bsym):
            for _, future in gathered:
                sizes[future.name] = nbytes(future)
                _derive([future], future.name, shard_of, alive)
        elif len(shards) == 1 and _depends_on_nothing_else(bsym, alive):
            _derive(bsym.flat_proxy_outs, next(iter(shards)), shard_of, alive)
        elif bsym.sym is not prims.python_return:
            live = {shard: sizes[shard] for shard in {shard_of[name] for name in alive}}
            result.append(LiveAt(bsym.sym.name, live, frozenset(shards)))
    return result


def saved_for_backward(forward: TraceCtx) -> list[TensorProxy]:
    """Return the tensors that forward saves for backward."""
    tensors, _ = forward.bound_symbols[-1].args[1]
    return list(tensors)


def nbytes(tensor: Proxy) -> int:
    assert isinstance(tensor, TensorProxy | FutureTensorProxy)
    return int(tensor.numel) * int(tensor.dtype.bytes)


def _derive(
    outputs: Sequence[Proxy], shard: str, shard_of: dict[str, str], alive: set[str]
) -> None:
    for output in outputs:
        shard_of[output.name] = shard
        alive.add(output.name)


def _depends_on_nothing_else(bsym: BoundSymbol, alive: set[str]) -> bool:
    tensors = [a for a in bsym.flat_proxy_args if isinstance(a, TensorProxy | FutureTensorProxy)]
    return all(a.name in alive for a in tensors)
