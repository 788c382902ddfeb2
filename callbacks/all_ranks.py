"""Runs a step on every rank before any goes on: all get the results, or all stop."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch.distributed as dist
from lightning.fabric import Fabric

from thunder_memsave.checkpoints.disk_errors import disk_error, is_disk_full, told
from thunder_memsave.distributed.agreement import CheckpointError, together_telling

T = TypeVar("T")


class DiskError(CheckpointError):
    """A file could not be written or read on some rank; the message names the file and the reason."""


class DiskFullError(DiskError):
    """Some rank could not write, because the disk has no space left."""

    tells_most = True  # it says what to do


def on_all_ranks(
    fabric: Fabric, act: Callable[[], T], *, group: dist.ProcessGroup | None = None
) -> list[T]:
    """Run `act` on every rank and return what each returned, by rank. A collective.

    Args:
        fabric: Launched.
        act: Does not communicate, or fails on all ranks alike.
        group: A group of all ranks, for the agreement; None means the default one.

    Raises:
        DiskFullError: some rank's disk is full; on all ranks.
        DiskError: a file could not be written or read on some rank; on all ranks.
        CheckpointError: `act` raised something else on another rank; the rank itself raises that.
    """
    _, told_by_rank = together_telling(
        act, num_ranks=fabric.world_size, group=group, tell=lambda result: result, shared=_of_disk
    )
    return told_by_rank


def _of_disk(error: Exception) -> DiskError | None:
    if isinstance(error, DiskError):
        return error
    found = disk_error(error)
    if found is None:
        return None
    return DiskFullError(told(found)) if is_disk_full(found) else DiskError(told(found))
