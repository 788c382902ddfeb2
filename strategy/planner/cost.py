"""Estimates the time of operations: as measured, or by a roofline of the device where nothing was measured.

The rates are those that kernels sustain, fractions of the data sheet's (`Device.sustained`), so that the time is near
what a profiler would show.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from types import MappingProxyType

from thunder_memsave.planner.graph import (
    DECOMPRESS,
    FETCH,
    UPDATE,
    Device,
    Op,
    Program,
    TrainingGraph,
)
from thunder_memsave.planner.offload.copies import runs_beside

_NOTHING_MEASURED: Mapping[str, float] = MappingProxyType({})


def costs_us(
    graph: TrainingGraph, device: Device, measured_us: Mapping[str, float] = _NOTHING_MEASURED
) -> tuple[float, ...]:
    """Return the time that each operation of a graph takes to be recomputed.

    Args:
        graph: The operations.
        device: The device that they run on.
        measured_us: Times by `Op.key`.

    Returns:
        Microseconds by the operation's index. Views take 0 whatever was measured: nothing runs on the device. So does
        what rides in a kernel that runs anyway; what joins one takes as long as what it moves there.
    """
    costs = [_cost_us(op, device, measured_us) for op in graph.ops]
    if any(op.symbol == DECOMPRESS for op in graph.ops):
        _leave_out_unread(graph, costs)
    return tuple(costs)


def _leave_out_unread(graph: TrainingGraph, costs: list[float]) -> None:
    """Let what makes a value again, that is read through fp8 alone, cost less by what that takes.

    A plan that recomputes both, which the costs of both then add up to, stores nothing in fp8.
    """
    makers = {s: n for n, op in enumerate(graph.ops) for s in op.makes}
    readers: dict[int, set[int]] = {}
    for number, op in enumerate(graph.ops):
        if op.repeat != "free":
            for storage in op.reads:
                readers.setdefault(storage, set()).add(number)
    for number, op in enumerate(graph.ops):
        if op.symbol == DECOMPRESS:
            producer: int | None = makers[op.reads[0]]
            assert producer is not None
            is_read = graph.ops[producer].makes[0] in readers
            left_us = 0.0 if is_read else costs[number]
            while producer is not None and left_us > 0.0:
                part_us = min(costs[producer], left_us)
                costs[producer] -= part_us
                left_us -= part_us
                producer = _made_for(graph, producer, makers, readers)


def _made_for(
    graph: TrainingGraph,
    number: int,
    makers: Mapping[int, int],
    readers: Mapping[int, Collection[int]],
) -> int | None:
    """Return an operation whose result is read by this one alone, that with the most FLOPs; None: there is none."""
    found = [makers[s] for s in graph.ops[number].reads if s in makers and len(readers[s]) == 1]
    return max(found, key=lambda n: graph.ops[n].flops, default=None)


def program_costs_us(program: Program, device: Device) -> tuple[float, ...]:
    """Return the time of each step of a program at the device's rates, in microseconds."""
    return tuple(roofline_us(step.op, device) for step in program.steps)


def forward_and_backward_us(program: Program, device: Device) -> float:
    """Return the time of what a program computes but for updates of weights, at the device's rates, in microseconds."""
    return sum(
        roofline_us(step.op, device)
        for step in program.steps
        if step.op.symbol != UPDATE and not runs_beside(step.op)
    )


def roofline_us(op: Op, device: Device) -> float:
    """Return the longest of computing, moving and receiving at sustained rates, in microseconds; 0 for a view."""
    if op.repeat == "free":
        return 0.0
    return max(kernel_us(op, device), device.launch_us)


def kernel_us(op: Op, device: Device) -> float:
    """Return the same of kernels alone, however short."""
    rates = device.sustained
    of_products = rates.products
    if is_attention(op):
        forward, backward = rates.attention_forward, rates.attention_backward
        if "cudnn" in op.symbol:
            forward, backward = rates.cudnn_forward, rates.cudnn_backward
        of_products = backward if "backward" in op.symbol or "bwd" in op.symbol else forward
    products_per_s = flops_per_s(op, device) * of_products
    return seconds_of(op, device, products_per_s, device.memory_bytes_per_s * rates.memory) * 1e6


def is_attention(op: Op) -> bool:
    """Return whether an operation computes attention in one kernel, or its derivative."""
    return bool(op.flops) and ("attention" in op.symbol or "sdpa" in op.symbol)


def seconds_of(op: Op, device: Device, products_per_s: float, memory_bytes_per_s: float) -> float:
    """Return the longest of computing, moving and receiving, and what kernels without products move beside it."""
    longest = max(
        op.flops / products_per_s,
        (op.moved_bytes - op.beside_bytes) / memory_bytes_per_s,
        op.sent_bytes / device.network_bytes_per_s,
    )
    return longest + op.beside_bytes / memory_bytes_per_s


def _cost_us(op: Op, device: Device, measured_us: Mapping[str, float]) -> float:
    op = (
        op.alone or op
    )  # forward then runs that one, and backward this: one time more than without recomputation
    if op.rides:
        return 0.0
    if op.symbol == FETCH:  # it runs beside what computes; the timeline has what waits for it
        return 0.0
    if op.repeat != "free" and op.key in measured_us:
        return measured_us[op.key] * _moved_part(op)
    return kernel_us(op, device) * _moved_part(op) if op.joins else roofline_us(op, device)


def alone_us(op: Op, device: Device) -> float:
    """Return how much longer an operation takes that joins no kernel, at the device's rates, in microseconds."""
    return roofline_us(op, device) - _cost_us(op, device, _NOTHING_MEASURED)


def _moved_part(op: Op) -> float:
    """Return the part of what an operation moves that it moves where it is recomputed."""
    return op.joined_bytes / op.moved_bytes if op.joins else 1.0


def flops_per_s(op: Op, device: Device) -> float:
    """Return the rate of the operation's dtype; that of float32 if the device has none for it, such as for integers."""
    return device.flops_per_s.get(op.dtype, device.flops_per_s["float32"])
