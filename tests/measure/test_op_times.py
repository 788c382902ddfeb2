"""Kinds of operations are timed once, within seconds, and every later plan has the same numbers."""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from harness.fabric import make_fabric
from harness.rates import by_rates
from thunder_memsave import ThunderMemsaveStrategy
from thunder_memsave.measure import op_times
from thunder_memsave.measure.layouts import Value, layout_of
from thunder_memsave.measure.op_profile import Operation, OpProfile
from thunder_memsave.measure.op_times import MeasuredTimes
from thunder_memsave.planner.cost import roofline_us
from thunder_memsave.planner.devices import device
from thunder_memsave.planner.graph import THEN, Op, Plan, TrainingGraph

CPU = device("cpu")
X = torch.ones(4)


def op(key: str, *, moved_bytes: int = 100, **values: Any) -> Op:
    settings: dict[str, Any] = {
        "symbol": key,
        "index": 0,
        "arguments": (),
        "results": (),
        "reads": (),
        "makes": (),
        "peak_bytes": 0,
    }
    return Op(**{**settings, **values}, key=key, moved_bytes=moved_bytes)


def graph(*ops: Op) -> TrainingGraph:
    nothing: frozenset[int] = frozenset()
    return TrainingGraph(
        storages=(),
        ops=ops,
        num_forward=len(ops),
        storage_of={},
        inputs=nothing,
        outputs=nothing,
        gradients=nothing,
        cotangents=nothing,
    )


def remember(
    times: MeasuredTimes, key: str, run: Callable[[Tensor], object], *, opaque: bool = False
) -> None:
    operation = Operation(run, [Value(layout_of(X), 0)], not opaque)
    times.remember(
        operation,
        OpProfile(results=(), num_argument_storages=1, made_bytes=(16,), moved_bytes=16, key=key),
    )


def sleep(seconds: float) -> Callable[[Tensor], None]:
    return lambda _: time.sleep(seconds)


def never(_: Tensor) -> None:
    pytest.fail("it ran")


def test_each_kind_has_its_time_and_keeps_it(tmp_path: Path) -> None:
    times = MeasuredTimes(directory=tmp_path)
    remember(times, "slow", sleep(4e-3))
    remember(times, "quick", sleep(1e-3))
    found = times.of(graph(op("slow"), op("quick"), op("slow")), CPU)
    assert found.us["slow"] >= 4000 > found.us["quick"] >= 1000
    assert (found.num_timed, found.num_kinds) == (2, 2)
    later = MeasuredTimes(directory=tmp_path)
    remember(later, "slow", never)
    remember(later, "quick", never)
    assert later.of(graph(op("slow"), op("quick")), CPU).us == found.us


def test_kinds_that_count_as_one_take_the_time_of_each(tmp_path: Path) -> None:
    times = MeasuredTimes(directory=tmp_path)
    remember(times, "a", sleep(0.002))
    remember(times, "b", sleep(0.001))
    both, unknown = f"a{THEN}b", f"a{THEN}c"
    found = times.of(graph(op(both), op(unknown)), CPU)
    assert 2_500 < found.us[both] < 30_000
    assert found.num_timed == 1


def test_kinds_without_time_left_are_estimated_now_and_later(tmp_path: Path) -> None:
    """The most expensive kind by the roofline goes first, and tells the roofline's error."""
    asked = graph(op("small", moved_bytes=10), op("large", moved_bytes=10**6))
    times = MeasuredTimes(directory=tmp_path, limit_s=0.02)
    remember(times, "small", never)
    remember(times, "large", sleep(0.03))
    found = times.of(asked, CPU)
    small_us, large_us = (roofline_us(o, CPU) for o in asked.ops)
    assert found.num_timed == 1
    assert found.us["large"] >= 30_000
    assert found.us["small"] == pytest.approx(small_us * found.us["large"] / large_us)
    later = MeasuredTimes(directory=tmp_path)
    remember(later, "small", never)
    assert later.of(asked, CPU).us == found.us


