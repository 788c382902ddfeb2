"""NVFP4 has the bits of TransformerEngine's Python reference, and its stochastic rounding is that of a seed."""

from __future__ import annotations

from types import ModuleType

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from harness import te_kernels, te_nvfp4_kernels
from harness.te_linear import (
    Result,
    Step,
    TransformerEngine,
    assert_same,
    recipe_named,
    same_bits,
    steps,
)
from thunder_memsave.aten.record import AtenRecord
from thunder_memsave.fp8.kernels import casting, te_backend, te_library, torch_backend
from thunder_memsave.fp8.kernels.nvfp4_blocks import NVFP4_BLOCK, Quantized, dequantize_nvfp4

INF, NAN = torch.inf, torch.nan
SEED = torch.tensor([3_141_592_653_589_793])
NUMBERS = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def hostile(dtype: torch.dtype, worst: float | None) -> Tensor:
    """Blocks of many magnitudes, constants, zeros and subnormal numbers; `worst` is one more element."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        x = torch.randn(96, 64) * torch.exp2(
            torch.randint(-20, 12, (96, 4)).repeat_interleave(16, 1)
        )
    x[0], x[1, :16], x[2, 16:32], x[3] = 0.0, 1.5, -3.0, torch.finfo(dtype).smallest_normal / 8
    x[16:32, 32:48], x[5, 7] = 0.0, -0.0
    x[6] = torch.tensor([*NUMBERS, *(-n for n in NUMBERS)]).repeat(4) * 448 / 6
    if worst is not None:
        x[95, 63] = worst
    return x.to(dtype)


def same(ours: tuple[Tensor, ...], theirs: tuple[Tensor, ...]) -> bool:
    """Compare numbers, scales and amaxes; a NaN is like another, whatever its sign."""
    pairs = list(zip(ours, theirs, strict=True))
    values = all(same_bits(a.float(), b.float()) for a, b in pairs)
    return values and all(a.dtype == b.dtype for a, b in pairs)


@pytest.mark.parametrize("worst", [None, 0.0, 3e38, 1e-38, INF, -INF, NAN])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("block_rows", [1, NVFP4_BLOCK])
@pytest.mark.usefixtures("transformer_engine_on_blackwell")
def test_casts_in_both_directions_have_the_bits_of_the_reference(
    block_rows: int, dtype: torch.dtype, worst: float | None
) -> None:
    x = hostile(dtype, worst) if worst != 0.0 else torch.zeros(96, 64, dtype=dtype)
    with_rht = block_rows == 1
    reference = te_nvfp4_kernels.quantizer_of(block_rows=block_rows, with_rht=with_rht)
    q, scales, columns, scales_of_columns, amax, amax_of_columns = reference._quantize(x)
    by_rows = torch_backend.quantize_nvfp4(x, block_rows, None)
    by_columns = torch_backend.quantize_nvfp4_columns(x, block_rows, None)
    assert same(by_rows, (q, scales, amax))
    assert scales.shape == (96, 4)
    assert same(by_columns, (columns, scales_of_columns, amax_of_columns))
    if with_rht:
        assert same(torch_backend.quantize_nvfp4_both(x), (*by_rows, *by_columns))
    assert len(set(by_rows[0].flatten().tolist())) > 30 or worst is not None


@pytest.mark.usefixtures("transformer_engine_on_blackwell")
def test_both_backends_cast_alike_with_emulated_kernels() -> None:
    x = hostile(torch.bfloat16, None)[:90]
    for name in ("quantize_nvfp4", "quantize_nvfp4_columns"):
        for rows in (1, NVFP4_BLOCK):
            value = x if rows == 1 else hostile(torch.float32, None)
            ours, theirs = (
                getattr(m, name)(value, rows, None) for m in (torch_backend, te_backend)
            )
            assert same(ours, theirs), name
    assert same(*(m.quantize_nvfp4_both(x) for m in (torch_backend, te_backend)))
    assert len(te_kernels.calls.quantized) == 5


@pytest.mark.parametrize(
    "magnitude", [0.0, 0.25, 0.26, 0.75, 1.25, 1.75, 2.5, 2.6, 3.5, 5.0, 5.1, 6.0]
)
def test_numbers_are_the_nearest_and_of_two_the_even_one(magnitude: float) -> None:
    x = torch.full((1, 32), 6.0)
    x[0, 1], x[0, 2] = magnitude, -magnitude
    # A scale of 448 and an amax of 6: numbers stand for themselves.
    found = dequantize_nvfp4(*torch_backend.quantize_nvfp4(x, 1, None))[0]
    expected = min(NUMBERS, key=lambda n: (abs(n - magnitude), NUMBERS.index(n) % 2))
    torch.testing.assert_close(found[[0, 1, 2]], torch.tensor([6.0, expected, -expected]))


def test_a_cast_in_parts_has_the_bits_of_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    x, weight = hostile(torch.bfloat16, None), hostile(torch.float32, None)

    def run() -> list[tuple[Tensor, ...]]:
        found: list[tuple[Tensor, ...]] = [torch_backend.quantize_nvfp4(weight, NVFP4_BLOCK, None)]
        for cast in (torch_backend.quantize_nvfp4, torch_backend.quantize_nvfp4_columns):
            found += [cast(x, 1, None), cast(x, 1, SEED)]
        return found

    whole = run()
    monkeypatch.setitem(casting._CAST_ELEMENTS, "cpu", 1500)
    assert all(same(ours, theirs) for ours, theirs in zip(run(), whole, strict=True))


def test_a_gradient_is_rounded_up_as_often_as_its_mean_wants() -> None:
    values = torch.tensor([0.1, 0.5, 0.8, 1.9, 2.25, 3.0, 4.5, 5.9, 6.0, -0.3, -1.2, -3.9, -4.0])
    x = torch.zeros(8192, 32)
    x[:, : len(values)], x[:, 31] = values, 6.0
    found = dequantize_nvfp4(*torch_backend.quantize_nvfp4(x, 1, SEED))[:, : len(values)]
    down = torch.tensor([max(n for n in NUMBERS if n <= v) for v in values.abs()])
    up = torch.tensor([min(n for n in NUMBERS if n >= v) for v in values.abs()])
    nearest = torch.minimum((found.abs() - down).abs(), (found.abs() - up).abs())
    assert nearest.max() < 1e-5
    # Five standard deviations of the mean of 8,192 numbers, of which each is half a step from its mean at most.
    deviation = 5 * (up - down) / 2 / 8192**0.5
    assert ((found.mean(0) - values).abs() <= deviation + 1e-5).all()
    assert (found[:, up == down] - values[up == down]).abs().max() < 1e-5


def test_its_random_bits_are_those_of_the_seed_and_of_the_direction() -> None:
    x = torch.rand(64, 64).bfloat16()
    first = torch_backend.quantize_nvfp4(x, 1, SEED)
    assert same(torch_backend.quantize_nvfp4(x, 1, SEED.clone()), first)
    # The lowest and the highest bits count, and they look independent: two draws differ in part of the numbers.
    for other in (SEED + 1, SEED + 2**40):
        part = (torch_backend.quantize_nvfp4(x, 1, other)[0] != first[0]).float().mean()
        assert 0.2 < part < 0.8
    # Symmetric, and not transformed: only the random bits differ.
    weight = torch.full((64, 64), 0.7)
    weight[::16, ::16] = 6.0
    rows, columns = (
        cast(weight, NVFP4_BLOCK, SEED)
        for cast in (torch_backend.quantize_nvfp4, torch_backend.quantize_nvfp4_columns)
    )
    assert torch.equal(rows[1].float(), columns[1].float())
    assert not torch.equal(rows[0], columns[0])


@pytest.mark.usefixtures("transformer_engine_on_blackwell")
def test_transformer_engine_rounds_by_its_generator_at_the_seed_with_emulated_kernels() -> None:
    x = torch.rand(64, 64).bfloat16()
    before = torch.get_rng_state()
    ours = [te_backend.quantize_nvfp4(x, 1, SEED) for _ in range(2)]
    of_columns = te_backend.quantize_nvfp4_columns(x, 1, SEED)
    assert torch.equal(torch.get_rng_state(), before)
    assert same(*ours)
    torch.manual_seed(int(SEED))
    theirs = te_library.loaded().extension.quantize(x, _quantizer(rowwise=True))
    assert torch.equal(theirs._rowwise_data, ours[0][0])
    torch.manual_seed(int(SEED) + 1)
    theirs = te_library.loaded().extension.quantize(x, _quantizer(rowwise=False))
    assert torch.equal(theirs._columnwise_data, of_columns[0])
    assert not torch.equal(ours[0][0], te_backend.quantize_nvfp4(x, 1, None)[0])


def _quantizer(*, rowwise: bool) -> object:
    return te_library.loaded().tensor.NVFP4Quantizer(
        rowwise=rowwise,
        columnwise=not rowwise,
        with_rht=not rowwise,
        with_post_rht_amax=not rowwise,
        stochastic_rounding=True,
    )


@pytest.mark.parametrize("num_rows", [1, 16, 31, 32, 40])
@pytest.mark.usefixtures("transformer_engine_on_blackwell")
def test_rows_of_any_number_end_with_zeros_and_their_transform_is_undone_by_the_product(
    num_rows: int,
) -> None:
    x, grad = torch.randn(num_rows, 64).bfloat16(), torch.randn(num_rows, 96).bfloat16()
    exact = grad.double().t() @ x.double()
    for backend in (torch_backend, te_backend):
        columns = [backend.quantize_nvfp4_columns(t, 1, None) for t in (grad, x)]
        assert columns[1][0].shape == (64, -(-num_rows // 32) * 16)
        product = backend.gemm_nvfp4(*columns[0], *columns[1], None, torch.float32)
        values = [dequantize_nvfp4(*c).double() for c in columns]
        torch.testing.assert_close(
            product.double(), values[0] @ values[1].t(), rtol=1e-5, atol=1e-5
        )
        # Each number of 4 bits is off by a sixth at most; without undoing the transform, nothing is alike.
        assert (product - exact).norm() < 0.25 * exact.norm()


def linear(step: Step, backend: ModuleType) -> Result:
    """The linear by a backend's functions, as our operators combine them, with gradients rounded to the nearest."""
    x, grad, dtype = step.x.flatten(0, 1), step.grad.flatten(0, 1), step.x.dtype
    by_rows, by_columns = backend.quantize_nvfp4, backend.quantize_nvfp4_columns
    weight = by_rows(step.weight, NVFP4_BLOCK, None)
    y = backend.gemm_nvfp4(*by_rows(x, 1, None), *weight, step.bias, dtype, True)
    of_weight = by_columns(step.weight, NVFP4_BLOCK, None)
    grad_input = backend.gemm_nvfp4(*by_rows(grad, 1, None), *of_weight, None, dtype, False)
    columns = (*by_columns(grad, 1, None), *by_columns(x, 1, None))
    grad_weight = backend.gemm_nvfp4(*columns, None, dtype, False)
    return Result(
        y=y.view_as(step.grad), grad_input=grad_input.view_as(step.x), grad_weight=grad_weight
    )


