"""Shows the work of one micro-batch by kind of operation: FLOPs, bytes moved, and the time at sustained rates."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from thunder_memsave.planner.cost import is_attention, roofline_us
from thunder_memsave.planner.graph import Device, Op, Program
from thunder_memsave.planner.report.attention_work import attention_lines

KINDS = ("products", "attention", "collectives", "other operations")
_LAYER = re.compile(r"^(.*?)\.(\d+)(?=\.|$)")


@dataclass(frozen=True, kw_only=True, slots=True)
class Work:
    """The work of the operations of one kind."""

    num_ops: int
    flops: int
    moved_bytes: int
    """Bytes that kernels read from and write to device memory."""
    ms: float


def kind_of(op: Op) -> str:
    """Return the kind of an operation that is no view."""
    if op.flops:
        return "attention" if is_attention(op) else "products"
    return "collectives" if op.sent_bytes else "other operations"


def work_by_kind(ops: Sequence[Op], device: Device) -> Mapping[str, Work]:
    """Add up the work of operations by kind; views do none."""
    real = [op for op in ops if op.repeat != "free"]
    return {kind: _sum([op for op in real if kind_of(op) == kind], device) for kind in KINDS}


def ops_of_layers(program: Program) -> tuple[int, Sequence[Op]]:
    """Return the number of repeated layers and their operations: the numbered modules that occur most."""
    found = [(match[1], match[2]) for s in program.steps if (match := _LAYER.match(s.op.module))]
    if not found:
        return 0, ()
    ((name, _),) = Counter(name for name, _ in found).most_common(1)
    layers = {number for each, number in found if each == name}
    ops = [s.op for s in program.steps if (m := _LAYER.match(s.op.module)) and m[1] == name]
    return len(layers), ops


def work_table(program: Program, device: Device) -> str:
    """Describe the work of forward and backward, recomputation included."""
    ops = [step.op for step in program.steps]
    works = work_by_kind(ops, device)
    rows = [*works.items(), ("sum", _sum([op for op in ops if op.repeat != "free"], device))]
    lines = [
        "work of one micro-batch, recomputation included, at the rates that kernels sustain",
        f"{'':17}{'operations':>12}{'TFLOP':>10}{'GB moved':>10}{'ms':>10}",
    ]
    lines += [
        f"{kind:17}{w.num_ops:12,}{w.flops / 1e12:10.2f}{w.moved_bytes / 1e9:10.2f}{w.ms:10.2f}"
        for kind, w in rows
    ]
    num_layers, of_layers = ops_of_layers(program)
    if num_layers:
        others = work_by_kind(of_layers, device)["other operations"]
        gb, ops_each = others.moved_bytes / num_layers / 1e9, others.num_ops / num_layers
        lines.append(
            f"each of {num_layers} layers moves {gb:.2f} GB in {ops_each:.0f} other operations"
        )
    lines += attention_lines(program)
    return "\n".join(lines)


def _sum(ops: Sequence[Op], device: Device) -> Work:
    return Work(
        num_ops=len(ops),
        flops=sum(op.flops for op in ops),
        moved_bytes=sum(op.moved_bytes for op in ops),
        ms=sum(roofline_us(op, device) for op in ops) / 1e3,
    )
