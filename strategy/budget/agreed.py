"""Ranks agree on the plan's structure, the largest peak and the least room before they run the same plan."""

from __future__ import annotations

import hashlib
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor

from thunder_memsave.distributed.agreement import broadcast, device_of
from thunder_memsave.distributed.data_parallel import DataParallel
from thunder_memsave.distributed.lost_ranks import collective
from thunder_memsave.measure.devices import available_bytes
from thunder_memsave.passes.overlap.room import Room
from thunder_memsave.planner.graph import TrainingGraph


def structure_of(graph: TrainingGraph) -> str:
    """Hash the operations and the names they read, without shapes: a plan holds for all graphs with the same hash."""
    digest = hashlib.sha256()
    for op in graph.ops:
        digest.update(repr((op.symbol, op.arguments, op.results)).encode())
    return digest.hexdigest()


def largest(nbytes: int, data_parallel: DataParallel | None) -> int:
    """Return the maximum over the ranks. A collective."""
    if data_parallel is None:
        return nbytes
    return int(_reduced(torch.tensor(nbytes), dist.ReduceOp.MAX, data_parallel))


def least_available_bytes(place: torch.device, data_parallel: DataParallel | None) -> int | None:
    """Return the bytes that this process can have on each rank's device; None for the CPU. A collective."""
    own = available_bytes(place)
    return None if own is None else -largest(-own, data_parallel)


def least_room(own: Room, data_parallel: DataParallel | None) -> Room:
    """Return the room that every rank has: batches may differ in length. A collective."""
    room = broadcast(own, data_parallel)
    if data_parallel is None:
        return room
    left = torch.tensor([own.left_bytes.get(name, 0) for name in room.left_bytes])
    least = _reduced(left, dist.ReduceOp.MIN, data_parallel).tolist()
    return replace(room, left_bytes=dict(zip(room.left_bytes, least, strict=True)))


def _reduced(
    nbytes: Tensor, operation: dist.ReduceOp.RedOpType, data_parallel: DataParallel
) -> Tensor:
    """Reduce a tensor over all ranks. A collective."""
    reduced = nbytes.to(device_of(data_parallel.everyone))
    with collective("agreement on a plan", data_parallel.everyone):
        dist.all_reduce(reduced, operation, group=data_parallel.everyone)
    return reduced
