"""Gives each piece of a step the bytes that the budget leaves it: the first step measures what eager code takes.

In the first step each piece keeps little and computes the rest again. Then one piece after the other, in the order of
the second step, gets the fastest plan with which the whole step stays within the budget; those to come count as they
ran in the first.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import cache
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from thunder_memsave.aten.record import allocated_bytes
from thunder_memsave.budget.agreed import largest
from thunder_memsave.budget.pieces.call_bytes import CallBytes
from thunder_memsave.budget.pieces.measured_step import FollowedCall, MeasuredStep, StepFollower
from thunder_memsave.budget.planned_call import Attempt, PlannedCall
from thunder_memsave.distributed.data_parallel import DataParallel
from thunder_memsave.errors import BudgetError
from thunder_memsave.measure.step_meter import step_meter
from thunder_memsave.ops.host_copies.weights import device_of, is_always_here
from thunder_memsave.planner.graph import StepMemory
from thunder_memsave.sharding.sharded_parameter import as_rows

T = TypeVar("T")

_log = logging.getLogger(__name__)


class PiecesBudget:
    """The budget of a module that runs in pieces, shared by their planners."""

    def __init__(
        self,
        module: nn.Module,
        *,
        budget_bytes: int,
        beside: Callable[[], StepMemory],
        data_parallel: DataParallel | None,
    ) -> None:
        """Measure nothing yet.

        Args:
            module: The whole module.
            budget_bytes: The largest peak of a step.
            beside: Returns what a step holds beside the module and its calls.
            data_parallel: The ranks that run the same pieces.
        """
        self._module, self._budget_bytes, self._beside = module, budget_bytes, beside
        self._data_parallel = data_parallel
        self._device = device_of(module.parameters())
        self._steps: list[MeasuredStep] = []
        """Measured ones; each calls other pieces."""
        self._least: dict[int, CallBytes] = {}
        """For each piece, the plan that keeps little."""
        self._running: dict[int, CallBytes] = {}
        """For each piece, the plan that runs."""
        self._stale: set[int] = set()
        """Pieces that get a new plan when they are called; they count as in `_least`."""
        self._follower: StepFollower | None = None
        self._wants_measure = True
        self._batch: dict[int, int] = {}
        self._results: dict[int, int] = {}
        self._start_bytes = 0
        """Bytes of gradients when the step began."""
        self._memory = StepMemory()
        """The bytes that a step holds besides, when a piece was planned last."""
        self.piece: int | None = None
        """The piece that is compiled now."""
        self._owner = 0
        """The module whose piece is compiled now."""
        self._owners: dict[int, int] = {}
        """For each piece, the number of its module."""
        self._planned: set[int] = set()
        """Modules of which a piece got a plan for the room in a step."""

    @property
    def is_new(self) -> bool:
        """Whether the piece that is compiled now was never measured."""
        return self.piece not in self._stale

    def is_stale(self, piece: int | None) -> bool:
        """Whether a piece gets a new plan when it is called."""
        return piece in self._stale

    def has_plan_for_all(self, owner: int) -> bool:
        """Whether a module has a plan for all lengths, by its number."""
        return self._data_parallel is not None and owner in self._planned

    @contextmanager
    def compiling(self, piece: int | None, *, owner: int) -> Iterator[None]:
        """Compile a piece here, a new one if it has no number; nothing of it is measured.

        Args:
            piece: Its number; None: it is new.
            owner: A number of its module in this process.
        """
        if piece is None and self._data_parallel is not None:
            # Other ranks may plan the module's piece now, which is a collective: this length takes its plan.
            piece = min((p for p in self._stale if self._owners[p] == owner), default=None)
        self.piece, self._owner = piece, owner
        follower = self._follower
        with nullcontext() if follower is None else follower.paused():
            yield

    def forward(self, run: Callable[[], T], arguments: Any) -> T:
        """Run the module's forward, and measure it if that is wanted.

        Args:
            run: Runs it.
            arguments: The batch.
        """
        if not torch.is_grad_enabled():
            return run()
        if self._follower is not None and self._follower.is_spoiled:
            self._drop()
        if self._wants_measure and self._follower is None:
            self._follower = StepFollower(step_meter(self._device))
        if self._follower is None:
            return run()
        if not self._follower.has_begun:
            gc.collect()  # what it frees within the step would count as room
            self._start_bytes, self._batch = self._gradient_bytes(), {}
        self._batch |= _storages(tree_leaves(arguments), self._device)
        try:
            with self._follower.following("forward"):
                result = run()
        except BaseException:
            self._follower = None
            raise
        self._results = _storages(tree_leaves(result), self._device)
        return result

    @contextmanager
    def followed(self, piece: int) -> Iterator[FollowedCall | None]:
        """Run the forward of a piece here; None if the step is not measured now."""
        follower = self._follower
        if follower is None or not follower.is_running:
            yield None
            return
        with follower.forward(piece) as call:
            yield call

    @contextmanager
    def backward(self, loss: Tensor) -> Iterator[None]:
        """Run the step's backward here. A collective if forward was measured.

        Args:
            loss: What is differentiated.

        Raises:
            BudgetError: eager code and the pieces, which keep little, exceed the budget.
        """
        follower = self._follower
        if follower is None:
            yield
            return
        try:
            with follower.following("backward"):
                yield
        except BaseException:
            self._follower = None
            raise
        if largest(int(follower.is_spoiled), self._data_parallel):
            self._drop()
            return
        self._follower = None
        made = _storages([loss], self._device).items() - self._results.items()
        # The allocator of CUDA has counted what was made between forward and backward.
        loss_bytes = 0 if self._device.type == "cuda" else sum(nbytes for _, nbytes in made)
        before_bytes = max(self._start_bytes - self._memory.gradient_bytes, 0)
        step = follower.step(dict(self._running), before_bytes=before_bytes, loss_bytes=loss_bytes)
        self._measured(step)

    def _measured(self, step: MeasuredStep) -> None:
        self._memory = self._beside()
        self._steps.append(step)
        self._stale |= step.pieces
        self._wants_measure = False
        nbytes = largest(self._step_bytes(self._numbers()), self._data_parallel)
        if nbytes <= self._budget_bytes:
            _log.info(
                "eager code keeps at most %s bytes beside what %d pieces keep; the next step plans these within "
                "memory.budget.",
                f"{step.eager_bytes:,}",
                len(step.pieces),
            )
            return
        self._steps.clear()
        self._wants_measure = True
        bound_bytes = largest(self._constant_bytes() + step.eager_bytes, self._data_parallel)
        raise BudgetError.no_plan(
            budget_bytes=self._budget_bytes,
            smallest_bytes=nbytes,
            bound_bytes=bound_bytes,
            of="what ran so far, for the module runs in pieces, and later ones may need more",
        )

    def _drop(self) -> None:
        """Forget a step of which not all was measured, and measure the next one."""
        self._follower = None
        _warn_once(
            f"{type(self._module).__name__} runs in pieces, and what its eager code takes could not be measured in "
            "this step, because its backward was not called by fabric.backward(loss), another profiler ran, or a "
            "module was called in another way than before. Until a step is measured, memory.budget is not promised."
        )

    def given(self, attempt: Attempt) -> Attempt:
        """Return a piece's call with the bytes that a step holds beside it."""
        graph, self._memory = attempt.graph, attempt.memory
        if self.is_new:
            held = map(graph.storages.__getitem__, graph.inputs)
            own = sum(s.nbytes for s in held if s.kind in ("parameter", "buffer"))
            return _with_other(attempt, max(self._module_bytes() - own, 0))
        assert self.piece is not None
        return self._beside_others(attempt, self.piece)

    def _beside_others(self, attempt: Attempt, piece: int) -> Attempt:
        numbers, least = self._numbers(), self._least[piece]
        other_bytes, between_bytes = 0, 0
        for step in self._steps:
            for half in step.halves(piece, "forward"):
                other_bytes = max(other_bytes, step.before(half, numbers))
            for half in step.halves(piece, "backward"):
                other_bytes = max(other_bytes, step.before(half, numbers) - least.ends_bytes)
            for segment in step.segments:
                if piece in segment.open:
                    own = least.kept_bytes
                    between_bytes = max(between_bytes, step.during(segment, numbers) - own)
        between_bytes = max(between_bytes - other_bytes, 0)
        attempt = _with_other(
            attempt, max(self._module_bytes() + other_bytes - least.held_bytes, 0)
        )
        memory = replace(
            attempt.memory,
            between_bytes=max(between_bytes, attempt.memory.between_bytes),
            update_peak_bytes=0,
            loss_allocations=(),
            update_allocations=(),
        )
        return replace(attempt, memory=memory)

    def step_bytes(self, call: PlannedCall) -> int:
        """Return the peak of the measured steps, if the piece that is compiled now runs as `call`."""
        assert self.piece is not None
        return self._step_bytes({**self._numbers(), self.piece: CallBytes.of(call)})

    def noted(self, call: PlannedCall) -> PlannedCall:
        """Let the piece that is compiled now run as `call`; return it with the peak of the step."""
        numbers = CallBytes.of(call)
        if self.is_new:
            self._add(numbers)
            return call
        assert self.piece is not None
        assert call.plan is not None
        peak_bytes = self.step_bytes(call)
        self._running[self.piece] = numbers
        self._stale.discard(self.piece)
        self._planned.add(self._owner)
        if not self._stale:
            _log.info(
                "the pieces are planned: a step takes at most %s bytes of the budget of %s.",
                f"{peak_bytes:,}",
                f"{self._budget_bytes:,}",
            )
        return replace(call, plan=replace(call.plan, predicted_peak_bytes=peak_bytes))

    def _add(self, numbers: CallBytes) -> None:
        self.piece = len(self._least)
        self._least[self.piece] = self._running[self.piece] = numbers
        self._owners[self.piece] = self._owner
        # On ranks, others may not have met this length: they could not measure together.
        if self._follower is None and self._steps and self._data_parallel is None:
            self._wants_measure = True

    def agreement(self, structure: str, known: Collection[str]) -> str:
        """Return what the plan of the piece that is compiled now is agreed on for.

        Equal pieces keep little alike. Plans for the room in a step are each piece's own. On ranks, of which only some
        may meet another length, a module has one for all lengths: plans say which collectives run.

        Args:
            structure: That of its operations.
            known: What plans were agreed on for.
        """
        of_module = f"{structure} module {self._owner}"
        if not self.is_new:
            shared = self._data_parallel is not None
            return of_module if shared else f"{structure} piece {self.piece}"
        return of_module if of_module in known else structure

    def describe(self) -> str:
        """Say what is known of the step, for `explain()`."""
        start = f"{type(self._module).__name__} runs in pieces."
        if not self._steps:
            return f"{start} What its eager code takes is not measured yet: memory.budget is not promised."
        step = self._steps[-1]
        waiting = f", {len(self._stale)} of them not planned yet" if self._stale else ""
        return (
            f"{start} The step takes at most {self._step_bytes(self._numbers()):,} bytes of the budget of "
            f"{self._budget_bytes:,}. Eager code was measured: it takes at most {step.eager_bytes:,} beside parameters "
            f"and what {len(step.pieces)} pieces keep{waiting}. What follows is of the piece that was planned last."
        )

    def _numbers(self) -> dict[int, CallBytes]:
        return {p: self._least[p] if p in self._stale else n for p, n in self._running.items()}

    def _step_bytes(self, numbers: dict[int, CallBytes]) -> int:
        memory, peaks = self._memory, [0]
        for step in self._steps:
            for segment in step.segments:
                # What the caller says that its loss takes may live until backward has read it.
                caller_bytes = memory.between_bytes if segment.phase == "backward" else 0
                peaks.append(step.during(segment, numbers) + caller_bytes)
            peaks.append(step.end_bytes + memory.update_peak_bytes)
        return self._constant_bytes() + max(peaks)

    def _constant_bytes(self) -> int:
        memory = self._memory
        constant = memory.gradient_bytes + memory.optimizer_bytes + memory.other_bytes
        return constant + self._module_bytes()

    def _gradient_bytes(self) -> int:
        gradients = [p.grad for p in self._module.parameters() if p.grad is not None]
        return sum(_storages(gradients, self._device).values())

    def _module_bytes(self) -> int:
        """Return the bytes of parameters, buffers and the batch on the device."""
        parameters = filter(is_always_here, self._module.parameters())
        tensors = (*parameters, *self._module.buffers())
        return sum({**_storages(tensors, self._device), **self._batch}.values())


def _with_other(attempt: Attempt, nbytes: int) -> Attempt:
    memory = attempt.memory
    return replace(attempt, memory=replace(memory, other_bytes=memory.other_bytes + nbytes))


def _storages(values: Sequence[Any], device: torch.device) -> dict[int, int]:
    """Return the bytes of the storages of tensors on a device, by their addresses."""
    tensors = (as_rows(v) for v in values if isinstance(v, Tensor) and v.device == device)
    storages = (t.untyped_storage() for t in tensors)
    return {s.data_ptr(): allocated_bytes(s.nbytes(), device.type) for s in storages}


@cache
def _warn_once(message: str) -> None:
    _log.warning(message)
