"""`make versions` tests what it says that it tests."""

from __future__ import annotations

import shutil
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[2]
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]

SETUP = """
mkdir -p "$1/bin" && touch "$1/tests.log"
printf '#!/bin/sh\\necho "$*" >%s/asked_of_pip\\n' "$1" >"$1/bin/pip"
printf '#!/bin/sh\\necho "$4: 2 passed"\\ntest %s != .venv-2.99\\n' "$1" >"$1/bin/pytest"
printf '#!/bin/sh\\necho "torch %s"\\n' "$2" >"$1/bin/python"
chmod +x "$1"/bin/*
"""


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A checkout whose `setup` installs programs that only say what was asked of them."""
    (tmp_path / ".ci").mkdir()
    (tmp_path / ".ci/setup").write_text(SETUP)
    shutil.copy(ROOT / ".ci/versions", tmp_path / ".ci/versions")
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    return tmp_path


def run_versions(checkout: Path, versions: str) -> subprocess.CompletedProcess[str]:
    command = ["bash", ".ci/versions", "constraints.txt", versions, "-k", "two words"]
    return subprocess.run(command, cwd=checkout, capture_output=True, text=True, check=False)


def oldest(name: str) -> str:
    declared = PROJECT["dependencies"] + PROJECT["optional-dependencies"]["hf"]
    (requirement,) = [each for each in map(Requirement, declared) if each.name == name]
    (bound,) = [each.version for each in requirement.specifier if each.operator == ">="]
    return bound


def test_without_a_version_everything_is_the_oldest_that_is_allowed(checkout: Path) -> None:
    result = run_versions(checkout, "")
    torch = oldest("torch")
    venv = checkout / f".venv-{torch}"
    asked = f"install --quiet torch=={oldest('torch')} transformers=={oldest('transformers')} peft=={oldest('peft')}\n"
    assert (venv / "asked_of_pip").read_text() == asked
    assert result.stdout == f"torch {torch}: two words: 2 passed (.venv-{torch}/tests.log)\n"
    assert result.returncode == 0, result.stderr


def test_each_version_has_a_line_and_a_failure_of_one_is_the_result(checkout: Path) -> None:
    result = run_versions(checkout, "2.99 2.98")
    assert [line.split(":")[0] for line in result.stdout.splitlines()] == [
        "torch 2.99",
        "torch 2.98",
    ]
    assert result.returncode == 1
