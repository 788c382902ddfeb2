"""The ranks that share parameters, and how parameters are spread over them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
import torch.distributed as dist


@dataclass(frozen=True, kw_only=True, slots=True)
class DataParallel:
    """How parameters are spread over ranks: split inside `group`, the same across `replicas`."""

    mode: Literal["none", "zero2", "zero3", "auto"]
    """`none`: every rank holds everything; otherwise every rank holds its rows, and whole parameters stay from forward
    to backward (`zero2`), are gathered again (`zero3`), or as the plan says, without a budget again (`auto`)."""
    group: dist.ProcessGroup
    """The ranks that share one set of rows, with the user's timeout, as every group here."""
    replicas: dist.ProcessGroup | None = None
    """The ranks that hold the same rows as this one; None: no other does."""
    world: dist.ProcessGroup | None = None
    """All ranks; None: those of `group` are all."""
    prefetch: int | Literal["auto"] = 0
    """Bytes of whole parameters that may be on their way beside those that are read; `auto` is two largest blocks."""
    accumulate: Literal["reduce_every", "accumulate_unsharded"] = "reduce_every"
    """Where gradients of several micro-batches are summed: as shards, or whole and not yet reduced."""
    bucket_bytes: int = 0
    """Parameters of at most so many bytes share collectives; 0: each has its own."""
    reduce_dtype: torch.dtype | None = torch.float32
    """Gradients of fewer bits are summed over the ranks in it; None: in their own."""

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
        """All ranks, for what all must agree on."""
        return self.group if self.world is None else self.world

    @property
    def num_ranks(self) -> int:
        """The number of all ranks, over which gradients are averaged."""
        return dist.get_world_size(self.everyone)

    @property
    def shards(self) -> bool:
        """Whether parameters are split at all."""
        return self.mode != "none" and self.world_size > 1
