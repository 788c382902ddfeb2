"""Compares the time in which the host launches a step with the time of its kernels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from thunder_memsave.planner.cost import kernel_us
from thunder_memsave.planner.graph import Device, Op

HOST_US_PER_OPERATION = 5.0
"""Python, dispatch and launch of one operation: 4 to 6 us on servers of the 2020s."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Launches:
    """The launches of a forward and backward."""

    num_ops: int
    """Operations that are no views."""
    launch_us: float
    kernel_us: float
    """At the rates that kernels sustain, however small they are."""

    def __str__(self) -> str:
        return (
            f"{self.num_ops:,} launches take {self.launch_us / 1e3:.1f} ms, their kernels "
            f"{self.kernel_us / 1e3:.1f} ms"
        )

    @property
    def bound(self) -> bool:
        """Whether the device waits for the host."""
        return self.kernel_us < self.launch_us


def launches_of(ops: Sequence[Op], device: Device) -> Launches:
    """Count the launches of operations, and add up the time of their kernels."""
    real = [op for op in ops if op.repeat != "free"]
    return Launches(
        num_ops=len(real),
        launch_us=HOST_US_PER_OPERATION * len(real),
        kernel_us=sum(kernel_us(op, device) for op in real),
    )
