"""Splits a joint trace into the forward and backward that run, scheduled and with deletions."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

from thunder.core.symbol import Symbol
from thunder.core.trace import TraceCtx
from thunder.executors.passes import (
    del_last_used,
)
from thunder.transforms.autodiff import (
    split_into_forward_and_backward,
)

from thunder_memsave.compiler.gradient_checks import check_gradients
from thunder_memsave.frontend.lowering import Lowered
from thunder_memsave.passes.overlap.room import Room
from thunder_memsave.passes.symbols import is_joint


class Schedule(Protocol):
    """Orders a forward or a backward."""

    def __call__(self, trace: TraceCtx, *, room: Room | None = None) -> TraceCtx:
        """`room`: what else limits what is on its way."""


@dataclass(frozen=True, slots=True)
class _Split:
    """Forward and backward of a trace in the order in which they run, and with what deletes values."""

    scheduled_forward: TraceCtx
    forward: TraceCtx
    scheduled_backward: TraceCtx | None = None
    """None, as is the next, where nothing needs a gradient."""
    backward: TraceCtx | None = None


@dataclass(frozen=True, slots=True)
class _Planned:
    """What the planner simulated."""

    trace: TraceCtx
    room: Room | None
    split: _Split


class Splitting:
    """Makes of a trace what runs. What the planner simulated is not made again, where nothing has changed since."""

    def __init__(self, lowered: Lowered, schedule: Schedule) -> None:
        self._lowered, self._schedule = lowered, schedule
        self._last: _Planned | None = None

    def planned(self, trace: TraceCtx, room: Room | None) -> tuple[TraceCtx, TraceCtx | None]:
        """For the planner, which takes the last: forward and backward, or an inference trace and None."""
        split = self._split(trace, room)
        if split.backward is not None and self._lowered.depends_on is not None:
            names, depends_on = self._lowered.input_names, self._lowered.depends_on
            check_gradients(names, split.forward, split.backward, depends_on)
        self._last = _Planned(trace, room, split)
        return split.forward, split.backward

    def of(self, trace: TraceCtx) -> _Split:
        """What runs. Executors that fuse, and those of Python's own operations, may have changed the planned trace."""
        if self._last is None:
            return self._split(trace, None)
        if _is_same(trace, self._last.trace):
            return self._last.split
        return self._split(trace, self._last.room)

    def _split(self, trace: TraceCtx, room: Room | None) -> _Split:
        backward = None
        if is_joint(trace.bound_symbols):
            trace, backward = split_into_forward_and_backward(trace)
        forward = self._schedule(trace, room=room)
        if backward is None:
            return _Split(forward, del_last_used(forward))
        backward = self._schedule(backward, room=room)
        return _Split(forward, del_last_used(forward), backward, with_deletions(backward))


def _is_same(trace: TraceCtx, other: TraceCtx) -> bool:
    """Whether the same operators run on the same values, whatever these are called.

    Thunder's executors change an operator, or name what it makes anew, and nothing else of it.
    """
    if len(trace.bound_symbols) != len(other.bound_symbols):
        return False
    pairs = zip(_numbered(trace), _numbered(other), strict=True)
    return all(a == b for a, b in pairs)


def _numbered(trace: TraceCtx) -> Iterator[tuple[Symbol, list[int]]]:
    """Yield the operators, with their arguments and results numbered in the order in which they appear."""
    numbers: dict[str, int] = {}
    for bsym in trace.bound_symbols:
        proxies = (*bsym.flat_proxy_args, *bsym.flat_proxy_outs)
        yield bsym.sym, [numbers.setdefault(p.name, len(numbers)) for p in proxies]


def with_deletions(backward: TraceCtx) -> TraceCtx:
    """Delete the values of a backward after their last use, saved ones too."""
    return del_last_used(backward, clear_mutable_collections=True)
