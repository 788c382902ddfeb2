from __future__ import annotations

from harness.training_graphs import GraphBuilder, chain
from thunder_memsave.planner.actions import keeping
from thunder_memsave.planner.graph import StepMemory
from thunder_memsave.planner.order import order
from thunder_memsave.planner.simulate import live_bytes_by_kind, simulate


def test_memory_before_during_and_after_each_step() -> None:
    b = GraphBuilder()
    b.input("x", 40, "batch")
    b.op("x", {"a": 100}, inside=7)
    b.op("a", {"y": 10})
    b.backward(g=5)
    b.op("g a", {"dx": 40}, kind="gradient")
    profile = simulate(order(b.graph(outputs="y", gradients="dx")))
    assert profile.live_bytes == (40, 140, 155, 80)
    assert profile.step_peak_bytes == (147, 150, 195)
    assert (profile.peak_bytes, profile.peak_step) == (195, 2)
    assert (profile.forward_peak_bytes, profile.backward_peak_bytes) == (150, 195)
    assert profile.peak_bytes_by_kind == {
        "batch": 40,
        "activation": 110,
        "cotangent": 5,
        "inside": 40,
    }


def test_a_step_ends_with_the_update_of_the_optimizer() -> None:
    memory = StepMemory(
        gradient_bytes=1, optimizer_bytes=20, other_bytes=300, update_peak_bytes=4000
    )
    program = order(chain(2))
    profile = simulate(program, memory)
    assert profile.live_bytes[0] == 321 + 100 + 10 + 10
    assert profile.update_peak_bytes == 321 + 100 + 10 + 10 + 10 + 10 + 4000
    assert (profile.peak_bytes, profile.peak_step) == (
        profile.update_peak_bytes,
        len(program.steps),
    )
    assert profile.peak_bytes_by_kind == {
        "batch": 100, "parameter": 20, "gradient": 20, "accumulated": 1, "optimizer": 20, "other": 300,
        "update": 4000,
    }  # fmt: skip


def test_the_callers_loss_counts_between_forward_and_backward_only() -> None:
    program, alone = order(chain(2)), simulate(order(chain(2)))
    small = simulate(program, StepMemory(between_bytes=10))
    assert small.peak_bytes == alone.peak_bytes
    profile = simulate(program, StepMemory(between_bytes=5000))
    cotangents = sum(program.storages[s].nbytes for s in program.cotangents)
    outside = alone.live_bytes[program.num_forward] - cotangents
    assert profile.between_peak_bytes == profile.peak_bytes == outside + 5000
    assert profile.peak_step == program.num_forward
    assert (profile.live_bytes, profile.step_peak_bytes) == (
        alone.live_bytes,
        alone.step_peak_bytes,
    )
    assert sum(profile.peak_bytes_by_kind.values()) == profile.peak_bytes
    assert profile.peak_bytes_by_kind["loss"] == 5000


def test_a_program_without_backward_has_no_loss_and_no_update() -> None:
    b = GraphBuilder()
    b.input("x", 40, "batch")
    b.op("x", {"y": 10})
    memory = StepMemory(update_peak_bytes=1000, between_bytes=1000)
    profile = simulate(order(b.graph(outputs="y")), memory)
    assert (profile.peak_bytes, profile.backward_peak_bytes) == (50, 0)
    assert (profile.between_peak_bytes, profile.update_peak_bytes) == (0, 0)


def test_kinds_sum_to_what_is_live() -> None:
    program = order(chain(5), keeping({"a2"}))
    rows = live_bytes_by_kind(program)
    assert tuple(map(sum, zip(*rows.values(), strict=True))) == simulate(program).live_bytes
    assert set(rows) == {"batch", "parameter", "activation", "cotangent", "gradient", "temporary"}


def test_recomputing_lowers_the_peak_of_a_chain() -> None:
    graph = chain(8)
    plans = (None, keeping({"a2", "a4", "a6"}))
    peaks = [simulate(order(graph, actions)).peak_bytes for actions in plans]
    assert peaks[1] < peaks[0]
