"""Tells disk errors from others, also when torch hides them behind another exception."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator

import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from thunder_memsave.compat.foreign_messages import error_numbers

_FULL = (errno.ENOSPC, errno.EDQUOT)
_OF_DISKS = (
    *_FULL,
    *(errno.EACCES, errno.EPERM, errno.EROFS),
    *(errno.EIO, errno.EBUSY, errno.ESTALE, errno.ENODEV, errno.ENXIO, errno.EREMOTEIO),
    *(errno.ENOENT, errno.ENOTDIR, errno.ENOTEMPTY, errno.EEXIST, errno.EISDIR),
    *(errno.ENAMETOOLONG, errno.ELOOP, errno.EFBIG, errno.EMFILE, errno.ENFILE),
)


def disk_error(error: BaseException) -> OSError | None:
    """Return the file or disk error that `error` is, or that led to it; None if there is none."""
    for before in _chain(error):
        if isinstance(before, OSError) and before.errno in _OF_DISKS:
            return before
        # Of errors from other ranks, from safetensors, or caught by torch, only the text is left.
        for number in error_numbers(before):
            if number in _OF_DISKS:
                return OSError(number, str(before))
    return None


def is_disk_full(error: BaseException) -> bool:
    """Tell whether an error, or one that led to it, is a full disk."""
    found = disk_error(error)
    return found is not None and found.errno in _FULL


def told(error: OSError) -> str:
    """Describe a file error for the user: `Input/output error: /runs/a/state/meta.pt`."""
    if error.filename is None:
        return error.strerror or str(error)
    names = [os.fsdecode(name) for name in (error.filename, error.filename2) if name is not None]
    return f"{error.strerror}: {' -> '.join(names)}"


class TellingWriter(dcp.FileSystemWriter):
    """DCP's writer, which names the disk error on all ranks: DCP does not send along what led to an error."""

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's files."""
        try:
            written: Future[list[WriteResult]] = super().write_data(plan, planner)
        except Exception as error:
            found = disk_error(error)
            if found is None:
                raise
            assert found.errno is not None
            name = str(self.path) if found.filename is None else os.fsdecode(found.filename)
            raise OSError(found.errno, os.strerror(found.errno), name) from error
        return written


def _chain(error: BaseException) -> Iterator[BaseException]:
    """Yield an error and those that led to it."""
    seen: BaseException | None = error
    while seen is not None:
        yield seen
        # `__context__` too: torch's writer fails a second time while it closes, and raises that error.
        seen = seen.__cause__ or seen.__context__
