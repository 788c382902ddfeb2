"""Free wins: what backward need not keep because it follows cheaply from what is kept anyway.

Applied at any budget. Each storage is kept once, whatever views of it are called; views, casts, masks, comparisons,
constants and elementwise values are computed again where that leaves less to keep. Matrix products, attention,
reductions of much data, random numbers and collectives never are. The choice is an optimum: the least of kept bytes
plus a tenth of the bytes that computing again moves. So the time that it adds is bounded: for each byte less that is
kept, at most ten are moved, and eager PyTorch moves at least two, because it writes and reads what it saves. With fewer
than ten, GPT-2 in bfloat16 keeps more than in eager PyTorch, whose kernels compute the same again inside of themselves;
with sixteen, a step of a small GPT-2 in float32 moves 23 % more than with nothing computed again, with ten 13 %.
"""

from __future__ import annotations

from thunder_memsave.planner.actions import NO_ACTIONS, Actions
from thunder_memsave.planner.choices import Needs
from thunder_memsave.planner.graph import Op, TrainingGraph
from thunder_memsave.planner.linear.coverage import add_coverage
from thunder_memsave.planner.linear.program import LinearProgram

MOVED_PER_KEPT_BYTE = 10
_REDUCTION = 16
"""An operation that reads so many times what it makes is a reduction; a comparison of two int64 reads 16 times that."""


def choose_free(needs: Needs, *, pinned: Actions = NO_ACTIONS) -> frozenset[str]:
    """Choose what is kept when there is no budget.

    Args:
        needs: What backward needs.
        pinned: By names of storages: kept whatever follows from what, or computed again whatever that takes, as
            parameters in ZeRO-3.

    Returns:
        Names of storages. Everything that backward reads is among them, or follows from them.
    """
    graph, program = needs.graph, LinearProgram()
    keep = pinned.kept
    recompute = pinned.keys() - keep
    ops = {
        o: program.variable(cost=_cost(graph.ops[o]), whole=True)
        for o in needs.ops
        if _is_cheap(graph, graph.ops[o])
        or any(graph.storages[s].name in recompute for s in needs.makes[o])
    }
    kept = {s: program.variable(cost=graph.storages[s].nbytes, whole=True) for s in needs.storages}
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


def _cost(op: Op) -> float:
    # A byte more: of two equal choices the one with fewer operations.
    return op.moved_bytes / MOVED_PER_KEPT_BYTE + 1.0


def _is_cheap(graph: TrainingGraph, op: Op) -> bool:
    made = sum(graph.storages[s].nbytes for s in op.makes)
    is_reduction = op.moved_bytes - made > _REDUCTION * made
    return op.repeat != "replay" and not (op.sent_bytes or op.flops or is_reduction)
