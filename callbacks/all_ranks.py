"""What every rank does before any goes on: all have the results, or all stop."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch.distributed as dist
from lightning.fabric import Fabric

from thunder_memsave.agreement import CheckpointError
from thunder_memsave.checkpoints.disk_errors import disk_error, is_disk_full, told
from thunder_memsave.missing_ranks import collective

T = TypeVar("T")


class DiskError(CheckpointError):
    """A file could not be written or read on some rank; the message names the file, and says why not."""


class DiskFullError(DiskError):
    """Some rank could not write, because the disk has no space left."""


def on_all_ranks(
    fabric: Fabric, act: Callable[[], T], *, group: dist.ProcessGroup | None = None
) -> list[T]:
    """Run `act` on every rank and return what each returned, by rank. A collective.

    Args:
        fabric: Launched.
        act: Does not communicate, or fails on all ranks alike.
        group: Of all ranks, over which they agree; None is the default one.

    Raises:
        DiskFullError: some rank's disk is full; on all ranks.
        DiskError: a file could not be written or read on some rank; on all ranks.
        CheckpointError: `act` raised something else on another rank; the rank itself raises that.
    """
    result: T | None = None
    error: Exception | None = None
    try:
        result = act()
    except Exception as e:  # raised again below, once the others know
        error = e
    text = None if error is None else f"{type(error).__name__}: {error}"
    told_of = _gather(fabric, (result, text, _of_disk(error)), group)
    _raise_of_disk([of_disk for _, _, of_disk in told_of if of_disk is not None], error)
    if error is not None:
        raise error
    for rank, (_, failed, _) in enumerate(told_of):
        if failed is not None:
            raise CheckpointError(f"rank {rank} failed, so this rank stops too: {failed}")
    return [value for value, _, _ in told_of]  # type: ignore[misc]  # no rank failed


def _of_disk(error: Exception | None) -> DiskError | None:
    if isinstance(error, DiskError):
        return error
    found = None if error is None else disk_error(error)
    if found is None:
        return None
    return DiskFullError(told(found)) if is_disk_full(found) else DiskError(told(found))


def _raise_of_disk(found: list[DiskError], error: Exception | None) -> None:
    """A full disk first: it says what to do."""
    found.sort(key=lambda each: not isinstance(each, DiskFullError))
    if found:
        raise type(found[0])(str(found[0])) from error


def _gather(fabric: Fabric, value: T, group: dist.ProcessGroup | None) -> list[T]:
    if fabric.world_size == 1:
        return [value]
    values: list[T | None] = [None] * fabric.world_size
    with collective("exchange of what failed where", group):
        dist.all_gather_object(values, value, group=group)
    return values  # type: ignore[return-value]  # all are filled
