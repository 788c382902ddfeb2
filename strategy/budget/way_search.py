"""Finds the way to carry a call out that costs least among those that fit, or the one that needs least."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from thunder_memsave.budget.agreed import largest
from thunder_memsave.budget.plan_request import Offer
from thunder_memsave.budget.planned_call import Attempt, PlannedCall
from thunder_memsave.budget.ways.way import Way, ways
from thunder_memsave.distributed.data_parallel import DataParallel
from thunder_memsave.passes.overlap.room import Room
from thunder_memsave.planner.cost import costs_us
from thunder_memsave.planner.graph import Device

_NOTICEABLE = 0.02
"""Part of the budget, or of what is needed, that a loss's tile takes at least for smaller ones to be tried."""
WORTH_A_TRY = 0.005
"""Part of a budget for which one more plan is solved."""
_BLOCK = 2
"""The largest ratio of an allocator's block to what is in it."""


@dataclass(frozen=True, slots=True)
class Run:
    """A call as it runs: with a plan, or without backward."""

    call: PlannedCall
    room: Room | None
    """Bytes for collectives in flight; equal on all ranks."""
    more_bytes: int = 0
    """Bytes beyond the budget, on the rank that needs the most; negative if there is room."""
    limited_bytes: int = 0
    """Bytes of this rank that the budget limits."""
    overlap_lacks: int = 0
    """Bytes that were lacking to overlap what runs one after the other instead; 0: nothing does."""
    joins_pay: bool | None = None
    """Whether a step computes faster if what can join kernels of backward does; None: as fast, or not tried."""

    @property
    def added_us(self) -> float:
        """Time that the plan adds to a step as it runs, on this rank."""
        assert self.call.plan is not None
        return self.call.plan.added_us


@dataclass(frozen=True, slots=True)
class Tried:
    """A call in one way, with the last plan that was tried for it."""

    attempt: Attempt
    run: Run
    offer: Offer


