"""Stores plans in the user's cache directory, so that a run that was planned before starts without solving."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import torch

from thunder_memsave.measure.disk_table import DiskTable, cache_directory, replace_file
from thunder_memsave.planner.actions import Action, Actions
from thunder_memsave.planner.graph import Decision, Plan, StepMemory, TrainingGraph
from thunder_memsave.planner.search.mixes import OffloadTerms

_BOUND = "bytes"
_FORMAT = 7
"""Version of the files and of the search, part of the key: plans of another version are never read."""


def plan_key(
    graph: TrainingGraph,
    *,
    budget_bytes: int | None,
    costs_us: Sequence[float],
    memory: StepMemory,
    pinned: Actions,
    terms: OffloadTerms | None = None,
) -> str:
    """Hash all that a plan within a budget depends on, including the versions of torch, this package and the files."""
    digest = hashlib.sha256()
    versions = (torch.__version__, importlib.metadata.version("thunder-memsave"), _FORMAT)
    asked: tuple[object, ...] = (versions, budget_bytes, memory, pinned, graph.num_forward)
    if terms is not None:  # keys of plans without offload stay as they are
        asked += (terms,)
    roles = map(sorted, (graph.inputs, graph.outputs, graph.gradients, graph.cotangents))
    for part in (asked, graph.storages, graph.ops, costs_us, *roles):
        digest.update(repr(part).encode())
    return digest.hexdigest()


def cached_plan(key: str, *, directory: Path | None = None) -> Plan | None:
    """Return the plan of an earlier run; None if there is none that can be read.

    Args:
        key: `plan_key(...)`.
        directory: Cache directory; that of this user unless given.
    """
    try:
        values = json.loads(_path(key, directory).read_text(encoding="utf-8"))
        decisions = tuple(Decision(**d) for d in values.pop("decisions"))
        actions = Actions({name: Action(**a) for name, a in values.pop("actions").items()})
        return Plan(**values, actions=actions, decisions=decisions)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def cache_plan(key: str, plan: Plan, *, directory: Path | None = None) -> None:
    """Write a plan. If the directory cannot be written to, nothing is raised: the next run solves again."""
    path = _path(key, directory)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        actions = {name: asdict(action) for name, action in plan.actions.items()}
        replace_file(path, json.dumps({**asdict(plan), "actions": actions}))
    except OSError:
        return


def remember_budget(key: str, budget_bytes: int, *, directory: Path | None = None) -> None:
    """Record that there is a plan for a budget.

    Args:
        key: `plan_key(...)` without a budget.
        budget_bytes: Budget of the plan.
        directory: As for `cached_plan`.
    """
    table = _budgets(key, directory)
    table.put(str(budget_bytes), 1)
    table.save()


def smaller_budgets(key: str, budget_bytes: int, *, directory: Path | None = None) -> Sequence[int]:
    """Return the budgets up to this one that have plans, the largest first; arguments as for `remember_budget`."""
    budgets = map(int, _budgets(key, directory).keys())
    return sorted((b for b in budgets if b <= budget_bytes), reverse=True)


def remember_bound(key: str, bound_bytes: int, *, directory: Path | None = None) -> None:
    """Record that no plan is below a peak; arguments as for `remember_budget`."""
    table = _bounds(key, directory)
    if bound_bytes > (table.get(_BOUND) or 0):
        table.put(_BOUND, bound_bytes)
        table.save()


def known_bound(key: str, *, directory: Path | None = None) -> int:
    """Return a peak below which there is no plan, 0 if none is known; arguments as for `remember_budget`."""
    return int(_bounds(key, directory).get(_BOUND) or 0)


def _bounds(key: str, directory: Path | None) -> DiskTable:
    return DiskTable("plans/bounds", key, directory=directory)


def _budgets(key: str, directory: Path | None) -> DiskTable:
    return DiskTable("plans/budgets", key, directory=directory)


def _path(key: str, directory: Path | None) -> Path:
    return (directory or cache_directory()) / "plans" / f"{key}.json"
