"""Adds the rows that every plan obeys: each storage that backward or a recomputation reads is kept or recomputed."""

from __future__ import annotations

from collections.abc import Mapping

from thunder_memsave.planner.choices import Needs
from thunder_memsave.planner.linear.program import LinearProgram


def add_coverage(
    program: LinearProgram, needs: Needs, kept: Mapping[int, int], ops: Mapping[int, int]
) -> None:
    """Require that every storage that backward reads is kept or recomputed, and the inputs of recomputations as well.

    Args:
        program: Gets the rows.
        needs: Choices of the graph.
        kept: Variable of each storage: kept.
        ops: Variable of each operation that can be recomputed: recomputed.
    """
    for storage in needs.first:
        again = _again(needs, storage, ops)
        program.row([(kept[storage], 1.0), *again], least=1.0)
    for number, variable in ops.items():
        for storage in needs.inputs[number]:
            again = _again(needs, storage, ops)
            program.row([(kept[storage], 1.0), *again, (variable, -1.0)], least=0.0)


def _again(needs: Needs, storage: int, ops: Mapping[int, int]) -> list[tuple[int, float]]:
    number = needs.producer[storage]
    if storage in needs.must_keep or number not in ops:
        return []
    return [(ops[number], 1.0)]
