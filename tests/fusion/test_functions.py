"""Functions in formulas are PyTorch's functions, and fuse on a device where they have its bits."""

from __future__ import annotations

import logging
from pathlib import Path
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
from thunder_memsave.measure.layouts import layout_of

aten = torch.ops.aten
CALLS = [
    pytest.param(device_type, call, num, id=f"{operator} of {num} on {device_type}")
    for device_type, formulas in functions.FORMULAS_OF.items()
    for operator in formulas
    for call, num in functions.calls(operator)
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("device_type", "call", "num"), CALLS)
def test_a_formula_is_the_function(
    device_type: str, call: Any, num: int, dtype: torch.dtype
) -> None:
    operands = torch.linspace(-6, 6, 998).reshape(2, 499)[:num].to(dtype)
    table = functions.formulas(device_type)
    graph = make_fx(lambda *args: [call(*args)], decomposition_table=table)(*operands)
    used = {node.target for node in graph.graph.nodes if node.op == "call_function"}
    assert not used & (
        functions.FORMULAS_OF[device_type].keys() - {aten.exp.default, aten.div.Tensor}
    )
    (found,) = graph(*operands)
    assert found.dtype is dtype
    exact = call(*operands.double())
    tolerance = 2e-6 if dtype is torch.float32 else 2.0**-8
    torch.testing.assert_close(found.double(), exact, rtol=tolerance, atol=1e-6)


def test_what_has_no_formula_is_known_by_its_arguments() -> None:
    assert functions.has_formula(aten.silu.default, {}, "cuda")
    assert functions.has_formula(aten.silu.default, {}, "cpu")
    assert functions.has_formula(aten.gelu.default, {"approximate": "tanh"}, "cuda")
    assert not functions.has_formula(aten.gelu.default, {"approximate": "tanh"}, "cpu")
    assert not functions.has_formula(aten.silu.default, {}, "mps")
    assert not functions.has_formula(aten.gelu.default, {}, "cuda")
    assert not functions.has_formula(aten.div.Tensor_mode, {"rounding_mode": "floor"}, "cuda")
    assert not functions.has_formula(aten.tanh.default, {}, "cuda")
    assert not functions.has_formula(None, {}, "cuda")


def test_integers_keep_pytorchs_quotient() -> None:
    ids = torch.arange(1, 5)
    graph = make_fx(lambda x: [x / x], decomposition_table=functions.formulas("cuda"))(ids)
    assert [n.target for n in graph.graph.nodes if n.op == "call_function"] == [aten.div.Tensor]


def test_a_function_is_looked_up_by_its_dtype_and_device() -> None:
    asked = []

    def has_same_bits(operator: Any, dtype: torch.dtype, device: torch.device) -> bool:
        asked.append((operator, dtype, device))
        return True

    def is_function(
        device: str, dtype: torch.dtype, result: torch.dtype, like: Tensor | None = None
    ) -> bool:
        with tracectx(TraceCtx()):
            place = devices.to_device(device)
            x, y = (
                TensorProxy(shape=(2,), device=place, dtype=dtypes.to_dtype(d))
                for d in (dtype, result)
            )
        bsym: Any = SimpleNamespace(kwargs={}, flat_proxy_args=[x], flat_proxy_outs=[y])
        layouts = [layout_of(torch.empty(2, 64) if like is None else like)] * 2
        return operators._is_function(bsym, aten.silu.default, layouts)

    sixteen, wide = torch.bfloat16, torch.float32

    with patch.object(same_bits, "has_same_bits", has_same_bits):
        assert is_function("cuda:0", sixteen, sixteen)
        assert is_function("cuda:0", sixteen, sixteen, torch.empty(3, 5).t())
        assert not is_function("cuda:0", sixteen, wide)
        assert is_function("cpu", wide, wide)
    cuda, cpu = torch.device("cuda", 0), torch.device("cpu")
    assert asked == [
        (aten.silu.default, *e) for e in ((sixteen, cuda), (sixteen, cuda), (wide, cpu))
    ]


@pytest.mark.parametrize(
    ("layout", "num_threads", "expected"),
    [
        (torch.empty(2, 64), 1, True),
        (torch.empty(2, 64).t(), 1, False),
        (torch.empty(1, 64).expand(2, 64), 1, False),
        (torch.empty(2, 63), 1, False),  # 62 numbers after 64
        (torch.empty(2**18), 2, True),
        (torch.empty(2**18), 3, False),  # parts of 87,382 numbers
        (torch.empty(2**15), 3, True),  # too few for more than one thread
    ],
)
def test_pytorch_computes_numbers_in_whole_vectors(
    layout: Tensor, num_threads: int, expected: bool
) -> None:
    with patch.object(torch, "get_num_threads", lambda: num_threads):
        assert operators._is_vectorized([layout_of(layout)] * 2) is expected


@pytest.mark.parametrize("operator", functions.FORMULAS_OF["cpu"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_function_on_a_cpu_has_pytorchs_bits(operator: Any, dtype: torch.dtype) -> None:
    if (reason := inductor.why_unavailable("cpu")) is not None:
        pytest.skip(reason)
    assert same_bits.has_same_bits(operator, dtype, torch.device("cpu")), (
        "the step on a CPU loses a fusion: PyTorch or inductor computes it otherwise now"
    )


def of_neg(formula: Any, dtype: torch.dtype) -> bool | None:
    with (
        patch.dict(functions.FORMULAS_OF["cpu"], {aten.neg.default: formula}),
        patch.dict(functions.FORMULAS, {aten.neg.default: formula}),
    ):
        cpu = torch.device("cpu")
        return same_bits._answer(aten.neg.default, dtype, cpu)


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


def test_an_answer_is_kept_on_disk_and_one_that_is_broken_is_asked_for_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("THUNDER_MEMSAVE_CACHE", str(tmp_path))
    asked: list[bool | None] = []

    def ask(answer: bool | None) -> bool:
        def is_same(operator: Any, dtype: torch.dtype, device: torch.device) -> bool | None:
            asked.append(answer)
            return answer

        with patch.object(same_bits, "_answer", is_same):
            cpu = torch.device("cpu")
            return same_bits._is_compared.__wrapped__(aten.neg.default, torch.float32, cpu)

    assert not ask(None), "it could not be compared"
    assert not ask(False)
    assert not ask(True), "the answer of before"
    assert asked == [None, False]
    (stored,) = tmp_path.glob("same_bits-*.json")
    whole = stored.read_text()
    for broken in (
        whole.replace("1.0", "0.0"),
        whole.replace("other", "ither"),
        whole[:-4],
        '{"numbers": [1]}',
    ):
        stored.write_text(broken)
        assert ask(True), broken
        assert asked.pop() is True, "it was asked again"
        stored.write_text(whole)
    with patch.object(same_bits, "_code", lambda: "other formulas"):
        assert ask(True)
    with patch.object(torch, "get_num_threads", lambda: 63):
        assert ask(True)
