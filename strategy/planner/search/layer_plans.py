"""Plans one layer: the storages that it keeps, its recompute time, and its peak while backward is in it.

A layer is a small graph of its own: its inputs from the layer before are kept, or not needed.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import inf

from thunder_memsave.planner.choices import Needs, needs
from thunder_memsave.planner.fast_simulate import FastSimulation
from thunder_memsave.planner.graph import Op, StepMemory, TrainingGraph
from thunder_memsave.planner.linear.peak_program import (
    Constants,
    Effort,
    Moment,
    PeakModel,
    Prices,
    Solved,
    live_anyway,
)
from thunder_memsave.planner.search.find_layers import Block

_MOST_CORRECTIONS = 8
_MOST_NEW_ROWS = 6
_EXACT = 1e-4
_GAP = 2e-4
_TIME_LIMIT_S = 2.0


@dataclass(frozen=True, kw_only=True)
class BlockPlan:
    """A plan of one layer. Storages are numbered in the layer, so that equal layers can have the same plan."""

    keep: frozenset[int]
    us: float
    """Recompute time in microseconds."""
    saved_bytes: float
    """Bytes kept from its forward to the begin of its backward, kept inputs included."""
    peak_bytes: float
    """Peak while backward is in it, without the storages that earlier layers keep."""


@dataclass(frozen=True, kw_only=True)
class BlockPrices:
    """The prices of memory in one layer."""

    saved_us_per_byte: float
    peak_us_per_byte: float

    def of(self, plan: BlockPlan) -> float:
        """Return the cost of a plan: its time plus the price of its memory."""
        return (
            plan.us
            + self.saved_us_per_byte * plan.saved_bytes
            + self.peak_us_per_byte * plan.peak_bytes
        )


@dataclass(frozen=True, kw_only=True)
class BlockGraph:
    """A layer as a graph of its own; storages are numbered as in the whole."""

    block: Block
    graph: TrainingGraph
    costs_us: tuple[float, ...]

    @cached_property
    def needs(self) -> Needs:
        """The choices of this layer's plans."""
        return needs(self.graph)

    def looks(self, pinned: Mapping[int, bool]) -> Hashable:
        """Return a key that is equal for layers that can have the same plans."""
        graph, number = self.graph, {s: n for n, s in enumerate(self.needs.storages)}
        return tuple(
            (
                op.symbol,
                op.repeat,
                op.peak_bytes,
                us,
                tuple(number.get(s, -1) for s in op.reads),
                tuple(number.get(s, -1) for s in op.makes),
                tuple(graph.storages[s].nbytes for s in op.makes),
                tuple(pinned.get(s) for s in op.makes),
                tuple(s in graph.gradients for s in op.makes),
                number_ >= graph.num_forward,
            )
            for number_, (op, us) in enumerate(zip(graph.ops, self.costs_us, strict=True))
        )


def block_graph(whole: Needs, costs_us: Sequence[float], block: Block) -> BlockGraph:
    """Cut a layer out of the whole graph."""
    graph = whole.graph
    begin = graph.num_forward + block.backward.start
    forward = graph.ops[block.forward.start : block.forward.stop]
    backward = graph.ops[begin : graph.num_forward + block.backward.stop]
    inputs = [_input(whole, s, (*forward, *backward)) for s in block.inputs]
    ops = (*inputs, *forward, *backward)
    made = {s for op in ops for s in op.makes}
    return BlockGraph(
        block=block,
        graph=replace(
            graph,
            ops=ops,
            num_forward=len(inputs) + len(forward),
            inputs=frozenset({s for op in ops for s in op.reads} - made) | graph.inputs,
            outputs=graph.outputs & made,
            gradients=graph.gradients & made,
            cotangents=frozenset(),
        ),
        costs_us=(
            *(0.0 for _ in inputs),
            *costs_us[block.forward.start : block.forward.stop],
            *(0.0 for _ in backward),
        ),
    )


