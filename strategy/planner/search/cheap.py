"""Chooses the storages of a plan that recomputes what is cheap to recompute from others that are kept anyway.

Searches begin with it where it does not fit. Each storage is kept once, whatever its views are called; views, casts,
masks, comparisons, constants and elementwise values are recomputed where that leaves less to keep. Matrix products,
attention, reductions of much data, random numbers and collectives never are. The choice is an optimum: the least of
kept bytes plus a tenth of the bytes that recomputation moves. So the time that it adds is bounded: for each byte less
that is kept, at most ten are moved, and eager PyTorch moves at least two, as it writes and reads its saved tensors.
With sixteen, a step of a small GPT-2 in float32 moves 23 % more than without recomputation, with ten 13 %.
"""

from __future__ import annotations

from thunder_memsave.planner.actions import NO_ACTIONS, Actions
from thunder_memsave.planner.choices import Needs
from thunder_memsave.planner.graph import DECOMPRESS, Op, TrainingGraph
from thunder_memsave.planner.linear.coverage import add_coverage
from thunder_memsave.planner.linear.program import LinearProgram

MOVED_PER_KEPT_BYTE = 10
_REDUCTION = 16
"""Ratio of bytes read to bytes made above which an operation is a reduction; a comparison of two int64 has 16."""


def choose_cheap(
    needs: Needs, *, pinned: Actions = NO_ACTIONS, moved_per_kept_byte: int = MOVED_PER_KEPT_BYTE
) -> frozenset[str]:
    """Choose the storages to keep.

    Args:
        needs: Choices of the graph.
        pinned: Actions by names of storages, which hold whatever they cost, as for parameters in ZeRO-3.
        moved_per_kept_byte: Bytes that recomputation moves at most for each byte less that is kept; 0: only what
            takes no time is recomputed, views and what rides in kernels that run anyway.

    Returns:
        Names of storages. Everything else that backward reads can be recomputed from them.
    """
    graph, program = needs.graph, LinearProgram()
    keep = pinned.kept
    recompute = pinned.keys() - keep
    ops = {
        o: program.variable(cost=_cost(graph.ops[o], moved_per_kept_byte), integer=True)
        for o in needs.ops
        if (moved_per_kept_byte and _is_cheap(graph, graph.ops[o]))
        or graph.ops[o].repeat == "free"
        or graph.ops[o].rides
        or any(graph.storages[s].name in recompute for s in needs.makes[o])
    }
    kept = {
        s: program.variable(cost=graph.storages[s].nbytes, integer=True) for s in needs.storages
    }
    for storage, variable in kept.items():
        name = graph.storages[storage].name
        if (storage in needs.must_keep and storage in needs.first) or name in keep:
            program.low[variable] = 1.0
        elif name in recompute:
            program.high[variable] = 0.0
    add_coverage(program, needs, kept, ops)
    values = program.solve().values
    assert values is not None, "keeping everything that can be kept is a solution"
    return frozenset(graph.storages[s].name for s, v in kept.items() if values[v] > 0.5)


def _cost(op: Op, moved_per_kept_byte: int) -> float:
    # A byte more, so that of two equal choices the one with fewer operations wins.
    return 1.0 if op.rides else op.moved_bytes / max(1, moved_per_kept_byte) + 1.0


def _is_cheap(graph: TrainingGraph, op: Op) -> bool:
    made = sum(graph.storages[s].nbytes for s in op.makes)
    is_reduction = op.moved_bytes - made > _REDUCTION * made
    is_exact = op.symbol != DECOMPRESS
    return is_exact and op.repeat != "replay" and not (op.communicates or op.flops or is_reduction)
