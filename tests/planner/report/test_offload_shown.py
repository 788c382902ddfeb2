"""What goes to the host is said in the summary, in the table, and as lanes for programs."""

from __future__ import annotations

from harness.training_graphs import chain
from thunder_memsave.planner.graph import Plan, StepMemory
from thunder_memsave.planner.offload.engines import CopyRates
from thunder_memsave.planner.order import CPU_GENERATOR_STATE_BYTES, order
from thunder_memsave.planner.report.explain import explain
from thunder_memsave.planner.report.offload_shown import offload_json
from thunder_memsave.planner.report.summary import plan_summary
from thunder_memsave.planner.search.mixes import OffloadTerms, solve_mix, timed
from thunder_memsave.planner.simulate import simulate

TERMS = OffloadTerms(
    rates=CopyRates(bytes_per_s=50e6, copy_us=0.0), host_bytes=10**6, least_bytes=1
)
COSTS = [1.0] * 23


def planned() -> Plan:
    return solve_mix(chain(8), budget_bytes=740, costs_us=COSTS, terms=TERMS)


def test_the_summary_has_a_line_for_the_host() -> None:
    plan = planned()
    lines = plan_summary(plan, simulate(order(chain(8))))
    assert f"offload: {plan.offloaded_bytes:,} B, +0.00 ms not hidden" in lines
    assert all(len(line) <= 50 for line in lines)


def test_the_table_says_what_goes_and_why() -> None:
    text = explain(planned())
    assert "on the host meanwhile" in text
    assert "copies not hidden" in text
    assert "on the host meanwhile: the budget needs its memory" in text


def test_the_lanes_are_those_of_the_simulated_engines() -> None:
    plan = planned()
    time = timed(plan, chain(8), COSTS, StepMemory(), TERMS, CPU_GENERATOR_STATE_BYTES)
    shown = offload_json(time)
    assert shown["offloaded_bytes"] == plan.offloaded_bytes == shown["host_peak_bytes"]
    assert shown["exposed_us"] == plan.exposed_us
    for lane, copies in shown["lanes"].items():
        assert sum(c["nbytes"] for c in copies) == plan.offloaded_bytes, lane
        assert all(c["end_us"] - c["start_us"] == TERMS.rates.us(c["nbytes"]) for c in copies)
    assert shown["step_us"] == time.us
