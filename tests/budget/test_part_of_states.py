"""Whose states go to the host: the fewest that free what is lacking, with room for copies that overlap."""

from __future__ import annotations

import random
from itertools import combinations
from math import inf

import pytest

from thunder_memsave.budget.offload.part_of_states import States, StatesSize, fewest
from thunder_memsave.optim.on_host import Kind
from thunder_memsave.planner.graph import StepMemory

F32 = "torch.float32"
LAYER: dict[Kind, StatesSize] = {
    ((256, 64), F32): StatesSize(10, 40),
    ((64, 256), F32): StatesSize(10, 20),
    ((64, 64), F32): StatesSize(3, 40),
    ((999, 64), F32): StatesSize(150, 2),
}
GATE, DOWN, ATTENTION, HEAD = LAYER


@pytest.mark.parametrize(
    ("least_bytes", "expected"),
    [
        (1, [ATTENTION]),
        (111, [ATTENTION]),  # 120 less three at once
        (112, [DOWN]),
        (171, [ATTENTION, DOWN]),
        (291, [GATE]),
        (371, [ATTENTION, GATE]),
        (491, [DOWN, GATE]),  # 600, not the head, which takes 450 at once
        (700, [GATE, HEAD]),  # without that room
        (1020, [ATTENTION, DOWN, GATE, HEAD]),
        (5000, [ATTENTION, DOWN, GATE, HEAD]),
    ],
)
def test_the_fewest_that_are_enough(least_bytes: int, expected: list[Kind]) -> None:
    assert fewest(LAYER, least_bytes, most_bytes=inf) == tuple(sorted(expected))


def test_without_room_for_copies_that_overlap_where_nothing_else_is_enough() -> None:
    one: dict[Kind, StatesSize] = {HEAD: StatesSize(150, 2), ATTENTION: StatesSize(3, 10)}
    assert fewest(one, 200, most_bytes=inf) == (HEAD,)


def test_as_an_exhaustive_search_finds() -> None:
    generator = random.Random(0)
    for _ in range(200):
        kinds: list[Kind] = [((n, 4), F32) for n in range(generator.randint(1, 6))]
        sizes = {k: StatesSize(generator.randint(1, 50), generator.randint(1, 9)) for k in kinds}
        least_bytes = generator.randint(1, 600)
        most_bytes = generator.choice((inf, 300, 1000))
        found = fewest(sizes, least_bytes, most_bytes=most_bytes)
        for at_once in (3, 0):
            enough = [
                sum(sizes[k].nbytes for k in some)
                for num in range(1, len(kinds) + 1)
                for some in combinations(kinds, num)
                if sum(sizes[k].nbytes for k in some) <= most_bytes
                and sum(sizes[k].nbytes for k in some)
                - at_once * max(sizes[k].of_one for k in some)
                >= least_bytes
            ]
            if enough:
                assert sum(sizes[k].nbytes for k in found) == min(enough)
                break
        else:
            sums = [
                sum(sizes[k].nbytes for k in some)
                for num in range(len(kinds) + 1)
                for some in combinations(kinds, num)
            ]
            most = max(each for each in sums if each <= most_bytes)
            assert sum(sizes[k].nbytes for k in found) == most


def test_of_many_kinds_those_with_the_most_bytes() -> None:
    sizes: dict[Kind, StatesSize] = {((n, 4), F32): StatesSize(100 + n, 1) for n in range(30)}
    assert fewest(sizes, 1, most_bytes=inf)
    assert len(fewest(sizes, 3000, most_bytes=inf)) == 30, (
        "all where none of the largest are enough"
    )
    assert len(fewest(sizes, 99_999, most_bytes=inf)) == 30
    assert fewest(sizes, 99_999, most_bytes=150) == (((29, 4), F32),)
    assert fewest(sizes, 1, most_bytes=99) == ()


def test_sizes_are_in_proportion_to_the_parameters() -> None:
    kinds: dict[Kind, int] = {((10, 10), F32): 2, ((100,), "torch.bfloat16"): 4}

    def memory(on_host: object) -> StepMemory:
        assert on_host == tuple(kinds)
        return StepMemory(host_bytes=3200 + 77)

    states = States(memory=memory, move=lambda _: None, kinds=lambda: kinds)
    assert states.sizes(StepMemory(host_bytes=77)) == {
        ((10, 10), F32): StatesSize(800, 2),
        ((100,), "torch.bfloat16"): StatesSize(400, 4),
    }
    assert States(memory=memory, move=lambda _: None, kinds=dict).sizes(StepMemory()) == {}
