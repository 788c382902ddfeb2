"""Finds between which layers to keep what passes, so that no more layers run again at once than there is room for.

What passes from layer to layer may follow, in almost no time, from what is kept of all of them. Then computing again
begins with the first layer, and what it makes of each waits until backward is there. From the last layer on, each run
of layers that are computed again together is made as long as fits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from thunder_memsave.planner.blocks import Block
from thunder_memsave.planner.evaluate import Evaluated


@dataclass(kw_only=True)
class EarlyBytes:
    """What was seen in plans of what layers have made again when backward is not there yet."""

    blocks: Sequence[Block]
    made: np.ndarray = field(init=False)
    """By layer: the most bytes that wait for its backward."""
    others: np.ndarray = field(init=False)
    """By layer: the most that is live while backward is in it, but for those of the layers before it."""

    most_bytes: int = 0
    """In backward, of the last plan."""

    def __post_init__(self) -> None:
        self.made = np.zeros(len(self.blocks))

    def observe(self, found: Evaluated) -> None:
        """Follow a plan through backward."""
        blocks, program = self.blocks, found.program
        layer_of = {o: n for n, block in enumerate(blocks) for o in block.forward}
        layer_at = {p: n for n, block in enumerate(blocks) for p in block.backward}
        number = {s.op.index: n for n, s in enumerate(program.steps[: program.num_forward])}
        self.others = np.zeros(len(blocks))
        early, where, position = np.zeros(len(blocks)), dict[int, int](), 0
        self.most_bytes = max(found.profile.step_peak_bytes[program.num_forward :])
        begin, during = program.num_forward, found.profile.step_peak_bytes
        for step, nbytes in zip(program.steps[begin:], during[begin:], strict=True):
            here = layer_at[position]
            self.others[here] = max(self.others[here], nbytes - early[:here].sum())
            layer = layer_of[number[step.op.index]] if step.is_repeated else here
            if layer < here:
                where.update(dict.fromkeys(step.makes, layer))
                early[layer] += sum(program.storages[s].nbytes for s in step.makes)
            for storage in step.frees:
                if storage in where:
                    early[where.pop(storage)] -= program.storages[storage].nbytes
            if layer < here:
                self.made[layer] = max(self.made[layer], early[layer])
            position += not step.is_repeated

    def first_layers(self, budget_bytes: float) -> list[int]:
        """Of each run of layers the first, the last run first."""
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
