"""A budget over a step that runs in pieces: kept to the byte from the second step on, with the same bits."""

from __future__ import annotations

import copy
import gc
import logging
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.profiler import profile

from harness.fabric import make_fabric, on_fabric_rank, run_on_fabric_ranks
from harness.memory import measured_memory
from thunder_memsave.budget.agreed import largest
from thunder_memsave.errors import BudgetError
from thunder_memsave.sharding.sharded_parameter import as_rows

# Dynamo looks at it, and hides the warning unless warnings are errors.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")

WIDTH, ROWS = 32, 256
MUCH = 2**40


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        up: Tensor = self.up(x).tanh()
        return x + self.dropout(self.down(up))


class Branching(nn.Module):
    """Cannot be one graph either; its inner block runs twice."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Block()

    def forward(self, x: Tensor) -> Tensor:
        x = self.inner(x)
        if x.sum().item() > 1e9:
            return x
        result: Tensor = self.inner(x.sigmoid())
        return result


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList([Block(), Branching()])
        self.last = nn.Linear(WIDTH, 4)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        for block in self.blocks:
            h = block(h).relu()
            if h.sum().item() > 1e9:
                h = h.clamp(-1.0, 1.0)
        result: Tensor = self.last(h)
        return result


class AllEager(nn.Module):
    """Has no submodule to compile."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(x).exp()
        return x if x.sum().item() > 0 else x.neg()


def made(kind: Callable[[], nn.Module] = Net) -> nn.Module:
    torch.manual_seed(0)
    return kind()


def batch(rows: int = ROWS, seed: int = 1) -> Tensor:
    return torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(seed))


@dataclass
class Run:
    """A model and its steps."""

    fabric: Any
    called: Any
    optimizer: Any

    @classmethod
    def under(cls, budget: int, model: nn.Module | None = None, **settings: Any) -> Run:
        fabric = make_fabric(memory={"budget": budget}, **settings)
        model = made() if model is None else model
        # A learning rate of 0: each step has the bits of the one before.
        called, optimizer = fabric.setup(model, torch.optim.Adam(model.parameters(), lr=0.0))
        return cls(fabric, called, optimizer)

    def step(self, x: Tensor) -> list[Tensor]:
        torch.manual_seed(3)
        self.fabric.backward(self.called(x).square().mean())
        gradients = [as_rows(p.grad).clone() for p in self.called.parameters()]
        self.optimizer.step()
        self.optimizer.zero_grad()
        return gradients

    def _quiet_step(self, x: Tensor) -> None:
        self.fabric.backward(self.called(x).square().mean())
        self.optimizer.step()
        self.optimizer.zero_grad()

    def peak_bytes(self, x: Tensor) -> int:
        """Return the measured peak of one step, with what is there all the time."""
        states = [s for state in self.optimizer.state.values() for s in state.values()]
        held = (*self.called.parameters(), *self.called.buffers(), *states, x)
        nbytes = sum(as_rows(t).untyped_storage().nbytes() for t in held)
        return nbytes + measured_memory(lambda: self._quiet_step(x)).peak_bytes

    @property
    def predicted_bytes(self) -> int:
        plan = self.fabric.strategy.plan
        assert plan is not None
        return int(plan.predicted_peak_bytes)


def refused_for(budget: int, x: Tensor) -> int | None:
    """Return the smallest budget that the error of a first step names; None: there is none."""
    try:
        Run.under(budget).step(x)
    except BudgetError as error:
        return error.smallest_bytes
    return None


def smallest_budget(x: Tensor) -> int:
    """Return the smallest budget, which is known after the first step, or before it if one piece alone is too much."""
    budget = 1
    for _ in range(3):
        smallest = refused_for(budget, x)
        if smallest is None:
            return budget
        assert smallest > budget
        budget = smallest
    raise AssertionError("the smallest budget is refused")


def test_the_peak_is_the_predicted_one_within_every_budget_and_bits_are_those_of_keeping_all() -> (
    None
):
    x = batch()
    free = Run.under(MUCH)
    expected = [free.step(x) for _ in range(2)][-1]
    keep_all, smallest = free.predicted_bytes, smallest_budget(x)
    assert free.peak_bytes(x) == keep_all
    assert smallest < 0.8 * keep_all
    used = []
    for share in (0.0, 0.5):
        budget = int(smallest + share * (keep_all - smallest))
        run = Run.under(budget)
        for found in (run.step(x), run.step(x), run.step(x)):
            assert all(map(torch.equal, found, expected))
        peak_bytes = run.peak_bytes(x)
        assert peak_bytes == run.predicted_bytes <= budget
        said = f"takes at most {peak_bytes:,} bytes of the budget of {budget:,}"
        assert said in run.fabric.strategy.explain()
        used.append(peak_bytes)
    assert used == sorted(set(used))