@pytest.mark.usefixtures("transformer_engine_on_blackwell")
def test_a_linear_is_that_of_transformer_engine_for_20_steps_with_emulated_kernels() -> None:
    reference = TransformerEngine(
        recipe_named("NVFP4BlockScaling", disable_stochastic_rounding=True)
    )
    num_ours = 0
    for number, step in enumerate(steps(num_inputs=192)):
        expected = reference.run(step)
        assert_same(linear(step, te_backend), expected, number)
        ours = linear(step, torch_backend)
        for name in ("y", "grad_input", "grad_weight"):
            found, theirs = (getattr(result, name).float() for result in (ours, expected))
            assert torch.equal(found.isfinite(), theirs.isfinite())
            # Sums of 192 products in float32 in another order, and one rounding to bfloat16.
            torch.testing.assert_close(found, theirs, rtol=2**-7, atol=1e-30, equal_nan=True)
            num_ours += same_bits(found, theirs)
    assert (
        num_ours >= 50
    )  # of 60: a sum in another order rarely rounds to another number of bfloat16


@pytest.mark.usefixtures("transformer_engine_on_blackwell")
def test_every_product_sums_over_the_last_dim_of_both_operands_with_emulated_kernels() -> None:
    te_kernels.calls.clear()
    (step,) = list(steps(num_inputs=192))[:1]
    linear(step, te_backend)
    asked = [(c.layout, c.m, c.n, c.k) for c in te_kernels.calls.gemms]
    assert asked == [("TN", 32, 160, 192), ("TN", 32, 192, 160), ("TN", 160, 192, 32)]
    assert [c.split_accumulator for c in te_kernels.calls.gemms] == [False, True, True]


