"""Finds the actions that no budget changes: of pins, checkpointed regions, and weights that a mode gathers again."""

from __future__ import annotations

from thunder.core.trace import TraceCtx

from thunder_memsave.budget.pins import pin_of
from thunder_memsave.config import MemoryConfig
from thunder_memsave.passes.checkpoint_regions import checkpointed
from thunder_memsave.planner.actions import RECOMPUTE, REGATHER, Action, Actions
from thunder_memsave.planner.graph import FETCH, TrainingGraph


def pinned_actions(
    graph: TrainingGraph,
    joint: TraceCtx,
    memory: MemoryConfig,
    *,
    regathers: bool,
    chooses_gathers: bool,
) -> Actions:
    """Return the actions that no budget changes.

    Args:
        graph: The call's graph.
        joint: The trace that it was extracted from.
        memory: The pins.
        regathers: Whether backward gathers every whole parameter again.
        chooses_gathers: Whether the plan chooses that for each of them.
    """
    pinned = dict.fromkeys(checkpointed(joint), RECOMPUTE)
    modules = {op.module for op in graph.ops}
    pins = {module: pin for module in modules if (pin := pin_of(memory, module))}
    for op in graph.ops[: graph.num_forward]:
        if op.module in pins:
            made = (graph.storages[s].name for s in op.makes)
            pinned.update(dict.fromkeys(made, pins[op.module]))
    gathers = regathered(graph)
    if regathers:  # ZeRO-3 keeps no whole parameter
        pinned.update(gathers)
    pinned.update(fetched(graph))
    names = {s.name for s in graph.storages}
    if chooses_gathers:  # pins are for activations, not for gathered parameters
        names -= gathers.keys()
    return Actions(pinned).only(names)


def regathered(graph: TrainingGraph) -> dict[str, Action]:
    """Return the action to regather for all storages of gathered parameters."""
    return {s.name: REGATHER for s in graph.storages if s.kind == "gathered"}


def fetched(graph: TrainingGraph) -> dict[str, Action]:
    """Return the action to copy again for weights from the host, and for what depends on one of them alone."""
    found: set[int] = set()
    for op in graph.ops[: graph.num_forward]:
        if op.symbol == FETCH or (op.reads and found.issuperset(op.reads)):
            found.update(s for s in op.makes if graph.storages[s].kind == "gathered")
    return {graph.storages[s].name: REGATHER for s in sorted(found)}
