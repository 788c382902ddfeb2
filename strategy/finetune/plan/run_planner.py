"""Plans one call of a run for absent ranks, and goes on with the smallest plan where none fits."""

from __future__ import annotations

from dataclasses import replace

from typing_extensions import override

from thunder_memsave.budget.arguments import Arguments
from thunder_memsave.budget.memory_planner import MemoryPlanner
from thunder_memsave.budget.offload.last_resort import LastResort, least_bytes
from thunder_memsave.budget.offload.offered_updates import OfferedUpdates
from thunder_memsave.budget.offload.part_of_states import States
from thunder_memsave.budget.offload.terms import offload_terms
from thunder_memsave.budget.plan_request import Question
from thunder_memsave.budget.planned_call import Attempt, PlannedCall
from thunder_memsave.budget.ways.way import Way
from thunder_memsave.config import StrategyConfig
from thunder_memsave.distributed.data_parallel import DataParallel
from thunder_memsave.errors import BudgetError
from thunder_memsave.finetune.plan.fp8_planned import by_transformer_engine
from thunder_memsave.planner.graph import Device, StepMemory
from thunder_memsave.planner.search.solve import pareto
from thunder_memsave.progress import stage

_SMALLEST_S = 3.0
"""CPU seconds to search for the smallest budget of a run that fits; one that does not is searched for longer."""
_CURVE_S = 3.0


class RunPlanner(MemoryPlanner):
    """Plans without other ranks to agree with, and continues with the smallest plan if the budget is too small."""

    def __init__(
        self,
        strategy: StrategyConfig,
        device: Device,
        budget_bytes: int | None,
        data_parallel: DataParallel | None,
        memory: StepMemory,
        states: States,
        updates: OfferedUpdates | None,
    ) -> None:
        """Store what limits plans.

        Args:
            strategy: Its keys of memory and fp8.
            device: Of each rank.
            budget_bytes: Of a step; None: no limit.
            data_parallel: Ranks that are not there; None: there is one.
            memory: What a step holds beside the call.
            states: The optimizer's, as they would be on the host.
            updates: Those that backward may make where no plan fits without; None: there are none.
        """
        super().__init__(
            strategy.memory,
            device=device,
            budget_bytes=budget_bytes,
            step_memory=lambda: memory,
            device_type="" if device.name == "cpu" else "cuda",
            by_transformer_engine=by_transformer_engine(strategy.fp8, device),
            offload=offload_terms(strategy.memory, device, free_bytes=device.host_memory_bytes),
            last_resort=LastResort.of(
                strategy.memory,
                device,
                states,
                free_bytes=device.host_memory_bytes,
                streams=strategy.may_stream_weights,
            ),
            updates=updates,
        )
        self.refusal: BudgetError | None = None
        self._attempt: Attempt | None = None
        self._sharding = "none" if data_parallel is None else data_parallel.mode

    @property
    @override
    def _mode(self) -> str:
        return self._sharding

    @override
    def _known_of(self, arguments: Arguments) -> Arguments:
        # The module's own tensors hold nothing; the trace knows their shapes.
        return replace(arguments, tensors={})

    @override
    def _planned(self, attempt: Attempt) -> PlannedCall:
        self._attempt = attempt
        try:
            return super()._planned(attempt)
        except BudgetError as error:
            if error.smallest_plan is None:
                raise
            assert self.refused is not None
            self.refusal = error
            smallest = replace(error.smallest_plan, budget_bytes=error.smallest_bytes)
            found = self.refused.run.call
            call = replace(found, plan=smallest)
            call.replayed.update(found.replayed)
            return call

    @property
    def call(self) -> PlannedCall:
        """The only call that was planned."""
        (call,) = self.calls
        return call

    @property
    def _smallest_s(self) -> float:
        return _SMALLEST_S

    def smallest_bytes(self, *, counts_tiles: bool) -> int:
        """Return the smallest budget for which a plan is found."""
        stage("smallest budget")
        if self.refusal is not None:
            assert self.refusal.smallest_bytes is not None
            return self.refusal.smallest_bytes
        asked, first = [self._last], self._attempt
        ways = [Way(is_tiled=True)] if counts_tiles and not self.call.is_tiled else []
        if self._memory.compress == "fp8":  # the last plan that was tried may be of either
            ways += [Way(), Way(compresses=True)]
        attempts = [] if first is None else [first.in_way(way) for way in ways]
        others = [self._question(each, None) for each in attempts if each is not None]
        asked += [other.narrowed or other for other in others]
        found = min(each.smallest_bytes(time_limit_s=self._smallest_s) for each in asked)
        if first is not None:
            found = max(found, least_bytes(first.with_memory(self.call.memory)))
        return min(self.call.profile.peak_bytes, found)

    def curve(self, smallest_bytes: int) -> tuple[tuple[int, float], ...]:
        """Return a lower bound of each budget's cost, from the smallest budget on."""
        stage("other budgets")
        asked = self._last
        points = pareto(
            asked.graph,
            costs_us=asked.costs_us,
            memory=asked.memory,
            pinned=asked.pinned,
            generator_state_bytes=asked.generator_state_bytes,
            time_limit_s=_CURVE_S,
        )
        return tuple(point for point in points if point[0] >= smallest_bytes)

    @property
    def _last(self) -> Question:
        """The last planning problem, narrowed to the choices that find the smallest plan sooner, if it was."""
        assert self._asked is not None, "a call was planned"
        return self._asked.narrowed or self._asked