@pytest.mark.parametrize("num_rows", [32, 40, 128])
@pytest.mark.usefixtures("transformer_engine_on_blackwell")
def test_on_tensors_without_data_it_says_what_is_made_with_emulated_kernels(num_rows: int) -> None:
    def run() -> list[Tensor]:
        x, weight = torch.randn(num_rows, 128).bfloat16(), torch.randn(160, 128).bfloat16()
        seed = torch.randint(9, (1,))
        qx = te_backend.quantize_nvfp4(x, 1, seed)
        qw = te_backend.quantize_nvfp4(weight, NVFP4_BLOCK, None)
        columns = te_backend.quantize_nvfp4_columns(x, 1, seed)
        of_weight = te_backend.quantize_nvfp4_columns(weight, NVFP4_BLOCK, None)
        products = [
            te_backend.gemm_nvfp4(*qx, *qw, weight[:, 0].float(), torch.bfloat16),
            te_backend.gemm_nvfp4(*columns, *columns, None, torch.bfloat16),
        ]
        both = te_backend.quantize_nvfp4_both(x)
        return [*qx, *qw, *columns, *both, *of_weight, *products]

    expected = run()
    with FakeTensorMode():
        found = run()
    for ours, real in zip(found, expected, strict=True):
        assert (ours.shape, ours.stride(), ours.dtype) == (real.shape, real.stride(), real.dtype)
        assert ours.untyped_storage().nbytes() == real.untyped_storage().nbytes()


