"""One call to plan: its traces and graph, and what runs once a plan is carried out."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count
from typing import Any

from thunder.core import dtypes
from thunder.core.prims import PrimIDs
from thunder.core.proxies import Proxy, TensorProxy
from thunder.core.trace import TraceCtx

from thunder_memsave.budget.arguments import Arguments, adding, updating
from thunder_memsave.budget.extract import Fuses, nothing_fuses, training_graph
from thunder_memsave.budget.running_program import program
from thunder_memsave.budget.ways.compressed_graph import with_choices_as_one
from thunder_memsave.budget.ways.compressible import compressible
from thunder_memsave.budget.ways.way import Way
from thunder_memsave.errors import PlanError
from thunder_memsave.measure.op_profile import OpProfiles
from thunder_memsave.ops.added_gradients import added_if_given
from thunder_memsave.ops.table import place_of_rows_per_tile
from thunder_memsave.ops.updated_parameters import Update
from thunder_memsave.passes.overlap.room import Room
from thunder_memsave.passes.step import CopyTerms, Step, Traces, try_steps
from thunder_memsave.passes.stored.compress import with_choices
from thunder_memsave.passes.symbols import is_joint
from thunder_memsave.passes.tiles.loss_tiles import divide_loss_tiles
from thunder_memsave.planner.actions import Actions
from thunder_memsave.planner.caching_allocator.environment import NotSimulatedError
from thunder_memsave.planner.cost import alone_us, forward_and_backward_us, program_costs_us
from thunder_memsave.planner.graph import (
    Device,
    Op,
    Plan,
    Program,
    StepMemory,
    TrainingGraph,
)
from thunder_memsave.planner.offload.copies import is_copy_of_states
from thunder_memsave.planner.offload.engines import CopyRates, StepTime, step_time
from thunder_memsave.planner.reserved import (
    Found,
    ReservedMemory,
    least_reserved_bytes,
    reserved_bytes,
    reserved_or_reason,
)
from thunder_memsave.planner.riding import without_joining
from thunder_memsave.planner.search.mixes import OffloadTerms
from thunder_memsave.planner.simulate import Profile, simulate

_numbers = count()


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannedCall:
    """A compiled call with its plan, and the program that will run."""

    graph: TrainingGraph
    plan: Plan | None
    """None for a call without backward."""
    actions: Actions | None
    """The plan's, for the values of the joint trace."""
    given_room: Room | None
    """In which collectives ran beside computation; None: their window alone limited them."""
    program: Program
    memory: StepMemory
    profile: Profile
    """Memory of the final traces."""
    joint: TraceCtx = field(compare=False, repr=False)
    """The joint trace that the plan is for."""
    updated: Mapping[str, Update] = field(default_factory=dict, compare=False, repr=False)
    """The updates that backward makes itself, by the argument's name."""
    way: Way = field(default_factory=Way)
    copies: CopyTerms | None = field(default=None, compare=False)
    """On which its copies to the host were placed; None: it has none."""
    time: StepTime | None = None
    """Of forward and backward with its copies; None: it has none."""
    replayed: Found = field(default_factory=dict, init=False, compare=False, repr=False)
    """What was found of the bytes that the allocator reserves."""
    joins: Mapping[str, str] = field(default_factory=dict)
    """Values that kernels of backward recompute beside their own results, each with one of these."""
    number: int = field(default_factory=partial(next, _numbers), compare=False)
    """Rises from each call planned in this process to the next."""

    @property
    def is_tiled(self) -> bool:
        """Whether wide values are in tiles."""
        return self.way.is_tiled

    @property
    def empties_cache(self) -> bool:
        """Whether it keeps a budget of reserved bytes only by giving back what is cached when it is reached."""
        return self.way.empties_cache

    def reserved_or_reason(
        self, environment: Mapping[str, str]
    ) -> ReservedMemory | NotSimulatedError:
        """Simulate what the allocator of a CUDA device reserves; or return which of its settings is not simulated."""
        return reserved_or_reason(
            self.program, self.memory, environment=environment, found=self.replayed
        )

    def reserved_bytes(self, environment: Mapping[str, str]) -> int:
        """Simulate what the allocator of a CUDA device reserves for steps of this call.

        Args:
            environment: Environment variables, which may have the allocator's settings.

        Raises:
            PlanError: the allocator has a setting that is not simulated.
        """
        with _naming_the_key():
            return reserved_bytes(
                self.program, self.memory, environment=environment, found=self.replayed
            )

    def least_bytes(
        self, environment: Mapping[str, str], *, wanted_bytes: int, enough_bytes: int
    ) -> int:
        """Return the least limit of reserved bytes under which steps run: `planner.reserved.least_reserved_bytes`.

        Raises:
            PlanError: the allocator has a setting that is not simulated.
        """
        with _naming_the_key():
            return least_reserved_bytes(
                self.program,
                self.memory,
                environment=environment,
                wanted_bytes=wanted_bytes,
                enough_bytes=enough_bytes,
            )

    def room(self, budget_bytes: int) -> Room:
        """Return the bytes that a budget leaves beside this call, which must not overlap collectives itself."""
        left: dict[str, int] = {}
        start_bytes: dict[str, int] = {}
        names: tuple[str, ...] = ()
        for step, nbytes in zip(self.program.steps, self.profile.step_peak_bytes, strict=True):
            if step.op.results and not is_copy_of_states(step.op):
                names = step.op.results
                left.update(dict.fromkeys(names, budget_bytes - nbytes))
            else:  # what has no name counts with what is before it
                left.update({name: min(left[name], budget_bytes - nbytes) for name in names})
            if step.op.communicates:
                start_bytes.update(dict.fromkeys(step.op.results, step.op.peak_bytes))
        return Room(left_bytes=left, start_bytes=start_bytes)


