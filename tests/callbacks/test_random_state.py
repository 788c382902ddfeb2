"""Random numbers continue where they were, or, on other ranks, in a documented way."""

from __future__ import annotations

import hashlib
import logging
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning.fabric import Fabric

from harness.fabric import make_fabric
from harness.run_checkpoints import make_state, save, sign_again
from thunder_memsave.callbacks.checkpoint import CheckpointInfo
from thunder_memsave.callbacks.random_state import random_state, seed_from
from thunder_memsave.callbacks.verified import load_checkpoint

CPU = torch.device("cpu")


def draw() -> tuple[float, ...]:
    """Draw from each generator."""
    return random.random(), float(np.random.rand()), float(torch.rand(()))


def drawn_after_load(fabric: Fabric, path: Path, *, world_size: int) -> tuple[float, ...]:
    state = make_state(fabric, 0.0, step=0)
    load_checkpoint(fabric, CheckpointInfo(path=path, world_size=world_size, values={}), state)
    return draw()


def test_as_many_ranks_draw_the_numbers_that_came_next(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    fabric = make_fabric()
    path = save(fabric, tmp_path, step=1)
    expected = draw()
    assert drawn_after_load(fabric, path, world_size=1) == expected
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


def test_other_ranks_draw_others_the_same_each_time_and_a_warning_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    fabric = make_fabric()
    path = save(fabric, tmp_path, step=1)
    expected = draw()
    first, second = (drawn_after_load(fabric, path, world_size=1 + 2) for _ in range(2))
    assert first == second
    assert not set(first) & set(expected)
    assert (
        "step-00000001 was written by 3 ranks on cpu, and 1 rank on cpu go on from it: the weights, the optimizer and "
        "the order of the data are as they were, but dropout and the like get other random numbers"
    ) in caplog.text


def test_ranks_on_another_kind_of_device_draw_others(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    fabric = make_fabric()
    path = save(fabric, tmp_path, step=1)
    state = torch.load(path / "random-00000.pt")
    torch.save(state | {"cuda": state["torch"]}, path / "random-00000.pt")
    sign_again(path)
    drawn_after_load(fabric, path, world_size=1)
    assert "was written by 1 rank on cuda, and 1 rank on cpu go on from it" in caplog.text


def test_the_seed_of_other_ranks_is_what_the_documentation_says() -> None:
    state = random_state(CPU)
    content = bytes(state["torch"].tolist()) + b"2 of 3"
    seed = int.from_bytes(hashlib.sha256(content).digest()[:8], "little")
    seed_from(state, rank=2, world_size=3)
    assert torch.initial_seed() == seed
    torch.manual_seed(seed)
    random.seed(seed)
    expected = random.random(), float(np.random.RandomState(seed % 2**32).rand())
    seed_from(state, rank=2, world_size=3)
    assert draw()[:2] == expected


def test_every_rank_of_every_number_of_ranks_is_seeded_in_another_way() -> None:
    state, seen = random_state(CPU), set[Any]()
    for world_size in range(1, 5):
        for rank in range(world_size):
            seed_from(state, rank=rank, world_size=world_size)
            seen |= set(draw())
    assert len(seen) == 3 * (1 + 2 + 3 + 4)
