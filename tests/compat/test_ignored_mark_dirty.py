"""A custom function that changes its input is captured with its derivative, or not at all."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.variables.misc import AutogradFunctionContextVariable

from harness.parity import weighted_sum
from thunder_memsave import compat
from thunder_memsave.compat import ignored_mark_dirty
from thunder_memsave.compiler.compiled_module import CompiledModule
from thunder_memsave.errors import CaptureError

compat.apply()


class Dirty(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.mark_dirty(x)
        x.mul_(2)
        return x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * 2


class ChangesInAFunction(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        y = x * 1.0
        Dirty.apply(y)  # type: ignore[no-untyped-call]
        return y


@pytest.mark.skipif(ignored_mark_dirty.is_needed(), reason="torch before 2.13 cannot capture it")
def test_a_custom_function_that_changes_its_input_has_eagers_bits() -> None:
    found = []
    for call in (ChangesInAFunction(), CompiledModule(ChangesInAFunction())):
        x = torch.arange(3.0).requires_grad_()
        y = call(x)
        weighted_sum(y).backward()
        assert x.grad is not None
        found.append([y.detach(), x.grad])
    assert all(map(torch.equal, *found))


@pytest.mark.skipif(not ignored_mark_dirty.is_needed(), reason="torch 2.13 and newer capture it")
def test_its_capture_is_refused_where_it_would_be_wrong() -> None:
    with pytest.raises(CaptureError, match=r"changes its input \(mark_dirty\)"):
        CompiledModule(ChangesInAFunction())(torch.ones(3, requires_grad=True))


@pytest.mark.skipif(not ignored_mark_dirty.is_needed(), reason="torch 2.13 and newer capture it")
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
def test_canary_dynamo_ignores_mark_dirty(monkeypatch: pytest.MonkeyPatch) -> None:
    refusing: Any = AutogradFunctionContextVariable.var_getattr
    known = refusing.__wrapped__
    monkeypatch.setattr(AutogradFunctionContextVariable, "var_getattr", known)
    x = torch.ones(3, requires_grad=True)
    torch.compile(ChangesInAFunction(), backend="eager", fullgraph=True)(x).sum().backward()
    assert x.grad is not None
    assert x.grad.tolist() == [1.0] * 3  # eager's is 2
