"""Says what a loss outside of the compiled call costs: logits that it returns, and what reads them."""

from __future__ import annotations

from collections.abc import Iterator

from thunder_memsave.planner.graph import Op, StepMemory, TrainingGraph
from thunder_memsave.planner.report.explain import in_units

_PRODUCTS = ("aten_mm", "aten_addmm")
_COPIES = ("aten__to_copy", "aten_clone")


def loss_outside(graph: TrainingGraph, memory: StepMemory, *, tile_bytes: int) -> list[str]:
    """Return what moving a loss into the compiled call would save, as a sentence; none if it saves nothing.

    Args:
        graph: Of a call whose largest result may be logits: those of a layer that reads a weight, and differentiated.
        memory: What the caller told of its own bytes.
        tile_bytes: Most bytes of a loss inside.
    """
    storage = max(_logits(graph), key=lambda s: graph.storages[s].nbytes, default=None)
    if storage is None or not graph.cotangents:
        return []
    logits_bytes = graph.storages[storage].nbytes
    gradient_bytes = max(graph.storages[s].nbytes for s in graph.cotangents)
    saved_bytes = logits_bytes + max(gradient_bytes, memory.between_bytes) - tile_bytes
    if gradient_bytes < logits_bytes or saved_bytes <= 0:
        return []
    return [
        f"the call returns {in_units(logits_bytes)} of a linear layer's results, which a loss outside of it reads and "
        f"differentiates. Where the module returns the loss in their place, the two take {in_units(tile_bytes)} at "
        f"most: about {in_units(saved_bytes)} less between forward and backward."
    ]


def _logits(graph: TrainingGraph) -> Iterator[int]:
    """Yield the results of the call that a product with a weight has made, or a cast or view of one."""
    made_by = {s: op for op in graph.ops[: graph.num_forward] for s in op.makes}
    for storage in graph.outputs:
        op = made_by.get(storage)
        while op is not None and not _is_product(op, graph):
            op = made_by.get(op.reads[0]) if op.symbol in _COPIES else None
        if op is not None:
            yield storage


def _is_product(op: Op, graph: TrainingGraph) -> bool:
    kinds = {graph.storages[s].kind for s in op.reads}
    return op.symbol in _PRODUCTS and bool(kinds & {"parameter", "gathered"})
