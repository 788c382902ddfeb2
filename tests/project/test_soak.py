"""`make soak` goes on where it was ended, and its table says what was reached and what was not."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = """
import os
import pytest

@pytest.mark.line("flips")
def test_flips(record_property):
    record_property("measured", "7 flips, 0 loaded")

@pytest.mark.soak
@pytest.mark.line("flips")
def test_fails_until_it_is_mended():
    assert os.path.exists("mended")

@pytest.mark.soak
def test_names_no_line():
    pytest.skip("has no GPU")

def test_is_no_part_of_it():
    raise AssertionError
"""
MARKERS = "[pytest]\nmarkers =\n  soak: long\n  line(name): a row\n"


def soak(root: Path, *options: str) -> subprocess.CompletedProcess[str]:
    plugin = ["-p", "harness.soak", "-p", "no:cacheprovider", "-m", "soak or line", "-q"]
    return subprocess.run(
        [sys.executable, "-m", "pytest", *plugin, *options, "tests"],
        cwd=root,
        env={"PYTHONPATH": str(Path(__file__).parents[1]), "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_it.py").write_text(TESTS)
    (tmp_path / "pytest.ini").write_text(MARKERS)
    return tmp_path


def row(output: str, line: str) -> str:
    return next(text for text in output.splitlines() if text.startswith(f"{line}  "))


def test_a_second_soak_goes_on_and_a_change_begins_anew(root: Path) -> None:
    first = soak(root)
    assert "1 failed, 1 passed, 1 skipped, 1 deselected" in first.stdout, first.stdout
    assert first.returncode == 1
    assert "FAILED: 1 of 2 tests; 7 flips, 0 loaded" in row(first.stdout, "flips")
    assert "failed: tests/test_it.py::test_fails_until_it_is_mended" in first.stdout
    assert "NOT reached: 0 of 1 tests; has no GPU" in row(first.stdout, "all combinations")
    assert row(first.stdout, "kills").endswith("no test")

    (root / "mended").touch()
    second = soak(root, "--soak-save=.")
    assert "1 passed, 1 skipped, 2 deselected" in second.stdout, second.stdout
    assert "reached: 2 of 2 tests; 7 flips, 0 loaded" in row(second.stdout, "flips")
    (saved,) = root.glob("soak_*_cpu.json")
    flips = next(each for each in json.loads(saved.read_text())["lines"] if each["line"] == "flips")
    assert (flips["num_passed"], flips["num_tests"], flips["failed"]) == (2, 2, [])
    assert "| flips | 1000 single-byte flips" in saved.with_suffix(".md").read_text()

    assert "2 passed, 1 skipped, 1 deselected" in soak(root, "--soak-fresh").stdout
    (root / "tests" / "test_it.py").write_text(TESTS + "\n")
    assert "2 passed, 1 skipped, 1 deselected" in soak(root).stdout


CHANGES_A_FILE = """
import pathlib
import pytest

@pytest.mark.line("flips")
def test_before():
    pass

@pytest.mark.line("flips")
def test_changes_a_file():
    path = pathlib.Path("strategy/plan.py")
    path.parent.mkdir()
    path.write_text("x = 1")
"""


def test_files_that_change_meanwhile_are_told_of_and_nothing_is_saved(root: Path) -> None:
    (root / "tests" / "test_it.py").write_text(CHANGES_A_FILE)
    changed = soak(root, "--soak-save=.")
    assert "2 passed" in changed.stdout, changed.stdout
    assert changed.returncode == 1
    assert "constraints.txt was changed while the tests ran. Tests that ended since are not" in (
        changed.stdout
    )
    assert "NOT reached: 1 of 2 tests" in row(changed.stdout, "flips")
    assert not list(root.glob("soak_*"))
    content = json.loads((root / ".soak" / "results.json").read_text())
    assert list(content["results"]) == ["tests/test_it.py::test_before"]


def test_a_line_that_is_not_in_the_table_is_refused(root: Path) -> None:
    (root / "tests" / "test_it.py").write_text(TESTS.replace('"flips"', '"flops"'))
    refused = soak(root)
    assert "has pytest.mark.line('flops',), which is no line of the table; name one of" in (
        refused.stdout + refused.stderr
    )
