"""Plans which activations a call keeps for backward: the same on all ranks, and checked on the traces that will run."""

from __future__ import annotations

import copy
import logging
import os
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

import torch

from thunder_memsave.budget.agreed import largest, least_room, structure_of
from thunder_memsave.budget.arguments import Arguments
from thunder_memsave.budget.extract import Fuses, nothing_fuses, profiles
from thunder_memsave.budget.limits import Limit
from thunder_memsave.budget.offload.fitting import best_of
from thunder_memsave.budget.offload.last_resort import LastResort
from thunder_memsave.budget.offload.offered_updates import OfferedUpdates
from thunder_memsave.budget.offload.terms import beside_states
from thunder_memsave.budget.own_pool import with_pool
from thunder_memsave.budget.pinned_actions import pinned_actions, regathered
from thunder_memsave.budget.plan_request import SMALLEST, Offer, Question, refuse_budget
from thunder_memsave.budget.planned_call import Attempt, PlannedCall, step_us
from thunder_memsave.budget.way_search import WORTH_A_TRY, Run, Tried, WaySearch
from thunder_memsave.config import MemoryConfig
from thunder_memsave.distributed.agreement import (
    OtherRankError,
    broadcast,
    is_rank_zero,
    together,
)
from thunder_memsave.distributed.data_parallel import DataParallel
from thunder_memsave.errors import PlanError
from thunder_memsave.measure.op_profile import Operation, OpProfile
from thunder_memsave.measure.op_times import MeasuredTimes
from thunder_memsave.measure.scratch import bounded_scratch, measured_scratch
from thunder_memsave.passes.overlap.room import NO_ROOM, Room
from thunder_memsave.passes.step import S, Step
from thunder_memsave.passes.symbols import is_joint
from thunder_memsave.planner.actions import Actions
from thunder_memsave.planner.cost import costs_us, forward_and_backward_us
from thunder_memsave.planner.graph import Device, Plan, StepMemory
from thunder_memsave.planner.order import generator_state_bytes
from thunder_memsave.planner.search.mixes import OffloadTerms
from thunder_memsave.planner.search.solve import Policy
from thunder_memsave.planner.workspaces import blas_workspace_bytes, te_workspace_bytes
from thunder_memsave.progress import stage

if TYPE_CHECKING:
    from thunder_memsave.budget.pieces.measured_step import Follow

_LEAST_STEP = 0.001
"""Part of a budget of reserved bytes by which tensors get less, at least, where a plan ran in more than it."""
_MOST_ROUNDS = 8
_MOST_ROOMS = 3
_MOST_OVERLAPS, _OVERLAP_STEP = 3, 0.005
"""Plans with less memory that are tried where copies of states, which wait for each other, could overlap with it; and
the part of the budget by which each has less, at least."""
_IN_FLIGHT = 4
"""Collectives, or copies of states, for which plans leave room that is cheap to have."""
_OF_ROOM = 0.9
"""The part of what is expected to fit that one more plan asks for."""
_RESERVED = 1.01
"""About as many bytes are reserved for a byte of tensors, at least."""

_log = logging.getLogger(__name__)


class _Refused(NamedTuple):
    """A try whose run exceeded the budget, by `more_bytes`."""

    target_bytes: int
    more_bytes: int


