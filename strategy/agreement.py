"""What all ranks must agree on around files and setup: names, and whether it worked."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch.distributed as dist

from thunder_memsave.missing_ranks import collective
from thunder_memsave.sharding import DataParallel

T = TypeVar("T")


class OtherRankError(RuntimeError):
    """Another rank could not do its part."""


class CheckpointError(OtherRankError):
    """Another rank could not do its part of saving or loading."""


def is_rank_zero(data_parallel: DataParallel | None) -> bool:
    """Whether this process does what is done once."""
    return data_parallel is None or dist.get_rank(data_parallel.everyone) == 0


def broadcast(value: T, data_parallel: DataParallel | None) -> T:
    """Rank 0's value, on all ranks. A collective."""
    if data_parallel is None:
        return value
    values: list[T] = [value]
    with collective("broadcast of rank 0's values", data_parallel.everyone):
        dist.broadcast_object_list(values, group=data_parallel.everyone, group_src=0)
    return values[0]


def together(
    act: Callable[[], T],
    data_parallel: DataParallel | None,
    *,
    error_elsewhere: type[OtherRankError] = CheckpointError,
) -> T:
    """Runs `act` on every rank, and fails on all ranks if it failed on one. A collective.

    Otherwise the other ranks would wait for the failed one until the timeout. `act` may not
    communicate.

    Raises:
        OtherRankError: `act` raised on another rank; the rank itself raises the original.
    """
    if data_parallel is None:
        return act()
    error: Exception | None = None
    try:
        result = act()
    except Exception as e:  # raised again below, once the others know
        error = e
    messages: list[str | None] = [None] * data_parallel.num_ranks
    text = None if error is None else f"{type(error).__name__}: {error}"
    with collective("exchange of what failed where", data_parallel.everyone):
        dist.all_gather_object(messages, text, group=data_parallel.everyone)
    if error is not None:
        raise error
    for rank, message in enumerate(messages):
        if message is not None:
            raise error_elsewhere(f"rank {rank} failed, so this rank stops too: {message}")
    return result


def once(act: Callable[[], None], data_parallel: DataParallel | None) -> None:
    """Runs `act` on rank 0 only, and fails on all ranks if it failed there. A collective."""
    together(act if is_rank_zero(data_parallel) else lambda: None, data_parallel)
