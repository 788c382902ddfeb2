"""Finds the operations whose recomputation rides in kernels of backward that run anyway, so that it takes no time.

    forward                       backward
    t1 = silu(t0)                 t5 = mul(t4, bw_t1)           # with bw_t1 = silu(t0): one kernel,
    t3 = mul(t1, t2)              t6 = silu_backward(t7, t0)    # which reads t0 anyway

Where neighbours that compute element by element are one kernel, it costs only the bytes that are not moved anyway. Of
an operation that rides these are no more than keeping its result would move: what forward writes for backward alone,
and what backward reads. So a plan that keeps all that fits recomputes it, and is smaller and no slower. The partitioner
of torch.compile has such a rule too (`torch/_functorch/partitioners.py`).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from functools import cached_property

from thunder_memsave.planner.graph import TrainingGraph

_NEVER = -1


def with_riding(graph: TrainingGraph, fusing: Collection[int]) -> TrainingGraph:
    """Return the graph with its riding operations marked.

    Args:
        graph: Forward and backward before recomputation.
        fusing: Indices into its operations: those that become one kernel with neighbours that do.
    """
    riding = _Riding(graph, fusing).found()
    if not riding:
        return graph
    ops = (replace(op, rides=n in riding) for n, op in enumerate(graph.ops))
    return replace(graph, ops=tuple(ops))


class _Riding:
    """Looks at one graph."""

    def __init__(self, graph: TrainingGraph, fusing: Collection[int]) -> None:
        self._graph, self._fusing = graph, fusing
        self._stays = graph.inputs | graph.outputs | graph.cotangents
        self._readers: dict[int, list[int]] = {}
        """Operations that are no views, by the storages that they read."""
        for number, op in enumerate(graph.ops):
            if op.repeat != "free":
                for storage in op.reads:
                    self._readers.setdefault(storage, []).append(number)

    def found(self) -> frozenset[int]:
        """Return the indices of the operations that ride."""
        riding: dict[int, int] = {}
        for number in reversed(range(self._graph.num_forward)):
            if number in self._fusing and (place := self._place(number, riding)) is not None:
                riding[number] = place
        return frozenset(riding)

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