class MemoryPlanner:
    """Plans the calls of one module."""

    def __init__(
        self,
        memory: MemoryConfig,
        *,
        device: Device,
        budget_bytes: int | None,
        data_parallel: DataParallel | None = None,
        step_memory: Callable[[], StepMemory] = StepMemory,
        device_type: str = "",
        times: MeasuredTimes | None = None,
        by_transformer_engine: bool = False,
        offload: OffloadTerms | None = None,
        last_resort: LastResort | None = None,
        updates: OfferedUpdates | None = None,
    ) -> None:
        """Store what plans depend on besides the call.

        Args:
            memory: Policy and pins.
            device: Device whose rates give the costs of operations.
            budget_bytes: The largest peak of a step; None: no limit.
            data_parallel: The ranks that must run the same plan.
            step_memory: Returns the bytes that a step holds besides; called whenever a call is planned.
            device_type: Type of the planned device, if it is not here; scratch inside kernels is then bounded
                instead of measured.
            times: Measured costs for plans that run here; None: the rates of `device`.
            by_transformer_engine: Whether it computes the fp8 products, in a workspace of its own.
            offload: On which plans may copy values to the host; None: they do not.
            last_resort: What may go to the host where no plan fits without; None: nothing.
            updates: Those that backward may make where no plan fits without; None: there are none.
        """
        self._memory = memory
        self.device = device
        self._limit_to(budget_bytes)
        self._data_parallel = data_parallel
        self._step_memory = step_memory
        self._device_type = device_type
        self._times, self._offload, self._last_resort = times, offload, last_resort
        self._updates = updates
        self._te_bytes = te_workspace_bytes(device) if by_transformer_engine else 0
        self.profiles = profiles(scratch=self._scratch, device_type=device_type)
        self._agreed: dict[str, Run] = {}
        self._asked: Question | None = None
        """The last request for a plan, on rank 0."""
        self.refused: Tried | None = None
        """The call that no plan fits, in the way in which it needs the least."""
        self.calls: list[PlannedCall] = []
        """Calls in the order in which they were planned."""
        self._pool_bytes = 0
        self._joins_pay: bool | None = None
        """Whether a step is faster for what can join kernels of backward; None: no plan of this call was tried."""

    def _limit_to(self, budget_bytes: int | None) -> None:
        self._budget_bytes = budget_bytes
        self._limit = Limit(self._memory, self.device, budget_bytes)

    def _scratch(self, operation: Operation, found: OpProfile) -> int:
        """Return the scratch of a kind of operation, when it is first seen: only then can it be run."""
        if self._times is not None:
            self._times.remember(operation, found)
        if self._device_type:
            return bounded_scratch(operation, found, device_type=self._device_type)
        return measured_scratch()(operation, found)

    @property
    def is_of_piece(self) -> bool:
        """Whether what it plans is a piece of a module that cannot be one graph."""
        return False

    @property
    def follow(self) -> Follow | None:
        """The context for the forward of the call that is compiled now, if it is a piece; None: it is none."""
        return None

    @property
    def has_budget(self) -> bool:
        """Whether plans are limited."""
        return self._budget_bytes is not None

    @property
    def budget_bytes(self) -> int | None:
        """The largest peak of a step; None: no limit."""
        return self._budget_bytes

    @property
    def is_to_save(self) -> bool:
        """Whether it is asked to keep less than all: by a budget, the policy or a pin."""
        policy = self._memory.policy
        return self.has_budget or policy == "recompute_all" or bool(self._memory.recompute)

    def for_copy(self) -> MemoryPlanner:
        """Return a planner like this one without any planned calls, for a copy of the module."""
        copied = copy.copy(self)
        copied._agreed, copied._asked, copied.calls = {}, None, []
        copied._pool_bytes = 0
        return copied

    def planned(
        self,
        traces: S,
        *,
        steps: Sequence[Step[S]],
        arguments: Arguments,
        fuses: Fuses = nothing_fuses,
    ) -> S:
        """Make the plan of a joint trace. A collective, the first time for each structure.

        Args:
            traces: With a joint trace after all other joint passes, or an inference trace, of which only what is on
                its way can be less.
            steps: Carry a plan out: make the traces that run.
            arguments: What is known of its arguments.
            fuses: Tells which symbols of the joint trace the steps fuse.

        Returns:
            The traces with the plan's actions and room.

        Raises:
            BudgetError: no plan fits the budget.
            OtherRankError: rank 0 found none.
        """
        stage("extract")
        arguments = self._known_of(arguments)
        attempt = Attempt.of(
            traces,
            steps,
            arguments=arguments,
            known=self.profiles,
            memory=self.memory_beside(arguments.unread_bytes),
            device=self.device,
            offload=self._offload,
            fuses=fuses,
        )
        plan = self._planned if is_joint(traces.joint.bound_symbols) else self._evaluated
        self.calls.append(call := plan(attempt))
        self._limit.enforce(call)
        if not self._device_type:
            measured_scratch().save()
            torch.cuda.empty_cache()  # operations were run alone, on tensors of all sizes
        return replace(
            traces,
            joint=call.joint,
            actions=call.actions,
            joins=call.joins,
            room=call.given_room,
            added=attempt.added,
            updated=call.updated,
            copies=call.copies,
        )

    def _known_of(self, arguments: Arguments) -> Arguments:
        """Return what plans may know of a call's arguments."""
        return arguments

    def memory_beside(self, unread_bytes: int) -> StepMemory:
        """Return what a step holds beside a call that does not read `unread_bytes` of the module."""
        memory = self._step_memory()
        other_bytes = unread_bytes + blas_workspace_bytes(self.device, os.environ)
        other_bytes += self._te_bytes + self._pool_bytes
        return replace(memory, other_bytes=memory.other_bytes + other_bytes)

    def hold_pool(self, more_bytes: int) -> str | None:
        """Let the last call hold a pool of its own, or say why there is no room, on all ranks alike. A collective."""
        call = self.calls[-1]
        if call.empties_cache:
            return "the plan counts on an allocator that gives cached memory back, which a pool does not"
        limited_bytes = self._limit.bytes_of(call)
        found = with_pool(call, more_bytes, limited_bytes, self._budget_bytes, self._data_parallel)
        if isinstance(found, str):
            return found
        self.calls[-1], self._pool_bytes = found.call, found.pool_bytes
        return None

    def _planned(self, attempt: Attempt) -> PlannedCall:
        """Apply the plan of a call's structure, which ranks agree on once: only some may see a batch of new length.

        One process plans again where a longer batch exceeds the budget with it.
        """
        structure = self._agreement(attempt)
        if (agreed := self._agreed.get(structure)) is None:
            run = self._agreed[structure] = self._fitting(attempt)
            return run.call
        way = attempt.in_way(agreed.call.way) or attempt
        call = way.run(agreed.call.plan, agreed.room, joins=bool(agreed.call.joins))
        needed_bytes = self._limited_bytes(call)
        if self._budget_bytes is not None and needed_bytes > self._budget_bytes:
            if self._data_parallel is None:
                return self._fitting(attempt).call
            _log.warning(
                "this batch needs %s bytes with the plan that the ranks agreed on for another length, and the budget "
                "is %s; start with the longest batch, or pad batches to one length.",
                f"{needed_bytes:,}",
                f"{self._budget_bytes:,}",
            )
        return call

    def _evaluated(self, attempt: Attempt) -> PlannedCall:
        """Run a call without backward; ranks that gather parameters agree on it as they do on plans."""
        budget_bytes = self._budget_bytes
        if budget_bytes is not None and self._mode != "none" and attempt.communicates:
            call = self._evaluated_alike(attempt, budget_bytes)
        else:
            call = attempt.run(None)
        if budget_bytes is not None and call.profile.peak_bytes > budget_bytes:
            _log.warning(
                "this call without gradients needs %s bytes, and the budget is %s; evaluate smaller batches, the "
                "longest of them first, or give a larger memory.budget.",
                f"{call.profile.peak_bytes:,}",
                f"{budget_bytes:,}",
            )
        return call

    def _evaluated_alike(self, attempt: Attempt, budget_bytes: int) -> PlannedCall:
        """Run a call without backward, with the same room on all ranks; with none if ranks run different operations."""
        structure = structure_of(attempt.graph)
        if (agreed := self._agreed.get(structure)) is not None:
            return attempt.run(None, agreed.room)
        is_other = structure != broadcast(structure, self._data_parallel)
        if largest(int(is_other), self._data_parallel):
            run = self._run(attempt, None, NO_ROOM, budget_bytes)
        else:
            run = self._within(attempt, None, budget_bytes)
        self._agreed[structure] = run
        return run.call

    def _fitting(self, attempt: Attempt) -> Run:
        """Plan until the traces that run fit on every rank, at last with more on the host."""
        self._joins_pay = None
        tried = best_of(
            attempt,
            self._last_resort,
            self._best,
            self._about_bytes,
            updates=self._updates,
            budget_bytes=self._budget_bytes,
            device=self.device,
            data_parallel=self._data_parallel,
        )
        if tried.run.more_bytes <= 0:
            return tried.run
        self.refused = tried
        assert self._budget_bytes is not None
        return refuse_budget(
            tried.offer,
            budget_bytes=self._budget_bytes,
            more_bytes=tried.run.more_bytes,
            data_parallel=self._data_parallel,
        )

    def _about_bytes(self, attempt: Attempt) -> int:
        """Estimate the smallest peak of a call: that of a plan that recomputes all."""
        question = replace(self._question(attempt, None), policy="recompute_all")
        nbytes = question.solved(None).predicted_peak_bytes
        return int(nbytes * _RESERVED) if self._limit.is_reserved else nbytes

    def _best(self, attempt: Attempt) -> Tried:
        """Try the ways to carry a call out one after the other."""
        search = WaySearch(
            attempt,
            lambda way: self._tried(way, structure_of(way.graph)),
            self._rerun,
            budget_bytes=self._budget_bytes,
            is_reserved=self._limit.is_reserved,
            device=self.device,
            data_parallel=self._data_parallel,
            may_compress=self._memory.compress == "fp8",
        )
        found = search.best()
        if found.attempt.way.compresses and self.device.name == "cpu":
            _log.warning(
                "this plan stores activations in fp8 (memory.compress), and a CPU converts to fp8 and back so slowly "
                "that steps took longer than with recomputation where both were measured; leave memory.compress out."
            )
        return found

    def _rerun(self, way: Attempt, of: Tried) -> Run:
        """Run the plan that was found for one way in another."""
        joins = bool(of.run.call.joins)
        return self._run(way, of.offer.plan, of.run.room, self._budget_bytes, joins=joins)

    def _tried(self, attempt: Attempt, structure: str) -> Tried:
        """Try plans until the traces that run fit, or the smallest does not: later passes move the peak."""
        budget_bytes = target_bytes = self._budget_bytes
        num_rounds = 0
        too_large: list[Actions] = []
        refused: _Refused | None = None
        while True:
            if self._joins_pay is False:
                attempt = attempt.without_joins()
            stage("solve")
            offer = self._rank_zeros(attempt, structure, target_bytes, too_large)
            stage("simulate")
            run = self._within(attempt, offer.plan, budget_bytes, target_bytes=target_bytes)
            if self._joins_pay is None and run.joins_pay is not None:
                self._joins_pay = run.joins_pay
                if not run.joins_pay:  # a plan for the prices without is faster
                    continue
            tried = Tried(attempt, run, offer)
            if budget_bytes is None or target_bytes is None:
                return tried
            # The smallest too: an error names what it needs, and it must be found again for that budget.
            is_worth = run.more_bytes <= 0 or offer.is_smallest
            if is_worth and self._asked is not None and not self._limit.is_reserved:
                self._asked.remember_run(offer.plan, peak_bytes=budget_bytes + run.more_bytes)
            if run.more_bytes <= 0 and run.overlap_lacks:
                return self._overlapping(tried, target_bytes, structure, too_large)
            if run.more_bytes <= 0 and not (self._limit.is_reserved and refused is None):
                return self._fuller(tried, target_bytes, refused, structure, too_large)
            if run.more_bytes <= 0 or offer.bound_bytes is not None:
                return tried
            refused = _Refused(target_bytes, run.more_bytes)
            too_large.append(offer.plan.actions)
            num_rounds += 1
            assert num_rounds <= _MOST_ROUNDS + 1, "the smallest plan has a bound"
            is_last = offer.is_smallest or num_rounds == _MOST_ROUNDS
            less_bytes = run.more_bytes
            if self._limit.is_reserved:  # for less the allocator takes as much
                less_bytes = max(less_bytes, int(_LEAST_STEP * budget_bytes))
            target_bytes = SMALLEST if is_last else max(target_bytes - less_bytes, SMALLEST)

    def _overlapping(
        self,
        found: Tried,
        target_bytes: int,
        structure: str,
        too_large: Collection[Actions],
    ) -> Tried:
        """Try plans with less memory, in whose step copies overlap, where that saves time. A collective."""
        budget_bytes, run = self._budget_bytes, found.run
        assert budget_bytes is not None
        for _ in range(_MOST_OVERLAPS):
            target_bytes -= max(2 * run.overlap_lacks, int(_OVERLAP_STEP * budget_bytes))
            if target_bytes <= SMALLEST:
                break
            stage("solve")
            offer = self._rank_zeros(found.attempt, structure, target_bytes, too_large)
            stage("simulate")
            run = self._within(found.attempt, offer.plan, budget_bytes, target_bytes=target_bytes)
            if run.more_bytes > 0:
                break
            if self._added_us(run) < self._added_us(found.run):
                found = Tried(found.attempt, run, offer)
            if not run.overlap_lacks:
                break
        return found

    def _added_us(self, run: Run) -> int:
        """Return the time that a plan adds to a step, the most of all ranks."""
        return self._most_us(run.added_us)

    def _fuller(
        self,
        tried: Tried,
        target_bytes: int,
        refused: _Refused | None,
        structure: str,
        too_large: Collection[Actions],
    ) -> Tried:
        """Try once to use what a plan leaves of the budget. A collective.

        What later passes save, what the allocator takes beside tensors, and the order in which they run, change from
        plan to plan: so it tries for less than is left, and between it and a plan that was refused, if one was.
        """
        budget_bytes, left_bytes = self._budget_bytes, -tried.run.more_bytes
        assert budget_bytes is not None
        more_bytes = int(_OF_ROOM * left_bytes)
        if refused is not None:
            part = left_bytes / (left_bytes + refused.more_bytes)
            more_bytes = int(_OF_ROOM * part * (refused.target_bytes - target_bytes))
        if not tried.offer.plan.recompute_us or more_bytes < WORTH_A_TRY * budget_bytes:
            return tried
        stage("solve")
        offer = self._rank_zeros(tried.attempt, structure, target_bytes + more_bytes, too_large)
        if offer.plan.added_us >= tried.offer.plan.added_us:
            return tried
        stage("simulate")
        target_bytes += more_bytes
        run = self._within(tried.attempt, offer.plan, budget_bytes, target_bytes=target_bytes)
        is_better = run.more_bytes <= 0 and self._added_us(run) <= self._added_us(tried.run)
        return Tried(tried.attempt, run, offer) if is_better else tried

    def _within(
        self,
        attempt: Attempt,
        plan: Plan | None,
        budget_bytes: int | None,
        *,
        target_bytes: int | None = None,
    ) -> Run:
        """Carry a plan out, with values recomputed in kernels of backward where a step is faster for it. A collective.

        `target_bytes` is that of the plan, below a budget by what the run of another plan took beside its tensors.
        """
        alone = self._overlapped(attempt, plan, budget_bytes, target_bytes)
        if plan is None or self._policy != "plan" or not attempt.joins(plan):
            return alone
        in_backward = alone.call.profile.peak_step >= alone.call.program.num_forward
        is_in_backward = largest(int(in_backward), self._data_parallel)
        if alone.more_bytes > 0 and self._joins_pay is not None and not is_in_backward:
            return alone  # what holds too much is the same
        assert alone.call.plan is not None
        recompute_us = alone.call.plan.recompute_us + attempt.alone_us(plan)
        priced = replace(alone.call.plan, recompute_us=recompute_us)
        alone = replace(alone, call=replace(alone.call, plan=priced))
        joined = self._overlapped(attempt, plan, budget_bytes, target_bytes, joins=True)

        runs = (joined, alone)
        us = [self._most_us(step_us(run.call, self.device)) for run in runs]
        lacking = [max(run.more_bytes, 0) for run in runs]
        found = joined if (lacking[0], us[0]) <= (lacking[1], us[1]) else alone
        computed = [
            self._most_us(forward_and_backward_us(run.call.program, self.device)) for run in runs
        ]
        pays = None if computed[0] == computed[1] else computed[0] < computed[1]
        return replace(found, joins_pay=pays)

    def _most_us(self, us: float) -> int:
        """Return the most of all ranks. A collective."""
        return largest(int(us), self._data_parallel)

    def _overlapped(
        self,
        attempt: Attempt,
        plan: Plan | None,
        budget_bytes: int | None,
        target_bytes: int | None,
        *,
        joins: bool = False,
    ) -> Run:
        """Overlap collectives with computation as far as the budget has room, on all ranks alike. A collective."""
        if budget_bytes is None or not attempt.communicates:
            return self._run(attempt, plan, None, budget_bytes, joins=joins)
        if not self._is_near(attempt, plan, target_bytes or budget_bytes):
            run = self._run(attempt, plan, None, budget_bytes, joins=joins)
            if run.more_bytes <= 0:
                return run
        at_once = self._run(attempt, plan, NO_ROOM, budget_bytes, joins=joins)
        if at_once.more_bytes > 0:
            return at_once
        # What the allocator takes beside tensors, it takes beside those in flight too.
        beside_bytes = max(at_once.limited_bytes - at_once.call.profile.peak_bytes, 0)
        room = least_room(at_once.call.room(budget_bytes - beside_bytes), self._data_parallel)
        for _ in range(_MOST_ROOMS):
            run = self._run(attempt, plan, room, budget_bytes, joins=joins)
            if run.more_bytes <= 0:
                return run
            room = room.without(run.more_bytes)
        return replace(at_once, overlap_lacks=run.more_bytes)

    def _is_near(self, attempt: Attempt, plan: Plan | None, target_bytes: int) -> bool:
        """Tell whether a plan leaves some rank no room for one more collective in flight, so that it needs limits."""
        if plan is None:
            return False
        needed_bytes = plan.predicted_peak_bytes + attempt.collective_bytes
        return largest(int(needed_bytes > target_bytes), self._data_parallel) > 0

    def _run(
        self,
        attempt: Attempt,
        plan: Plan | None,
        room: Room | None,
        budget_bytes: int | None,
        *,
        joins: bool = False,
    ) -> Run:
        def make() -> tuple[PlannedCall, int]:
            call = attempt.run(plan, room, joins=joins)
            return call, self._limited_bytes(call)

        call, limited_bytes = together(make, self._data_parallel, error_elsewhere=OtherRankError)
        if budget_bytes is None:
            return Run(call, room)
        more_bytes = largest(limited_bytes - budget_bytes, self._data_parallel)
        return Run(call, room, more_bytes, limited_bytes)

    def _agreement(self, attempt: Attempt) -> str:
        return structure_of(attempt.graph)

    def _limited_bytes(self, call: PlannedCall) -> int:
        return self._limit.bytes_of(call)

    @property
    def _policy(self) -> Policy:
        return self._memory.policy

    def _rank_zeros(
        self,
        attempt: Attempt,
        structure: str,
        target_bytes: int | None,
        too_large: Collection[Actions],
    ) -> Offer:
        """Return rank 0's offer; the last two arguments are those of `Question.answer`."""

        def make() -> Offer | None:
            if not is_rank_zero(self._data_parallel):
                return None
            self._asked = self._question(attempt, target_bytes)
            return self._asked.answer(
                target_bytes, budget_bytes=self._budget_bytes, too_large=too_large
            )

        own = together(make, self._data_parallel, error_elsewhere=OtherRankError)
        rank_zeros, offer = broadcast((structure, own), self._data_parallel)

        def check() -> None:
            if structure != rank_zeros:
                raise PlanError(
                    "this rank runs other operations than rank 0, so it cannot run rank 0's plan; run the same code "
                    "on every rank, and give all ranks batches that take the same branches."
                )

        together(check, self._data_parallel, error_elsewhere=OtherRankError)
        assert offer is not None
        return offer

    def _question(self, attempt: Attempt, target_bytes: int | None) -> Question:
        question = Question(
            graph=attempt.graph,
            policy=self._policy,
            costs_us=costs_us(attempt.graph, self.device),
            memory=attempt.memory,
            pinned=pinned_actions(
                attempt.graph,
                attempt.traces.joint,
                self._memory,
                regathers=self._regathers,
                chooses_gathers=self.decides_gathers,
            ),
            generator_state_bytes=generator_state_bytes(self.device),
            costs=f"rates of {self.device.name}",
            reuses_runs=not self._limit.is_reserved,
            offload=beside_states(attempt.offload, attempt.memory.host_bytes),
            # Worth more to collectives in flight than to what is cheap to recompute.
            spare_bytes=min(target_bytes or 0, _IN_FLIGHT * attempt.collective_bytes),
        )
        if self._times is not None and question.is_tight(target_bytes):
            question = self._timed(question, self._times)
        if not self.decides_gathers:
            return question
        pinned = Actions({**question.pinned, **regathered(attempt.graph)})
        return replace(question, narrowed=replace(question, pinned=pinned))

    def _timed(self, question: Question, times: MeasuredTimes) -> Question:
        stage("time operations")
        found = times.of(question.graph, self.device)
        return replace(
            question,
            costs_us=costs_us(question.graph, self.device, found.us),
            costs=f"{found.num_timed} of {found.num_kinds} kinds of operations timed here",
        )

    @property
    def decides_gathers(self) -> bool:
        """True if plans choose for each parameter whether backward gathers it again; else the sharding mode does."""
        return self._mode == "auto" and self._budget_bytes is not None

    @property
    def _regathers(self) -> bool:
        return self._mode in ("zero3", "auto") and not self.decides_gathers

    @property
    def _mode(self) -> str:
        return "none" if self._data_parallel is None else self._data_parallel.mode
