"""Ranks that are killed at random lose no committed step, and the run ends with the bits of one that was left alone."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from harness.language_model import run_values, write_model
from harness.random_kills import MOST_STEPS, Lives, train_with_kills

SECONDS_FOR_A_LIFE = 120  # on a machine that does other work
NUM_LAUNCHES, KILLS_OF_A_LAUNCH = 4, 25


def values(directory: Path, *, num_steps: int) -> dict[str, Any]:
    """All that is random in a run, or lasts from step to step: dropout, order of rows, moments, accumulation."""
    directory.mkdir()
    return run_values(
        directory,
        write_model(directory / "model"),
        lora={"r": 4, "target_modules": ["q_proj", "v_proj"], "lora_dropout": 0.2},
        train={"max_steps": num_steps},
        eval={"every_n_steps": None},
    )


def trained(directory: Path, *, num_kills: int, num_steps: int, seed: int = 0) -> Lives:
    lives = train_with_kills(
        directory,
        values(directory, num_steps=num_steps),
        seed=seed,
        num_kills=num_kills,
        timeout_s=(num_kills + 1) * SECONDS_FOR_A_LIFE,
    )
    assert not list((directory / "run" / "checkpoints").glob("damaged-*"))
    return lives


def adapter(directory: Path) -> dict[str, torch.Tensor]:
    return load_file(directory / "run" / "adapter" / "adapter_model.safetensors")


def assert_same_bits(first: Path, second: Path) -> None:
    ours, theirs = adapter(first), adapter(second)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def check_kills(tmp_path: Path, *, seed: int, num_kills: int, number: int = 0) -> Lives:
    killed, alone = tmp_path / f"killed-{number}", tmp_path / "alone"
    num_steps = MOST_STEPS * num_kills + MOST_STEPS
    if not alone.exists():
        assert trained(alone, num_kills=0, num_steps=num_steps).kills == []
    lives = trained(killed, num_kills=num_kills, num_steps=num_steps, seed=seed)
    assert [kill.attempt for kill in lives.kills] == list(range(num_kills)), f"seed {seed}"
    assert lives.num_lost_steps() == 0, f"seed {seed}: {lives}"
    assert_same_bits(killed, alone)
    return lives


@pytest.mark.line("kills")
def test_a_run_whose_ranks_are_killed_ends_with_the_same_bits(tmp_path: Path) -> None:
    lives = check_kills(tmp_path, seed=0, num_kills=2)
    assert any(kill.is_mid_save for kill in lives.kills)


@pytest.mark.soak
@pytest.mark.line("kills")
@pytest.mark.timeout(SECONDS_FOR_A_LIFE * NUM_LAUNCHES * (KILLS_OF_A_LAUNCH + 2))
def test_a_hundred_kills_lose_no_step(
    tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    seed = random.SystemRandom().randrange(10**6)
    kills = []
    for number in range(NUM_LAUNCHES):
        lives = check_kills(
            tmp_path, seed=seed + number, num_kills=KILLS_OF_A_LAUNCH, number=number
        )
        kills += lives.kills
    num_mid_save = sum(kill.is_mid_save for kill in kills)
    record_property("measured", f"{len(kills)} kills, {num_mid_save} mid-save, seed {seed}")
    assert num_mid_save >= 30
