"""Ways are tried as long as they can help: giving cached memory back does not where tensors alone are too many."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from thunder_memsave.budget.way_search import WaySearch
from thunder_memsave.budget.ways import Way
from thunder_memsave.planner.devices import DEVICES

BUDGET_BYTES = 100


@dataclass
class Call:
    """A call that no way makes fit, whose tensors take some bytes in tiles, and some without."""

    whole_bytes: int
    tiled_bytes: int | None
    asked: list[Way] = field(default_factory=list)

    def in_way(self, way: Way) -> Any:
        if way.is_tiled and self.tiled_bytes is None:
            return None
        return SimpleNamespace(way=way, loss_tile_bytes=0)

    def tried(self, attempt: Any) -> Any:
        self.asked.append(attempt.way)
        peak_bytes = self.tiled_bytes if attempt.way.is_tiled else self.whole_bytes
        call = SimpleNamespace(profile=SimpleNamespace(peak_bytes=peak_bytes))
        return SimpleNamespace(attempt=attempt, run=SimpleNamespace(more_bytes=9, call=call))

    def ways(self) -> list[tuple[bool, bool]]:
        first: Any = self
        WaySearch(
            first,
            self.tried,
            budget_bytes=BUDGET_BYTES,
            is_reserved=True,
            device=DEVICES["h100"],
            data_parallel=None,
        ).best()
        return [(way.is_tiled, way.empties_cache) for way in self.asked]


@pytest.mark.parametrize(
    ("whole_bytes", "tiled_bytes", "expected"),
    [
        (90, 80, [(False, False), (True, False), (False, True), (True, True)]),
        (101, 80, [(False, False), (True, False), (True, True)]),
        (101, 101, [(False, False), (True, False)]),
        (90, None, [(False, False), (False, True)]),
    ],
)
def test_cached_memory_is_given_back_where_tensors_fit(
    whole_bytes: int, tiled_bytes: int | None, expected: list[tuple[bool, bool]]
) -> None:
    assert Call(whole_bytes, tiled_bytes).ways() == expected
