from __future__ import annotations

import re
from dataclasses import replace

import pytest

from harness.training_graphs import GraphBuilder
from thunder_memsave.planner.cost import costs_us, roofline_us
from thunder_memsave.planner.devices import DEVICES, device
from thunder_memsave.planner.graph import Op

OP = Op(symbol="op", index=0, arguments=(), results=(), reads=(), makes=(), peak_bytes=0)
H100 = device("h100")


def test_an_operation_takes_the_longest_of_computing_moving_and_receiving() -> None:
    computing = replace(OP, flops=989 * 10**6, moved_bytes=10, dtype="bfloat16")
    moving = replace(OP, flops=10, moved_bytes=335 * 10**6, dtype="bfloat16")
    receiving = replace(OP, moved_bytes=10, sent_bytes=400 * 10**6)
    times = [roofline_us(op, H100) for op in (computing, moving, receiving)]
    rates = H100.sustained
    assert times == pytest.approx([2, 100 / rates.memory, 1000])
    more = replace(computing, flops=989 * 10**9)
    assert roofline_us(more, H100) == pytest.approx(1000 / rates.products)


def test_a_dtype_without_a_rate_runs_as_float32() -> None:
    times = {
        roofline_us(replace(OP, flops=10**12, dtype=dtype), H100) for dtype in ("int64", "float32")
    }
    assert len(times) == 1


def test_measured_times_win_but_views_cost_nothing() -> None:
    b = GraphBuilder()
    b.input("x")
    b.op("x", {"a": 10}, key="mul")
    b.view("a", "v")
    b.op("x", {"c": 10}, key="add")
    graph = b.graph(outputs="c")
    assert costs_us(graph, H100, {"mul": 7.5, "": 9.0}) == (7.5, 0.0, H100.launch_us)


def test_every_device_has_the_rates_that_costs_need() -> None:
    assert set(DEVICES) == {"h100", "h200", "b200", "a100", "l40s", "cpu"}
    for name, known in DEVICES.items():
        assert known.name == name
        assert {"bfloat16", "float16", "float32", "float64"} <= set(known.flops_per_s)


def test_an_unknown_device_is_refused_with_the_known_ones() -> None:
    text = "device 'v100' is not known; known are h100, h200, b200, a100, l40s, cpu."
    with pytest.raises(ValueError, match=re.escape(text)):
        device("v100")
