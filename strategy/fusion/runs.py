"""Cuts a trace that runs into regions: neighbours that fuse, with the views between them.

What communicates, draws or writes keeps its place, and a region holds no more at any moment than its operations one by
one, or than the trace does at another moment.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from thunder.core.proxies import Proxy, TensorProxy
from thunder.core.symbol import BoundSymbol
from thunder.core.trace import TraceCtx

from thunder_memsave.budget.extract import Values, is_bookkeeping
from thunder_memsave.fusion.computed_again import computed_again
from thunder_memsave.fusion.memory import Memory, Placed, makers_of, readers_of, with_places
from thunder_memsave.fusion.neighbours import beside
from thunder_memsave.fusion.operators import Kind, is_pure, kind_of, reshapes
from thunder_memsave.fusion.region import bind, has_failed, known
from thunder_memsave.measure.used_gradients import uses_gradient
from thunder_memsave.ops.host_copies.states import copies_states
from thunder_memsave.ops.updated_parameters import update_of, updates_parameter
from thunder_memsave.passes.symbols import emptied

FEWEST = 2
"""Operators of a region at least."""
Placing = Callable[[Sequence[Placed]], list[Placed]]
MOST = 64
"""Operators of a region at most: inductor's time grows faster than their number."""


def fused(
    trace: TraceCtx, values: Values, *, compiles: bool = True, placing: Placing = with_places
) -> TraceCtx:
    """Return the trace with regions in place of runs; the very same trace where there are none.

    Args:
        trace: A forward or a backward in its final order, before values are deleted.
        values: With the trace's arguments; gets all values of the trace.
        compiles: Whether each region is compiled; otherwise each is taken to be one kernel.
        placing: Says of the symbols, in their order, where later steps let them write.

    Raises:
        CompileError: an operation does not run on tensors without data.
    """
    new = emptied(trace)
    moved = beside(placing(follow(trace, values)), values)
    placed = placing(computed_again(moved, values, new))
    cut = _Cut(placed, values, compiles=compiles)
    found = list(cut.symbols())
    if len(found) == len(placed):
        return trace
    taken_in = {id(placed[index].bsym) for index in cut.taken_in}
    new.bound_symbols = [bsym for bsym in found if id(bsym) not in taken_in]
    return new


def most_held(trace: TraceCtx, values: Values) -> int:
    """Return the most bytes that a trace holds beside what it finds, where results are written over what dies.

    Args:
        trace: As that of `fused`, or what that returned.
        values: With the trace's arguments; gets all values of the trace.
    """
    memory = Memory(with_places(follow(trace, values)), values)
    return memory.held_before(len(trace.bound_symbols))[1]


def follow(trace: TraceCtx, values: Values) -> list[Placed]:
    """Return the symbols of a trace as they stand; `values` gets all values of the trace."""
    return [_placed(bsym, index, values) for index, bsym in enumerate(trace.bound_symbols)]


def fuses(bsym: BoundSymbol, values: Values) -> bool:
    """Return whether a symbol that is no bookkeeping fuses with neighbours; `values` has what it reads."""
    if uses_gradient(bsym) or not _is_of_tensors(bsym):
        return False
    arguments = [values.by_name.get(a.name) for a in bsym.flat_proxy_args]
    return kind_of(bsym, values.known.profile(bsym, arguments), arguments) is Kind.FUSES


def _is_of_tensors(bsym: BoundSymbol) -> bool:
    proxies = (*bsym.flat_proxy_args, *bsym.flat_proxy_outs)
    return bool(bsym.flat_proxy_args) and all(isinstance(p, TensorProxy) for p in proxies)


def _placed(bsym: BoundSymbol, index: int, values: Values) -> Placed:
    if uses_gradient(bsym):
        peak_bytes = update_of(bsym).peak_bytes if updates_parameter(bsym) else 0
        return Placed(bsym, Kind.OTHER, may_be_passed=True, peak_bytes=peak_bytes)
    is_copy = copies_states(bsym)
    if is_bookkeeping(bsym) or not bsym.flat_proxy_outs:  # such as one that keeps a gradient
        return Placed(bsym, Kind.OTHER, may_be_passed=is_copy)
    arguments = [values.by_name.get(a.name) for a in bsym.flat_proxy_args]
    profile = values.known.profile(bsym, arguments)
    values.run(bsym, index, "temporary")
    is_of_tensors = _is_of_tensors(bsym)
    kind = kind_of(bsym, profile, arguments) if is_of_tensors else Kind.OTHER
    may_be_passed = is_copy or (is_of_tensors and is_pure(bsym, profile))
    return Placed(bsym, kind, may_be_passed, profile.peak_bytes)