class WaySearch:
    """Tries the ways of one call. All methods are collectives."""

    def __init__(
        self,
        first: Attempt,
        tried: Callable[[Attempt], Tried],
        ran: Callable[[Attempt, Tried], Run],
        *,
        budget_bytes: int | None,
        is_reserved: bool,
        device: Device,
        data_parallel: DataParallel | None,
        may_compress: bool = False,
    ) -> None:
        """Store what is tried, and how.

        Args:
            first: The call, whole and with the largest tiles.
            tried: Searches for a plan of a way.
            ran: Runs the plan that was found for one way in another.
            budget_bytes: Of a step; None: no limit.
            is_reserved: Whether the budget is one of reserved bytes.
            device: Its rates are the times of what a way adds.
            data_parallel: The ranks that must choose the same.
            may_compress: Whether values may be stored in fp8.
        """
        self._first = first
        self._tried, self._ran = tried, ran
        self._budget_bytes = budget_bytes
        self._is_reserved = is_reserved
        self._device = device
        self._data_parallel = data_parallel
        self._may_compress = may_compress

    def best(self) -> Tried:
        """Return the first way that fits, with smaller tiles of losses where they save more time than they cost.

        Where none fits, that with the smallest plan.
        """
        refused: list[Tried] = []
        for attempt in self._attempts(refused):
            tried = self._tried(attempt)
            if tried.run.more_bytes <= 0:
                return self._compressed(self._quicker(tried))
            refused.append(tried)
            if (alone := self._without_copies(attempt)) is not None:
                return self._compressed(alone)
            if not self._is_reserved and self._is_of_update(tried):
                break
        return min(refused, key=lambda each: each.run.more_bytes)

    def _without_copies(self, attempt: Attempt) -> Tried | None:
        """Try an attempt whose plans with copies to the host did not fit without those; None: neither does."""
        if attempt.offload is None or attempt.offload.is_last_resort:
            return None
        tried = self._tried(replace(attempt, offload=None))
        return tried if tried.run.more_bytes <= 0 else None

    def _is_of_update(self, tried: Tried) -> bool:
        """Tell whether the peak is that of the optimizer's update on the rank that lacks most: no way changes it."""
        profile = tried.run.call.profile
        return not self._is_on_any(profile.peak_bytes > profile.update_peak_bytes)

    def _attempts(self, refused: Sequence[Tried]) -> Iterator[Attempt]:
        """Yield the ways, with smaller tiles of losses where those would do; `refused` has those before."""
        for of_largest in ways(is_reserved=self._is_reserved, may_compress=self._may_compress):
            if of_largest.empties_cache and not self._tensors_fit(of_largest, refused):
                continue
            way: Way | None = of_largest
            while way is not None:
                attempt = self._in_way(way)
                if attempt is None:
                    break
                if way is not of_largest and not self._needs_less(refused[-1], attempt):
                    break
                yield attempt
                way = self._next(way, refused[-1])

    def _needs_less(self, refused: Tried, attempt: Attempt) -> bool:
        """Tell whether a plan that does not fit needs less with smaller tiles.

        Else its peaks are at other moments, and those of other plans too.
        """
        assert self._budget_bytes is not None
        more_bytes = refused.run.more_bytes
        saved_bytes = more_bytes - self._ran(attempt, refused).more_bytes
        return saved_bytes >= min(more_bytes, WORTH_A_TRY * self._budget_bytes)

    def _tensors_fit(self, way: Way, refused: Sequence[Tried]) -> bool:
        """Tell whether what was refused without giving cached memory back was refused for that memory alone."""
        assert self._budget_bytes is not None
        same = [t for t in refused if _are_alike(t.attempt.way, way)]
        least = min((t.run.call.profile.peak_bytes for t in same), default=self._budget_bytes)
        return not self._is_on_any(least > self._budget_bytes)

    def _next(self, way: Way, refused: Tried) -> Way | None:
        """Return the way to try next, that with the smallest tiles where others cannot fit; None: it gains little."""
        assert self._budget_bytes is not None
        tile_bytes, more_bytes = refused.attempt.loss_tile_bytes, refused.run.more_bytes
        if self._is_on_any(tile_bytes < _NOTICEABLE * (self._budget_bytes + more_bytes)):
            return None
        is_hopeless = self._is_on_any(more_bytes > _BLOCK * tile_bytes)
        return way.with_smallest_losses if is_hopeless else way.with_smaller_losses

    def _quicker(self, tried: Tried) -> Tried:
        """Take smaller tiles while that costs less than to recompute what has no room beside larger ones.

        Where the same plan needs no less with smaller tiles, its peaks are at other moments, as those of others are.
        """
        while self._budget_bytes is not None and tried.offer.plan.recompute_us:
            way = tried.attempt.way.with_smaller_losses
            share = tried.attempt.loss_tile_bytes / self._budget_bytes
            attempt = None if way is None else self._in_way(way)
            if attempt is None or self._is_on_any(share < _NOTICEABLE):
                break
            saved_bytes = tried.run.more_bytes - self._ran(attempt, tried).more_bytes
            if saved_bytes < WORTH_A_TRY * self._budget_bytes:
                break
            smaller = self._tried(attempt)
            if smaller.run.more_bytes > 0 or self._step_us(smaller) >= self._step_us(tried):
                break
            tried = smaller
        return tried

    def _compressed(self, tried: Tried) -> Tried:
        """Store values in fp8 where that takes less time than to recompute what has no room beside them."""
        if not self._may_compress or tried.attempt.way.compresses:
            return tried
        if not self._is_on_any(tried.run.added_us > 0):
            return tried
        attempt = self._in_way(replace(tried.attempt.way, compresses=True))
        if attempt is None:
            return tried
        other = self._tried(attempt)
        is_slower = other.run.added_us >= tried.run.added_us
        return tried if other.run.more_bytes > 0 or self._is_on_any(is_slower) else other

    def _in_way(self, way: Way) -> Attempt | None:
        """Return the call in a way; None: a rank has no such tiles."""
        attempt = self._first.in_way(way)
        return None if self._is_on_any(attempt is None) else attempt

    def _step_us(self, tried: Tried) -> float:
        """Return a step's time by the device's rates, equal on all ranks."""
        return sum(costs_us(tried.attempt.graph, self._device)) + tried.offer.plan.added_us

    def _is_on_any(self, fact: bool) -> bool:
        return largest(int(fact), self._data_parallel) > 0


def _are_alike(one: Way, other: Way) -> bool:
    """Tell whether two ways run the same operations, but for the tiles of losses."""
    return (one.is_tiled, one.compresses) == (other.is_tiled, other.compresses)
