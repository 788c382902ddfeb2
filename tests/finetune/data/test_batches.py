from __future__ import annotations

from collections import Counter

import pytest

from harness.language_model import sample_of
from thunder_memsave.finetune.data.batches import (
    NO_ROW,
    Sharding,
    make_batch,
    num_steps_per_epoch,
    ordered_rows,
    step_rows,
)
from thunder_memsave.finetune.data.packing import pad
from thunder_memsave.finetune.data.tokenize import IGNORED


def shardings(world_size: int, global_batch_size: int, micro_batch_size: int) -> list[Sharding]:
    return [
        Sharding(
            global_batch_size=global_batch_size,
            micro_batch_size=micro_batch_size,
            rank=rank,
            world_size=world_size,
        )
        for rank in range(world_size)
    ]


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("num_rows", [1, 5, 12, 25])
def test_every_row_is_seen_exactly_once_per_epoch_over_all_ranks(
    world_size: int, num_rows: int
) -> None:
    ranks = shardings(world_size, 6, 1)
    num_steps = num_steps_per_epoch(num_rows, ranks[0])
    for epoch in range(2):
        seen: Counter[int] = Counter()
        for step in range(epoch * num_steps, (epoch + 1) * num_steps):
            for sharding in ranks:
                for chosen in step_rows(num_rows, sharding, seed=1, step=step):
                    assert len(chosen) == sharding.micro_batch_size
                    seen.update(chosen)
        del seen[NO_ROW]
        assert seen == Counter(range(num_rows))


@pytest.mark.parametrize("num_rows", [1, 7, 8])
def test_evaluation_sees_every_row_once_in_as_many_passes_on_every_rank(num_rows: int) -> None:
    passes = [list(ordered_rows(num_rows, sharding)) for sharding in shardings(2, 8, 2)]
    assert len(passes[0]) == len(passes[1])
    seen = Counter(row for rank in passes for chosen in rank for row in chosen)
    del seen[NO_ROW]
    assert seen == Counter(range(num_rows))


def test_the_global_batch_is_the_same_on_any_number_of_ranks() -> None:
    def batch(world_size: int, step: int) -> list[int]:
        ranks = shardings(world_size, 6, 1)
        shares = [step_rows(20, sharding, seed=4, step=step) for sharding in ranks]
        return sorted(row for share in shares for chosen in share for row in chosen)

    for step in range(8):
        assert batch(1, step) == batch(2, step) == batch(3, step)


def test_epochs_and_seeds_have_orders_of_their_own() -> None:
    (sharding,) = shardings(1, 20, 20)
    orders = [
        step_rows(20, sharding, seed=seed, step=step)[0] for seed in (1, 2) for step in (0, 1)
    ]
    assert len({tuple(order) for order in orders}) == 4
    assert step_rows(20, sharding, seed=1, step=0)[0] == orders[0]


def test_a_row_of_padding_has_no_targets() -> None:
    rows = pad([sample_of([5, 6, 7])], length=4, pad_id=0)
    batch = make_batch(rows, [0, NO_ROW])
    assert batch.targets.tolist() == [[6, 7, IGNORED, IGNORED], [IGNORED] * 4]
    assert batch.input_ids.tolist() == [[5, 6, 7, 0], [0] * 4]
