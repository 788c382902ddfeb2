"""What runs of tests share: a net under a Fabric, its plan's peak, and whether it has the weights of another one."""

from __future__ import annotations

from typing import Any, Self

import torch
from lightning.fabric import Fabric
from torch import nn

from thunder_memsave.sharding.sharded_parameter import as_rows


class FabricRun:
    """A net and its steps; tests set both and say what a step is."""

    fabric: Fabric
    net: nn.Module

    def step(self) -> None:
        """Take a step."""
        raise AssertionError("the test's own class says what a step is")

    def steps(self, count: int) -> Self:
        """Take steps."""
        for _ in range(count):
            self.step()
        return self

    @property
    def strategy(self) -> Any:
        """The strategy of the Fabric."""
        return self.fabric.strategy

    @property
    def peak_bytes(self) -> int:
        """The peak of the last call's plan."""
        return int(self.strategy.plan.predicted_peak_bytes)

    def same_as(self, other: FabricRun) -> bool:
        """Tell whether another's weights have the same bits."""
        pairs = zip(self.net.parameters(), other.net.parameters(), strict=True)
        return all(torch.equal(as_rows(mine), as_rows(theirs)) for mine, theirs in pairs)
