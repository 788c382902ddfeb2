"""A run shows its plan once, before the first update, and then the measured memory."""

from __future__ import annotations

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


def fabric_of(*, is_global_zero: bool = True) -> Fabric:
    return cast(Fabric, SimpleNamespace(strategy=Planned(), is_global_zero=is_global_zero))


def run_two_steps(fabric: Fabric, metrics: dict[str, Any]) -> None:
    shown = PlanShown()
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
def test_the_plan_is_shown_once_and_compared_with_what_was_measured(
    measured: dict[str, int], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    run_two_steps(fabric_of(), {"predicted_peak_bytes": 2**30, **measured})
    lines = [line for line in capsys.readouterr().out.splitlines() if line]
    assert lines == [
        "the plan, per process, when it holds the most:",
        "a table of 12 rows",
        f"memory: {text}",
    ]


def test_only_one_rank_shows_it(capsys: pytest.CaptureFixture[str]) -> None:
    run_two_steps(fabric_of(is_global_zero=False), {"predicted_peak_bytes": 2**30})
    assert capsys.readouterr().out == ""
