"""Finds the layers whose inputs to keep, so that no more layers are recomputed at once than there is room for.

The storages that pass from layer to layer can be cheap to recompute from what all layers keep. Then recomputation
begins with the first layer, and its results in each layer are live until backward gets there. From the last layer on,
each run of layers that are recomputed together is made as long as fits.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from thunder_memsave.planner.search.evaluate import Evaluated
from thunder_memsave.planner.search.find_layers import Block


@dataclass(kw_only=True)
class EarlyBytes:
    """Bytes that plans were seen to recompute in layers that backward has not reached yet."""

    blocks: Sequence[Block]
    made: np.ndarray = field(init=False)
    """The most recomputed bytes of each layer that were live before its backward."""
    others: np.ndarray = field(init=False)
    """The most bytes live during each layer's backward, without those recomputed in the layers before it."""

    most_bytes: int = 0
    """Peak of backward of the last plan."""

    def __post_init__(self) -> None:
        self.made = np.zeros(len(self.blocks))

    def observe(self, found: Evaluated) -> None:
        """Simulate the backward of a plan, and note the recomputed bytes of each layer."""
        backward = found.evaluator.backward(found.keep)
        graph, position = found.evaluator.needs.graph, 0
        self.most_bytes = max(backward.during)
        self.others = np.zeros(len(self.blocks))
        early, dies = np.zeros(len(self.blocks)), dict[int, list[tuple[int, int]]]()
        for index, ((op, is_again), nbytes) in enumerate(
            zip(backward.steps, backward.during, strict=True)
        ):
            here = self._layer_at[position]
            self.others[here] = max(self.others[here], nbytes - early[:here].sum())
            layer = self._layer_of[op] if is_again else here
            for storage in graph.ops[op].makes if layer < here else ():
                last = backward.last.get(storage, -1)
                if last > index and storage not in found.keep:
                    early[layer] += graph.storages[storage].nbytes
                    dies.setdefault(last, []).append((layer, graph.storages[storage].nbytes))
            for where, bytes_ in dies.pop(index, ()):
                early[where] -= bytes_
            if layer < here:
                self.made[layer] = max(self.made[layer], early[layer])
            position += not is_again

    @cached_property
    def _layer_of(self) -> Mapping[int, int]:
        """Layer by operation of forward."""
        return {o: n for n, block in enumerate(self.blocks) for o in block.forward}

    @cached_property
    def _layer_at(self) -> Mapping[int, int]:
        """Layer by position of backward."""
        return {p: n for n, block in enumerate(self.blocks) for p in block.backward}

    def first_layers(self, budget_bytes: float) -> list[int]:
        """Return the first layer of each run that fits the budget, the last run first."""
        room = np.maximum(0.0, budget_bytes - self.others)
        firsts, last = [], len(self.blocks) - 1
        while last > 0:
            first = last
            while first > 0 and self._fits(first - 1, last, room):
                first -= 1
            if first > 0:
                firsts.append(first)
            last = first - 1
        return firsts

    def _fits(self, first: int, last: int, room: np.ndarray) -> bool:
        waiting = np.cumsum(self.made[first : last + 1])
        return bool((waiting[:-1] <= room[first + 1 : last + 1]).all())
