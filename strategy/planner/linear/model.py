"""Gathers what all linear programs of a graph share: choices, costs, the bytes live in every plan, and the units."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import numpy as np

from thunder_memsave.planner.actions import keeping
from thunder_memsave.planner.choices import Needs
from thunder_memsave.planner.graph import StepMemory
from thunder_memsave.planner.order import order
from thunder_memsave.planner.simulate import simulate


class Moment(NamedTuple):
    """A moment at which memory is counted."""

    phase: Literal["forward", "backward", "again"]
    position: int
    """Index of the operation in forward or in backward; the number of forward's operations: while the caller has a
    loss."""
    op: int = -1
    """The operation of forward that is recomputed before the operation of backward at `position`, for `again`."""


@dataclass(frozen=True)
class AlwaysLive:
    """Bytes live in every plan: during each operation of forward and after it, and during those of backward."""

    forward: np.ndarray
    backward: np.ndarray
    largest: float
    """Peak of the plan that keeps all."""


@dataclass(kw_only=True)
class Model:
    """The plans of a graph."""

    needs: Needs
    costs_us: Sequence[float]
    memory: StepMemory
    generator_state_bytes: int
    pinned: Mapping[int, bool] = field(default_factory=dict)
    """Storages that are kept (True) or not kept (False) in every plan."""
    offloaded: frozenset[int] = frozenset()
    """Those of the kept ones that are on the host, between forward's last reader and backward's first."""

    def __post_init__(self) -> None:
        self.always_live = _always_live(self.needs, self.memory)
        # Numbers near 1 suit the solver's tolerances.
        self.unit_bytes = max(1.0, self.always_live.largest / 4096)
        self.unit_us = max(1e-9, sum(self.costs_us[o] for o in self.needs.ops) / 1024)

    @property
    def between(self) -> Moment:
        """The moment between forward and backward."""
        return Moment("forward", self.needs.graph.num_forward)


def _always_live(needs: Needs, memory: StepMemory) -> AlwaysLive:
    graph = needs.graph
    actions = keeping(graph.storages[s].name for s in needs.first)
    profile = simulate(order(graph, actions), memory)
    during = np.array(profile.step_peak_bytes, dtype=float)
    forward, backward = np.split(during, [graph.num_forward])
    forward = np.append(forward, float(profile.between_peak_bytes))
    for storage, first in needs.first.items():
        nbytes = graph.storages[storage].nbytes
        forward[needs.last_in_forward[storage] + 1 :] -= nbytes
        backward[:first] -= nbytes
    return AlwaysLive(forward, backward, float(profile.peak_bytes))
