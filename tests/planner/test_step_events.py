"""A training step's allocations are those that the plan counts."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import pytest

from harness.training_graphs import GraphBuilder, chain
from thunder_memsave.planner.actions import keeping
from thunder_memsave.planner.caching_allocator.replay import Allocate, Event, Free
from thunder_memsave.planner.graph import Program, StepMemory
from thunder_memsave.planner.order import order
from thunder_memsave.planner.simulate import simulate
from thunder_memsave.planner.step_events import Inside, training_events


def live_bytes(events: Iterable[Event]) -> list[int]:
    """Return live bytes after each event; every free is of something live."""
    sizes: dict[object, int] = {}
    live = []
    for event in events:
        if isinstance(event, Allocate):
            assert event.key not in sizes
            sizes[event.key] = event.nbytes
        elif isinstance(event, Free):
            del sizes[event.key]
        live.append(sum(sizes.values()))
    return live


def sizes_of(events: Iterable[Event]) -> list[int]:
    """Return the bytes of each allocation that takes any."""
    return [event.nbytes for event in events if isinstance(event, Allocate) and event.nbytes]


def peak_bytes(program: Program, memory: StepMemory, inside: Inside = "before") -> int:
    return max(live_bytes(training_events(program, memory, inside=inside)))


@pytest.mark.parametrize("inside", ["before", "after"])
@pytest.mark.parametrize(
    "memory",
    [
        StepMemory(),
        StepMemory(optimizer_bytes=70, other_bytes=5),
        StepMemory(update_peak_bytes=4000),
        StepMemory(between_bytes=5000, other_bytes=3),
        StepMemory(between_bytes=1),
    ],
)
def test_the_peak_is_the_plans(memory: StepMemory, inside: Inside) -> None:
    for program in (order(chain(5)), order(chain(5), keeping({"a2"}))):
        assert peak_bytes(program, memory, inside) == simulate(program, memory).peak_bytes


def test_a_step_leaves_weights_and_the_optimizers_state() -> None:
    program = order(chain(2))
    memory = StepMemory(optimizer_bytes=20, other_bytes=300)
    stays = sum(
        program.storages[s].nbytes for s in program.held if program.storages[s].kind == "parameter"
    )
    assert live_bytes(training_events(program, memory, inside="after"))[-1] == stays + 320


def test_a_recorded_update_makes_the_state_in_the_first_step() -> None:
    program = order(chain(2))
    # The first update makes two states and a temporary, the second one replaces a state.
    memory = StepMemory(
        optimizer_bytes=300,
        update_peak_bytes=7000,
        update_allocations=((100, 200, 7000, -3), (6000, 100, -1, -4)),
    )
    events = list(training_events(program, memory, inside="after"))
    sizes = sizes_of(events)
    assert [sizes.count(n) for n in (200, 7000, 6000)] == [1, 1, 1]
    without = StepMemory()
    base = live_bytes(training_events(program, without, inside="after"))
    assert live_bytes(events)[-1] == base[-1] + 300
    assert sizes.index(7000) < sizes.index(6000)


def test_a_recorded_loss_leaves_the_gradient_of_the_output() -> None:
    program = order(chain(2))
    (cotangent,) = program.cotangents
    nbytes = program.storages[cotangent].nbytes
    recorded = StepMemory(between_bytes=900 + nbytes, loss_allocations=(900, nbytes, -1))
    sizes = sizes_of(training_events(program, recorded, inside="after"))
    plain = sizes_of(training_events(program, StepMemory(), inside="after"))
    # The loss's own gradient is what backward reads: nothing else is allocated for it.
    assert sorted(sizes) == sorted([*plain, 900, 900])
    assert peak_bytes(program, recorded) == simulate(program, recorded).peak_bytes


def test_a_loss_that_leaves_no_such_gradient_makes_one() -> None:
    program = order(chain(2))
    other = StepMemory(loss_allocations=(900,))
    events = training_events(program, other, inside="after")
    assert live_bytes(events)[-1] == live_bytes(
        training_events(program, StepMemory(), inside="after")
    )[-1]  # fmt: skip


def accumulating() -> Program:
    """Return a program whose gradient dies when autograd has added it to the earlier one."""
    b = GraphBuilder()
    b.input("w", 40, "parameter")
    b.input("x", 30, "batch")
    b.op("w x", {"y": 10})
    b.backward(g=10)
    b.op("g x", {"dw": 40}, kind="gradient", inside=11)
    program = order(b.graph(outputs="y", gradients="dw"))
    (gradient,) = (n for n, s in enumerate(program.storages) if s.kind == "gradient")
    *steps, last = program.steps
    last = replace(last, frees=(*last.frees, gradient))
    return replace(program, steps=(*steps, last))


def test_gradients_of_the_first_micro_batch_stay_for_the_second() -> None:
    program, memory = accumulating(), StepMemory(gradient_bytes=40)
    events = list(training_events(program, memory, inside="before"))
    sizes = sizes_of(events)
    assert sizes.count(11) == 4
    assert max(live_bytes(events)) == simulate(program, memory).peak_bytes
    assert live_bytes(events)[-1] == 40


def test_whole_gradients_that_are_kept_besides_stay() -> None:
    program = accumulating()
    events = training_events(program, StepMemory(gradient_bytes=100), inside="before")
    assert live_bytes(events)[-1] == 40 + 60