def test_one_process_spends_its_limit_once(tmp_path: Path) -> None:
    times = MeasuredTimes(directory=tmp_path, limit_s=0.02)
    remember(times, "first", sleep(0.03))
    remember(times, "second", never)
    times.of(graph(op("first")), CPU)
    assert times.of(graph(op("second")), CPU).num_timed == 0


def test_views_collectives_and_unknown_functions_are_not_run(tmp_path: Path) -> None:
    times = MeasuredTimes(directory=tmp_path)
    for key in ("view", "gather"):
        remember(times, key, never)
    remember(times, "unknown", never, opaque=True)
    found = times.of(
        graph(op("view", repeat="free"), op("gather", sent_bytes=8), op("unknown")), CPU
    )
    assert found.us == {"unknown": roofline_us(op("unknown"), CPU)}


def test_an_operation_that_refuses_zeros_has_the_rooflines_time_and_that_is_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(_: Tensor) -> None:
        raise ValueError("no zeros, please")

    times = MeasuredTimes(directory=tmp_path)
    remember(times, "choosy", refuse)
    with caplog.at_level(logging.INFO):
        assert times.of(graph(op("choosy")), CPU).num_timed == 0
    assert "choosy could not be timed, so the roofline estimates it: no zeros" in caplog.text
    assert "timed 1 kinds of operations in 0.0 s" in caplog.text


def test_an_operation_that_reads_no_tensor_is_not_timed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    times = MeasuredTimes(directory=tmp_path)
    found = OpProfile(results=(), num_argument_storages=0, made_bytes=(16,), key="zeros")
    times.remember(Operation(never, [], True), found)
    with caplog.at_level(logging.INFO):
        assert times.of(graph(op("zeros")), CPU).num_timed == 0
    assert "zeros could not be timed" in caplog.text
    assert "it reads no tensor, or several on different devices" in caplog.text


def test_the_users_random_numbers_stay_the_same(tmp_path: Path) -> None:
    times = MeasuredTimes(directory=tmp_path)
    remember(times, "random", torch.rand_like)
    before = torch.random.get_rng_state()
    assert times.of(graph(op("random")), CPU).num_timed == 1
    assert torch.equal(torch.random.get_rng_state(), before)


class Wide(nn.Module):
    """Needs much more memory in the middle than at its ends."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 64), nn.Linear(64, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.up(x)
        for _ in range(4):
            x = x.sin().exp().cos()
        return self.down(x).square().mean()


def plan_of(memory: dict[str, Any]) -> Plan:
    fabric = make_fabric(memory=memory)
    torch.manual_seed(0)
    model = fabric.setup(Wide())
    fabric.backward(model(torch.randn(256, 4)))
    strategy = fabric.strategy
    assert isinstance(strategy, ThunderMemsaveStrategy)
    assert strategy.plan is not None
    assert re.search(rf"(?m)^times from +{strategy.plan.costs}$", strategy.explain())
    return strategy.plan


def test_plans_that_run_have_measured_times_where_they_matter_the_same_in_every_run() -> None:
    whole = plan_of({"policy": "keep_all"})
    assert whole.costs == "rates of cpu"
    tight = {"budget": whole.predicted_peak_bytes * 62 // 100}
    first = plan_of(tight)
    num_timed, _, num_kinds, text = first.costs.split(" ", 3)
    assert 5 < int(num_timed) <= int(num_kinds)
    assert text == "kinds of operations timed here"
    assert first.recompute_us > 0
    assert plan_of(tight) == first
    with by_rates():
        assert plan_of(tight).costs == "rates of cpu"


def test_on_cuda_the_device_waits_until_all_kernels_are_launched(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    did: list[str] = []

    class Event:
        def __init__(self, *, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            did.append("record")

        def elapsed_time(self, end: Event) -> float:
            return 0.003

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: did.append("synchronize"))
    monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: did.append("wait"))
    assert op_times._cuda_us(lambda: did.append("launch")) == 3.0
    assert did == ["synchronize", "wait", "record", "launch", "record", "synchronize"]
