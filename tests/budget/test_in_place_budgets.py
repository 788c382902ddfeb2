"""Models that write in place give, at every budget, the bits of keeping all, or an error that there is no plan."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import pytest
import torch
from torch import Tensor, nn

from harness.distributed import SOAK_HANG_S
from harness.effort import little_effort
from harness.in_place_models import FAMILIES, MODELS, batch, drawn, source
from harness.memory import measured_peak_bytes
from thunder_memsave.budget.memory_planner import MemoryPlanner
from thunder_memsave.budget.planned_call import PlannedCall
from thunder_memsave.compiler.compiled_module import CompiledModule
from thunder_memsave.config import MemoryConfig
from thunder_memsave.errors import BudgetError, CompileError
from thunder_memsave.planner.devices import device

# Of what keeping all takes, in percent.
NINE = range(100, 55, -5)
PARTS = (*NINE, 45, 30)
SMALLEST = (30,)  # for none of these models is there so small a plan
NUM_DRAWN = 60
AT_ONCE = ("scores", "views")  # the others are left to `make soak`


@pytest.fixture(autouse=True)
def _good_enough_plans() -> Iterator[None]:
    with little_effort(0.5):
        yield


def planner(policy: str, budget_bytes: int | None = None) -> MemoryPlanner:
    memory = MemoryConfig(policy=policy)  # type: ignore[arg-type]
    return MemoryPlanner(memory, device=device("cpu"), budget_bytes=budget_bytes)


def step(
    build: Callable[[], nn.Module], by: MemoryPlanner | None
) -> tuple[CompiledModule, list[Tensor]]:
    """The compiled module, and what a step of it computes: loss, gradients, buffers, the generator's state."""
    torch.manual_seed(0)
    model = build().train()
    x = batch(model)
    compiled = CompiledModule(model, planner=by)
    loss = compiled(x)[0]
    loss.backward()
    gradients = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    buffers = [b.clone() for b in model.buffers()]
    return compiled, [loss.detach(), *gradients, *buffers, torch.get_rng_state()]


def check_memory(compiled: CompiledModule, call: PlannedCall) -> None:
    """A step takes what was predicted."""
    x = batch(compiled.module)
    compiled.zero_grad()
    held = sum(call.program.storages[s].nbytes for s in call.program.held)

    def run() -> None:
        outputs = compiled(x)  # the caller is taken to hold all of them
        outputs[0].backward()

    measured = measured_peak_bytes(run)
    assert measured == call.profile.peak_bytes - held - call.memory.other_bytes


def check(build: Callable[[], nn.Module], parts: Sequence[int]) -> list[float]:
    """Return the recompute time for each budget, or for the smallest one that the error names, which has a plan."""
    _, in_place = step(build, None)
    by = planner("keep_all")
    compiled, kept = step(build, by)
    assert len(kept) == len(in_place)
    assert all(map(torch.equal, kept, in_place))
    check_memory(compiled, by.calls[-1])
    largest_bytes, smallest_bytes = by.calls[-1].profile.peak_bytes, 0
    times = []
    for part in parts:
        budget_bytes = largest_bytes * part // 100
        if budget_bytes < smallest_bytes:
            continue
        try:
            times.append(check_plan(build, budget_bytes, kept))
        except BudgetError as error:
            smallest_bytes = error.smallest_bytes or 0
            times.append(check_plan(build, smallest_bytes, kept))
    return times


def check_plan(
    build: Callable[[], nn.Module], budget_bytes: int, expected: Sequence[Tensor]
) -> float:
    by = planner("plan", budget_bytes)
    compiled, computed = step(build, by)
    assert all(map(torch.equal, computed, expected)), budget_bytes
    assert by.calls[-1].profile.peak_bytes <= budget_bytes
    check_memory(compiled, by.calls[-1])
    plan = by.calls[-1].plan
    assert plan is not None
    return plan.recompute_us


@pytest.mark.parametrize("name", AT_ONCE)
def test_the_smallest_budget_gives_the_bits_of_keeping_all(name: str) -> None:
    assert max(check(MODELS[name], SMALLEST)) > 0


@pytest.mark.soak
@pytest.mark.timeout(SOAK_HANG_S)
@pytest.mark.parametrize("build", [*MODELS.values(), *FAMILIES.values()], ids=[*MODELS, *FAMILIES])
def test_each_of_nine_budgets_and_the_smallest_has_the_bits_of_keeping_all_or_an_error(
    build: Callable[[], nn.Module], record_property: Callable[[str, object], None]
) -> None:
    by = planner("keep_all")
    _, kept = step(build, by)
    assert len(kept) > 5
    largest_bytes = by.calls[-1].profile.peak_bytes
    found = [outcome(build, largest_bytes * part // 100, kept) for part in NINE]
    assert found[0] == "kept"
    with pytest.raises(BudgetError) as error:
        step(build, planner("plan", 1))
    smallest_bytes = error.value.smallest_bytes
    assert smallest_bytes is not None
    recompute_us = check_plan(build, smallest_bytes, kept)
    assert (
        recompute_us > 0 or smallest_bytes < largest_bytes
    )  # another order may take less, and no time
    record_property("measured", ", ".join(map(" ".join, zip(map(str, NINE), found, strict=True))))


def outcome(build: Callable[[], nn.Module], budget_bytes: int, expected: Sequence[Tensor]) -> str:
    """How a budget ends, and whether an error may be one of the search's time only."""
    try:
        recompute_us = check_plan(build, budget_bytes, expected)
    except BudgetError as error:
        return "none" if (error.bound_bytes or 0) > budget_bytes else "not found"
    return "recomputed" if recompute_us > 0 else "kept"


def test_so_does_a_model_that_is_drawn() -> None:
    check(partial(drawn, 1), SMALLEST)


@pytest.mark.soak
@pytest.mark.timeout(SOAK_HANG_S)
@pytest.mark.parametrize("first", range(0, NUM_DRAWN, 10))
def test_so_do_all_models_that_are_drawn(first: int) -> None:
    for seed in range(first, first + 10):
        if not runs_in_eager(partial(drawn, seed)):
            with pytest.raises(CompileError, match="eager PyTorch ends there in an error too"):
                step(partial(drawn, seed), None)
            continue
        try:
            check(partial(drawn, seed), PARTS)
        except AssertionError as error:
            raise AssertionError(f"model {seed}:\n{source(seed)}") from error


def runs_in_eager(build: Callable[[], nn.Module]) -> bool:
    """Whether PyTorch can differentiate a model: some write over what a gradient needs."""
    model = build().train()
    loss = model(batch(model))[0]
    try:
        loss.backward()
    except RuntimeError:
        return False
    return True


def test_the_drawn_models_run_but_for_those_that_eager_refuses_too() -> None:
    seeds = range(NUM_DRAWN)
    run = [seed for seed in seeds if runs_in_eager(partial(drawn, seed))]
    assert len(run) > NUM_DRAWN // 2


def test_the_drawn_models_contain_what_they_are_for() -> None:
    texts = [source(seed) for seed in range(NUM_DRAWN)]
    for construct in (
        "+=",
        "mul_",
        "clamp_",
        "masked_fill_",
        "inplace",
        "[:, 0]",
        "reshape(",
        "drop",
    ):
        assert sum(construct in t for t in texts) > 10, construct
