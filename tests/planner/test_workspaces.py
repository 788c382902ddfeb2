"""The workspaces of cuBLAS and TransformerEngine are counted by device and setting."""

from __future__ import annotations

import pytest

from thunder_memsave.planner.devices import device
from thunder_memsave.planner.workspaces import (
    VARIABLE,
    blas_workspace_bytes,
    te_workspace_bytes,
)

M = 2**20


@pytest.mark.parametrize(
    ("name", "setting", "nbytes"),
    [
        ("cpu", None, 0),
        ("h200", None, 2 * 32 * M),
        ("b200", None, 2 * 32 * M),
        ("a100", None, 2 * 8_519_680),
        ("l40s", None, 2 * 8_519_680),
        ("h200", ":4096:8", 2 * 32 * M),
        ("h200", ":16:8", 2 * 16 * 8 * 1024),
        ("a100", ":4096:2:16:8", 2 * 8_519_680),
        ("a100", "no setting", 2 * 8_519_680),
        ("a100", ":4096", 2 * 8_519_680),
    ],
)
def test_two_threads_have_one_each(name: str, setting: str | None, nbytes: int) -> None:
    environment = {} if setting is None else {VARIABLE: setting}
    assert blas_workspace_bytes(device(name), environment) == nbytes


@pytest.mark.parametrize(
    ("name", "nbytes"),
    [("cpu", 0), ("l40s", 4 * M), ("h100", 32 * M + 1024), ("b200", 32 * M + 1024)],
)
def test_transformer_engine_has_one_for_all_threads(name: str, nbytes: int) -> None:
    assert te_workspace_bytes(device(name)) == nbytes