def step_us(call: PlannedCall, device: Device) -> float:
    """Return the time of forward and backward but for updates, with waits for copies, at a device's rates."""
    waits_us = 0.0 if call.time is None else call.time.exposed_us
    return forward_and_backward_us(call.program, device) + waits_us


@contextmanager
def _naming_the_key() -> Iterator[None]:
    try:
        yield
    except NotSimulatedError as error:
        raise PlanError(
            f"memory.limits is 'reserved', but {error} Leave that setting out, or memory.limits."
        ) from error


@dataclass(frozen=True, slots=True)
class Attempt:
    """One call before it has a plan."""

    traces: Traces
    """Before the plan is carried out."""
    steps: Sequence[Step[Any]]
    """Carry it out: make what runs."""
    graph: TrainingGraph
    arguments: Arguments
    known: OpProfiles
    memory: StepMemory
    added: frozenset[str] = frozenset()
    """Names of the arguments to whose gradients backward adds new ones itself."""
    updated: Mapping[str, Update] = field(default_factory=dict)
    """The updates that backward makes itself, by the argument's name."""
    device: Device | None = None
    """The device whose rates say how long copies to the host take; None: plans have none."""
    way: Way = field(default_factory=Way)
    offload: OffloadTerms | None = None
    """On which plans may copy values to the host; None: they do not."""
    fuses: Fuses = nothing_fuses
    """Tells which symbols of the joint trace the steps fuse."""

    @classmethod
    def of(
        cls,
        traces: Traces,
        steps: Sequence[Step[Any]],
        *,
        arguments: Arguments,
        known: OpProfiles,
        memory: StepMemory,
        device: Device | None = None,
        offload: OffloadTerms | None = None,
        fuses: Fuses = nothing_fuses,
    ) -> Attempt:
        """Extract the graph of a call's joint trace."""
        added = adding(memory, arguments)
        updated = updating(memory, traces.joint, arguments)
        graph = training_graph(
            traces.joint,
            kinds=arguments.kinds,
            tensors=arguments.tensors,
            known=known,
            used={*added, *updated},
            fuses=fuses,
        )
        graph = with_choices_as_one(with_zeros(graph, traces.joint))
        return cls(
            traces,
            steps,
            graph,
            arguments,
            known,
            memory,
            added=added,
            updated=updated,
            device=device,
            offload=offload,
            fuses=fuses,
        )

    def in_way(self, way: Way) -> Attempt | None:
        """Return this call, which must be whole and with its largest tiles, in a way; None: it has none.

        That is, no such tiles, or no values to store in fp8.
        """
        assert self.way == Way(), "others are made of the first"
        traces = self.traces
        if way.is_tiled:
            if (tiled := traces.tiled()) is None:
                return None
            traces = replace(traces, joint=tiled)
        if way.compresses:
            joint = self._with_choices(traces.joint)
            if joint is traces.joint:
                return None
            traces = replace(traces, joint=joint)
        if way.loss_divisor > 1:
            joint = divide_loss_tiles(traces.joint, way.loss_divisor)
            if joint is traces.joint:
                return None
            traces = replace(traces, joint=joint)
        if traces is self.traces:
            return replace(self, way=way)
        return replace(self.with_traces(traces, self.arguments), way=way)

    def _with_choices(self, joint: TraceCtx) -> TraceCtx:
        """Return a joint trace in which a plan may store values in fp8; the same one if it has none of those."""
        arguments = self.arguments
        return with_choices(
            joint,
            compressible(joint, kinds=arguments.kinds, tensors=arguments.tensors, known=self.known),
        )

    def with_traces(self, traces: Traces, arguments: Arguments) -> Attempt:
        """Return this call with other traces, whose graph is extracted."""
        return Attempt.of(
            traces,
            self.steps,
            arguments=arguments,
            known=self.known,
            memory=self.memory,
            device=self.device,
            offload=self.offload,
            fuses=self.fuses,
        )

    def with_memory(self, memory: StepMemory) -> Attempt:
        """Return this call in steps that hold other bytes besides, and whose updates take others."""
        updated = updating(memory, self.traces.joint, self.arguments)
        return replace(self, memory=memory, updated=updated)

    @property
    def loss_tile_bytes(self) -> int:
        """The most that a tile of a loss takes, beside what is computed in tiles."""
        ops = [op for op in self.graph.ops if place_of_rows_per_tile(op.symbol) is not None]
        storages = self.graph.storages
        return max(
            (op.peak_bytes - sum(storages[s].nbytes for s in op.makes) for op in ops), default=0
        )

    @property
    def communicates(self) -> bool:
        """True if the call has collectives, or copies of states, which could be in flight during computation."""
        return any(op.communicates for op in self.graph.ops) or self._states_bytes > 0

    @property
    def collective_bytes(self) -> int:
        """The most that a collective makes, or the copies of states that are in flight beside an update."""
        storages = self.graph.storages
        sends = [op for op in self.graph.ops if op.communicates]
        made = (sum(storages[s].nbytes for s in op.makes) for op in sends)
        return max(2 * self._states_bytes, *made, 0)

    @property
    def _states_bytes(self) -> int:
        """The most that the states of one weight take that are copied for its update in backward."""
        return max((update.states_bytes for update in self.updated.values()), default=0)

    def run(
        self, plan: Plan | None, room: Room | None = None, *, joins: bool = False
    ) -> PlannedCall:
        """Carry a plan out, and simulate what runs.

        Args:
            plan: None for a call without backward.
            room: For collectives that run beside computation; None: they are limited by their window alone.
            joins: Whether what can join kernels of backward does.
        """
        actions = None if plan is None else self._of_values(plan)
        joined = self.joins(plan) if plan is not None and joins else {}
        copies = None if plan is None else self._copies(plan)
        planned = replace(
            self.traces,
            actions=actions,
            joins=joined,
            room=room,
            added=self.added,
            updated=self.updated,
            copies=copies,
        )
        tried = try_steps(self.steps, planned)
        assert tried.forward is not None
        ran = self._program(tried.forward, tried.backward)
        profile = simulate(ran, self.memory)
        time = self._time(ran)
        if plan is not None:
            plan = replace(plan, predicted_peak_bytes=profile.peak_bytes)
        if plan is not None and time is not None:
            plan = replace(plan, exposed_us=time.exposed_us)
        return PlannedCall(
            graph=self.graph,
            plan=plan,
            actions=actions,
            given_room=room,
            program=ran,
            memory=self.memory,
            profile=profile,
            joint=self.traces.joint,
            updated=self.updated,
            way=self.way,
            copies=copies,
            time=time,
            joins=joined,
        )

    def without_joins(self) -> Attempt:
        """Return the call with plans of which nothing joins kernels of backward."""
        return replace(self, graph=without_joining(self.graph))

    def joins(self, plan: Plan) -> Mapping[str, str]:
        """Return the values that a plan recomputes and kernels of backward can, each with a result of its kernel."""
        return {op.results[0]: op.joins for op in self._joining(plan)}

    def alone_us(self, plan: Plan) -> float:
        """Return how much longer a plan recomputes if these have kernels of their own."""
        assert self.device is not None
        return sum(alone_us(op, self.device) for op in self._joining(plan))

    def _joining(self, plan: Plan) -> Iterator[Op]:
        storages, kept = self.graph.storages, plan.actions.kept
        for op in self.graph.ops:
            if op.joins and storages[op.makes[0]].name not in kept:
                yield op

    def _program(self, forward: TraceCtx, backward: TraceCtx | None) -> Program:
        """Make the program of the traces that run, after values are deleted after their last use."""
        return program(
            forward,
            backward,
            kinds=self.arguments.kinds,
            tensors=self.arguments.tensors,
            known=self.known,
            differentiated=differentiated(flat_outputs(self.traces.joint)),
            accumulates=self.memory.gradient_bytes > 0,
        )

    def _time(self, ran: Program) -> StepTime | None:
        """Return the time of what runs, if anything is copied to or from the host."""
        if self.device is None or not any(step.op.copied_bytes for step in ran.steps):
            return None
        return step_time(ran, program_costs_us(ran, self.device), CopyRates.of(self.device))

    def _copies(self, plan: Plan) -> CopyTerms | None:
        """Return how to place a plan's copies to the host; None: it has none."""
        if not plan.actions.offloaded:
            return None
        assert self.device is not None, "plans offload only where the device is known"
        return CopyTerms(
            program_of=self._program,
            costs_us=partial(program_costs_us, device=self.device),
            rates=CopyRates.of(self.device),
            memory=self.memory,
            target_bytes=plan.copies_within_bytes,
        )

    def _of_values(self, plan: Plan) -> Actions:
        """Return a plan's actions for all values in its storages: passes know only values."""
        storages, planned = self.graph.storages, plan.actions
        names = [(name, storages[s].name) for name, s in self.graph.storage_of.items()]
        return Actions({name: planned[storage] for name, storage in names if storage in planned})


