"""Copies an optimizer's states beside what backward computes, where backward updates weights with states on the host.

    t8 = linear_backward(...)                               t_a_states = fetch_states("t_a", ...)
    update_parameter(t8, "t_a", ...)                        t8 = linear_backward(...)
    t9 = linear_backward(...)                 becomes       t_b_states = fetch_states("t_b", ...)
    update_parameter(t9, "t_b", ...)                        update_parameter(t8, "t_a", ..., t_a_states)
                                                            t_a_stored = store_states(t_a_states, "t_a")
                                                            t9 = linear_backward(...)
                                                            update_parameter(t9, "t_b", ..., t_b_states)
                                                            ...
                                                            wait_states(t_a_stored, "t_a")

So while one weight is updated, the states of the next come, and those of the one before leave, as in an
`optimizer.step()` with states on the host; and all of that runs beside what computes. States of small weights are
fetched further ahead, up to `AHEAD_BYTES` of them, and as many leave later. Where a plan has too little room, fetches
are later, and waits sooner: at last both are around their update.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from thunder.core import devices, prims
from thunder.core.symbol import BoundSymbol
from thunder.core.trace import TraceCtx, TraceProvenance, tracectx

from thunder_memsave.ops.host_copies.states import fetch_states, store_states, wait_states
from thunder_memsave.ops.host_copies.symbols import bytes_proxy
from thunder_memsave.ops.updated_parameters import (
    update_of,
    updated_name,
    updates_parameter,
    with_fetched,
)
from thunder_memsave.passes.overlap.room import Room, left_at
from thunder_memsave.passes.symbols import emptied

AHEAD_BYTES = 128 * 2**20
"""Bytes of states that are fetched before others are used, and that leave after, unless one weight's are more."""
_UNPACKING = (prims.PrimIDs.UNPACK_TRIVIAL, prims.PrimIDs.UNPACK_SEQUENCE)
_BEFORE_ALL = 16
"""Parts of what computes before the first update; the first fetches may be after the first quarter of them."""


@dataclass(frozen=True, slots=True)
class _Update:
    """An update whose states are on the host."""

    at: int
    """Index of its symbol."""
    nbytes: int
    """Bytes of its states on the device."""


def copy_states(backward: TraceCtx, room: Room | None) -> TraceCtx:
    """Return a backward that fetches states before updates, and stores them after; the same one if none are away.

    Args:
        backward: In its final order, with updates, before values are deleted after their last use.
        room: Bytes that a budget leaves at each operation; None: there is no limit.
    """
    symbols = backward.bound_symbols
    updates = [
        _Update(index, nbytes)
        for index, bsym in enumerate(symbols)
        if updates_parameter(bsym) and (nbytes := update_of(bsym).states_bytes)
    ]
    if not updates:
        return backward
    places = _Places(updates, symbols, room)
    before: dict[int, list[BoundSymbol]] = {}
    """Symbols to add, by the index of that before which they come."""
    instead: dict[int, list[BoundSymbol]] = {}
    new = emptied(backward)
    with tracectx(new):
        for number, update in enumerate(updates):
            bsym = symbols[update.at]
            name, place = updated_name(bsym), str(devices.to_torch_device(bsym.args[0].device))
            states = bytes_proxy(f"{name}_states", update.nbytes, place)
            stored = bytes_proxy(f"{name}_stored", update.nbytes, place)
            fetch = fetch_states.bind(name, update.nbytes, place, output=states)
            before.setdefault(places.fetch(number), []).append(fetch)
            instead[update.at] = [
                with_fetched(bsym, states),
                store_states.bind(states, name, output=stored),
            ]
            wait = wait_states.bind(stored, name, output=None)
            before.setdefault(places.wait(number), []).append(wait)
        for index, bsym in enumerate(symbols):
            # What frees memory first.
            added = sorted(before.get(index, ()), key=lambda b: b.sym.id == fetch_states.id)
            new.bound_symbols += [*added, *instead.get(index, [bsym])]
    new.set_provenance(TraceProvenance("Pass copy_states"))
    return new


class _Places:
    """Finds where copies begin and end, as far apart as is useful, and as the room allows."""

    def __init__(
        self, updates: Sequence[_Update], symbols: Sequence[BoundSymbol], room: Room | None
    ) -> None:
        self._updates = updates
        unpacked = (n for n, bsym in enumerate(symbols) if bsym.sym.id in _UNPACKING)
        self._begin = max(unpacked, default=-1) + 1
        self._end = len(symbols) - 1  # of what computes: the last symbol returns
        self._waited = 0
        self._left = None if room is None else left_at(room, symbols)

    def fetch(self, number: int) -> int:
        """Return the index of the symbol before which to fetch the states of an update."""
        update = self._updates[number]
        ahead, first = 0, number
        while first > 0 and (first == number or ahead <= AHEAD_BYTES):
            first -= 1
            ahead += self._updates[first].nbytes
        places = [other.at for other in self._updates[first:number]]
        if first == 0 and ahead <= AHEAD_BYTES:
            before = (places or [update.at])[0] - self._begin
            parts = range(_BEFORE_ALL // 4, _BEFORE_ALL)
            places[:0] = [self._begin + before * part // _BEFORE_ALL for part in parts]
        for at in places:
            if self._takes(update.nbytes, at, update.at):
                return at
        return update.at

    def wait(self, number: int) -> int:
        """Return the index of the symbol before which to wait for the copies back of an update."""
        update = self._updates[number]
        passed, places = 0, list[int]()
        for other in self._updates[number + 1 :]:
            places.append(other.at + 1)
            passed += other.nbytes
            if passed >= max(update.nbytes, AHEAD_BYTES):
                break
        else:
            places.append(self._end)
        for place in reversed(places):
            at = max(place, self._waited)  # copies end in the order in which they began
            if self._takes(update.nbytes, update.at + 1, at):
                self._waited = at
                return at
        return update.at + 1

    def _takes(self, nbytes: int, start: int, end: int) -> bool:
        """Tell whether so many bytes are left between two symbols, and take them."""
        if self._left is None:
            return True
        here = self._left[start:end]
        if len(here) and int(here.min()) < nbytes:
            return False
        here -= nbytes
        return True
