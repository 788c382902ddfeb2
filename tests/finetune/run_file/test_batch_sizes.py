from __future__ import annotations

import pytest

from thunder_memsave.finetune.run_file.batch_sizes import batch_sizes
from thunder_memsave.finetune.run_file.config import TrainConfig
from thunder_memsave.settings.problems import ConfigError


@pytest.mark.parametrize(
    ("given", "world_size", "expected"),
    [
        # (global, micro, accumulation)
        ((None, None, None), 1, (16, 1, 16)),
        ((None, None, None), 4, (16, 1, 4)),
        ((8, None, None), 2, (8, 1, 4)),
        ((None, 4, None), 2, (16, 4, 2)),
        ((None, None, 3), 2, (6, 1, 3)),
        ((8, 2, None), 2, (8, 2, 2)),
        ((8, None, 2), 2, (8, 2, 2)),
        ((None, 2, 2), 2, (8, 2, 2)),
        ((8, 2, 2), 2, (8, 2, 2)),
    ],
)
def test_any_two_of_three_give_the_third(
    given: tuple[int | None, ...], world_size: int, expected: tuple[int, int, int]
) -> None:
    sizes = batch_sizes(train(given), world_size=world_size)
    assert expected == (
        sizes.global_batch_size,
        sizes.micro_batch_size,
        sizes.gradient_accumulation_steps,
    )


@pytest.mark.parametrize(
    ("given", "world_size", "message"),
    [
        ((8, 2, 2), 1, "micro_batch_size 2 x gradient_accumulation_steps 2 x 1 process is 4;"),
        (
            (8, 3, None),
            1,
            "is 8, which is not a multiple of 3 (micro_batch_size 3 x 1 process); make it 9,",
        ),
        ((8, None, 3), 1, "a multiple of 3 (gradient_accumulation_steps 3 x 1 process); make it 9"),
        (
            (8, 2, None),
            3,
            "is 8, which is not a multiple of 6 (micro_batch_size 2 x 3 processes); make it 12",
        ),
        ((None, None, None), 3, "is 16, which is not a multiple of 3"),
        ((None, 3, None), 1, "is 16, which is not a multiple of 3"),
    ],
)
def test_sizes_that_contradict_each_other_are_refused(
    given: tuple[int | None, ...], world_size: int, message: str
) -> None:
    with pytest.raises(ConfigError) as error:
        batch_sizes(train(given), world_size=world_size)
    assert message in str(error.value)
    assert error.value.key == "train.global_batch_size"


def train(given: tuple[int | None, ...]) -> TrainConfig:
    in_all, micro, accumulation = given
    return TrainConfig(
        global_batch_size=in_all,
        micro_batch_size=micro,
        gradient_accumulation_steps=accumulation,
    )
