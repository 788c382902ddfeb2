"""Runs a step on all ranks, or on rank 0, and raises on all of them if one fails."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

import torch
import torch.distributed as dist

from thunder_memsave.distributed.data_parallel import DataParallel
from thunder_memsave.distributed.lost_ranks import collective
from thunder_memsave.errors import ThunderMemsaveError

T = TypeVar("T")
ToldT = TypeVar("ToldT")


class OtherRankError(ThunderMemsaveError, RuntimeError):
    """Another rank could not do its part."""

    tells_most: ClassVar[bool] = False
    """Whether all ranks raise this error if several ranks share different ones."""


class CheckpointError(OtherRankError):
    """Another rank could not do its part of saving or loading."""


def is_rank_zero(data_parallel: DataParallel | None) -> bool:
    """Return whether this process is rank 0, which does what must happen once."""
    return data_parallel is None or dist.get_rank(data_parallel.everyone) == 0


def broadcast(value: T, data_parallel: DataParallel | None) -> T:
    """Return rank 0's value on all ranks. A collective."""
    if data_parallel is None:
        return value
    values: list[T] = [value]
    with collective("broadcast of rank 0's values", data_parallel.everyone):
        dist.broadcast_object_list(values, group=data_parallel.everyone, group_src=0)
    return values[0]


def device_of(group: dist.ProcessGroup) -> str:
    """Return the type of device whose tensors the group's ranks exchange."""
    return "cuda" if dist.get_backend(group) == "nccl" else "cpu"


def numbers_of_all(number: int, data_parallel: DataParallel) -> list[int]:
    """Return each rank's number, in the order of ranks. A collective, of a tensor: a few of them per step are cheap."""
    group = data_parallel.everyone
    own = torch.tensor([number], dtype=torch.int64, device=device_of(group))
    found = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
    with collective("agreement on a number", group):
        dist.all_gather(found, own, group=group)
    return [int(n) for n in torch.cat(found).tolist()]


def together(
    act: Callable[[], T],
    data_parallel: DataParallel | None,
    *,
    error_elsewhere: type[OtherRankError] = CheckpointError,
) -> T:
    """Run `act` on every rank, and fail on all ranks if it failed on one. A collective.

    Otherwise the other ranks would wait for the failed one until the timeout. `act` may not
    communicate.

    Raises:
        OtherRankError: `act` raised on another rank; the rank itself raises the original.
    """
    if data_parallel is None:
        return act()
    result, _ = together_telling(
        act,
        num_ranks=data_parallel.num_ranks,
        group=data_parallel.everyone,
        tell=lambda _: None,  # results may be large, and of no use elsewhere
        error_elsewhere=error_elsewhere,
    )
    return result


def together_telling(
    act: Callable[[], T],
    *,
    num_ranks: int,
    group: dist.ProcessGroup | None,
    tell: Callable[[T], ToldT],
    shared: Callable[[Exception], OtherRankError | None] = lambda _: None,
    error_elsewhere: type[OtherRankError] = CheckpointError,
) -> tuple[T, list[ToldT]]:
    """Run `act` on every rank and share the outcomes: all ranks get them, or all raise. A collective.

    Args:
        act: A function that does not communicate, or fails on all ranks alike.
        num_ranks: The number of ranks; a single one shares nothing.
        group: All ranks; None is the default group.
        tell: Returns the part of a result to send to the others; small, because it is pickled.
        shared: Converts a rank's error to one that all ranks raise; None: the others raise `error_elsewhere`.
        error_elsewhere: The error that the other ranks raise then.

    Returns:
        This rank's result, and the part that each rank sent, by rank.

    Raises:
        OtherRankError: `act` raised on another rank; the rank itself raises the original.
    """
    result, error = _attempt(act)
    own = _Outcome(
        told=tell(result) if error is None else None,  # type: ignore[arg-type]  # it has a result
        failed=None if error is None else f"{type(error).__name__}: {error}",
        shared=None if error is None else shared(error),
    )
    outcomes = _of_all(own, num_ranks=num_ranks, group=group)
    found = _that_tells_most([each.shared for each in outcomes if each.shared is not None])
    if found is not None:
        raise type(found)(found.message) from error
    if error is not None:
        raise error
    for rank, outcome in enumerate(outcomes):
        if outcome.failed is not None:
            raise error_elsewhere(f"rank {rank} failed, so this rank stops too: {outcome.failed}")
    return result, [outcome.told for outcome in outcomes]  # type: ignore[return-value]  # no rank failed


def _attempt(act: Callable[[], T]) -> tuple[T | None, Exception | None]:
    try:
        return act(), None
    except Exception as error:  # raised again once the other ranks know
        return None, error


@dataclass(frozen=True, kw_only=True, slots=True)
class _Outcome:
    """The outcome on one rank."""

    told: Any
    failed: str | None
    shared: OtherRankError | None


def _that_tells_most(errors: Sequence[OtherRankError]) -> OtherRankError | None:
    return next((each for each in errors if each.tells_most), errors[0] if errors else None)


def _of_all(own: _Outcome, *, num_ranks: int, group: dist.ProcessGroup | None) -> list[_Outcome]:
    if num_ranks == 1:
        return [own]
    outcomes: list[_Outcome | None] = [None] * num_ranks
    with collective("exchange of outcomes", group):
        dist.all_gather_object(outcomes, own, group=group)
    return outcomes  # type: ignore[return-value]  # all are filled


def once(act: Callable[[], None], data_parallel: DataParallel | None) -> None:
    """Run `act` on rank 0 only, and fail on all ranks if it failed there. A collective."""
    together(act if is_rank_zero(data_parallel) else lambda: None, data_parallel)
