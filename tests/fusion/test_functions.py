"""Functions in formulas are PyTorch's functions, and fuse on a device where they have its bits."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from thunder.core import devices, dtypes
from thunder.core.proxies import TensorProxy
from thunder.core.trace import TraceCtx, tracectx
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from thunder_memsave.fusion import functions, inductor, operators, same_bits

aten = torch.ops.aten
CALLS = [
    pytest.param(call, num, id=f"{operator} of {num}")
    for operator in functions.FORMULAS
    for call, num in functions.calls(operator)
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("call", "num"), CALLS)
def test_a_formula_is_the_function(call: Any, num: int, dtype: torch.dtype) -> None:
    operands = torch.linspace(-6, 6, 998).reshape(2, 499)[:num].to(dtype)
    table = functions.formulas()
    graph = make_fx(lambda *args: [call(*args)], decomposition_table=table)(*operands)
    used = {node.target for node in graph.graph.nodes if node.op == "call_function"}
    assert not used & (functions.FORMULAS.keys() - {aten.exp.default, aten.div.Tensor})
    (found,) = graph(*operands)
    assert found.dtype is dtype
    exact = call(*operands.double())
    tolerance = 2e-6 if dtype is torch.float32 else 2.0**-8
    torch.testing.assert_close(found.double(), exact, rtol=tolerance, atol=1e-6)


def test_what_has_no_formula_is_known_by_its_arguments() -> None:
    assert functions.has_formula(aten.silu.default, {})
    assert functions.has_formula(aten.gelu.default, {"approximate": "tanh"})
    assert not functions.has_formula(aten.gelu.default, {})
    assert not functions.has_formula(aten.div.Tensor_mode, {"rounding_mode": "floor"})
    assert not functions.has_formula(aten.tanh.default, {})
    assert not functions.has_formula(None, {})


def test_integers_keep_pytorchs_quotient() -> None:
    ids = torch.arange(1, 5)
    graph = make_fx(lambda x: [x / x], decomposition_table=functions.formulas())(ids)
    assert [n.target for n in graph.graph.nodes if n.op == "call_function"] == [aten.div.Tensor]


def test_a_function_is_looked_up_by_its_dtype_and_device_on_cuda_alone() -> None:
    asked = []

    def has_same_bits(operator: Any, dtype: torch.dtype, device: torch.device) -> bool:
        asked.append((operator, dtype, device))
        return True

    def is_function(device: str, dtype: dtypes.dtype, result: dtypes.dtype) -> bool:
        with tracectx(TraceCtx()):
            place = devices.to_device(device)
            x, y = (TensorProxy(shape=(2,), device=place, dtype=d) for d in (dtype, result))
        bsym: Any = SimpleNamespace(kwargs={}, flat_proxy_args=[x], flat_proxy_outs=[y])
        return operators._is_function(bsym, aten.silu.default)

    with patch.object(same_bits, "has_same_bits", has_same_bits):
        assert is_function("cuda:0", dtypes.bfloat16, dtypes.bfloat16)
        assert not is_function("cpu", dtypes.bfloat16, dtypes.bfloat16)
        assert not is_function("cuda:0", dtypes.bfloat16, dtypes.float32)
    assert asked == [(aten.silu.default, torch.bfloat16, torch.device("cuda", 0))]


def of_neg(formula: Any, dtype: torch.dtype) -> bool:
    with patch.object(functions, "FORMULAS", {aten.neg.default: formula}):
        cpu = torch.device("cpu")
        return same_bits._is_compared.__wrapped__(aten.neg.default, dtype, cpu)


def right(x: Tensor) -> Tensor:
    return x * -1.0


def nearly_right(x: Tensor) -> Tensor:
    return x.float() * -(1 + 2.0**-20)


def wrong_where_it_is_large(x: Tensor) -> Tensor:
    return right(x).clamp(max=3e38)


def wrong_zero(x: Tensor) -> Tensor:
    return 0.0 - x


@pytest.mark.parametrize(
    ("formula", "dtype", "expected"),
    [
        (right, torch.bfloat16, True),
        (right, torch.float16, True),
        (nearly_right, torch.bfloat16, False),  # in 16 bits it is right; float32 tells
        (wrong_where_it_is_large, torch.float32, False),
        (wrong_zero, torch.float32, False),
    ],
)
def test_the_device_is_asked_for_all_sizes_of_numbers(
    formula: Any, dtype: torch.dtype, expected: bool
) -> None:
    if (reason := inductor.why_unavailable("cpu")) is not None:
        pytest.skip(reason)
    assert of_neg(formula, dtype) is expected


def test_a_comparison_that_fails_is_said(caplog: pytest.LogCaptureFixture) -> None:
    def fail(call: Any, operands: Any) -> Any:
        raise OSError("no compiler\nmore")

    with patch.object(same_bits, "compiled", fail), caplog.at_level(logging.WARNING):
        assert not of_neg(right, torch.float32)
    (line,) = caplog.messages
    assert line == (
        "aten.neg.default is not fused on cpu, which takes longer: comparing its bits raised OSError: no compiler"
    )
