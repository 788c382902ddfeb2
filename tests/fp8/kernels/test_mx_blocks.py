"""MXFP8 has the bits that TransformerEngine's sources say, and its Python with emulated kernels."""

from __future__ import annotations

import importlib
from types import ModuleType

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from harness import te_kernels, te_mx_kernels
from harness.te_linear import Result, Step, TransformerEngine, assert_same, recipe_named, steps
from thunder_memsave.aten.record import AtenRecord
from thunder_memsave.fp8.kernels import casting, te_backend, torch_backend

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
BOTH = {E4M3: 7, E5M2: 8}  # TransformerEngine's DType
INF, NAN = torch.inf, torch.nan
Quantized = tuple[Tensor, Tensor]


def hostile(dtype: torch.dtype) -> Tensor:
    """Blocks with amaxes at and around all powers of 2 times the largest numbers, with zeros, infinities and NaN."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        x = torch.rand(320, 64) * 2 - 1
    exponents = torch.arange(320) - 160.0
    for column, largest in ((0, 448.0), (32, 57344.0)):
        edge = (largest * torch.exp2(exponents.double())).float()
        for row, of in enumerate(edge):
            near = torch.nextafter(of, torch.tensor((INF, -INF)[row % 2]))
            x[row, column : column + 32] *= of
            x[row, column + row % 32] = (of, near)[row // 2 % 2]
    x[0], x[1, :32], x[2, :32] = 0.0, NAN, INF
    x[3, 5], x[4, 7], x[5, 33] = NAN, INF, -INF
    x[6] = torch.finfo(dtype).max
    x[7] = torch.finfo(dtype).smallest_normal / 8
    return x.to(dtype)


def same(ours: Quantized, theirs: Quantized) -> bool:
    return torch.equal(ours[0].view(torch.uint8), theirs[0].view(torch.uint8)) and torch.equal(
        ours[1], theirs[1]
    )


@pytest.mark.parametrize(
    ("amax", "byte"),
    [
        (448.0, 127),  # a scale of 1
        (448.0 + 2**-15, 128),  # rounded up, not to the nearest
        (225.0, 127),
        (224.0, 126),
        (0.0, 0),
        (448 * 2.0**-127, 0),
        (448 * 2.0**-126, 1),
        (300 * 2.0**-126, 1),
        (torch.finfo(torch.float32).max, 247),
        (INF, 254),
    ],
)
def test_a_scale_is_the_amax_over_the_largest_number_rounded_up_to_a_power_of_2(
    amax: float, byte: int
) -> None:
    x = torch.zeros(1, 32)
    x[0, 9] = -amax
    q, scale_inv = torch_backend.quantize_mx(x, E4M3)
    assert scale_inv.tolist() == [[byte]]
    assert te_mx_kernels.byte_of(amax) == byte
    found = torch_backend.dequantize(q, scale_inv)[0, 9].double()
    if amax < 2.0**127:  # else its number rounds up to 2**128
        # Four bits of a number: half a unit is a 16th.
        assert abs(found + amax) <= amax / 16


def test_numbers_saturate_and_nan_stays_and_raises_no_amax() -> None:
    x = torch.zeros(1, 64)
    x[0, :3] = torch.tensor([NAN, 3.0, -448.0])
    x[0, 32:34] = torch.tensor([INF, 1.0])
    q, scale_inv = torch_backend.quantize_mx(x, E4M3)
    assert scale_inv.tolist() == [[127, 254]]
    assert q[0, 0].isnan()
    assert q.float()[0, [1, 2, 32, 33]].tolist() == [3.0, -448.0, 448.0, 0.0]


@pytest.mark.parametrize("fp8", BOTH)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.usefixtures("transformer_engine_on_blackwell")
def test_both_backends_cast_alike_in_both_directions_with_emulated_kernels(
    dtype: torch.dtype, fp8: torch.dtype
) -> None:
    x = hostile(dtype)
    assert x.isinf().any()
    assert x.isnan().any()
    for name in ("quantize_mx", "quantize_mx_columns"):
        ours, theirs = (getattr(m, name)(x, fp8) for m in (torch_backend, te_backend))
        assert same(ours, theirs), name
        assert ours[0].dtype == theirs[0].dtype == fp8
        assert ours[1].unique().numel() > 10
    both = [m.quantize_mx_both(x, fp8) for m in (torch_backend, te_backend)]
    for found in both:
        assert same(found[:2], torch_backend.quantize_mx(x, fp8))
        assert same(found[2:], torch_backend.quantize_mx_columns(x, fp8))
    assert len(te_kernels.calls.quantized) == 3


def test_a_cast_in_parts_has_the_bits_of_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    x = hostile(torch.float32)
    names = ("quantize_mx", "quantize_mx_columns")
    whole = [getattr(torch_backend, name)(x[:300], E4M3) for name in names]
    monkeypatch.setitem(casting._CAST_ELEMENTS, "cpu", 1000)
    for name, expected in zip(names, whole, strict=True):
        assert same(getattr(torch_backend, name)(x[:300], E4M3), expected)


def test_a_transpose_is_cast_from_the_values_not_from_the_numbers() -> None:
    x = torch.randn(64, 96) * torch.exp2(torch.randn(64, 1) * 4)
    q, scale_inv = torch_backend.quantize_mx_columns(x, E4M3)
    assert same((q, scale_inv), torch_backend.quantize_mx(x.t().contiguous(), E4M3))
    by_rows = torch_backend.quantize_mx(x, E4M3)
    assert not torch.equal(
        torch_backend.dequantize(q, scale_inv), torch_backend.dequantize(*by_rows).t()
    )


@pytest.mark.parametrize("num_rows", [1, 31, 32, 33, 40])
@pytest.mark.usefixtures("transformer_engine_on_blackwell")
def test_rows_of_any_number_end_with_zeros_which_change_no_sum_with_emulated_kernels(
    num_rows: int,
) -> None:
    x, grad = torch.randn(num_rows, 64), torch.randn(num_rows, 96)
    for backend in (torch_backend, te_backend):
        (qx, sx), (qg, sg) = (backend.quantize_mx_columns(t, E4M3) for t in (x, grad))
        assert qx.shape == (64, -(-num_rows // 32) * 32)
        assert not qx.float()[:, num_rows:].any()
        product = backend.gemm(qg, sg, qx, sx, None, torch.float32)
        exact = torch_backend.dequantize(qg, sg)[:, :num_rows].double() @ (
            torch_backend.dequantize(qx, sx)[:, :num_rows].double().t()
        )
        torch.testing.assert_close(product.double(), exact, rtol=1e-5, atol=1e-5)


def linear(step: Step, backend: ModuleType, fp8_of_gradients: torch.dtype) -> Result:
    """The linear by a backend's functions, as our operators combine them."""
    x, grad, dtype = step.x.flatten(0, 1), step.grad.flatten(0, 1), step.x.dtype
    by_rows, by_columns = backend.quantize_mx, backend.quantize_mx_columns
    y = backend.gemm(*by_rows(x, E4M3), *by_rows(step.weight, E4M3), step.bias, dtype, True)
    of_grad = by_rows(grad, fp8_of_gradients)
    grad_input = backend.gemm(*of_grad, *by_columns(step.weight, E4M3), None, dtype, False)
    columns = (*by_columns(grad, fp8_of_gradients), *by_columns(x, E4M3))
    grad_weight = backend.gemm(*columns, None, dtype, False)
    return Result(
        y=y.view_as(step.grad), grad_input=grad_input.view_as(step.x), grad_weight=grad_weight
    )


