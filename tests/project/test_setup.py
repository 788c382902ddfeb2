"""`make setup` says what it needs before it touches anything."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def fake_python(folder: Path, version: str, *, fits: bool) -> str:
    path = folder / "python"
    path.write_text(
        f'#!/bin/sh\ncase "$2" in *sys.exit*) exit {int(not fits)};; *) echo {version};; esac\n'
    )
    path.chmod(0o755)
    return str(path)


def run_setup(
    venv: Path, *, python: str, constraints: str = ""
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", ROOT / ".ci" / "setup", venv, "", constraints],
        env={**os.environ, "PYTHON": python},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize("version", ["3.10", "3.14"])
def test_another_python_is_refused_by_version(tmp_path: Path, version: str) -> None:
    python = fake_python(tmp_path, version, fits=False)
    result = run_setup(tmp_path / "venv", python=python)
    assert result.returncode == 1
    assert f"'{python}' is Python {version}, but 3.11 to 3.13 is needed" in result.stderr
    assert not (tmp_path / "venv").exists()


def test_a_missing_python_is_named(tmp_path: Path) -> None:
    result = run_setup(tmp_path / "venv", python="no-such-python")
    assert result.returncode == 1
    assert "there is no 'no-such-python'; install Python 3.11" in result.stderr


def test_missing_constraints_are_named(tmp_path: Path) -> None:
    python = fake_python(tmp_path, "3.11", fits=True)
    result = run_setup(tmp_path / "venv", python=python, constraints="absent.txt")
    assert result.returncode == 1
    assert "the constraints file 'absent.txt' does not exist" in result.stderr
