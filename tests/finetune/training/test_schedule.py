from __future__ import annotations

from typing import Any

import pytest
import torch

from thunder_memsave.finetune.run_file.config import LRSchedulerConfig
from thunder_memsave.finetune.training.schedule import (
    lr_factor,
    num_warmup_steps,
    set_learning_rate,
)


def factors(num_steps: int, **settings: Any) -> list[float]:
    config = LRSchedulerConfig(**settings)
    return [lr_factor(config, step=step, num_steps=num_steps) for step in range(num_steps)]


def test_warmup_rises_linearly_to_one_and_the_cosine_falls_to_the_ratio() -> None:
    measured = factors(11, warmup_steps=4, min_lr_ratio=0.1)
    assert measured[:4] == [0.25, 0.5, 0.75, 1.0]
    assert measured[4] == 1.0
    assert measured[-1] == pytest.approx(0.1)
    assert sorted(measured[4:], reverse=True) == measured[4:]
    assert measured[7] == pytest.approx(0.55)  # half way


def test_without_warmup_the_first_step_has_the_whole_rate() -> None:
    assert factors(3, warmup_steps=0, min_lr_ratio=0.0) == pytest.approx([1.0, 0.5, 0.0])


def test_a_line_falls_evenly_from_one_to_the_ratio() -> None:
    measured = factors(6, name="linear", warmup_steps=1, min_lr_ratio=0.2)
    assert measured == pytest.approx([1.0, 1.0, 0.8, 0.6, 0.4, 0.2])


def test_a_constant_rate_has_a_warmup_only() -> None:
    assert factors(5, name="constant", warmup_steps=2) == [0.5, 1.0, 1.0, 1.0, 1.0]


@pytest.mark.parametrize("name", ["cosine", "linear"])
def test_a_tenth_is_left_unless_the_ratio_is_given(name: str) -> None:
    assert factors(4, name=name, warmup_steps=0)[-1] == pytest.approx(0.1)


@pytest.mark.parametrize(("warmup", "steps"), [(0.1, 20), (0.0, 0), (1, 1), (50, 50), (50.0, 50)])
def test_a_warmup_below_one_is_a_fraction_of_the_run(warmup: float, steps: int) -> None:
    assert num_warmup_steps(LRSchedulerConfig(warmup_steps=warmup), 200) == steps


def test_a_run_of_one_step_has_a_rate() -> None:
    assert factors(1, warmup_steps=0.03, min_lr_ratio=0.1) == [1.0]


def test_every_group_keeps_its_own_rate_and_a_second_call_does_not_compound() -> None:
    a, b = torch.nn.Parameter(torch.zeros(1)), torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([{"params": [a], "lr": 1.0}, {"params": [b], "lr": 4.0}])
    for _ in range(2):
        set_learning_rate(optimizer, 0.5)
    assert [group["lr"] for group in optimizer.param_groups] == [0.5, 2.0]
