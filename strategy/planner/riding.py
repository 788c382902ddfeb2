"""Finds the operations whose recomputation is part of kernels of backward that run anyway: it takes no, or less, time.

    forward                       backward
    t1 = silu(t0)                 t5 = mul(t4, bw_t1)           # with bw_t1 = silu(t0): one kernel,
    t3 = mul(t1, t2)              t6 = silu_backward(t7, t0)    # which reads t0 anyway

Where neighbours that compute element by element are one kernel, it costs only the bytes that are not moved anyway. Of
an operation that rides these are no more than keeping its result would move: what forward writes for backward alone,
and what backward reads. So a plan that keeps all that fits recomputes it, and is smaller and no slower. The partitioner
of torch.compile has such a rule too (`torch/_functorch/partitioners.py`).

What a product reads has to be written for it, and can be one more result of such a kernel all the same, where the
product can wait for that. So recomputing it moves its own bytes alone:

    t5 = mm(t4, t3)               t6 = mm(t4, w)
    t6 = mm(t4, w)                t7 = mul(t6, bw_t1); bw_t3 = mul(bw_t1, t2)     # one kernel
    t7 = mul(t6, bw_t1)           t5 = mm(t4, bw_t3)

`passes/recompute_in_kernels.py` moves the product.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from functools import cached_property

from thunder_memsave.planner.graph import TrainingGraph

_NEVER = -1
_MOST_PASSED = 2
"""Products over which another one moves at most: what it reads is held meanwhile."""


def with_riding(graph: TrainingGraph, fusing: Collection[int]) -> TrainingGraph:
    """Return the graph with its operations marked that ride in kernels, or join them.

    Args:
        graph: Forward and backward before recomputation.
        fusing: Indices into its operations: those that become one kernel with neighbours that do.
    """
    found = _Riding(graph, fusing)
    riding = found.riding()
    joining = found.joining(riding)
    if not riding and not joining:
        return graph
    ops = list(graph.ops)
    for number in riding:
        ops[number] = replace(ops[number], rides=True)
    for number, (reader, nbytes) in joining.items():
        joins = graph.ops[reader].results[0]
        ops[number] = replace(ops[number], joins=joins, joined_bytes=nbytes)
    return replace(graph, ops=tuple(ops))


def without_joining(graph: TrainingGraph) -> TrainingGraph:
    """Return the graph with no operation marked that joins a kernel."""
    ops = (replace(op, joins="", joined_bytes=0) if op.joins else op for op in graph.ops)
    return replace(graph, ops=tuple(ops))


class _Riding:
    """Looks at one graph."""

    def __init__(self, graph: TrainingGraph, fusing: Collection[int]) -> None:
        self._graph, self._fusing = graph, fusing
        self._stays = graph.inputs | graph.outputs | graph.cotangents
        self._maker = {s: n for n, op in enumerate(graph.ops) for s in op.makes}
        self._readers: dict[int, list[int]] = {}
        """Operations that are no views, by the storages that they read."""
        for number, op in enumerate(graph.ops):
            if op.repeat != "free":
                for storage in op.reads:
                    self._readers.setdefault(storage, []).append(number)

    def riding(self) -> Mapping[int, int]:
        """Return the operations that ride, each with the place in backward of its kernel."""
        riding: dict[int, int] = {}
        for number in reversed(range(self._graph.num_forward)):
            if number in self._fusing and (place := self._place(number, riding)) is not None:
                riding[number] = place
        return riding

    def joining(self, riding: Mapping[int, int]) -> Mapping[int, tuple[int, int]]:
        """Return the operations that can join a kernel, each with the first operation of that, and the bytes moved."""
        found: dict[int, tuple[int, int]] = {}
        for number in sorted(self._fusing):
            if number >= self._graph.num_forward or number in riding:
                continue
            if (joined := self._joined(number, riding)) is not None:
                found[number] = joined
        return found

    def _joined(self, number: int, riding: Mapping[int, int]) -> tuple[int, int] | None:
        """Return the first operation of the kernel of backward that an operation can join, and the bytes moved."""
        op, storages = self._graph.ops[number], self._graph.storages
        if op.repeat != "yes" or len(op.makes) != 1 or op.makes[0] in self._stays:
            return None
        (made,) = op.makes
        later = [r for r in self._readers.get(made, ()) if r >= self._graph.num_forward]
        if len(later) != 1 or later[0] in self._fusing or not self._is_product(later[0]):
            return None
        (product,) = later
        maker = {s: self._maker.get(s, _NEVER) for s in op.reads}
        own = [r for s in op.reads for r in self._readers[s] if r > product and r in self._fusing]
        # Those that read what rides, which op reads, read what op reads.
        places = {self._after[r] for r in own}
        best: tuple[int, int] | None = None
        for place in sorted(places):
            first = min(r for r in own if self._after[r] == place)
            moved = sum(
                storages[s].nbytes
                for s in op.reads
                if not self._is_read(s, place) and riding.get(maker[s]) != place
            )
            nbytes = moved + storages[made].nbytes
            is_less = nbytes < op.moved_bytes and (best is None or nbytes < best[1])
            if is_less and self._may_wait(product, first):
                best = first, nbytes
        return best

    def _may_wait(self, product: int, first: int) -> bool:
        """Return whether a product can come after an operation of backward, over few other products."""
        made, passed = set(self._graph.ops[product].makes), 0
        for number in range(product + 1, first + 1):
            op = self._graph.ops[number]
            if not made.isdisjoint(op.reads):
                made.update(op.makes)
                if number == first:
                    return False
            elif op.repeat != "free" and number not in self._fusing:
                passed += 1
                if passed > _MOST_PASSED or not self._is_product(number):
                    return False
        return True

    def _is_product(self, number: int) -> bool:
        op = self._graph.ops[number]
        return op.flops > 0 and not op.communicates and op.repeat == "yes"

    def _place(self, number: int, riding: Mapping[int, int]) -> int | None:
        """Return the place in backward of the kernel in which an operation can ride; None: it cannot."""
        op, forward = self._graph.ops[number], self._graph.num_forward
        if op.repeat != "yes" or len(op.makes) != 1 or op.makes[0] in self._stays:
            return None
        (made,) = op.makes
        readers = self._readers.get(made, [])
        later = [r for r in readers if r >= forward]
        if not self._fusing_all(later):
            return None  # it would have to be written for those
        places = {self._after[r] for r in later}
        places.update(riding[r] for r in readers if r in riding)
        if len(places) != 1:
            return None
        (place,) = places
        nbytes = self._graph.storages[made].nbytes
        first = [r for r in readers if r < forward]
        is_written_for_it = self._fusing_all(first) and len({self._after[r] for r in first}) == 1
        moved = sum(self._graph.storages[s].nbytes for s in op.reads if not self._is_read(s, place))
        return place if moved <= (2 if is_written_for_it else 1) * nbytes else None

    def _fusing_all(self, numbers: Sequence[int]) -> bool:
        return all(n in self._fusing for n in numbers)

    def _is_read(self, storage: int, place: int) -> bool:
        """Return whether a kernel of backward reads a storage anyway."""
        later = (r for r in self._readers.get(storage, ()) if r >= self._graph.num_forward)
        return any(r in self._fusing and self._after[r] == place for r in later)

    @cached_property
    def _after(self) -> Mapping[int, int]:
        """The last operation that does not fuse of those that an operation depends on: equal for those that can fuse.

        In backward, those of backward alone count.
        """
        found: dict[int, int] = {}
        last_of: dict[int, int] = {}
        for number, op in enumerate(self._graph.ops):
            if number == self._graph.num_forward:
                last_of = {}
            after = max((last_of.get(s, _NEVER) for s in op.reads), default=_NEVER)
            found[number] = after
            does_fuse = number in self._fusing or op.repeat == "free"
            last_of.update(dict.fromkeys(op.makes, after if does_fuse else number))
        return found
