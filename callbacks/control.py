"""Lets a callback ask for the end of the training, and lets all ranks agree on it."""

from __future__ import annotations

from lightning.fabric import Fabric


class TrainingControl:
    """The object that a loop passes to its callbacks as `control`.

    A callback of any rank may call `stop`, at any time. The loop reads `is_asked` where it reduces
    something over the ranks anyway, so that no rank leaves while others wait for it:

        stops = fabric.all_reduce(torch.tensor(float(control.is_asked)), reduce_op="sum")
        if stops > 0:
            fabric.print(control.agreed_reason(fabric))
            break
    """

    def __init__(self) -> None:
        self.reason: str | None = None

    @property
    def is_asked(self) -> bool:
        """Whether a callback of this rank asked for the end."""
        return self.reason is not None

    def stop(self, reason: str) -> None:
        """Ask for the end after the current step; only the first reason is kept."""
        if self.reason is None:
            self.reason = reason

    def agreed_reason(self, fabric: Fabric) -> str:
        """Return the first reason of any rank, when one is known to have asked. A collective."""
        reasons = (fabric.broadcast(self.reason, src=rank) for rank in range(fabric.world_size))
        return next(reason for reason in reasons if reason is not None)
