"""Evaluates plans exactly: orders and simulates each, and gives the live bytes at every moment."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from functools import cached_property

from thunder_memsave.planner.actions import keeping
from thunder_memsave.planner.choices import Needs
from thunder_memsave.planner.fast_simulate import FastSimulation, SimulatedBackward
from thunder_memsave.planner.graph import Program, StepMemory
from thunder_memsave.planner.linear.model import Moment
from thunder_memsave.planner.offload.copies import is_copy, with_copies
from thunder_memsave.planner.order import order
from thunder_memsave.planner.simulate import Profile, simulate
from thunder_memsave.planner.work import Work

_PER_STEP = 7e-7
"""Work of one simulated step."""


@dataclass(frozen=True, kw_only=True)
class Evaluated:
    """A plan with its exact peak and recompute time."""

    keep: frozenset[int]
    """Storages of the graph that are kept and read in backward."""
    decided: frozenset[int]
    """Storages of forward that are read in backward: keeping any others changes nothing."""
    peak_bytes: int
    """Peak of the whole training step."""
    recompute_us: float
    found_by: str = field(compare=False)
    """Name of the search that evaluated it first."""
    evaluator: Evaluator = field(repr=False, compare=False)

    @cached_property
    def program(self) -> Program:
        """The steps that run under the plan."""
        return self.evaluator.program(self.keep)

    @cached_property
    def profile(self) -> Profile:
        """The program's memory over the step."""
        return simulate(self.program, self.evaluator.memory)

    @cached_property
    def live_bytes(self) -> Mapping[Moment, int]:
        """Live bytes during each operation."""
        return dict(self._moments())

    def _moments(self) -> Iterator[tuple[Moment, int]]:
        position = 0
        num_forward = self.evaluator.needs.graph.num_forward
        steps = zip(self.program.steps, self.profile.step_peak_bytes, strict=True)
        for number, (step, nbytes) in enumerate(each for each in steps if not is_copy(each[0].op)):
            if number == num_forward and self.evaluator.memory.between_bytes:
                yield Moment("forward", number), self.profile.between_peak_bytes
            if number < num_forward:
                yield Moment("forward", number), nbytes
            elif step.is_repeated:
                yield Moment("again", position, self._numbers[step.op.index]), nbytes
            else:
                yield Moment("backward", position), nbytes
                position += 1

    @cached_property
    def _numbers(self) -> Mapping[int, int]:
        forward = self.evaluator.needs.graph.ops[: self.evaluator.needs.graph.num_forward]
        return {op.index: number for number, op in enumerate(forward)}


@dataclass(kw_only=True)
class Evaluator:
    """Evaluates plans of one graph, and remembers them."""

    needs: Needs
    costs_us: Sequence[float]
    """Microseconds by operation; 0 for what every plan recomputes."""
    memory: StepMemory
    generator_state_bytes: int
    offloaded: frozenset[int] = frozenset()
    """Storages that every plan keeps, on the host."""
    work: Work = field(default_factory=Work)
    """Counts what is simulated."""
    finder: str = ""
    """Name of the search that is at work."""
    _known: dict[frozenset[int], Evaluated] = field(default_factory=dict)

    def __call__(self, keep: Set[int]) -> Evaluated:
        """Evaluate the plan that keeps these storages, and those that cannot be recomputed."""
        wanted = frozenset(keep)
        if wanted not in self._known:
            self._known[wanted] = self._evaluated(wanted)
        return self._known[wanted]

    def excess_bytes(self, keep: Set[int], *, over_bytes: float) -> float:
        """Return the bytes above `over_bytes`, summed over all moments."""
        self._count(0)
        return self._simulation.excess_bytes(keep, over_bytes=over_bytes)

    def again(self, keep: Set[int]) -> frozenset[int]:
        """Return the operations that a plan recomputes."""
        return frozenset(self._simulation(keep).again)

    def backward(self, keep: Set[int]) -> SimulatedBackward:
        """Return the steps of backward under a plan."""
        self._count(0)
        return self._simulation.backward(keep)

    @property
    def update_bytes(self) -> int:
        """Peak of the optimizer's update, which no plan changes."""
        return self._simulation.update_bytes

    def forget(self) -> None:
        """Forget all plans."""
        self._known.clear()

    @property
    def smallest(self) -> Evaluated:
        """The evaluated plan with the smallest peak."""
        return min(self._known.values(), key=lambda e: (e.peak_bytes, e.recompute_us))

    def fastest_within(self, budget_bytes: float) -> Evaluated | None:
        """Return the fastest evaluated plan that fits, of equals that with the smallest peak; None if none fits."""
        fitting = [e for e in self._known.values() if e.peak_bytes <= budget_bytes]
        return min(fitting, key=lambda e: (e.recompute_us, e.peak_bytes), default=None)

    def program(self, keep: Set[int]) -> Program:
        """Return the steps that run under a plan."""
        graph = self.needs.graph
        actions = keeping(graph.storages[s].name for s in keep)
        program = order(graph, actions, generator_state_bytes=self.generator_state_bytes)
        return with_copies(program, self.offloaded)

    def _evaluated(self, keep: frozenset[int]) -> Evaluated:
        result = self._simulation(keep)
        self._count(len(result.again))
        return Evaluated(
            keep=result.kept,
            decided=result.read,
            peak_bytes=result.peak_bytes,
            recompute_us=sum(self.costs_us[number] for number in result.again),
            found_by=self.finder,
            evaluator=self,
        )

    def _count(self, num_again: int) -> None:
        self.work.add(_PER_STEP * (len(self.needs.graph.ops) + num_again))

    @cached_property
    def _simulation(self) -> FastSimulation:
        return FastSimulation(self.needs, self.memory, self.generator_state_bytes, self.offloaded)
