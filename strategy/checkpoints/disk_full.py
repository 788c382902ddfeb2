"""Tells a disk without space from other errors, also where torch hides it behind another one."""

from __future__ import annotations

import errno

import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

_FULL = (errno.ENOSPC, errno.EDQUOT)
# For errors of another rank, of which only the text is left.
_FULL_TEXTS = ("No space left on device", "Disk quota exceeded")


def is_disk_full(error: BaseException) -> bool:
    """Tell whether an error, or one that led to it, is of a disk without space."""
    if isinstance(error, OSError) and error.errno in _FULL:
        return True
    if any(text in str(error) for text in _FULL_TEXTS):
        return True
    # `__context__` too: torch's writer fails again while it closes, and that error is the one raised.
    before = error.__cause__ or error.__context__
    return before is not None and is_disk_full(before)


class DiskFullWriter(dcp.FileSystemWriter):
    """DCP's writer, whose error on a full disk says so on all ranks: what led to it is not sent along."""

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's files."""
        try:
            written: Future[list[WriteResult]] = super().write_data(plan, planner)
        except Exception as error:
            if is_disk_full(error):
                raise OSError(errno.ENOSPC, "No space left on device", str(self.path)) from error
            raise
        return written
