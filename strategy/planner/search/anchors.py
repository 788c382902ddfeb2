"""Finds the points of forward with the fewest live bytes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from thunder_memsave.planner.choices import Needs


def anchors(needs: Needs) -> list[tuple[int, ...]]:
    """Return, by the points of forward with the fewest live bytes, the storages that every recomputation passes."""
    last = {s: max((o for o in needs.readers(s)), default=-1) for s in needs.storages}
    alive: dict[int, None] = {}
    widths: list[tuple[int, tuple[int, ...]]] = []
    made = _made_at(needs)
    for op in needs.ops:
        alive.update(dict.fromkeys(made.get(op, ())))
        alive = {s: None for s in alive if last[s] > op}
        widths.append((sum(needs.graph.storages[s].nbytes for s in alive), tuple(alive)))
    return list(_narrow(widths))


def _made_at(needs: Needs) -> dict[int, list[int]]:
    made: dict[int, list[int]] = {}
    for storage in needs.storages:
        made.setdefault(needs.producer[storage], []).append(storage)
    return made


def _narrow(widths: Sequence[tuple[int, tuple[int, ...]]]) -> Iterator[tuple[int, ...]]:
    """Yield the storages at local minima of the width, without the wide ones among these."""
    outer = (1 << 62, ())
    around = zip([outer, *widths], widths, [*widths[1:], outer], strict=False)
    found = [here for before, here, after in around if here[1] and before[0] > here[0] <= after[0]]
    usual = sorted(width for width, _ in found)
    for width, live in found:
        if 4 * width <= 5 * usual[len(usual) // 4]:
            yield live
