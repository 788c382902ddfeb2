"""Operators that fuse have the bits of PyTorch's own kernels, side by side in one kernel; the others do not fuse."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from packaging.version import Version
from thunder.core import dtypes as thunder_dtypes
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from thunder_memsave.fusion import inductor, operators
from thunder_memsave.fusion.operators import EXACT, EXACT_ON_CPU, EXACT_ON_CUDA

aten = torch.ops.aten


FACTOR, DIVISOR = (0.375, 7.0) if inductor.rounds_factors() else (0.3, 7.1)
"""Numbers of 16 bits, where others are rounded to them."""


def results(x: Tensor, y: Tensor) -> list[Tensor]:
    """Every operator that fuses, and chains that a compiler may contract or keep in more bits."""
    mask = aten.gt.Scalar(x, 0.1)
    other = aten.le.Tensor(x, y)
    return [
        aten.add.Tensor(x, y),
        aten.add.Tensor(x, 1e-6),
        aten.sub.Tensor(x, y),
        aten.mul.Tensor(x, y),
        aten.mul.Tensor(x, FACTOR),
        aten.div.Tensor(x, y),
        aten.div.Tensor(x, 3.0),
        aten.neg.default(x),
        aten.abs.default(x),
        aten.where.self(mask, x, y),
        aten.masked_fill.Scalar(x, other, -3.0),
        aten.native_dropout_backward.default(x, mask, 1.25),
        aten.relu.default(x),
        aten.threshold_backward.default(x, y, 0),
        *(op(x, 0.5) for op in (aten.eq.Scalar, aten.ne.Scalar, aten.ge.Scalar, aten.lt.Scalar)),
        *(op(x, y) for op in (aten.eq.Tensor, aten.ne.Tensor, aten.gt.Tensor)),
        *(op(x, y) for op in (aten.ge.Tensor, aten.lt.Tensor)),
        aten.le.Scalar(x, 0.5),
        aten.logical_and.default(mask, other),
        aten.logical_or.default(mask, other),
        aten.logical_not.default(mask),
        aten.bitwise_and.Tensor(mask, other),
        aten.bitwise_or.Tensor(mask, other),
        aten.bitwise_not.default(mask),
        aten.cat.default([aten.neg.default(x), y], -1),
        aten.clone.default(x),
        aten._to_copy.default(x, dtype=torch.bfloat16),
        aten._to_copy.default(aten.mul.Tensor(x, y), dtype=torch.float32),
        aten.slice_backward.default(y, [37, 200], 1, 3, 134, 1),
        aten.select_backward.default(y, [2, 37, 131], 0, 1),
        aten.mul.Tensor(aten.add.Tensor(aten.mul.Tensor(x, y), y), aten.sub.Tensor(x, y)),
        *(aten.mul.Tensor(each, y) for each in between(x, y, mask, other)),
    ]


def between(x: Tensor, y: Tensor, mask: Tensor, other: Tensor) -> list[Tensor]:
    """Values that a kernel may keep in more bits before they are read again."""
    product = aten.mul.Tensor(x, y)
    return [
        aten.native_dropout_backward.default(x, mask, 1.1),
        aten.masked_fill.Scalar(product, other, -3.1),
        aten.where.self(mask, product, x),
        aten.relu.default(product),
        aten.threshold_backward.default(product, y, 0),
        aten.div.Tensor(x, y),
        aten.div.Tensor(x, DIVISOR),
        aten.mul.Tensor(x, FACTOR),
        aten.neg.default(product),
        aten.abs.default(product),
        aten.clone.default(product),
        aten.slice_backward.default(product, list(x.shape), 1, 0, 131, 1),
    ]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_fuses_has_the_bits_of_the_operators_one_by_one(dtype: torch.dtype) -> None:
    if (reason := inductor.why_unavailable("cpu")) is not None:
        pytest.skip(reason)
    differ = dtype is torch.bfloat16 and not inductor.keeps_rounding("cpu")
    generator = torch.Generator().manual_seed(0)
    x, y = (3 * torch.randn(37, 131, generator=generator).to(dtype) for _ in range(2))
    with torch.no_grad(), inductor.options():
        graph = make_fx(results, tracing_mode="fake")(x, y)
        tested = {node.target for node in graph.graph.nodes}
        found = inductor.compile_graph(graph, [x, y])(x, y)
    assert tested >= EXACT, EXACT - tested
    compared = [torch.equal(a, b) for a, b in zip(found, results(x, y), strict=True)]
    if differ:
        if Version(torch.__version__).release[:2] == (2, 12):
            pytest.skip("2.12 is taken to round as 2.11 does")
        assert not all(compared), "a canary: where inductor rounds, 16 bits may fuse"
        return
    assert all(compared), [number for number, is_same in enumerate(compared) if not is_same]
    for ours, theirs in zip(found, results(x, y), strict=True):
        assert ours.stride() == theirs.stride()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_numbers_among_the_operands_have_the_bits_for_every_number_of_16_bits(
    dtype: torch.dtype,
) -> None:
    if (reason := inductor.why_unavailable("cpu")) is not None:
        pytest.skip(reason)
    if not inductor.keeps_rounding("cpu"):
        pytest.skip(
            "this PyTorch's inductor does not round to 16 bits on a CPU, so nothing of 16 bits fuses"
        )

    def of_numbers(x: Tensor) -> list[Tensor]:
        mask = aten.gt.Scalar(x, 0.5)
        return [
            *(aten.add.Tensor(x, 0.5), aten.sub.Tensor(x, 2.0**-20)),
            *(aten.mul.Tensor(x, FACTOR), aten.div.Tensor(x, DIVISOR)),
            *(aten.masked_fill.Scalar(x, mask, -3.1), aten.threshold_backward.default(x, x, 0.5)),
            aten.native_dropout_backward.default(x, mask, 1.1111),
            *(aten.eq.Scalar(x, 0.5), aten.ne.Scalar(x, 0.5), aten.ge.Scalar(x, 0.5)),
            *(aten.lt.Scalar(x, 0.5), aten.le.Scalar(x, 0.5), mask),
        ]

    x = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(dtype)
    with torch.no_grad(), inductor.options():
        graph = make_fx(of_numbers, tracing_mode="fake")(x)
        found = inductor.compile_graph(graph, [x])(x)
    for number, (ours, theirs) in enumerate(zip(found, of_numbers(x), strict=True)):
        assert bool(((ours == theirs) | (ours.isnan() & theirs.isnan())).all()), number


def symbol(
    *args: float, device: str = "cpu", dtype: Any = thunder_dtypes.float32, **kwargs: float
) -> Any:
    tensor = SimpleNamespace(device=SimpleNamespace(type=device), dtype=dtype)
    return SimpleNamespace(
        args=(tensor, *args), kwargs=kwargs, flat_proxy_args=[tensor], flat_proxy_outs=[tensor]
    )


def test_a_number_that_16_bits_round_does_not_fuse() -> None:
    sixteen = thunder_dtypes.bfloat16
    assert operators._is_exact(symbol(0.1), aten.add.Tensor)
    assert not operators._is_exact(symbol(0.1, dtype=sixteen), aten.add.Tensor)
    assert operators._is_exact(symbol(0.5, dtype=sixteen), aten.add.Tensor)
    assert not operators._is_exact(symbol(0.1, dtype=sixteen), aten.gt.Scalar)
    is_exact = operators._is_exact(symbol(0.1, dtype=sixteen), aten.mul.Tensor)
    assert is_exact is not inductor.rounds_factors()
    assert not operators._is_exact(symbol(1.0, alpha=2), aten.add.Tensor)


def test_quotients_on_cuda_do_not_fuse() -> None:
    assert {aten.div.Tensor} == EXACT - EXACT_ON_CUDA
    assert operators._is_exact(symbol(3.0), aten.div.Tensor)
    assert not operators._is_exact(symbol(3.0, device="cuda"), aten.div.Tensor)
    assert operators._is_exact(symbol(3.0, device="cuda"), aten.mul.Tensor)


def test_a_reciprocal_root_fuses_on_a_cpu_in_float32_alone() -> None:
    assert {aten.rsqrt.default} == EXACT_ON_CPU - EXACT
    assert operators._is_exact(symbol(), aten.rsqrt.default)
    assert not operators._is_exact(symbol(device="cuda"), aten.rsqrt.default)
    sixteen = thunder_dtypes.bfloat16
    assert not operators._is_exact(symbol(dtype=sixteen), aten.rsqrt.default)


def test_factors_fuse_as_far_as_inductor_does_not_round_them() -> None:
    if (reason := inductor.why_unavailable("cpu")) is not None:
        pytest.skip(reason)
    if not inductor.keeps_rounding("cpu"):
        pytest.skip(
            "this PyTorch's inductor does not round to 16 bits, so nothing of 16 bits fuses"
        )
    x = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)

    def scaled(x: Tensor) -> list[Tensor]:
        return [aten.mul.Tensor(x, 0.3), aten.div.Tensor(x, 7.1)]

    with torch.no_grad(), inductor.options():
        graph = make_fx(scaled, tracing_mode="fake")(x)
        found = inductor.compile_graph(graph, [x])(x)
    for ours, theirs in zip(found, scaled(x), strict=True):
        is_same = bool(((ours == theirs) | (ours.isnan() & theirs.isnan())).all())
        assert is_same is not inductor.rounds_factors(), "the rule of `rounds_factors`"
