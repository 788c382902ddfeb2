"""Lays out the rows of a step ahead of it, and agrees with the other ranks on what they weigh, without the device."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, cast

import torch
import torch.distributed as dist
from lightning.fabric import Fabric
from lightning.fabric.utilities import move_data_to_device
from lightning.fabric.utilities.apply_func import apply_to_collection
from torch import Tensor

from thunder_memsave.finetune.data.batches import Order, Sharding, make_batch, step_rows
from thunder_memsave.finetune.data.row_set import RowSet
from thunder_memsave.finetune.objectives.objective import Objective


@dataclass(frozen=True, kw_only=True, slots=True)
class Work:
    """The data of one optimizer step, and whether to take it."""

    position: int
    """Its number among the global batches of the data."""

    batches: list[Any]
    """This rank's micro-batches, on the device."""

    weight: Tensor
    """The objective's weight over all ranks, on the host."""

    is_stopped: bool
    """Whether a callback of some rank asked for the end, so that the step is not taken."""

    is_signalled: bool
    """Whether some rank got a signal."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _LaidOut:
    """This rank's part of the data of one step."""

    position: int
    """Its number among the global batches of the data."""

    batches: list[Any]
    """On the device."""

    weight: Tensor
    """Their weight, on the host."""


@dataclass(kw_only=True, slots=True)
class DataAhead:
    """Lays out the data of a step while the device still computes the one before."""

    fabric: Fabric
    rows: RowSet[Any]
    sharding: Sharding
    seed: int
    objective: Objective[Any]
    order: Order = "listed"
    _ready: _LaidOut | None = None
    _sum: _HostSum = field(init=False)

    def __post_init__(self) -> None:
        self._sum = _HostSum(self.fabric)

    def lay_out(self, position: int) -> None:
        """Lay out a step, and begin to copy it to the device, which the host does not wait for."""
        self._ready = self._laid_out(position)

    def take(self, position: int, flags: tuple[bool, bool]) -> Work:
        """Agree with the other ranks on a step, whose rows are laid out now unless they were ahead. A collective.

        Args:
            position: The step's number among the global batches of the data.
            flags: Whether a callback of this rank asked for the end, and whether this rank got a signal.
        """
        ready, self._ready = self._ready, None
        data = ready if ready and ready.position == position else self._laid_out(position)
        weight = data.weight
        if self.fabric.world_size > 1:
            counted = [weight, *(torch.full_like(weight, int(flag)) for flag in flags)]
            weight, *summed = self._sum(torch.stack(counted))
            flags = bool(summed[0]), bool(summed[1])
        return Work(
            position=position,
            batches=data.batches,
            weight=weight,
            is_stopped=flags[0],
            is_signalled=flags[1],
        )

    def _laid_out(self, position: int) -> _LaidOut:
        chosen = step_rows(
            len(self.rows), self.sharding, seed=self.seed, step=position, order=self.order
        )
        batches = [make_batch(self.rows, numbers) for numbers in chosen]
        return _LaidOut(
            position=position,
            weight=torch.stack([self.objective.weight(batch) for batch in batches]).sum(),
            batches=[to_device(self.fabric, batch) for batch in batches],
        )


def to_device(fabric: Fabric, batch: Any) -> Any:
    """Copy a batch to the device; to a GPU from pinned memory, so that the host does not wait for the copy."""
    if fabric.device.type != "cuda":
        return fabric.to_device(batch)
    return move_data_to_device(pinned(batch), fabric.device)


def pinned(batch: Any) -> Any:
    """Copy a batch's tensors into memory that a GPU can read by itself.

    As for torch's DataLoader, an object may have a method `pin_memory`.
    """
    pin = getattr(batch, "pin_memory", None)
    if callable(pin):
        return pin()
    return apply_to_collection(batch, dtype=Tensor, function=Tensor.pin_memory)


class _HostSum:
    """Sums numbers over the ranks on their hosts, so that none waits for its device. Making one is a collective."""

    def __init__(self, fabric: Fabric) -> None:
        self._fabric = fabric
        self._group: dist.ProcessGroup | None = None
        if fabric.world_size > 1 and "cpu:gloo" not in str(dist.get_backend_config()):
            name = "thunder_memsave agreement of hosts"
            timeout = getattr(getattr(fabric.strategy, "config", None), "timeout", None)
            self._group = dist.new_group(backend="gloo", timeout=timeout, group_desc=name)

    def __call__(self, tensor: Tensor) -> Tensor:
        """Return the sum of the ranks' tensors, which are on the host. A collective."""
        if self._fabric.world_size == 1:
            return tensor
        strategy = self._fabric.strategy
        return cast(Tensor, strategy.all_reduce(tensor, group=self._group, reduce_op="sum"))
