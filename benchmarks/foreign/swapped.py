"""A plugin of pytest (`-p foreign.swapped`): Lightning's own tests of Fabric run with our strategy.

Every `Fabric(...)` of a test on the CPU whose strategy is Lightning's choice (`auto`) or replicates the model (`ddp`
and its kinds, a single device) gets ours. Tests that name other strategies, devices or launchers are left as they are:
so is what a test asks of `ddp` itself. `FOREIGN_REPORT` names a JSON file: for each test, its outcome, whether a
strategy was swapped in it, and its error.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from lightning.fabric import Fabric
from lightning.fabric.strategies import DDPStrategy, SingleDeviceStrategy

from thunder_memsave import ThunderMemsaveStrategy

REPORT = "FOREIGN_REPORT"
SWAP = "FOREIGN_SWAP"
"""`ddp` or `thunder_memsave`: what a test gets; none: what it asks for."""
_NAMES = ("auto", "ddp", "ddp_find_unused_parameters_true", "ddp_find_unused_parameters_false")


class _Report:
    """What became of each test."""

    def __init__(self) -> None:
        self.rows: dict[str, dict[str, Any]] = {}
        self.has_swapped = False


_report = _Report()


def _swapped(kwargs: dict[str, Any]) -> bool:
    strategy = kwargs.get("strategy", "auto")
    is_ours = strategy in _NAMES if isinstance(strategy, str) else type(strategy) is DDPStrategy
    is_ours |= type(strategy) is SingleDeviceStrategy
    return (
        is_ours and kwargs.get("accelerator", "auto") in ("auto", "cpu") and "plugins" not in kwargs
    )


def pytest_configure() -> None:
    wanted = os.environ.get(SWAP, "")
    if not wanted:
        return
    init = Fabric.__init__

    def made(self: Any, *args: Any, **kwargs: Any) -> None:
        if args or not _swapped(kwargs):
            return init(self, *args, **kwargs)
        _report.has_swapped = True
        strategy = DDPStrategy() if wanted == "ddp" else ThunderMemsaveStrategy()
        devices = {} if kwargs.get("devices", "auto") != "auto" else {"devices": 1}
        init(self, **kwargs | devices | {"accelerator": "cpu", "strategy": strategy})
        if self.strategy.num_processes == 1:
            self.launch()  # without it only a single device's strategy sets models up
        return None

    Fabric.__init__ = made  # type: ignore[method-assign]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Any:
    report = yield
    if report.when == "call" or report.outcome != "passed":
        row = {"outcome": report.outcome, "swapped": _report.has_swapped, "error": ""}
        if call.excinfo is not None and report.outcome == "failed":
            row["error"] = f"{call.excinfo.typename}: {call.excinfo.value}"[:600]
        _report.rows[item.nodeid] = row
    if report.when == "teardown":
        _report.has_swapped = False
    return report


def pytest_sessionfinish() -> None:
    Path(os.environ[REPORT]).write_text(json.dumps(_report.rows, indent=1))
