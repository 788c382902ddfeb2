"""`DataParallel`: the ranks that share parameters, and the sharding mode."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
import torch.distributed as dist


@dataclass(frozen=True, kw_only=True, slots=True)
class DataParallel:
    """The layout of parameters over ranks: sharded within `group`, replicated across `replicas`."""

    mode: Literal["none", "zero2", "zero3", "auto"]
    """`none`: every rank holds everything. Otherwise every rank holds its rows, and backward uses forward's gathered
    parameters (`zero2`), regathers them (`zero3`), or does as the plan says (`auto`; without a budget it regathers)."""
    group: dist.ProcessGroup
    """The ranks that share one set of rows; like every group here, with the user's timeout."""
    replicas: dist.ProcessGroup | None = None
    """The ranks that hold the same rows as this one; None: there are no others."""
    world: dist.ProcessGroup | None = None
    """All ranks; None: `group` has all ranks."""
    prefetch: int | Literal["auto"] = 0
    """Bytes of whole parameters in flight beside those being read; `auto` is twice the largest block."""
    accumulate: Literal["reduce_every", "accumulate_unsharded"] = "reduce_every"
    """Form in which gradients of several micro-batches are summed: reduced shards, or whole and unreduced."""
    bucket_bytes: int = 0
    """Bytes of the largest parameters that share collectives; 0: each has its own."""
    reduce_dtype: torch.dtype | None = torch.float32
    """Dtype in which gradients of fewer bits are summed over the ranks; None: their own."""

    @property
    def rank(self) -> int:
        """This process's rank within the group."""
        return dist.get_rank(self.group)

    @property
    def world_size(self) -> int:
        """The number of ranks in the group."""
        return dist.get_world_size(self.group)

    @property
    def everyone(self) -> dist.ProcessGroup:
        """The group of all ranks."""
        return self.group if self.world is None else self.world

    @property
    def num_ranks(self) -> int:
        """The number of all ranks, over which gradients are averaged."""
        return dist.get_world_size(self.everyone)

    @property
    def shards(self) -> bool:
        """Whether parameters are sharded at all."""
        return self.mode != "none" and self.world_size > 1
