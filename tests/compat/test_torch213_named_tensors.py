"""Thunder imports with the stubs; without them the defect is still there, or the file can go."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from thunder_memsave.compat import torch213_named_tensors

IMPORT = """
import warnings; warnings.simplefilter("ignore")
from thunder_memsave.compat.torch214_function_apply import as_method
with as_method():
    import thunder
"""


def run_python(script: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False
    )


def test_canary_import_fails_exactly_where_the_guard_says() -> None:
    result = run_python(IMPORT)
    if not torch213_named_tensors.is_needed():
        assert result.returncode == 0, result.stderr
        return
    assert result.returncode != 0, (
        "thunder imports without the stubs: upstream has healed, so tighten is_needed() in "
        "strategy/compat/torch213_named_tensors.py, or delete the file."
    )
    assert "has no attribute 'align_as'" in result.stderr


def test_thunder_imports_and_nothing_stays_on_the_tensor() -> None:
    script = (
        "from thunder_memsave import compat; compat.apply(); compat.apply(); "
        "import sys, thunder, torch; assert callable(thunder.jit); "
        "from thunder_memsave.compat.torch213_named_tensors import METHODS, is_needed; "
        "sys.exit(is_needed() and any(hasattr(torch.Tensor, name) for name in METHODS))"
    )
    result = run_python(script)
    assert result.returncode == 0, result.stderr


def test_a_stub_says_that_the_method_was_removed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch213_named_tensors, "is_needed", lambda: True)
    monkeypatch.setattr(torch213_named_tensors, "METHODS", ("a_removed_method",))
    with (
        torch213_named_tensors.stubs(),
        pytest.raises(NotImplementedError, match=r"Tensor\.a_removed_method was removed"),
    ):
        torch.zeros(1).a_removed_method()  # type: ignore[attr-defined]
    assert not hasattr(torch.Tensor, "a_removed_method")