def _input(whole: Needs, storage: int, ops: Sequence[Op]) -> Op:
    """Return an operation that stands for the layer before, which recomputes nothing for this one."""
    made = {name for op in ops for name in op.results}
    names = {
        name: None
        for op in ops
        for name in op.arguments
        if whole.graph.storage_of.get(name) == storage and name not in made
    }
    return Op(
        symbol="input",
        index=-1,
        arguments=(),
        results=tuple({whole.graph.storages[storage].name: None} | names),
        reads=(),
        makes=(storage,),
        peak_bytes=0,
        repeat="no",
    )


@dataclass(kw_only=True)
class BlockPlans:
    """Makes plans for equal layers, and remembers the known ones."""

    cut: BlockGraph
    constants: Constants
    """Bytes live in every plan, for the whole graph."""
    pinned: Mapping[int, bool]
    memory: StepMemory
    generator_state_bytes: int
    known: dict[BlockPlan, None] = field(default_factory=dict)

    def __post_init__(self) -> None:
        own = live_anyway(self.cut.needs, StepMemory())
        positions = self.cut.block.backward
        before = self.constants.before[positions.start : positions.stop]
        during = self.constants.during[positions.start : positions.stop]
        self._simulation = FastSimulation(
            self.cut.needs,
            StepMemory(),
            self.generator_state_bytes,
            elsewhere_bytes=(before - own.before).tolist(),
        )
        self._number = {s: n for n, s in enumerate(self.cut.needs.storages)}
        self._model = PeakModel(
            needs=self.cut.needs,
            costs_us=self.cut.costs_us,
            memory=self.memory,
            generator_state_bytes=self.generator_state_bytes,
            pinned={s: p for s, p in self.pinned.items() if s in self._number},
            constants=Constants(own.forward, before, during, self.constants.largest),
        )
        self._moments: dict[Moment, float] = {}

    def cheapest(self, prices: BlockPrices) -> tuple[BlockPlan | None, float]:
        """Return the cheapest plan at these prices, and a lower bound on the cost of any."""
        bound, plan = -inf, None
        self._model.corrections = self._moments if prices.peak_us_per_byte else {}
        for _ in range(_MOST_CORRECTIONS):
            solved = self._model.cheapest(
                Prices(
                    peak_us_per_byte=prices.peak_us_per_byte,
                    kept_us_per_byte=prices.saved_us_per_byte,
                ),
                Effort(gap=_GAP, time_limit_s=_TIME_LIMIT_S),
                # Without rows for the peak it is a minimum cut, and its vertices are integer.
                relaxed=not prices.peak_us_per_byte,
            )
            if solved.is_bound:
                bound = max(bound, solved.solution.bound * self._model.unit_us)
            if solved.solution.values is None:
                break
            plan = self.evaluate(solved.keep)
            if not prices.peak_us_per_byte or not self._is_missed(plan, solved):
                break
        return plan, bound

    def evaluate(self, keep: frozenset[int]) -> BlockPlan:
        """Evaluate the plan that keeps these storages of the whole graph."""
        result = self._simulation(keep)
        kept = result.kept
        ops, storages = self.cut.graph.ops, self.cut.graph.storages
        replayed = sum(ops[o].repeat == "replay" for o in result.again)
        return BlockPlan(
            keep=frozenset(self._number[s] for s in kept),
            us=sum(self.cut.costs_us[o] for o in result.again),
            saved_bytes=sum(storages[s].nbytes for s in kept)
            + replayed * self.generator_state_bytes,
            peak_bytes=result.peak_bytes,
        )

    def _is_missed(self, plan: BlockPlan, solved: Solved) -> bool:
        """Give rows to the moments at which the plan needs more than the model says; tell whether there were any."""
        believed = max(solved.live_bytes.values(), default=0.0)
        if plan.peak_bytes <= believed * (1 + _EXACT):
            return False
        keep = frozenset(self.cut.needs.storages[n] for n in plan.keep)
        moments = [
            Moment("backward", position) if op < 0 else Moment("again", position, op)
            for position, op in self._simulation.worst(keep, over_bytes=believed * (1 + _EXACT))
        ]
        new = [
            m
            for m in moments
            if m not in self._moments and (m.op < 0 or m.op in self.cut.needs.makes)
        ]
        self._moments.update(dict.fromkeys(new[:_MOST_NEW_ROWS], 0.0))
        return bool(new)
