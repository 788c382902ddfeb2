"""Processes with other hash seeds compile the same: ranks agree, and a plan is found by every later process."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from harness import families
from harness.distributed import SOAK_HANG_S, run_on_ranks
from harness.fabric import make_fabric, on_fabric_rank, run_on_fabric_ranks
from thunder_memsave import ThunderMemsaveStrategy
from thunder_memsave.budget import plan_cache, plan_request
from thunder_memsave.budget.agreed import structure_of
from thunder_memsave.budget.memory_planner import MemoryPlanner
from thunder_memsave.compiler.compiled_module import CompiledModule
from thunder_memsave.config import MemoryConfig
from thunder_memsave.distributed.agreement import OtherRankError
from thunder_memsave.errors import BudgetError
from thunder_memsave.planner.devices import device
from thunder_memsave.planner.graph import Plan
from thunder_memsave.planner.search.solve import solve

HASH_SEEDS = (1, 2)
QUICK = ("bucketize", "differentiated", "in place")
QUICK_AND_TIGHT = ("in place",)
NUM_PARTS = 3
_AMPLE_BYTES = 2**30
_ADDRESS = re.compile(r"0x[0-9a-f]{6,}|_\d{12,}")  # as Python, or as a part of a name
_SECONDS = re.compile(r"\(took .* milliseconds\)")


@contextmanager
def counted_solves() -> Iterator[list[str]]:
    """Collect the answers that were not found in a cache; the solver is given little time."""
    found: list[str] = []

    def counted(*args: Any, **kwargs: Any) -> Any:
        found.append("solved")
        return solve(*args, **{**kwargs, "time_limit_s": 1.0})

    with patch.object(plan_request, "solve", counted):
        yield found


@contextmanager
def seen_keys() -> Iterator[list[str]]:
    """Collect the keys under which plans are looked for."""
    keys: list[str] = []

    def noted(*args: Any, **kwargs: Any) -> str:
        keys.append(plan_cache.plan_key(*args, **kwargs))
        return keys[-1]

    with patch.object(plan_request, "plan_key", noted):
        yield keys


@dataclass(frozen=True, slots=True)
class Compiled:
    """The results of compiling and differentiating a model that other processes compare with or look up."""

    structure: str
    plan_keys: list[str]
    operations: list[str]
    traces: list[str]
    budget_bytes: int
    num_solves: int


def planner(budget_bytes: int) -> MemoryPlanner:
    return MemoryPlanner(MemoryConfig(), device=device("cpu"), budget_bytes=budget_bytes)


def compiled(name: str, budget_bytes: int) -> Compiled:
    sample, ours = families.sample(name), planner(budget_bytes)
    module = CompiledModule(sample.module, planner=ours)
    with seen_keys() as keys, counted_solves() as solves:
        sample.loss(module(**sample.arguments)).backward()
    (capture,) = module.captures
    traces = "\n".join(map(str, (*capture.forward_traces, *capture.backward_traces)))
    graph = ours.calls[-1].graph
    return Compiled(
        structure=structure_of(graph),
        plan_keys=keys,
        operations=list(map(repr, graph.ops)),
        traces=_SECONDS.sub("", traces).splitlines(),
        budget_bytes=budget_bytes,
        num_solves=len(solves),
    )


def tight_budget(name: str, directory: Path) -> int:
    """Return a budget half way from the smallest plan to keeping all; what is found stays in a cache of its own."""
    sample = families.sample(name)
    elsewhere = patch.dict(os.environ, {"THUNDER_MEMSAVE_CACHE": str(directory / "other cache")})
    with elsewhere, counted_solves(), pytest.raises(BudgetError) as error:
        CompiledModule(sample.module, planner=planner(1))(**sample.arguments)
    smallest = error.value.smallest_plan
    assert smallest is not None
    assert error.value.smallest_bytes is not None
    return (error.value.smallest_bytes + smallest.keep_all_peak_bytes) // 2


def check_samples(rank: int, directory: Path, names: Sequence[str], tight: Sequence[str]) -> None:
    """Compile each sample on rank 1 after rank 0, which goes on with the next one meanwhile."""
    os.environ["THUNDER_MEMSAVE_CACHE"] = str(directory / "cache")
    store = dist.FileStore(str(directory / "store"), 2)
    store.set_timeout(timedelta(minutes=5))
    store.set(f"hash on {rank}", str(hash("a name")))
    assert store.get("hash on 0") != store.get("hash on 1")
    for name in names:
        if rank == 0:
            first = compiled(name, tight_budget(name, directory) if name in tight else _AMPLE_BYTES)
            assert first.num_solves > 0
            lines = (*first.operations, *first.traces)
            assert [line for line in lines if _ADDRESS.search(line)] == []
            store.set(name, json.dumps(asdict(first)))
        else:
            first = Compiled(**json.loads(store.get(name)))
            second = compiled(name, first.budget_bytes)
            check_equal(first, second, name)


def check_equal(first: Compiled, second: Compiled, name: str) -> None:
    for own, other in zip(second.operations, first.operations, strict=True):
        assert own == other, name
    for own, other in zip(second.traces, first.traces, strict=True):
        assert own == other, name
    assert second.structure == first.structure, name
    assert second.plan_keys[0] == first.plan_keys[0], name
    assert second.num_solves == 0, name


def trained(memory: dict[str, Any]) -> tuple[Plan, list[Tensor]]:
    """Run a step with operations unknown to Thunder; return its plan, its gradients and the parameters after it."""
    fabric = make_fabric(devices=2, sharding="zero3", memory=memory, timeout="2min")
    sample = families.sample("scatter_add")
    module = sample.module
    model, optimizer = fabric.setup(module, torch.optim.SGD(module.parameters(), lr=0.1))
    before = [p.data.clone() for p in model.parameters()]
    torch.manual_seed(1)
    fabric.backward(sample.loss(model(**sample.arguments)))
    gradients = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    optimizer.step()
    after = [p.data.clone() for p in model.parameters()]
    assert len(gradients) == len(after) == 4
    assert not any(map(torch.equal, before, after))
    assert isinstance(fabric.strategy, ThunderMemsaveStrategy)
    assert fabric.strategy.plan is not None
    return fabric.strategy.plan, [*gradients, *after]


def check_training() -> None:
    kept, expected = trained({"policy": "keep_all"})
    with counted_solves(), pytest.raises((BudgetError, OtherRankError)) as error:
        trained({"budget": 1})
    found = [getattr(error.value, "smallest_bytes", None)]
    dist.broadcast_object_list(found)
    with counted_solves():
        tight, computed = trained({"budget": found[0]})
    assert tight.saved_bytes < kept.saved_bytes
    assert all(map(torch.equal, computed, expected))


@on_fabric_rank
def check_quickly(directory: Path) -> None:
    check_samples(int(os.environ["RANK"]), directory, QUICK, QUICK_AND_TIGHT)
    check_training()


def test_processes_with_other_hash_seeds_compile_alike_find_each_others_plans_and_train(
    tmp_path: Path,
) -> None:
    run_on_fabric_ranks(check_quickly, 2, tmp_path, hash_seeds=HASH_SEEDS)


@pytest.mark.soak
@pytest.mark.timeout(SOAK_HANG_S + 60)
@pytest.mark.parametrize("part", range(NUM_PARTS))
def test_so_do_models_of_all_families_under_tight_budgets(
    part: int, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    names = families.names()[part::NUM_PARTS]
    assert len(names) > 10
    arguments = (tmp_path, names, names)
    run_on_ranks(
        check_samples, 2, Path(), *arguments, init=False, hash_seeds=HASH_SEEDS, hang_s=SOAK_HANG_S
    )
    record_property("measured", f"{len(names)} models")