@dataclass(frozen=True, slots=True)
class _Span:
    """A part of a run, as a region."""

    views_before: Sequence[BoundSymbol]
    """Views of what the region reads, for later readers."""
    region: BoundSymbol
    views_after: Sequence[BoundSymbol]
    """Views of its results, for later readers."""
    taken_in: Sequence[int]
    """Indices of views that are in the region now: those made before for it alone, and those through which alone its
    results are read."""


class _Cut:
    """Cuts one trace."""

    def __init__(self, placed: Sequence[Placed], values: Values, *, compiles: bool) -> None:
        symbols = self._symbols = [p.bsym for p in placed]
        self._kinds = [p.kind for p in placed]
        self._values, self._compiles = values, compiles
        self._memory = Memory(placed, values)
        self._before, self._most = self._memory.held_before(len(symbols))
        self.taken_in: set[int] = set()
        """Indices of the views that are in regions alone."""
        self._readers, self._maker = readers_of(symbols), makers_of(symbols)
        self._last_of_storage: dict[int, int] = {}
        for name, readers in self._readers.items():
            if (value := values.by_name.get(name)) is not None:
                last = self._last_of_storage.get(value.storage, -1)
                self._last_of_storage[value.storage] = max(last, readers[-1])

    def symbols(self) -> Iterator[BoundSymbol]:
        """Yield the symbols of the new trace."""
        start, end = 0, len(self._symbols)
        while start < end:
            stop, found = self._span(start)
            if found is None:
                yield from self._symbols[start:stop]
            else:
                self.taken_in.update(found.taken_in)
                yield from (*found.views_before, found.region, *found.views_after)
            start = stop

    def _span(self, start: int) -> tuple[int, _Span | None]:
        """Return the longest region that begins here, with the index after it; None: what is between stays as it is."""
        if self._kinds[start] is not Kind.FUSES:
            return start + 1, None
        ends = self._ends(start)
        while ends:
            stop = next((e for e in reversed(ends) if self._holds_no_more(start, e)), None)
            if stop is None:
                break
            span = self._made(start, stop)
            if self._may_run(span.region, start, stop):
                return stop, span
            if has_failed(span.region):
                return stop, None
            ends = [e for e in ends if e < stop][: len(ends) // 2]
        return start + 1, None

    def _ends(self, start: int) -> list[int]:
        """Return the indices after which a region may end, all after an operator."""
        ends, num_operators = [], 0
        for index in range(start, len(self._symbols)):
            if self._kinds[index] is Kind.OTHER or num_operators == MOST:
                break
            if self._kinds[index] is Kind.FUSES:
                num_operators += 1
                if num_operators >= FEWEST:
                    ends.append(index + 1)
        return ends

    def _holds_no_more(self, start: int, stop: int) -> bool:
        """Return whether the results are at most what the operations one by one hold beside what was there before.

        They may be more where the trace holds as much at another moment.
        """
        outputs = self._outputs(start, stop)
        if not outputs or self._divides_sum(start, stop):
            return False
        return sum(map(self._nbytes, outputs)) <= self._room(start, stop)

    def _room(self, start: int, stop: int) -> int:
        """Return the bytes that a region may allocate."""
        most, _ = self._memory.held(range(start, stop), self._memory.last, stop)
        return max(most, self._most - self._before[start])

    def _divides_sum(self, start: int, stop: int) -> bool:
        """Return whether a part that is left out and its sum are not on one side: both would be made then."""
        memory, span = self._memory, range(start, stop)
        inside = [s for index in span for s in memory.uses(index) & memory.absent]
        made = {s for index in span for s in memory.made[index]}
        return any(s not in made or memory.last[s] >= stop for s in inside)

    def _storage(self, proxy: Proxy) -> int:
        return self._values.by_name[proxy.name].storage

    def _nbytes(self, proxy: Proxy) -> int:
        return self._values.storages[self._storage(proxy)].nbytes

    def _outputs(self, start: int, stop: int) -> list[Proxy]:
        """Return what operators make in new memory that something later reads, itself or through views."""
        made = [
            o
            for index in range(start, stop)
            if self._kinds[index] is Kind.FUSES
            for o in self._symbols[index].flat_proxy_outs
        ]
        return [o for o in made if self._last_of_storage.get(self._storage(o), -1) >= stop]

    def _made(self, start: int, stop: int) -> _Span:
        outputs, after = self._read_through_views(self._outputs(start, stop))
        inside = [i for i in range(start, stop) if i not in self.taken_in]
        symbols = [self._symbols[i] for i in (*inside, *(i for i in after if i >= stop))]
        body = self._needed(symbols, {o.name for o in outputs})
        views = self._views([i for i in inside if i not in after], start, stop)
        taken_in = self._read_here_alone(body, [*views[0], *views[1]], start, stop)
        body = [*(self._symbols[i] for i in taken_in), *body]
        made = {o.name for bsym in body for o in bsym.flat_proxy_outs}
        read = {a.name: a for bsym in body for a in bsym.flat_proxy_args}
        inputs = [a for name, a in read.items() if name not in made]
        region = bind(
            body,
            inputs,
            outputs,
            self._values.by_name,
            num_operators=self._kinds[start:stop].count(Kind.FUSES),
        )
        return _Span(views[0], region, views[1], [*taken_in, *after])

    def _read_through_views(self, outputs: Sequence[Proxy]) -> tuple[list[Proxy], list[int]]:
        """Return what is read of results, and the indices of the views through which alone some are: other shapes."""
        found, taken_in = [], []
        for each in outputs:
            output = each
            while len(readers := set(self._readers[output.name])) == 1:
                (reader,) = readers
                is_view = self._kinds[reader] is Kind.VIEW and reshapes(self._symbols[reader])
                # Inductor lays a shape without numbers out otherwise.
                has_numbers = 0 not in output.shape
                if not (is_view and has_numbers) or reader in self.taken_in:
                    break
                taken_in.append(reader)
                (output,) = self._symbols[reader].flat_proxy_outs
            found.append(output)
        return found, taken_in

    def _read_here_alone(
        self, body: Sequence[BoundSymbol], beside: Sequence[BoundSymbol], start: int, stop: int
    ) -> list[int]:
        """Return the indices of the views that are made before a span and read in its region alone.

        Args:
            body: The region.
            beside: Views of the span that stay in the trace.
            start: Index of the span's first symbol.
            stop: The index after its last one.
        """
        stays = {id(bsym) for bsym in beside}
        here = {i for i in range(start, stop) if id(self._symbols[i]) not in stays}
        found: set[int] = set()
        stack = list(body)
        while stack:
            for proxy in stack.pop().flat_proxy_args:
                maker = self._maker.get(proxy.name, stop)
                is_view = maker < start and self._kinds[maker] is Kind.VIEW
                if not is_view or maker in self.taken_in:
                    continue
                bsym = self._symbols[maker]
                readers = [r for o in bsym.flat_proxy_outs for r in self._readers[o.name]]
                if all(r in here or r in found for r in readers):
                    found.add(maker)
                    stack.append(bsym)
        return sorted(found)

    def _needed(self, symbols: Sequence[BoundSymbol], names: set[str]) -> list[BoundSymbol]:
        """Return the symbols from which the named values follow, in order."""
        needed, found = set(names), []
        for bsym in reversed(symbols):
            if any(o.name in needed for o in bsym.flat_proxy_outs):
                needed.update(a.name for a in bsym.flat_proxy_args)
                found.append(bsym)
        return found[::-1]

    def _views(
        self, inside: Sequence[int], start: int, stop: int
    ) -> tuple[list[BoundSymbol], list[BoundSymbol]]:
        """Return the views that later readers need: of what was there before, and of what the region makes."""
        views = [self._symbols[i] for i in inside if self._kinds[i] is Kind.VIEW]
        later = {
            o.name
            for b in views
            for o in b.flat_proxy_outs
            if any(r >= stop for r in self._readers[o.name])
        }
        made = {self._storage(o) for o in self._outputs(start, stop)}
        before: list[BoundSymbol] = []
        after: list[BoundSymbol] = []
        for bsym in self._needed(views, later):
            is_of_region = self._storage(bsym.flat_proxy_args[0]) in made
            (after if is_of_region else before).append(bsym)
        return before, after

    def _may_run(self, region: BoundSymbol, start: int, stop: int) -> bool:
        """Return whether a region can be compiled, and has room for what it allocates, as to concatenate on a CPU."""
        if not self._compiles:
            return True
        compiled = known(region.sym.name)
        if compiled is None or not compiled.is_compiled():
            return False
        arguments = [self._values.by_name[a.name] for a in region.flat_proxy_args]
        profile = self._values.known.profile(region, arguments)
        most = sum(profile.made_bytes)
        return profile.peak_bytes <= most or profile.peak_bytes <= self._room(start, stop)
