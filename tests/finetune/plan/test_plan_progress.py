"""The stages of planning are shown on stderr while they run, with the seconds that they took."""

from __future__ import annotations

import time
from typing import NoReturn

import pytest

from thunder_memsave.finetune.plan.plan_progress import STAGES, Progress
from thunder_memsave.progress import stage

NUM_STAGES = len(STAGES)


def test_a_stage_is_shown_when_it_begins_and_its_seconds_when_it_ends(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with Progress().shown():
        stage("capture")
        assert capsys.readouterr().err == f"[ 3/{NUM_STAGES}] capture ... "
        stage("lower")
        assert capsys.readouterr().err == f"0.0 s\n[ 4/{NUM_STAGES}] lower ... "
    assert capsys.readouterr().err == "0.0 s\n"


def test_the_seconds_of_a_stage_that_begins_again_are_added_up() -> None:
    progress = Progress()
    with progress.shown():
        for name in ("solve", "simulate", "solve"):
            stage(name)
            start = time.process_time()
            while time.process_time() < start + 0.02:
                pass
    assert set(progress.cpu_seconds) == {"solve", "simulate"}
    assert progress.cpu_seconds["solve"] >= 0.04
    assert 0.02 <= progress.cpu_seconds["simulate"] < progress.cpu_seconds["solve"]


def test_an_error_ends_the_line_of_the_stage_that_raised_it(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(ValueError, match="wrong"), Progress().shown():
        _fail()
    assert capsys.readouterr().err.endswith(" s\n")


def _fail() -> NoReturn:
    stage("lower")
    raise ValueError("wrong")