def test_what_eager_code_takes_is_measured_for_each_shape() -> None:
    short, long = batch(ROWS // 2), batch()
    free = Run.under(MUCH)
    for _ in range(2):
        free.step(long)
    budget = (smallest_budget(long) + free.predicted_bytes) // 2
    run = Run.under(budget)
    for x in (short, short, long, long, short, long, short):
        run.step(x)
    for x in (long, short):
        assert run.peak_bytes(x) <= budget


def test_a_step_without_any_piece_has_a_smallest_budget() -> None:
    x = batch()
    with pytest.raises(BudgetError) as refused:
        Run.under(1, made(AllEager)).step(x)
    assert refused.value.smallest_bytes is not None
    run = Run.under(refused.value.smallest_bytes, made(AllEager))
    run.step(x)
    assert run.peak_bytes(x) <= refused.value.smallest_bytes


def test_a_backward_that_was_not_measured_is_named_and_the_next_one_is_measured(
    caplog: pytest.LogCaptureFixture,
) -> None:
    run, x = Run.under(MUCH), batch()
    with caplog.at_level(logging.WARNING, logger="thunder_memsave"):
        run.called(x).square().mean().backward()
        run.optimizer.zero_grad()
        run.step(x)
    assert [r for r in caplog.records if "fabric.backward(loss)" in r.message]
    with profile():  # there is one at a time
        run.step(x)
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        run.step(x[:, 1:])
    for _ in range(2):
        run.step(x)
    assert run.peak_bytes(x) == run.predicted_bytes


def test_gradients_that_are_there_when_a_step_is_measured_count() -> None:
    x = batch()
    free = Run.under(MUCH)
    for _ in range(2):
        free.step(x)
    run = Run.under(MUCH)
    run.fabric.backward(run.called(x[:8]).square().mean())  # of another shape, and added to
    for _ in range(3):
        run.step(x)
    assert run.peak_bytes(x) == free.predicted_bytes <= run.predicted_bytes


def test_results_die_with_their_last_reader_in_the_first_step_too() -> None:
    """Errors of the capture that failed kept the frames that held them."""
    model = made()
    called = make_fabric().setup(model)
    gc.disable()
    try:
        result = called(batch())
        alive = weakref.ref(result)
        del result
        assert alive() is None
    finally:
        gc.enable()


@on_fabric_rank
def check_ranks() -> None:
    for mode in ("none", "zero2", "zero3"):
        settings: dict[str, Any] = {"devices": 2, "sharding": mode}
        free = Run.under(MUCH, **settings)
        x = batch(seed=free.fabric.global_rank)
        expected = [free.step(x) for _ in range(2)][-1]
        # Buffers of collectives, 4 % of the peak, are freed by other threads, sooner or later than in the next run.
        keep_all = largest(free.predicted_bytes, free.fabric.strategy.data_parallel)
        run = Run.under(int(0.95 * keep_all), **settings)
        for _ in range(2):
            assert all(map(torch.equal, run.step(x), expected)), mode
        assert run.predicted_bytes <= 0.95 * keep_all


class Student(nn.Module):
    """Calls another model, which was set up on its own and has more pieces."""

    teacher: Any = None

    def __init__(self) -> None:
        super().__init__()
        self.block, self.last = Block(), nn.Linear(WIDTH, 4)

    def forward(self, x: Tensor) -> Tensor:
        h = self.block(x)
        result: Tensor = self.last(h if h.sum().item() < 1e9 else h / 2) + self.teacher[0](x)
        return result


def test_a_model_that_is_called_within_another_is_measured_on_its_own() -> None:
    x = batch()
    teacher = Run.under(MUCH)
    teacher.step(x)
    student: Any = made(Student)
    student.teacher = [teacher.called]  # in a list, so that its parameters are not the student's
    run = Run.under(MUCH, student)
    results = [run.step(x) for _ in range(3)]
    teacher.optimizer.zero_grad()
    assert all(map(torch.equal, results[0], results[-1]))
    assert run.peak_bytes(x) <= run.predicted_bytes + teacher.predicted_bytes


@on_fabric_rank
def check_lengths() -> None:
    """One rank meets a length that the other does not, before and after what eager code takes is measured."""
    run = Run.under(MUCH, devices=2, sharding="zero2")
    own = run.fabric.global_rank
    for rows in ((ROWS, ROWS), (ROWS, 8), (16, ROWS), (ROWS, ROWS), (24, 24)):
        run.step(batch(rows[own]))


def test_ranks_may_meet_other_lengths() -> None:
    run_on_fabric_ranks(check_lengths, 2)


def test_ranks_plan_alike() -> None:
    run_on_fabric_ranks(check_ranks, 2)


def test_a_copy_is_planned_anew() -> None:
    run, x = Run.under(MUCH), batch()
    expected = [run.step(x) for _ in range(2)][-1]
    module = copy.deepcopy(run.called.module)
    again = Run.under(MUCH, module)
    assert all(map(torch.equal, [again.step(x) for _ in range(2)][-1], expected))
