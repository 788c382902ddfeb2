"""Evaluates plans exactly: orders and simulates each, and says at which moments it needs how much."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from functools import cached_property

from thunder_memsave.planner.actions import keeping
from thunder_memsave.planner.choices import Needs
from thunder_memsave.planner.fast_simulate import QuickBackward, QuickSimulation
from thunder_memsave.planner.graph import Program, StepMemory
from thunder_memsave.planner.linear.peak_program import Moment
from thunder_memsave.planner.order import order
from thunder_memsave.planner.simulate import Profile, simulate


@dataclass(frozen=True, kw_only=True)
class Evaluated:
    """A plan, and what running it takes."""

    keep: frozenset[int]
    """Storages of the graph that are kept, and read in backward."""
    decided: frozenset[int]
    """Storages of forward that are read in backward: keeping others, or not, changes nothing."""
    peak_bytes: int
    """Of the whole training step."""
    recompute_us: float
    evaluator: Evaluator = field(repr=False, compare=False)

    @cached_property
    def program(self) -> Program:
        """What runs."""
        return self.evaluator.program(self.keep)

    @cached_property
    def profile(self) -> Profile:
        """Memory at every moment."""
        return simulate(self.program, self.evaluator.memory)

    @cached_property
    def live_bytes(self) -> Mapping[Moment, int]:
        """During each operation."""
        return dict(self._moments())

    def _moments(self) -> Iterator[tuple[Moment, int]]:
        position = 0
        for number, (step, nbytes) in enumerate(
            zip(self.program.steps, self.profile.step_peak_bytes, strict=True)
        ):
            if number == self.program.num_forward and self.evaluator.memory.between_bytes:
                yield Moment("forward", number), self.profile.between_peak_bytes
            if number < self.program.num_forward:
                yield Moment("forward", number), nbytes
            elif step.is_repeated:
                yield Moment("again", position, self._numbers[step.op.index]), nbytes
            else:
                yield Moment("backward", position), nbytes
                position += 1

    @cached_property
    def _numbers(self) -> Mapping[int, int]:
        forward = self.program.steps[: self.program.num_forward]
        return {step.op.index: number for number, step in enumerate(forward)}


@dataclass(kw_only=True)
class Evaluator:
    """Remembers what was evaluated."""

    needs: Needs
    costs_us: Sequence[float]
    """By operation; 0 for what is not counted."""
    memory: StepMemory
    generator_state_bytes: int
    _known: dict[frozenset[int], Evaluated] = field(default_factory=dict)

    def __call__(self, keep: Set[int]) -> Evaluated:
        """Evaluate the plan that keeps these storages, and what nothing gives a second time."""
        wanted = frozenset(keep)
        if wanted not in self._known:
            self._known[wanted] = self._evaluated(wanted)
        return self._known[wanted]

    def excess_bytes(self, keep: Set[int], *, over_bytes: float) -> float:
        """What a plan needs beyond so much, summed over all moments."""
        return self._simulation.excess_bytes(keep, over_bytes=over_bytes)

    def again(self, keep: Set[int]) -> frozenset[int]:
        """Operations that a plan computes again."""
        return frozenset(self._simulation(keep).again)

    def backward(self, keep: Set[int]) -> QuickBackward:
        """What runs in backward under a plan."""
        return self._simulation.backward(keep)

    def forget(self) -> None:
        """Evaluate all plans anew."""
        self._known.clear()

    @property
    def smallest(self) -> Evaluated:
        """Of all that were evaluated, what needs the least memory."""
        return min(self._known.values(), key=lambda e: (e.peak_bytes, e.recompute_us))

    def fastest_within(self, budget_bytes: float) -> Evaluated | None:
        """Of all that were evaluated and fit, what takes the least time; of equals, what needs the least memory."""
        fitting = [e for e in self._known.values() if e.peak_bytes <= budget_bytes]
        return min(fitting, key=lambda e: (e.recompute_us, e.peak_bytes), default=None)

    def program(self, keep: Set[int]) -> Program:
        """What runs under a plan."""
        graph = self.needs.graph
        actions = keeping(graph.storages[s].name for s in keep)
        return order(graph, actions, generator_state_bytes=self.generator_state_bytes)

    def _evaluated(self, keep: frozenset[int]) -> Evaluated:
        result = self._simulation(keep)
        return Evaluated(
            keep=result.kept,
            decided=result.read,
            peak_bytes=result.peak_bytes,
            recompute_us=sum(self.costs_us[number] for number in result.again),
            evaluator=self,
        )

    @cached_property
    def _simulation(self) -> QuickSimulation:
        return QuickSimulation(self.needs, self.memory, self.generator_state_bytes)