@pytest.mark.parametrize(("rows", "copied"), [(64, 0), (96, 96 * 128 * 2)])
def test_without_data_the_copy_that_a_transform_needs_is_known(rows: int, copied: int) -> None:
    with FakeTensorMode():
        x = torch.empty(rows, 128, dtype=torch.bfloat16)
        with AtenRecord([x]) as record:
            te_backend.quantize_nvfp4_columns(x, 1, None)
    numbers, scales = rows * 128 // 2, 128 * -(-rows // 64) * 4
    compact = 128 * rows // 16 if rows % 64 else 0  # otherwise the kernel's have no padding
    assert record.peak_bytes == copied + numbers + scales + compact + 4


def test_without_data_the_work_and_the_bytes_of_a_product_are_known() -> None:
    with FakeTensorMode():
        operands: list[Quantized] = [
            (
                torch.empty(n, 32, dtype=torch.uint8),
                torch.empty(n, 4, dtype=torch.float8_e4m3fn),
                torch.empty(1),
            )
            for n in (40, 96)
        ]
        with AtenRecord([t for of in operands for t in of]) as record:
            te_backend.gemm_nvfp4(*operands[0], *operands[1], None, torch.bfloat16)
    # 40 rows are padded to 48; two numbers count as one of 8 bits.
    assert record.flops == 2 * 48 * 32 * 96
    padded_scales = 2 * 2 * 128 * 4  # of both operands, and as cuBLAS reads them
    assert record.peak_bytes == 48 * 96 * 2 + padded_scales + 48 * 32 + 48 * 4
