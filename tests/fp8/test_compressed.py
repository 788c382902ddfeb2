"""A value that is stored in fp8 differs by no more than the stated bound from what it was."""

from __future__ import annotations

import pytest
import torch

from thunder_memsave.fp8.compressed import BLOCK, DTYPE, OF_LARGEST, RELATIVE, make_again, store
from thunder_memsave.fp8.kernels import torch_backend


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_numbers_are_rounded_by_no_more_than_is_stated(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    spread = torch.logspace(-9, 4, 64).reshape(-1, 1, 1)
    x = torch.randn(64, 4, BLOCK, generator=generator) * spread
    x[:, 0] = x[:, 0].exp2().nan_to_num(0, 0).clamp_(max=6e4)  # many magnitudes in a row
    x[:, 1, 1:] *= 1e-4  # one large number among small ones
    x = x.to(dtype)
    same, quantized, scale_inv = store(x)
    assert same is x
    assert (quantized.dtype, quantized.nbytes, scale_inv.nbytes) == (
        DTYPE,
        x.numel(),
        x.numel() // BLOCK * 4,
    )
    again = make_again(quantized, scale_inv, tuple(x.shape), dtype)
    assert (again.shape, again.dtype) == (x.shape, dtype)
    exact, found = x.double(), again.double()
    largest = exact.abs().amax(-1, keepdim=True)
    bound = torch.maximum(RELATIVE * exact.abs(), OF_LARGEST * largest)
    smallest = torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps
    assert ((found - exact).abs() <= bound + smallest).all()
    # The bound is none of other formats.
    assert ((found - exact).abs() > 0.9 * RELATIVE * exact.abs()).any()


def test_zeros_stay_zeros_and_nan_stays_nan() -> None:
    x = torch.zeros(2, BLOCK)
    x[1, 3] = float("nan")
    x[1, 4] = -2.0
    _, quantized, scale_inv = store(x)
    again = make_again(quantized, scale_inv, (2, BLOCK), torch.float32)
    torch.testing.assert_close(again, x, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_rows_are_dequantised_as_blocks_are(dtype: torch.dtype) -> None:
    x = torch.randn(300, 48, generator=torch.Generator().manual_seed(1))
    quantized, scale_inv = torch_backend.quantize_block(x, DTYPE, 1, 48)
    expected = torch_backend.dequantize(quantized, scale_inv).to(dtype)
    assert torch.equal(torch_backend.dequantize_rows(quantized, scale_inv, dtype), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_no_finite_number_becomes_infinite(dtype: torch.dtype) -> None:
    largest = torch.finfo(dtype).max
    x = torch.tensor([largest, -largest, 0.99 * largest, 1.0] * 32, dtype=dtype)
    _, quantized, scale_inv = store(x)
    again = make_again(quantized, scale_inv, (BLOCK,), dtype)
    assert again.isfinite().all()
    assert (again[:3].double() / x[:3].double() - 1).abs().max() <= RELATIVE
