"""Decides which rows each rank sees in which micro-batch, from seed and step alone."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from thunder_memsave.finetune.packing import Rows
from thunder_memsave.finetune.tokenize import IGNORED

NO_ROW = -1
"""Stands for a row of padding, which fills the last batch and counts nowhere."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Batch:
    """The rows of one forward pass; tensors of shape (micro_batch_size, length)."""

    input_ids: Tensor
    targets: Tensor
    position_ids: Tensor
    document_ids: Tensor

    def to(self, device: torch.device) -> Batch:
        """Copy the batch to a device."""
        return Batch(
            input_ids=self.input_ids.to(device),
            targets=self.targets.to(device),
            position_ids=self.position_ids.to(device),
            document_ids=self.document_ids.to(device),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Sharding:
    """How a global batch is divided."""

    global_batch_size: int
    micro_batch_size: int
    rank: int = 0
    world_size: int = 1


def num_steps_per_epoch(num_rows: int, sharding: Sharding) -> int:
    """Count the global batches of one pass over the rows; the last may be padded."""
    return math.ceil(num_rows / sharding.global_batch_size)


def step_rows(num_rows: int, sharding: Sharding, *, seed: int, step: int) -> list[list[int]]:
    """List this rank's micro-batches of row numbers for one optimizer step, counted from 0.

    The order depends on the seed and the epoch only: any step of any run can be computed without
    the ones before, and every rank and world size agrees on the global batch.
    """
    epoch, batch = divmod(step, num_steps_per_epoch(num_rows, sharding))
    generator = torch.Generator().manual_seed(seed * 1_000_003 + epoch)
    order = torch.randperm(num_rows, generator=generator).tolist()
    start = batch * sharding.global_batch_size
    return _rank_share(order[start : start + sharding.global_batch_size], sharding)


def ordered_rows(num_rows: int, sharding: Sharding) -> Iterator[list[int]]:
    """Yield this rank's micro-batches of one pass in the rows' own order."""
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


def make_batch(rows: Rows, chosen: Sequence[int]) -> Batch:
    """Gather rows by number; `NO_ROW` gives a row without targets."""
    index = torch.tensor(chosen)
    is_padding = (index == NO_ROW)[:, None]
    # Any row will do for the tokens of padding, as long as no target counts.
    index = index.clamp(min=0)
    return Batch(
        input_ids=rows.input_ids[index],
        targets=rows.targets[index].masked_fill(is_padding, IGNORED),
        position_ids=rows.position_ids[index],
        document_ids=rows.document_ids[index],
    )


def _rank_share(chosen: list[int], sharding: Sharding) -> list[list[int]]:
    padded = chosen + [NO_ROW] * (sharding.global_batch_size - len(chosen))
    mine = padded[sharding.rank :: sharding.world_size]
    size = sharding.micro_batch_size
    return [mine[start : start + size] for start in range(0, len(mine), size)]
