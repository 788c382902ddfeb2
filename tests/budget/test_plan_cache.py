"""A cached plan is found by everything that it depends on, and by nothing else."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from thunder_memsave.budget import plan_cache
from thunder_memsave.budget.plan_cache import (
    cache_plan,
    cached_plan,
    known_bound,
    plan_key,
    remember_bound,
    remember_budget,
    smaller_budgets,
)
from thunder_memsave.planner.actions import KEEP, NO_ACTIONS, RECOMPUTE, REGATHER, Actions
from thunder_memsave.planner.graph import Decision, Op, Plan, StepMemory, Storage, TrainingGraph

GRAPH = TrainingGraph(
    storages=(
        Storage(nbytes=8, kind="batch", name="x"),
        Storage(nbytes=8, kind="activation", name="y"),
    ),
    ops=(
        Op(
            symbol="exp",
            index=0,
            arguments=("x",),
            results=("y",),
            reads=(0,),
            makes=(1,),
            peak_bytes=8,
        ),
    ),
    num_forward=1,
    storage_of={"x": 0, "y": 1},
    inputs=frozenset({0}),
    outputs=frozenset({1}),
    gradients=frozenset(),
    cotangents=frozenset(),
)
DECISION = Decision(name="y", nbytes=8, cost_us=0.1, reason="cheap", source="model.py:3")
PLAN = Plan(
    actions=Actions({"x": REGATHER, "y": KEEP}),
    budget_bytes=100,
    predicted_peak_bytes=90,
    keep_all_peak_bytes=95,
    saved_bytes=8,
    recompute_us=1.5,
    lower_bound_us=1.25,
    decisions=(DECISION,),
)


def key(graph: TrainingGraph = GRAPH, **changes: object) -> str:
    asked: dict[str, object] = {
        "budget_bytes": 100,
        "costs_us": (0.5,),
        "memory": StepMemory(),
        "pinned": NO_ACTIONS,
    }
    return plan_key(graph, **{**asked, **changes})  # type: ignore[arg-type]


def test_a_plan_is_read_as_it_was_written(tmp_path: Path) -> None:
    cache_plan(key(), PLAN, directory=tmp_path)
    assert cached_plan(key(), directory=tmp_path) == PLAN


@pytest.mark.parametrize(
    "changes",
    [
        {"budget_bytes": 101},
        {"costs_us": (0.6,)},
        {"memory": StepMemory(optimizer_bytes=1)},
        {"pinned": Actions({"y": KEEP})},
        {"pinned": Actions({"y": RECOMPUTE})},
        {"graph": replace(GRAPH, ops=(replace(GRAPH.ops[0], peak_bytes=9),))},
        {"graph": replace(GRAPH, storages=(GRAPH.storages[0],))},
        {"graph": replace(GRAPH, outputs=frozenset())},
    ],
)
def test_another_question_has_another_key(changes: dict[str, object]) -> None:
    assert key(**changes) != key()  # type: ignore[arg-type]


def test_a_damaged_file_counts_as_none(tmp_path: Path) -> None:
    cache_plan(key(), PLAN, directory=tmp_path)
    (path,) = tmp_path.rglob("*.json")
    path.write_text(path.read_text()[:-9])
    assert cached_plan(key(), directory=tmp_path) is None


@pytest.mark.parametrize(
    "changes",
    [
        {"actions": {"y": {"kind": "shrink"}}},
        {"actions": {"y": {"kind": "keep", "tomorrow": 1}}},
        {"actions": ["y"]},
        {"keep": ["y"]},
        {"actions": None, "keep": ["y"]},
    ],
)
def test_a_file_of_another_format_counts_as_none(changes: dict[str, Any], tmp_path: Path) -> None:
    cache_plan(key(), PLAN, directory=tmp_path)
    (path,) = tmp_path.rglob("*.json")
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    assert cached_plan(key(), directory=tmp_path) is None


def test_files_of_another_format_are_not_looked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    before = key()
    monkeypatch.setattr(plan_cache, "_FORMAT", plan_cache._FORMAT + 1)
    assert key() != before


def test_a_directory_that_cannot_be_written_to_is_no_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    cache_plan(key(), PLAN, directory=tmp_path / "file")
    assert cached_plan(key(), directory=tmp_path / "file") is None


def test_budgets_of_the_same_question_are_found_again(tmp_path: Path) -> None:
    for budget in (300, 100, 200):
        remember_budget(key(budget_bytes=None), budget, directory=tmp_path)
    remember_budget(key(budget_bytes=None, costs_us=(0.7,)), 150, directory=tmp_path)
    found = smaller_budgets(key(budget_bytes=None), 200, directory=tmp_path)
    assert found == [200, 100]


def test_the_largest_bound_of_a_question_is_found_again(tmp_path: Path) -> None:
    assert known_bound("key", directory=tmp_path) == 0
    for bound_bytes in (70, 75, 60):
        remember_bound("key", bound_bytes, directory=tmp_path)
    assert known_bound("key", directory=tmp_path) == 75
    assert known_bound("another", directory=tmp_path) == 0
