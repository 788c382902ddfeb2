"""Simulates the time of a step on three engines: one computes, one copies to the host, one copies back.

A copy starts when the operation that begins it is reached and its engine is free, in the order in which copies begin.
What computes goes on, until it reaches the wait for a copy that has not ended. A host buffer is taken from the start of
the copy out until the copy back has arrived.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from thunder_memsave.planner.graph import FETCH, Device, Program
from thunder_memsave.planner.offload.copies import (
    COPY_IN,
    COPY_OUT,
    FETCH_STATES,
    STORE_STATES,
    WAIT_IN,
    WAIT_OUT,
    WAIT_STATES,
    is_copy,
)

Lane = Literal["compute", "out", "in"]


@dataclass(frozen=True, kw_only=True, slots=True)
class CopyRates:
    """The time that copies between a device and its host take; both ways run at once."""

    bytes_per_s: float
    copy_us: float
    states: float = 1.0
    """The part of the bandwidth at which an optimizer's states are copied, both ways at once."""

    @classmethod
    def of(cls, device: Device) -> CopyRates:
        """Return the rates of a device, as one rank of its node has them."""
        return cls(
            bytes_per_s=device.copied_bytes_per_s,
            copy_us=device.copy_us,
            states=device.sustained.states,
        )

    def us(self, nbytes: int) -> float:
        """Return the microseconds of one copy."""
        return self.copy_us + nbytes / self.bytes_per_s * 1e6

    def states_us(self, nbytes: int) -> float:
        """Return the microseconds of copying states one way, beside those that go the other way."""
        return self.copy_us + nbytes / (self.states * self.bytes_per_s) * 1e6


@dataclass(frozen=True, kw_only=True, slots=True)
class Span:
    """One copy on its engine."""

    lane: Lane
    name: str
    """Name of the value that is copied, in the program."""
    nbytes: int
    start_us: float
    end_us: float


@dataclass(frozen=True, kw_only=True, slots=True)
class StepTime:
    """The time of forward and backward, without the caller's loss and the optimizer's update."""

    us: float
    """From the first operation to the end of the last."""
    exposed_us: float
    """Part of it in which nothing computes, because a copy has not ended."""
    starts_us: tuple[float, ...]
    """Start of each step of the program; of a wait: its end."""
    copies: tuple[Span, ...]
    host_peak_bytes: int
    """Most bytes in host buffers at once."""
    offloaded_bytes: int
    """Bytes of activations that are copied out."""


def step_time(program: Program, costs_us: Sequence[float], rates: CopyRates) -> StepTime:
    """Simulate a program.

    Args:
        program: With copies; without any, it takes the sum of the costs.
        costs_us: Microseconds of each step; those of copies and waits are not read.
        rates: Bandwidth of the copies, each way.
    """
    run = _Run(rates)
    fetched: set[str] = set()
    states: set[str] = set()
    for step, cost_us in zip(program.steps, costs_us, strict=True):
        run.starts_us.append(run.now_us)
        op = step.op
        if op.symbol == FETCH:
            run.begin("in", op.results[0], op.copied_bytes)
            fetched.add(op.results[0])
        elif op.symbol == FETCH_STATES:
            run.begin_states("in", op.results[0], op.copied_bytes)
            states.add(op.results[0])
        elif op.symbol == STORE_STATES:
            run.begin_states("out", op.results[0], op.copied_bytes)
        elif op.symbol == WAIT_STATES or (op.arguments and op.arguments[0] in fetched):
            run.wait(op.arguments[0], is_back=False)
        elif not is_copy(op):
            for name in states.intersection(op.arguments):  # an update, with its states
                run.wait(name, is_back=False)
            run.now_us += cost_us
            run.computed_us += cost_us
        elif op.symbol in (COPY_OUT, COPY_IN):
            run.begin("out" if op.symbol == COPY_OUT else "in", op.results[0], op.copied_bytes)
        else:
            run.wait(op.arguments[0], is_back=op.symbol == WAIT_IN)
            assert op.symbol in (WAIT_OUT, WAIT_IN)
    return StepTime(
        us=run.now_us,
        exposed_us=run.now_us - run.computed_us,
        starts_us=tuple(run.starts_us),
        copies=tuple(run.copies.values()),
        host_peak_bytes=run.host_peak_bytes,
        offloaded_bytes=run.offloaded_bytes,
    )


class _Run:
    """The engines at a moment of the step."""

    def __init__(self, rates: CopyRates) -> None:
        self._rates = rates
        self._free_us: dict[Lane, float] = {"out": 0.0, "in": 0.0}
        self._host_bytes = 0
        self.now_us = self.computed_us = 0.0
        self.starts_us: list[float] = []
        self.copies: dict[str, Span] = {}
        """By the name of what the copy makes."""
        self.host_peak_bytes = self.offloaded_bytes = 0

    def begin(self, lane: Lane, name: str, nbytes: int) -> None:
        self._begin(lane, name, nbytes, self._rates.us(nbytes))
        if lane == "out":
            self.offloaded_bytes += nbytes
            self._host_bytes += nbytes
            self.host_peak_bytes = max(self.host_peak_bytes, self._host_bytes)

    def begin_states(self, lane: Lane, name: str, nbytes: int) -> None:
        """Begin to copy states, whose place on the host is theirs between steps too."""
        self._begin(lane, name, nbytes, self._rates.states_us(nbytes))

    def _begin(self, lane: Lane, name: str, nbytes: int, us: float) -> None:
        start_us = max(self.now_us, self._free_us[lane])
        end_us = self._free_us[lane] = start_us + us
        self.copies[name] = Span(
            lane=lane, name=name, nbytes=nbytes, start_us=start_us, end_us=end_us
        )

    def wait(self, name: str, *, is_back: bool) -> None:
        self.now_us = max(self.now_us, self.copies[name].end_us)
        if is_back:
            self._host_bytes -= self.copies[name].nbytes
