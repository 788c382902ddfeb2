"""Finds the cheapest change of a run that does not fit, with which it does: estimated first, then planned."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from thunder_memsave.config import ShardingConfig
from thunder_memsave.errors import BudgetError, HostMemoryError, PlanError
from thunder_memsave.finetune.plan.other_formats import (
    Choice,
    Known,
    choices,
    held_bytes,
    with_values,
)
from thunder_memsave.finetune.plan.plan_run import RunPlan
from thunder_memsave.finetune.run_file.batch_sizes import batch_sizes
from thunder_memsave.finetune.run_file.config import RunConfig
from thunder_memsave.planner.report.explain import in_units
from thunder_memsave.settings.problems import ConfigError

NO_CHANGE = (
    "no change of rows per micro-batch, of formats or of the number of ranks was found with which it fits; --longest "
    "finds the longest row that does, and --formats shows what each change would save."
)
_MOST_PLANS = 3
_CONSTANT = ("parameter", "buffer", "gathered", "gradient", "accumulated", "optimizer", "other")
"""Kinds of bytes that do not grow with the rows."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Change:
    """A change of a run's keys, or of its number of ranks."""

    num_ranks: int
    more_ranks: bool = False
    values: Mapping[str, Any] = field(default_factory=dict)
    """Keys of the run file with their new values."""
    estimated_bytes: int

    @property
    def shown(self) -> str:
        """As one types it."""
        words = [f"--{key}={_shown(value)}" for key, value in self.values.items()]
        if self.more_ranks:
            words.insert(0, f"--world-size={self.num_ranks}")
        return " ".join(words)


@dataclass(frozen=True, kw_only=True, slots=True)
class Found:
    """A change with which the run fits, as a plan has shown."""

    change: Change
    made: RunPlan

    @property
    def sentence(self) -> str:
        """What to say of it."""
        known = Known.of_plan(self.made)
        assert known.budget_bytes is not None
        return (
            f"the cheapest change found with which it fits: {self.change.shown}; planned so, it needs "
            f"{in_units(known.peak_bytes)} of {in_units(known.budget_bytes)}."
        )


def cheapest_change(
    config: RunConfig,
    refused: RunPlan,
    plan: Callable[[RunConfig, int], RunPlan],
    *,
    say: Callable[[str], None],
) -> Found | None:
    """Plan the changes that should fit, the cheapest first, until one does; None: none of the first three.

    Args:
        config: The run.
        refused: Its smallest plan.
        plan: `(run, number of ranks) -> plan`.
        say: Shows a line while it goes on.
    """
    estimated = with_states_on_host(config) if refused.call.memory.host_bytes else config
    for change in islice(changes_that_should_fit(estimated, Known.of_plan(refused)), _MOST_PLANS):
        say(f"it does not fit; trying {change.shown}")
        gc.collect()
        try:
            made = plan(with_values(config, change.values), change.num_ranks)
        # Such as a batch that other ranks do not divide, or states that the host has no room for.
        except (BudgetError, ConfigError, HostMemoryError, PlanError):
            continue
        if made.fits:
            return Found(change=change, made=made)
    return None


def with_states_on_host(config: RunConfig) -> RunConfig:
    """Return the run that `memory.offload: auto` stands for where a plan has put all on the host that may be there."""
    return with_values(config, {"memory.offload": "all"}) if config.memory.may_offload else config


def changes_that_should_fit(config: RunConfig, refused: Known) -> Iterator[Change]:
    """Yield changes of a run that are estimated to fit its budget, the cheapest first.

    Cheaper is what changes no number: fewer rows at once, shards where there were replicas, then an optimizer's states
    on the host. Then come formats, few of them before many, and of these those that store the most bytes. More ranks
    come last.

    Args:
        config: The run.
        refused: What is known of its smallest plan.
    """
    assert refused.budget_bytes is not None
    for change in _changes(config, refused):
        if change.estimated_bytes <= refused.budget_bytes:
            yield change


def _changes(config: RunConfig, refused: Known) -> Iterator[Change]:
    yield from _fewer_rows(config, refused)
    before = refused.num_ranks
    sharding: dict[str, Any] = {}
    if config.strategy.sharding.mode == "none":
        sharding = {"strategy.sharding": ShardingConfig(mode="zero3")}
    of_sharded = choices(config, with_values(config, sharding), refused)
    found = choices(config, config, refused) if sharding else of_sharded
    if sharding and before > 1:
        yield _change(of_sharded[0], sharding, before)
    yield from _states_on_host(config, refused)
    for each in sorted(found, key=_cost):
        if each.num_ranks == before and each.form.values:
            yield _change(each, {}, before)
    for each in sorted(of_sharded, key=lambda c: (c.num_ranks, _cost(c))):
        if each.num_ranks > before and _divides_batch(config, each.num_ranks):
            yield _change(each, sharding, before)


def _states_on_host(config: RunConfig, refused: Known) -> Iterator[Change]:
    """Yield the change that keeps the optimizer's states on the host of a GPU; it costs time for copies."""
    memory = config.memory
    is_tried = memory.may_offload or memory.offloads_optimizer
    if refused.device_type != "cuda" or is_tried or not refused.of("optimizer"):
        return
    yield Change(
        num_ranks=refused.num_ranks,
        values={"memory.offload": "all" if memory.offloads_activations else "optimizer"},
        estimated_bytes=refused.peak_bytes - refused.of("optimizer"),
    )


def _divides_batch(config: RunConfig, num_ranks: int) -> bool:
    try:
        batch_sizes(config.train, world_size=num_ranks)
    except ConfigError:
        return False
    return True


def _fewer_rows(config: RunConfig, refused: Known) -> Iterator[Change]:
    rows = refused.num_rows
    if rows == 1:
        return
    constant = refused.of(*_CONSTANT) or held_bytes(config, refused)
    sizes = batch_sizes(config.train, world_size=refused.num_ranks)
    for fewer in range(rows - 1, 0, -1):
        if rows % fewer:
            continue
        values: dict[str, Any] = {"train.micro_batch_size": fewer}
        if config.train.gradient_accumulation_steps is not None:
            steps = sizes.gradient_accumulation_steps * rows // fewer
            values["train.gradient_accumulation_steps"] = steps
        estimate = constant + (refused.peak_bytes - constant) * fewer // rows
        yield Change(num_ranks=refused.num_ranks, values=values, estimated_bytes=estimate)


def _shown(value: object) -> str:
    return value.mode if isinstance(value, ShardingConfig) else str(value)


def _cost(choice: Choice) -> tuple[int, int]:
    return len(choice.form.values), -choice.held_bytes


def _change(choice: Choice, values: Mapping[str, Any], before: int) -> Change:
    return Change(
        num_ranks=choice.num_ranks,
        more_ranks=choice.num_ranks != before,
        values={**values, **choice.form.values},
        estimated_bytes=choice.peak_bytes,
    )