def flat_outputs(trace: TraceCtx) -> Sequence[Any]:
    """Return the flat outputs of forward of a joint trace; nothing for any other trace."""
    symbols = trace.bound_symbols
    return symbols[-1].args[0]["fw_flat_out"] if is_joint(symbols) else ()


def differentiated(outputs: Sequence[Any]) -> frozenset[int] | None:
    """Return the indices of the outputs for which a gradient is expected: losses, if there are any; None: all.

    A loss is a scalar, as transformers' models return it before their logits.
    """
    losses = {
        number
        for number, o in enumerate(outputs)
        if isinstance(o, TensorProxy) and o.ndim == 0 and dtypes.is_inexact_dtype(o.dtype)
    }
    return frozenset(losses) or None


def without_gradient(trace: TraceCtx) -> frozenset[str]:
    """Return the names of the outputs for which no gradient is expected: those beside losses."""
    outputs = flat_outputs(trace)
    if (expected := differentiated(outputs)) is None:
        return frozenset()
    others = (o for n, o in enumerate(outputs) if n not in expected)
    return frozenset(o.name for o in others if isinstance(o, Proxy))


def with_zeros(graph: TrainingGraph, trace: TraceCtx) -> TrainingGraph:
    """Begin backward with the zeros that `compiler/autograd.py` makes for outputs without a gradient."""
    if not (others := without_gradient(trace)):
        return graph
    names = [
        b.output.name
        for b in trace.bound_symbols
        if b.sym.id is PrimIDs.GET_GRAD and b.args[0].name in others
    ]
    absent = added_if_given(trace.bound_symbols)
    zeros = tuple(_zeros(graph, name) for name in names if name not in absent)
    made = frozenset(s for op in zeros for s in op.makes)
    forward, backward = graph.ops[: graph.num_forward], graph.ops[graph.num_forward :]
    storages = (replace(s, nbytes=0) if s.name in absent else s for s in graph.storages)
    return replace(
        graph,
        storages=tuple(storages),
        ops=(*forward, *zeros, *backward),
        cotangents=frozenset(graph.cotangents - made),
    )


def _zeros(graph: TrainingGraph, name: str) -> Op:
    storage = graph.storage_of[name]
    nbytes = graph.storages[storage].nbytes
    return Op(
        symbol="zeros",
        index=-1 - storage,  # none of the trace's
        arguments=(),
        results=(name,),
        reads=(),
        makes=(storage,),
        peak_bytes=nbytes,
        repeat="no",
        moved_bytes=nbytes,
    )
