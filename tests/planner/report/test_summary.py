"""Three lines of at most 50 columns say what the tables say."""

from __future__ import annotations

import pytest

from thunder_memsave.planner.actions import KEEP, RECOMPUTE, Actions
from thunder_memsave.planner.graph import Decision, Plan
from thunder_memsave.planner.report.explain import explain, kinds_table
from thunder_memsave.planner.report.summary import plan_summary
from thunder_memsave.planner.simulate import Profile

GIB = 2**30


def decision(name: str, nbytes: int) -> Decision:
    return Decision(name=name, nbytes=nbytes, cost_us=30864.0, reason="", source="a.py:1")


def plan(budget_bytes: int | None, *, recomputed: int) -> Plan:
    names = [f"t{n}" for n in range(4)]
    return Plan(
        actions=Actions({n: RECOMPUTE if i < recomputed else KEEP for i, n in enumerate(names)}),
        budget_bytes=budget_bytes,
        predicted_peak_bytes=12 * GIB,
        keep_all_peak_bytes=20 * GIB,
        saved_bytes=GIB,
        recompute_us=123456.0 if recomputed else 0.0,
        lower_bound_us=0.0,
        decisions=tuple(decision(name, 100 * GIB) for name in names),
    )


PROFILE = Profile(
    peak_bytes=12 * GIB,
    peak_step=0,
    peak_bytes_by_kind={"activation": 7 * GIB, "parameter": 5 * GIB, "batch": 0},
    live_bytes=(),
    step_peak_bytes=(),
    forward_peak_bytes=0,
    between_peak_bytes=0,
    backward_peak_bytes=0,
    update_peak_bytes=0,
)


@pytest.mark.parametrize(
    ("budget", "recomputed", "lines"),
    [
        (
            40 * GIB,
            0,
            [
                "plan: fits, 12.00 GiB of 40.00 GiB",
                "recompute: nothing, +0.00 ms",
                "largest: activations 7.00 GiB, weights 5.00 GiB",
            ],
        ),
        (11 * GIB, 1, ["plan: does not fit, 12.00 GiB of 11.00 GiB"]),
        (None, 4, ["plan: 12.00 GiB at the peak, no budget"]),
    ],
)
def test_the_lines_are_short_and_agree_with_the_tables(
    budget: int | None, recomputed: int, lines: list[str]
) -> None:
    of = plan(budget, recomputed=recomputed)
    made = plan_summary(of, PROFILE)
    assert made[: len(lines)] == lines
    assert len(made) == 3
    assert max(map(len, made)) <= 50
    if recomputed:
        time = f"{of.recompute_us / 1000:,.2f} ms"
        assert time in made[1]
        assert time in explain(of)
    for part in made[2].removeprefix("largest: ").split(", "):
        name, amount = part.split(" ", 1)
        assert [name, *amount.split()] in [row.split() for row in kinds_table(PROFILE).splitlines()]
