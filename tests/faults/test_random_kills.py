"""Ranks that are killed at random lose no committed step, and the run ends with an undisturbed run's bits."""

from __future__ import annotations

import random
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from safetensors.torch import load_file

from harness.fabric import finish, start_python
from harness.language_model import run_values, write_model
from harness.random_kills import MOST_STEPS, Kill, Lives, Start, train_with_kills

SECONDS_FOR_A_LIFE = 300  # on a busy machine
NUM_LAUNCHES, KILLS_OF_A_LAUNCH = 10, 10
LEAST_MID_SAVE = 3  # of a launch


def values(directory: Path, *, num_steps: int) -> dict[str, Any]:
    """Return a run with everything random or stateful: dropout, order of rows, moments, accumulation."""
    directory.mkdir()
    run = run_values(
        directory,
        write_model(directory / "model", num_hidden_layers=1),
        lora={"r": 4, "target_modules": ["q_proj", "v_proj"], "lora_dropout": 0.2},
        train={"max_steps": num_steps},
    )
    del run["data"]["dataset"]["init_args"]["val_fraction"]  # saves one capture
    return run


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


def check_kills(tmp_path: Path, alone: Path, *, seed: int, num_kills: int) -> Lives:
    num_steps = MOST_STEPS * (num_kills + 1)
    if not (alone / "run" / "adapter").exists():
        shutil.rmtree(alone, ignore_errors=True)  # of an earlier test that failed there
        assert trained(alone, num_kills=0, num_steps=num_steps).kills == []
    lives = trained(tmp_path / "killed", num_kills=num_kills, num_steps=num_steps, seed=seed)
    assert [kill.attempt for kill in lives.kills] == list(range(num_kills)), f"seed {seed}"
    assert lives.num_lost_steps() == 0, f"seed {seed}: {lives}"
    assert_same_bits(tmp_path / "killed", alone)
    return lives


@pytest.mark.line("kills")
@pytest.mark.timeout(
    SECONDS_FOR_A_LIFE * (1 + 2 + 1)
)  # the run left alone, the lives of the other, and some time
def test_a_run_whose_ranks_are_killed_ends_with_the_same_bits(tmp_path: Path) -> None:
    lives = check_kills(tmp_path, tmp_path / "alone", seed=0, num_kills=1)
    assert [kill.is_mid_save for kill in lives.kills] == [True]


def test_a_step_that_is_lost_is_counted_though_others_are_gained() -> None:
    kills = [Kill(attempt=n, rank=0, committed=5, is_mid_save=False) for n in range(3)]
    starts = [Start(attempt=n, rank=0, step=step) for n, step in enumerate((0, 6, 3))]
    assert Lives(starts=starts, kills=kills[:1]).num_lost_steps() == 0
    assert Lives(starts=starts, kills=kills[:2]).num_lost_steps() == 2
    assert Lives(starts=starts, kills=kills).num_lost_steps() == 2 + 5  # and it never began again


def test_a_launch_that_its_test_leaves_is_ended_with_all_that_it_started(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    start = (
        "import subprocess, time; print(subprocess.Popen(['sleep', '60']).pid, flush=True); "
        "time.sleep(60)"
    )
    process = start_python(["-c", start])
    assert process.stdout is not None
    child = int(process.stdout.readline())
    ends = Mock(side_effect=[KeyboardInterrupt, ("", None)])
    monkeypatch.setattr(process, "communicate", ends)
    with pytest.raises(KeyboardInterrupt):
        finish(process)
    assert process.wait(10) == -signal.SIGKILL
    process.stdout.close()
    deadline = time.monotonic() + 30.0  # a signal was sent, which takes a moment
    while is_running(child):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def is_running(pid: int) -> bool:
    """Tell whether a process exists and is not only waiting to be reaped."""
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except FileNotFoundError:
        return False
    return status.rpartition(")")[2].split()[0] != "Z"


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the directory of the undisturbed run, which runs when it is first needed."""
    return tmp_path_factory.mktemp("kills") / "alone"


@pytest.mark.soak
@pytest.mark.line("kills")
@pytest.mark.timeout(SECONDS_FOR_A_LIFE * (KILLS_OF_A_LAUNCH + 2))
@pytest.mark.parametrize("launch", range(NUM_LAUNCHES))
def test_a_hundred_kills_lose_no_step(
    launch: int, alone: Path, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    seed = random.SystemRandom().randrange(10**6)
    lives = check_kills(tmp_path, alone, seed=seed, num_kills=KILLS_OF_A_LAUNCH)
    num_mid_save = sum(kill.is_mid_save for kill in lives.kills)
    told = f"{len(lives.kills)} kills, {num_mid_save} mid-save, {lives.num_lost_steps()} steps lost"
    record_property("measured", f"{told} (seed {seed})")
    assert num_mid_save >= LEAST_MID_SAVE
