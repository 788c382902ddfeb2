"""The time of a step with copies follows three engines, each of which does one thing after the other."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

from harness.training_graphs import chain
from thunder_memsave.planner.devices import device
from thunder_memsave.planner.graph import Op, Step
from thunder_memsave.planner.offload.copies import (
    FETCH_STATES,
    STORE_STATES,
    WAIT_STATES,
    is_copy,
    with_copies,
)
from thunder_memsave.planner.offload.engines import CopyRates, step_time
from thunder_memsave.planner.order import order

RATES = CopyRates(bytes_per_s=100e6, copy_us=0.0)
"""A copy of 100 bytes takes a microsecond."""


def test_copies_take_their_bytes_at_the_rate_and_a_start() -> None:
    assert RATES.us(100) == 1.0
    assert CopyRates(bytes_per_s=100e6, copy_us=10.0).us(200) == 12.0


def test_without_copies_a_step_takes_the_sum_of_its_operations() -> None:
    program = order(chain(3))
    found = step_time(program, [2.0] * len(program.steps), RATES)
    assert (found.us, found.exposed_us, found.copies) == (2.0 * len(program.steps), 0.0, ())


def test_a_copy_runs_beside_what_computes_and_a_wait_stands_still_for_the_rest() -> None:
    """a1 is out while a2 is made; the copy back begins when a2's gradients are there, and nothing hides it."""
    graph = chain(3)
    program = with_copies(order(graph), [graph.storage_of["a1"]])
    costs = [0.4 if not is_copy(s.op) else 99.0 for s in program.steps]
    found = step_time(program, costs, RATES)
    out, back = found.copies
    assert (out.lane, out.start_us, out.end_us) == ("out", 0.4, 1.4)
    # a1 .4, a2 .8, wait 1.4, a3 1.8, dw3 2.2, g2 2.6, back 3.6, dw2, g1, dw1
    assert (back.lane, round(back.start_us, 9), round(back.end_us, 9)) == ("in", 2.6, 3.6)
    assert round(found.exposed_us, 9) == 0.6 + 1.0
    assert round(found.us, 9) == 4.8, "eight operations, and what is exposed"
    assert (found.host_peak_bytes, found.offloaded_bytes) == (100, 100)


def test_states_come_before_their_update_and_leave_after_it() -> None:
    """Each way at half the rate, as both ways run at once."""
    program = order(chain(3))
    begin, end = program.steps[:-2], program.steps[-2:]
    steps = (
        *begin,
        _of_states(FETCH_STATES, (), ("s",), 100),
        end[0],
        _of_states("update_parameter", ("g", "s"), (), 0),
        _of_states(STORE_STATES, ("s",), ("o",), 100),
        end[1],
        _of_states(WAIT_STATES, ("o",), (), 0),
    )
    costs = [
        0.0 if s.op.symbol in (FETCH_STATES, STORE_STATES, WAIT_STATES) else 0.5 for s in steps
    ]
    rates = replace(RATES, states=0.5)
    found = step_time(replace(program, steps=steps), costs, rates)
    start = 0.5 * len(begin)
    fetch, store = found.copies
    assert (fetch.lane, fetch.start_us, fetch.end_us) == ("in", start, start + 2)
    assert (store.lane, store.start_us, store.end_us) == ("out", start + 2.5, start + 4.5)
    assert found.us == start + 4.5
    assert found.exposed_us == 1.5 + 1.5  # half a microsecond of each copy is hidden
    assert (found.host_peak_bytes, found.offloaded_bytes) == (0, 0)


def _of_states(
    symbol: str, arguments: tuple[str, ...], results: tuple[str, ...], nbytes: int
) -> Step:
    op = Op(
        symbol=symbol,
        index=-1,
        arguments=arguments,
        results=results,
        reads=(),
        makes=(),
        peak_bytes=0,
        copied_bytes=nbytes,
    )
    return Step(op=op, makes=(), frees=())


def test_copies_in_one_direction_follow_each_other_and_both_directions_run_at_once() -> None:
    graph = chain(5)
    away = [graph.storage_of[name] for name in ("a1", "a2", "a3")]
    program = with_copies(order(graph), away)
    found = step_time(program, [0.1] * len(program.steps), RATES)
    outs = [c for c in found.copies if c.lane == "out"]
    backs = [c for c in found.copies if c.lane == "in"]
    for copies in (outs, backs):
        assert all(a.end_us <= b.start_us for a, b in pairwise(copies))
    assert found.host_peak_bytes == 300
    assert [c.name for c in backs] == ["a3_back", "a2_back", "a1_back"]


def test_ranks_of_a_node_share_the_link_of_devices_behind_one_switch() -> None:
    a100, h100 = device("a100"), device("h100")
    assert (a100.devices_per_link, h100.devices_per_link) == (2, 1)
    for num_ranks, part in ((1, 1.0), (2, 0.5), (8, 0.5)):
        alone, beside = CopyRates.of(a100), CopyRates.of(a100.among(num_ranks))
        assert beside.bytes_per_s == part * alone.bytes_per_s
        assert CopyRates.of(h100.among(num_ranks)) == CopyRates.of(h100)
