"""Every storage has its place for as long as it is live, in a block little larger than the peak."""

from __future__ import annotations

import itertools
import random

import pytest

from thunder_memsave.planner.arena import ALIGNMENT, Arena, Lifetime, lifetimes, plan_arena
from thunder_memsave.planner.graph import Op, Program, Step, Storage

K = ALIGNMENT


def assert_apart(arena: Arena) -> None:
    """No two that are live at once share a byte, and all are within the block."""
    placed = list(zip(arena.lifetimes, arena.offsets, strict=True))
    for each, offset in placed:
        assert offset % ALIGNMENT == 0
        assert 0 <= offset <= arena.nbytes - each.nbytes
    for (a, at_a), (b, at_b) in itertools.combinations(placed, 2):
        if a.first <= b.last and b.first <= a.last:
            assert at_a + a.nbytes <= at_b or at_b + b.nbytes <= at_a, (a, b)


@pytest.mark.parametrize("seed", range(20))
def test_what_is_live_at_once_lies_apart(seed: int) -> None:
    rng = random.Random(seed)
    found = []
    for _ in range(rng.randrange(1, 120)):
        first = rng.randrange(60)
        length = rng.choice([1, 2, 3, 10, 60])
        found.append(Lifetime(K * rng.randrange(1, 40), first, min(first + length, 63)))
    arena = plan_arena(found)
    assert_apart(arena)
    live = [sum(e.nbytes for e in found if e.first <= t <= e.last) for t in range(64)]
    assert arena.least_bytes == max(live) <= arena.nbytes
    assert arena.ratio < 1.25


def test_nested_lifetimes_need_no_more_than_their_peak() -> None:
    # As forward and backward of layers: what is made first is freed last.
    found = [Lifetime(K * (3 + n % 4), n, 40 - n) for n in range(20)]
    assert plan_arena(found).ratio == 1.0


def test_an_order_that_wastes_memory_is_not_taken() -> None:
    # By size alone, the two of 4 would lie where the one of 5 leaves no room for them.
    found = [
        Lifetime(5 * K, 1, 1),
        Lifetime(4 * K, 0, 1),
        Lifetime(4 * K, 1, 2),
        Lifetime(9 * K, 2, 3),
    ]
    arena = plan_arena(found)
    assert_apart(arena)
    assert arena.nbytes == arena.least_bytes == 13 * K


def test_no_lifetimes_need_nothing() -> None:
    assert plan_arena([]).nbytes == 0
    assert plan_arena([]).ratio == 1.0


def op(index: int, *, makes: tuple[int, ...], reads: tuple[int, ...], peak_bytes: int) -> Op:
    return Op(
        symbol="op",
        index=index,
        arguments=(),
        results=(),
        reads=reads,
        makes=makes,
        peak_bytes=peak_bytes,
    )


def test_arguments_outputs_and_gradients_have_no_place() -> None:
    kinds = ("parameter", "activation", "activation", "gradient", "temporary")
    storages = tuple(
        Storage(nbytes=1000 * n, kind=kind, name=f"t{n}")  # type: ignore[arg-type]
        for n, kind in enumerate(kinds, start=1)
    )
    steps = (
        Step(op=op(0, makes=(1,), reads=(0,), peak_bytes=2000 + 700), makes=(1,), frees=()),
        Step(op=op(1, makes=(2,), reads=(1,), peak_bytes=3000), makes=(2,), frees=()),
        Step(op=op(2, makes=(4,), reads=(1,), peak_bytes=5000), makes=(4,), frees=(1,)),
        Step(op=op(3, makes=(3,), reads=(4,), peak_bytes=4000), makes=(3,), frees=(4, 3, 2)),
    )
    program = Program(
        storages=storages, steps=steps, num_forward=2, held=frozenset({0}), outputs=frozenset({2})
    )
    found = {(each.storage, each.nbytes, each.first, each.last) for each in lifetimes(program)}
    assert found == {(-1, 2 * K, 0, 0), (1, 4 * K, 0, 2), (4, 10 * K, 2, 3)}
