"""Assigns rows to ranks and micro-batches, from seed and step alone."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, TypeAlias, TypeVar

import numpy as np
import torch
from torch import Tensor

from thunder_memsave.finetune.data.row_set import RowSet
from thunder_memsave.finetune.data.stored.permutation import permuted

BatchT = TypeVar("BatchT")

Order: TypeAlias = Literal["listed", "computed"]

NO_ROW = -1
"""Row number of a padding row, which fills the last batch and has no loss."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Sharding:
    """The division of a global batch over ranks and micro-batches."""

    global_batch_size: int
    micro_batch_size: int
    rank: int = 0
    world_size: int = 1


def num_steps_per_epoch(num_rows: int, sharding: Sharding) -> int:
    """Count the global batches of one pass over the rows; the last may be padded."""
    return math.ceil(num_rows / sharding.global_batch_size)


def step_rows(
    num_rows: int, sharding: Sharding, *, seed: int, step: int, order: Order = "listed"
) -> list[list[int]]:
    """List this rank's micro-batches of row numbers for one optimizer step, counted from 0.

    The order depends on the seed and the epoch only: any step of any run can be computed without
    the ones before, and every rank and world size agrees on the global batch. An order that is `computed` takes no
    memory, `listed` 8 bytes per row; they are different orders.
    """
    epoch, batch = divmod(step, num_steps_per_epoch(num_rows, sharding))
    start = batch * sharding.global_batch_size
    end = min(start + sharding.global_batch_size, num_rows)
    if order == "computed":
        chosen = permuted(np.arange(start, end), num_rows, key=f"{seed} {epoch}").tolist()
    else:
        chosen = _order_of_epoch(num_rows, seed, epoch)[start:end].tolist()
    return _rank_share(chosen, sharding)


@lru_cache(maxsize=1)
def _order_of_epoch(num_rows: int, seed: int, epoch: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed * 1_000_003 + epoch)
    return torch.randperm(num_rows, generator=generator)


def ordered_rows(num_rows: int, sharding: Sharding) -> Iterator[list[int]]:
    """Yield this rank's micro-batches of one pass, with the rows in order."""
    rows_per_pass = sharding.micro_batch_size * sharding.world_size
    for start in range(0, num_rows, rows_per_pass):
        chosen = list(range(start, min(start + rows_per_pass, num_rows)))
        one_pass = Sharding(
            global_batch_size=rows_per_pass,
            micro_batch_size=sharding.micro_batch_size,
            rank=sharding.rank,
            world_size=sharding.world_size,
        )
        yield from _rank_share(chosen, one_pass)


def make_batch(rows: RowSet[BatchT], chosen: Sequence[int]) -> BatchT:
    """Lay out rows by number; `NO_ROW` gives a row without loss."""
    return rows.lay_out([None if row == NO_ROW else row for row in chosen])


def _rank_share(chosen: list[int], sharding: Sharding) -> list[list[int]]:
    padded = chosen + [NO_ROW] * (sharding.global_batch_size - len(chosen))
    mine = padded[sharding.rank :: sharding.world_size]
    size = sharding.micro_batch_size
    return [mine[start : start + size] for start in range(0, len(mine), size)]
