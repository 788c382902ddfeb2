"""Runs Lightning's own tests of Fabric twice: as they are, and with our strategy put in."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from foreign.swapped import REPORT, SWAP

FOLDER = Path("tests") / "tests_fabric"
FILES = (
    "test_fabric.py",
    "test_wrappers.py",
)
"""Files whose tests make a generic Fabric. Tests of single strategies, launchers and accelerators ask for those, and so
do those that start processes (`test_spike.py`, `test_amp_integration.py`)."""
LIMIT_S = 400

_REASONS = (
    (r"model was set up before", "a model is set up once; the tests set one up several times"),
    (r"torch\.compile|OptimizedModule", "a model that torch.compile compiled is refused by name"),
    (r"CheckpointIO", "CheckpointIO is refused by name: each rank writes its own part"),
    (r"DistributedDataParallel\(", "the test asks for calls of DistributedDataParallel"),
    (
        r"no len|ampler|_replace_dunder",
        "a sampler for ranks is put in, as with every strategy of several processes",
    ),
    (r"_launched|launched", "the plugin launches each Fabric; the test asks about one that is not"),
    (
        r"ForwardModule",
        "the test asks that the strategy's module is the user's own, as a single device's is",
    ),
    (
        r"state=\{'model'",
        "the test asks that the strategy's module is the user's own, as a single device's is",
    ),
    (r"precision|Precision", "the precision plugin is refused by name"),
)


@dataclass(frozen=True)
class TestRow:
    """A test that our strategy changed, and why it differs."""

    name: str
    reason: str


@dataclass(frozen=True)
class TestsOutcome:
    """What became of Lightning's tests."""

    num_run: int
    num_swapped: int
    """Tests that ran and made a Fabric that got our strategy."""
    num_passed: int
    """Those of them that pass."""
    differing: tuple[TestRow, ...]


def run_tests(checkout: Path, work: Path) -> TestsOutcome:
    """Run the files in processes of their own.

    Raises:
        ValueError: pytest ended without a report.
    """
    found = {swap: _reports(checkout, work, swap) for swap in ("", "thunder_memsave")}
    ours = {k: v for k, v in found["thunder_memsave"].items() if v["outcome"] != "skipped"}
    swapped = {k: v for k, v in ours.items() if v["swapped"]}
    failed = {k: v for k, v in swapped.items() if v["outcome"] == "failed"}
    before = {k for k in failed if found[""].get(k, {}).get("outcome") != "passed"}
    differing = [
        TestRow(_short(name), _reason(str(row["error"])))
        for name, row in failed.items()
        if name not in before
    ]
    return TestsOutcome(
        num_run=len(ours),
        num_swapped=len(swapped),
        num_passed=len(swapped) - len(failed),
        differing=tuple(differing),
    )


def _reports(checkout: Path, work: Path, swap: str) -> dict[str, dict[str, object]]:
    rows: dict[str, dict[str, object]] = {}
    for number, name in enumerate(FILES):
        report = work / f"tests_{swap}_{number}.json"
        if not report.exists():
            _run_file(checkout, checkout / FOLDER / name, report, {SWAP: swap})
        rows.update(json.loads(report.read_text()))
    return rows


def _run_file(checkout: Path, path: Path, report: Path, settings: Mapping[str, str]) -> None:
    arguments = [
        "-p",
        "foreign.swapped",
        "-q",
        "--timeout=120",
        "-p",
        "no:cacheprovider",
        str(path),
    ]
    environment = os.environ | settings | {REPORT: str(report)}
    command = [sys.executable, "-m", "pytest", *arguments]
    done = subprocess.run(
        command, cwd=checkout, env=environment, capture_output=True, text=True, timeout=LIMIT_S
    )
    if not report.exists():
        raise ValueError(f"pytest ended without a report of {path.name}: {done.stdout[-600:]}")


def _short(name: str) -> str:
    return name.rpartition("tests_fabric/")[2]


def _reason(error: str) -> str:
    known = next((reason for pattern, reason in _REASONS if re.search(pattern, error)), None)
    return known or "unexplained: " + error[:200].replace("\n", " ").replace("|", "/")
