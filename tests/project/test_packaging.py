"""What is declared in pyproject.toml is what the tree has."""

from __future__ import annotations

import importlib.metadata
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

import thunder_memsave

ROOT = Path(__file__).parents[2]
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())
CONSTRAINTS = [
    Requirement(line)
    for line in (ROOT / "constraints.txt").read_text().splitlines()
    if not line.startswith("#")
]
# Versions of torch and of Python that the suite was run with, as docs/versions.md has them.
TORCH_RUN = ["2.11.0", "2.13.0", "2.14.1", "2.15.0"]


def packages_in_tree() -> set[str]:
    mapping: dict[str, str] = PROJECT["tool"]["setuptools"]["package-dir"]
    return {
        ".".join([package, *path.parent.relative_to(ROOT / folder).parts])
        for package, folder in mapping.items()
        for path in (ROOT / folder).rglob("__init__.py")
    }


def test_every_package_in_the_tree_is_declared() -> None:
    # An editable install finds an undeclared one; a wheel silently lacks it.
    assert set(PROJECT["tool"]["setuptools"]["packages"]) == packages_in_tree()


def test_every_folder_with_code_is_a_package() -> None:
    for folder in PROJECT["tool"]["setuptools"]["package-dir"].values():
        for path in (ROOT / folder).rglob("*.py"):
            assert (path.parent / "__init__.py").is_file(), f"{path.parent} has no __init__.py"


def test_the_version_is_written_once() -> None:
    assert importlib.metadata.version("thunder-memsave") == thunder_memsave.__version__
    assert f"## [{thunder_memsave.__version__}]" in (ROOT / "CHANGELOG.md").read_text()


def test_the_console_script_can_be_loaded() -> None:
    (script,) = importlib.metadata.entry_points(group="console_scripts", name="thunder-memsave")
    assert callable(script.load())


def test_pinned_versions_are_within_the_declared_ranges() -> None:
    extras = PROJECT["project"]["optional-dependencies"]
    declared = [Requirement(text) for text in PROJECT["project"]["dependencies"] + extras["hf"]]
    pinned = {each.name.lower(): str(each.specifier).removeprefix("==") for each in CONSTRAINTS}
    for requirement in declared:
        assert Version(pinned[requirement.name.lower()]) in requirement.specifier, requirement


def test_constraints_pin_exact_versions_and_name_no_place() -> None:
    for requirement in CONSTRAINTS:
        assert re.fullmatch(r"==[\w.]+", str(requirement.specifier)), requirement
        assert requirement.url is None


@pytest.mark.parametrize("version", TORCH_RUN)
def test_the_docs_name_the_torch_versions_that_were_run(version: str) -> None:
    (torch,) = [
        Requirement(text)
        for text in PROJECT["project"]["dependencies"]
        if Requirement(text).name == "torch"
    ]
    assert version in torch.specifier
    assert version in (ROOT / "docs/versions.md").read_text()
