"""Thunder imports although `Function.apply` is a builtin, which works before, during and after that import."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch

from thunder_memsave.compat import torch214_function_apply

IMPORT = """
import warnings; warnings.simplefilter("ignore")
from thunder_memsave.compat.torch213_named_tensors import stubs
with stubs():
    import thunder
"""


class Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return 2 * x

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return 2 * grad


def doubled(x: torch.Tensor) -> torch.Tensor:
    return Double.apply(x)  # type: ignore[no-untyped-call]


def run_python(script: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False
    )


def test_canary_import_fails_exactly_where_the_guard_says() -> None:
    result = run_python(IMPORT)
    if not torch214_function_apply.is_needed():
        assert result.returncode == 0, result.stderr
        return
    assert result.returncode != 0, (
        "thunder imports without the stand-in: upstream has healed, so tighten is_needed() in "
        "strategy/compat/torch214_function_apply.py, or delete the file."
    )
    assert "has no attribute '__func__'" in result.stderr


@pytest.mark.skipif(
    not torch214_function_apply.is_needed(), reason="this torch has a method that Thunder can read"
)
def test_the_stand_in_is_a_method_that_applies_the_function() -> None:
    builtin = torch.autograd.Function.apply
    x = torch.ones(3, requires_grad=True)
    with torch214_function_apply.as_method():
        assert hasattr(torch.autograd.Function.apply, "__func__")
        doubled(x).sum().backward()
    assert x.grad is not None
    assert torch.equal(x.grad, torch.full((3,), 2.0))
    assert type(torch.autograd.Function.apply) is type(builtin)
    assert torch.equal(doubled(x), torch.full((3,), 2.0))
