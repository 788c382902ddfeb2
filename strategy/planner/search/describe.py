"""Describes a plan: the action for each storage that backward reads, its reason, and its cost."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import cached_property

from thunder_memsave.planner.actions import (
    KEEP,
    OFFLOAD,
    RECOMPUTE,
    REGATHER,
    REPLAY,
    Action,
    Actions,
)
from thunder_memsave.planner.choices import Needs
from thunder_memsave.planner.graph import DECOMPRESS, Decision


@dataclass(frozen=True, kw_only=True)
class Description:
    """A plan's kept storages, and what its decisions follow from."""

    needs: Needs
    kept: Set[int]
    cheap: Set[int]
    """Storages that a plan keeps which recomputes all that is cheap to recompute."""
    pinned: Mapping[int, bool]
    costs_us: Sequence[float]
    offloaded: Set[int] = frozenset()
    """Those of the kept storages that are on the host."""

    def actions(self, decided: Set[int]) -> Actions:
        """Return the actions of all storages read in backward, so that plans that keep the same have equal actions."""
        storages = self.needs.graph.storages
        read = [s for s in self.needs.storages if s in decided]
        return Actions({storages[s].name: self._action(s) for s in read})

    def decisions(self) -> Iterator[Decision]:
        """Yield the decision on each storage, in the order of forward."""
        graph = self.needs.graph
        counted: set[int] = set()
        for storage in self.needs.storages:
            if storage not in self.kept and storage not in self.needs.first:
                continue
            op = graph.ops[self.needs.producer[storage]]
            chain = self._chain(storage) - counted
            if storage not in self.kept:
                counted |= chain
            yield Decision(
                name=graph.storages[storage].name,
                nbytes=graph.storages[storage].nbytes,
                cost_us=sum(self.costs_us[o] for o in chain),
                reason=self._reason(storage),
                source=op.source,
                module=op.module,
            )

    @cached_property
    def _in_fp8(self) -> Set[int]:
        """Storages of which backward makes values that it reads."""
        ops = self.needs.graph.ops
        return frozenset(s for op in ops if op.symbol == DECOMPRESS for s in op.reads)

    def _chain(self, storage: int) -> set[int]:
        """Return the operations that recompute a storage from the kept ones."""
        found: set[int] = set()
        stack = [storage]
        while stack:
            op = self.needs.producer[stack.pop()]
            if op in self.needs.inputs and op not in found:
                found.add(op)
                stack += [s for s in self.needs.inputs[op] if s not in self.kept]
        return found

    def _action(self, storage: int) -> Action:
        if storage in self.kept:
            return OFFLOAD if storage in self.offloaded else KEEP
        op = self.needs.graph.ops[self.needs.producer[storage]]
        if self.needs.graph.storages[storage].kind == "gathered":
            return REGATHER
        return REPLAY if op.repeat == "replay" else RECOMPUTE

    def _reason(self, storage: int) -> str:
        if storage in self.offloaded and storage in self.kept:
            return "on the host meanwhile: the budget needs its memory"
        if storage in self.needs.must_keep:
            return "cannot be recomputed"
        if storage in self.pinned:
            return "pinned"
        if storage in self.kept and storage in self._in_fp8:
            return "in fp8 meanwhile: faster than to recompute"
        if storage in self.kept:
            return (
                "needed to recompute others"
                if storage not in self.needs.first
                else ("faster to keep than to recompute")
            )
        if self.needs.graph.ops[self.needs.producer[storage]].rides:
            return "part of a kernel of backward that runs anyway"
        return (
            "the budget needs its memory"
            if storage in self.cheap
            else ("cheap to recompute from others")
        )