@pytest.mark.parametrize("fp8_format", ["E4M3", "HYBRID"])
@pytest.mark.usefixtures("transformer_engine_on_blackwell")
def test_a_linear_is_that_of_transformer_engine_for_20_steps_with_emulated_kernels(
    fp8_format: str,
) -> None:
    formats = importlib.import_module("transformer_engine.common.recipe").Format
    recipe = recipe_named("MXFP8BlockScaling", fp8_format=formats[fp8_format])
    reference = TransformerEngine(recipe)
    for number, step in enumerate(steps(num_inputs=192)):
        result = linear(step, te_backend, E5M2 if fp8_format == "HYBRID" else E4M3)
        assert_same(result, reference.run(step), number)


@pytest.mark.parametrize("out_dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.usefixtures("transformer_engine_on_blackwell")
def test_both_backends_multiply_alike_with_emulated_kernels(out_dtype: torch.dtype) -> None:
    x, weight, bias = torch.randn(40, 192), torch.randn(160, 192), torch.randn(160)
    a, b = (torch_backend.quantize_mx(t, E4M3) for t in (x, weight))
    ours, theirs = (m.gemm(*a, *b, bias, out_dtype) for m in (torch_backend, te_backend))
    exact = torch_backend.dequantize(*a).double() @ torch_backend.dequantize(*b).double().t() + bias
    # One rounding to the result's type, and sums of 192 products in float32.
    bits = {torch.float32: 1e-5, torch.bfloat16: 2**-8, torch.float16: 2**-11}
    assert ours.dtype == theirs.dtype == out_dtype
    for found in (ours, theirs):
        assert (found.double() - exact).abs().max() <= bits[out_dtype] * exact.abs().max()


@pytest.mark.usefixtures("transformer_engine_on_blackwell")
def test_no_operand_is_transposed_for_a_product_with_emulated_kernels() -> None:
    te_kernels.calls.clear()
    (step,) = list(steps(num_inputs=192))[:1]
    linear(step, te_backend, E4M3)
    asked = [(c.layout, c.m, c.n, c.k) for c in te_kernels.calls.gemms]
    assert asked == [("TN", 32, 160, 192), ("NN", 32, 192, 160), ("NT", 160, 192, 32)]
    assert [c.split_accumulator for c in te_kernels.calls.gemms] == [False, True, True]
    assert te_kernels.calls.transposed == []


@pytest.mark.usefixtures("transformer_engine_on_blackwell")
def test_operands_in_any_layout_give_the_same_product_with_emulated_kernels() -> None:
    x, weight = torch.randn(64, 96), torch.randn(160, 96)
    a, b = torch_backend.quantize_mx(x, E4M3), torch_backend.quantize_mx(weight, E4M3)
    expected = te_backend.gemm(*a, *b, None, torch.float32)

    def moved(pair: Quantized) -> Quantized:
        numbers, scales = pair
        turned = numbers.view(torch.uint8).t().contiguous().t()
        return turned.view(E4M3), scales.t().contiguous().t()

    for left in (a, moved(a)):
        for right in (b, moved(b)):
            assert torch.equal(te_backend.gemm(*left, *right, None, torch.float32), expected)
    numbers, scales = moved(a)
    part = numbers[10:50], scales[10:50]
    assert torch.equal(te_backend.gemm(*part, *b, None, torch.float32), expected[10:50])


@pytest.mark.parametrize("num_rows", [32, 40, 256])
@pytest.mark.usefixtures("transformer_engine_on_blackwell")
def test_on_tensors_without_data_it_says_what_is_made_with_emulated_kernels(num_rows: int) -> None:
    def run() -> list[Tensor]:
        x, weight = torch.randn(num_rows, 256).bfloat16(), torch.randn(160, 256).bfloat16()
        bias = weight[:, 0].float()
        qx, qw = te_backend.quantize_mx(x, E4M3), te_backend.quantize_mx(weight, E4M3)
        columns, both = (
            te_backend.quantize_mx_columns(x, E4M3),
            te_backend.quantize_mx_both(x, E5M2),
        )
        of_weight = te_backend.quantize_mx_columns(weight, E4M3)
        products = [
            te_backend.gemm(*qx, *qw, bias, torch.float32),
            te_backend.gemm(*qw, *qx, None, torch.bfloat16) if num_rows % 32 == 0 else bias,
            te_backend.gemm(*columns, *columns, None, torch.bfloat16),
            te_backend.gemm(qx[0][:, :160], qx[1][:, :5], *of_weight, None, torch.bfloat16),
        ]
        return [*qx, *qw, *columns, *both, *of_weight, *products]

    expected = run()
    with FakeTensorMode():
        found = run()
    for ours, real in zip(found, expected, strict=True):
        assert (ours.shape, ours.stride(), ours.dtype) == (real.shape, real.stride(), real.dtype)
        assert ours.untyped_storage().nbytes() == real.untyped_storage().nbytes()


def test_without_data_the_work_and_the_bytes_of_a_product_are_known() -> None:
    with FakeTensorMode():
        a, b = torch.empty(48, 64, dtype=E4M3), torch.empty(96, 64, dtype=E4M3)
        scales = [torch.empty(n, 2, dtype=torch.uint8) for n in (48, 96)]
        with AtenRecord([a, b, *scales]) as record:
            te_backend.gemm(a, scales[0], b, scales[1], None, torch.bfloat16)
    assert record.flops == 2 * 64 * 64 * 96  # 48 rows are padded to 64
    padded_scales = 2 * 2 * 128 * 4  # of both operands, and as cuBLAS reads them
    padded_rows = 64 * 64 + 64 * 2
    assert record.peak_bytes == 64 * 96 * 2 + padded_scales + padded_rows
