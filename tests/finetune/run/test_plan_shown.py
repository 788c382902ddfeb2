"""A run says its plan in three lines before the first update, all of it in a file, and then the measured memory."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from lightning.fabric import Fabric

from thunder_memsave.finetune.run.plan_shown import PlanShown
from thunder_memsave.strategy import ThunderMemsaveStrategy


class Planned(ThunderMemsaveStrategy):
    plan = cast(Any, SimpleNamespace(predicted_peak_bytes=2**30))

    def explain(self, *, num_rows: int = 40, passes: bool = False) -> str:
        return f"a table of {num_rows} rows"

    def summary(self) -> list[str]:
        return ["plan: fits", "recompute: nothing", "largest: weights"]


def fabric_of(*, is_global_zero: bool = True) -> Fabric:
    return cast(Fabric, SimpleNamespace(strategy=Planned(), is_global_zero=is_global_zero))


def run_two_steps(fabric: Fabric, metrics: dict[str, Any], shown: PlanShown) -> None:
    for _ in range(2):
        shown.on_before_optimizer_step(fabric=fabric)
        shown.on_train_batch_end(fabric=fabric, metrics=metrics)


@pytest.mark.parametrize(
    ("measured", "text"),
    [
        (
            {},
            "predicted peak 1.00 GiB, not measured, because torch counts no bytes on this device",
        ),
        ({"peak_bytes": 2**30 - 2**24}, "predicted peak 1.00 GiB, measured 1,008.00 MiB (-1.6%)"),
    ],
)
def test_the_plan_is_said_once_in_short_and_compared_with_what_was_measured(
    measured: dict[str, int], text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "plan.txt"
    run_two_steps(fabric_of(), {"predicted_peak_bytes": 2**30, **measured}, PlanShown(path))
    assert capsys.readouterr().out.splitlines() == [
        "plan: fits",
        "recompute: nothing",
        "largest: weights",
        f"all of it: {path}",
        f"memory: {text}",
    ]
    assert "a table of 40 rows" in path.read_text()


def test_the_first_step_which_has_no_optimizer_states_yet_is_compared_with_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shown = PlanShown(tmp_path / "plan.txt")
    for number, peak_bytes in enumerate((2**29, 2**30, 2**28)):
        metrics = {"predicted_peak_bytes": 2**30, "peak_bytes": peak_bytes}
        shown.on_train_batch_end(fabric=fabric_of(), metrics=metrics)
        said = "memory: predicted peak 1.00 GiB, measured 1.00 GiB (+0.0%)\n"
        assert capsys.readouterr().out == (said if number == 1 else "")


def test_all_of_it_is_printed_if_it_is_asked_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_two_steps(fabric_of(), {}, PlanShown(tmp_path / "plan.txt", prints_all=True))
    printed = capsys.readouterr().out
    assert printed.strip() == (tmp_path / "plan.txt").read_text().strip()


def test_only_one_rank_shows_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fabric = fabric_of(is_global_zero=False)
    run_two_steps(fabric, {"predicted_peak_bytes": 2**30}, PlanShown(tmp_path / "plan.txt"))
    assert capsys.readouterr().out == ""
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_ends_no_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").touch()  # no directory
    run_two_steps(fabric_of(), {}, PlanShown(tmp_path / "file" / "plan.txt"))
    assert "the plan could not be written to" in caplog.text
