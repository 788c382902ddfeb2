"""Rows that every plan obeys: what is read in backward is kept, or it is computed again from what is there."""

from __future__ import annotations

from collections.abc import Mapping

from thunder_memsave.planner.choices import Needs
from thunder_memsave.planner.linear.program import LinearProgram


def add_coverage(
    program: LinearProgram, needs: Needs, kept: Mapping[int, int], ops: Mapping[int, int]
) -> None:
    """Require that what backward reads is kept or computed again, and so what computing again reads.

    Args:
        program: Gets the rows.
        needs: Of the graph.
        kept: Variables by storage.
        ops: Variables by operation, of those that may run again.
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
