"""Linear programs of all sizes can be solved, also without variables or rows."""

from __future__ import annotations

from thunder_memsave.planner.linear.program import LinearProgram


def test_a_program_without_variables_costs_nothing() -> None:
    solution = LinearProgram().solve()
    assert solution.values is not None
    assert solution.values.size == 0
    assert (solution.is_infeasible, solution.bound) == (False, 0.0)


def test_a_program_without_rows_takes_the_least_of_each_variable() -> None:
    program = LinearProgram()
    cheap, dear = (
        program.variable(cost=1.0, integer=True),
        program.variable(cost=-2.0, integer=True),
    )
    solution = program.solve()
    assert solution.values is not None
    assert (solution.values[cheap], solution.values[dear]) == (0.0, 1.0)
    assert solution.bound == -2.0
