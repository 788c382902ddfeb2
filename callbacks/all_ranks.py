"""What every rank does before any goes on: all have the results, or all stop."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch.distributed as dist
from lightning.fabric import Fabric

from thunder_memsave.agreement import CheckpointError
from thunder_memsave.checkpoints.disk_full import is_disk_full
from thunder_memsave.missing_ranks import collective

T = TypeVar("T")


class DiskFullError(CheckpointError):
    """Some rank could not write, because the disk has no space left."""


def on_all_ranks(fabric: Fabric, act: Callable[[], T]) -> list[T]:
    """Run `act` on every rank and return what each returned, by rank. A collective.

    Args:
        fabric: Launched.
        act: Does not communicate, or fails on all ranks alike.

    Raises:
        DiskFullError: some rank's disk is full; on all ranks.
        CheckpointError: `act` raised something else on another rank; the rank itself raises that.
    """
    result: T | None = None
    error: Exception | None = None
    try:
        result = act()
    except Exception as e:  # raised again below, once the others know
        error = e
    text = None if error is None else f"{type(error).__name__}: {error}"
    told = _gather(fabric, (result, text, error is not None and is_disk_full(error)))
    if any(is_full for _, _, is_full in told):
        raise DiskFullError(next(text for _, text, is_full in told if is_full)) from error
    if error is not None:
        raise error
    for rank, (_, failed, _) in enumerate(told):
        if failed is not None:
            raise CheckpointError(f"rank {rank} failed, so this rank stops too: {failed}")
    return [value for value, _, _ in told]  # type: ignore[misc]  # no rank failed


def _gather(fabric: Fabric, value: T) -> list[T]:
    if fabric.world_size == 1:
        return [value]
    values: list[T | None] = [None] * fabric.world_size
    with collective("exchange of what failed where"):
        dist.all_gather_object(values, value)
    return values  # type: ignore[return-value]  # all are filled
