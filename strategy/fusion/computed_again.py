"""Computes a value again in a later run that reads its operands anyway, instead of writing it for that run.

    t1 = silu(t0)                    t1 = silu(t0)
    t3 = mul(t1, t2)                 t3 = mul(t1, t2)         # t1 is in this kernel alone
    t4 = mm(t3, w)            ->     t4 = mm(t3, w)
    t5 = mul(t4, t1)                 t1_again = silu(t0)      # and this one is in the kernel that follows
    t6 = silu_backward(t7, t0)       t5 = mul(t4, t1_again)
                                     t6 = silu_backward(t7, t0)

A kernel fewer writes it, one fewer reads it, and it takes no memory between them. The bits are the same, as of all that
fuses.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from thunder.core.proxies import Proxy
from thunder.core.trace import TraceCtx, tracectx

from thunder_memsave.budget.extract import Values
from thunder_memsave.fusion.memory import Placed, readers_of
from thunder_memsave.fusion.operators import Kind
from thunder_memsave.ops.updated_parameters import updated_name, updates_parameter
from thunder_memsave.passes.symbols import renamed


@dataclass(frozen=True, slots=True)
class _Again:
    """A symbol to be computed again."""

    number: int
    place: int
    """The number of the symbol before which it is computed."""
    readers: Sequence[int]
    """In one later run, in order."""


def computed_again(symbols: Sequence[Placed], values: Values, trace: TraceCtx) -> list[Placed]:
    """Return the symbols with those that are computed again.

    Args:
        symbols: Of a trace, in the order in which they will be cut into regions.
        values: All values of the trace; gets the new ones.
        trace: That of the result; gives the new names.
    """
    before: dict[int, list[Placed]] = defaultdict(list)
    found = list(symbols)
    with tracectx(trace):
        for again in _Runs(symbols, values).again():
            place, placed = again.place, symbols[again.number]
            (result,) = placed.bsym.flat_proxy_outs
            named: dict[str, Proxy] = {
                result.name: result.replace_name(f"{result.name}_at_{place}")
            }
            copy = renamed(placed.bsym, named)
            values.run(copy, place, "temporary")
            before[place].append(replace(placed, bsym=copy))
            for reader in again.readers:
                bsym = renamed(found[reader].bsym, named, skip_output=True)
                found[reader] = replace(found[reader], bsym=bsym)
    return [each for number, one in enumerate(found) for each in (*before[number], one)]


class _Runs:
    """Symbols by number, and the runs that they are in: neighbours that may become one region."""

    def __init__(self, symbols: Sequence[Placed], values: Values) -> None:
        self._symbols, self._values = symbols, values
        self._run = list(accumulate(int(p.kind is Kind.OTHER) for p in symbols))
        self._readers = readers_of([placed.bsym for placed in symbols])
        self._fusing: dict[int, dict[int, int]] = defaultdict(dict)
        """The number of a storage's last reader that fuses, by storage and run."""
        self._written = set(values.written_at)
        for number, placed in enumerate(symbols):
            if placed.kind is Kind.FUSES:
                for storage in values.storages_of(placed.bsym.flat_proxy_args):
                    self._fusing[storage][self._run[number]] = number
            if updates_parameter(placed.bsym):
                self._written.add(values.by_name[updated_name(placed.bsym)].storage)

    def again(self) -> Iterator[_Again]:
        """Yield what is to be computed again, in the order of the symbols: of what is not computed again itself."""
        made: set[tuple[str, int]] = set()
        for number, placed in enumerate(self._symbols):
            found = self._again_of(number)
            runs = [self._run[again.place] for again in found]
            if any((a.name, run) in made for a in placed.bsym.flat_proxy_args for run in runs):
                continue
            made.update((o.name, run) for o in placed.bsym.flat_proxy_outs for run in runs)
            yield from found

    def _again_of(self, number: int) -> list[_Again]:
        """Return a symbol for each later run that reads it; none where one cannot compute it."""
        placed = self._symbols[number]
        if placed.kind is not Kind.FUSES or len(placed.bsym.flat_proxy_outs) != 1:
            return []
        found = []
        for run, readers in self._later(number).items():
            place = self._place(number, run, readers)
            if place is None:
                return []
            found.append(_Again(number, place, readers))
        return found

    def _later(self, number: int) -> Mapping[int, list[int]]:
        """Return the readers in later runs, by run; none if no reader is in the symbol's own."""
        (result,) = self._symbols[number].bsym.flat_proxy_outs
        by_run: dict[int, list[int]] = defaultdict(list)
        for reader in dict.fromkeys(self._readers[result.name]):
            by_run[self._run[reader]].append(reader)
        own = by_run.pop(self._run[number], None)
        return by_run if own is not None else {}

    def _place(self, number: int, run: int, readers: Sequence[int]) -> int | None:
        """Return where in a run that reads a result, and its operands, these are as they were; None: not so."""
        if any(self._symbols[r].kind is not Kind.FUSES for r in readers):
            return None
        operands = self._values.storages_of(self._symbols[number].bsym.flat_proxy_args)
        last = [self._fusing[s].get(run) for s in operands]
        if operands & self._written or None in last:
            return None
        return min(readers[0], *(n for n in last if n is not None))
