"""Keeps frozen weights of some layers on the host, where no plan fits without: about as few layers as that takes.

The layers are spread evenly over the model, so that the copies of one run beside what the layers before it compute.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from math import ceil

from thunder.core.proxies import TensorProxy
from thunder.core.trace import TraceCtx

from thunder_memsave.budget.planned_call import Attempt
from thunder_memsave.ops.host_copies.buffers import is_dense
from thunder_memsave.passes.fetch_weights import fetch_weights
from thunder_memsave.passes.regather import regather_forward
from thunder_memsave.passes.symbols import written_in_place
from thunder_memsave.planner.offload.copies import LEAST_BYTES

_LAYER = re.compile(r"^(.*?\.\d+)(?=\.|$)")


@dataclass(slots=True)
class Layer:
    """A numbered module, with its large frozen weights."""

    name: str
    weights: list[str] = field(default_factory=list)
    """Names of the arguments."""
    nbytes: int = 0


def layers_of(attempt: Attempt) -> list[Layer]:
    """Return the layers of a call in order, each with the frozen weights that it alone reads."""
    graph = attempt.graph
    written = {written_in_place(b) for b in attempt.traces.joint.bound_symbols}
    frozen = {
        graph.storage_of[a.name]: a.name
        for a in attempt.traces.joint.args
        if isinstance(a, TensorProxy) and not a.requires_grad and a.name not in written
        if attempt.arguments.kinds.get(a.name) == "parameter"
        if graph.storages[graph.storage_of[a.name]].nbytes >= LEAST_BYTES
        if (tensor := attempt.arguments.tensors.get(a.name)) is None or is_dense(tensor.data)
    }
    readers: dict[int, set[str]] = {storage: set() for storage in frozen}
    weight_of = {storage: storage for storage in frozen}
    for op in graph.ops[: graph.num_forward]:
        for storage in weight_of.keys() & set(op.reads):
            weight = weight_of[storage]
            if all(graph.storages[s].kind == "gathered" for s in op.makes):
                # The whole weight, a cast of it, or a view, which makes nothing.
                weight_of.update(dict.fromkeys(op.makes, weight))
                continue
            match = _LAYER.match(op.module)
            readers[weight].add(match[1] if match else "")
    found: dict[str, Layer] = {}
    for storage, names in readers.items():
        (name, *others) = names or {""}
        if name and not others:
            layer = found.setdefault(name, Layer(name))
            layer.weights.append(frozen[storage])
            layer.nbytes += graph.storages[storage].nbytes
    return list(found.values())


def spread(layers: Sequence[Layer], count: int) -> list[Layer]:
    """Return so many layers, evenly spread; the first ones are left out, whose copies nothing could hide."""
    return [layers[(number + 1) * len(layers) // count - 1] for number in range(count)]


def _bytes_of(layers: Sequence[Layer]) -> int:
    return sum(layer.nbytes for layer in layers)


def streamed(attempt: Attempt, layers: Sequence[Layer]) -> Attempt:
    """Return a call whose layers read copies of their weights, which are on the host."""
    names = {name for layer in layers for name in layer.weights}
    traces, arguments = attempt.traces, attempt.arguments

    def changed(trace: TraceCtx) -> TraceCtx:
        return regather_forward(fetch_weights(trace, names))

    def tiled() -> TraceCtx | None:
        found = traces.tiled()
        return None if found is None else changed(found)

    return attempt.with_traces(
        replace(traces, joint=changed(traces.joint), tiled=cache(tiled)),
        replace(arguments, kinds={**arguments.kinds, **dict.fromkeys(names, "host")}),
    )


def streaming(
    first: Attempt, about_bytes: Callable[[Attempt], int], *, budget_bytes: int, host_bytes: int
) -> Iterator[tuple[Attempt, Callable[[int], None]]]:
    """Yield calls with more and more layers on the host, each with a function that takes the bytes it lacks.

    Args:
        first: The call with none there.
        about_bytes: Estimates the smallest peak of a call in little time, the same on all ranks.
        budget_bytes: Of a step.
        host_bytes: Most bytes of the weights on a rank's host.
    """
    layers, count = layers_of(first), 0
    if not layers:
        return
    layer_bytes = max(layer.nbytes for layer in layers)
    most = max(
        (n for n in range(1, len(layers) + 1) if _bytes_of(spread(layers, n)) <= host_bytes),
        default=0,
    )
    lacking = about_bytes(first) - budget_bytes
    is_estimate = True

    def lack(nbytes: int) -> None:
        nonlocal lacking
        lacking = nbytes

    while count < most:
        count = min(most, count + max(1, ceil(lacking / layer_bytes)))
        attempt = streamed(first, spread(layers, count))
        if is_estimate:  # some layers' copies are there at once
            is_estimate = False
            lacking = about_bytes(attempt) - budget_bytes
            if lacking > 0 and count < most:
                continue
        yield attempt, lack
