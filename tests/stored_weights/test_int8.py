"""int8 by rows: each number is the nearest to an element over its row's scale, and a row knows no other."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from thunder_memsave.stored_weights.format import DTYPES, NonFiniteWeightError
from thunder_memsave.stored_weights.int8 import dequantize, quantize, stored_shape


def weight(number: int, *, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return weights of other sizes and magnitudes for other numbers."""
    generator = torch.Generator().manual_seed(number)
    sizes = torch.randint(1, 200, (2,), generator=generator).tolist()
    scale = 10.0 ** (number % 9 - 4)
    return (scale * torch.randn(sizes, generator=generator)).to(dtype)


def by_hand(values: Tensor) -> tuple[Tensor, Tensor]:
    """Return the numbers and scales, computed row by row in Python's way."""
    numbers, scales = torch.zeros(values.shape, dtype=torch.int8), torch.zeros(len(values))
    for row, elements in enumerate(values.float()):
        scales[row] = elements.abs().max() / 127
        if scales[row] > 0:
            numbers[row] = torch.tensor([round(float(e / scales[row])) for e in elements])
    return numbers, scales


@pytest.mark.parametrize("dtype", DTYPES)
def test_numbers_and_scales_are_those_computed_by_hand(dtype: torch.dtype) -> None:
    for number in range(20):
        values = weight(number, dtype=dtype)
        stored = quantize(values, name="w")
        numbers, scales = by_hand(values)
        assert torch.equal(stored[:, 4:].view(torch.int8), numbers)
        assert torch.equal(stored[:, :4].contiguous().view(torch.float32)[:, 0], scales)
        expected = (numbers * scales[:, None]).to(dtype)
        assert torch.equal(dequantize(stored, values.shape, dtype), expected)


def test_a_half_is_rounded_to_the_even_number() -> None:
    stored = quantize(torch.tensor([[127.0, 0.5, 1.5, -2.5, -127.0]]), name="w")
    assert stored[0, 4:].view(torch.int8).tolist() == [127, 0, 2, -2, -127]


def test_a_weight_takes_a_byte_for_each_element_and_four_for_each_row() -> None:
    for number in range(10):
        values = weight(number)
        before = values.clone()
        stored = quantize(values, name="w")
        assert torch.equal(values, before)
        assert stored.dtype == torch.uint8
        assert stored.shape == stored_shape(values.shape)
        assert stored.nbytes == values.numel() + 4 * len(values)


@pytest.mark.parametrize("smallest", [0.0, 1e-45, 1e-43])
def test_rows_of_zeros_or_nearly_so_give_zeros_or_finite_numbers(smallest: float) -> None:
    values = torch.tensor([[0.0, 0.0, 0.0], [smallest, -smallest, 0.0], [1.0, 2.0, 3.0]])
    stored = quantize(values, name="w")
    found = dequantize(stored, values.shape, torch.float32)
    assert not stored[0].any()
    assert not found[0].any()
    assert torch.isfinite(found).all()
    assert (found[1].abs() <= 2 * smallest).all()


def test_the_error_is_at_most_half_a_step_of_the_row() -> None:
    values = weight(3)
    error = dequantize(quantize(values, name="w"), values.shape, torch.float32) - values
    steps = values.abs().amax(dim=1, keepdim=True) / 127
    assert (error.abs() <= 0.5 * steps * (1 + 1e-5)).all()  # the product is rounded to float32


def test_a_row_does_not_depend_on_others_nor_on_how_many_are_done_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    values = torch.randn(37, 53)
    stored = quantize(values, name="w")
    assert torch.equal(torch.cat([quantize(row[None], name="w") for row in values]), stored)
    whole = dequantize(stored, values.shape, torch.bfloat16)
    monkeypatch.setattr("thunder_memsave.stored_weights.int8._ELEMENTS_AT_ONCE", 5 * 53)
    assert torch.equal(quantize(values, name="w"), stored)
    assert torch.equal(dequantize(stored, values.shape, torch.bfloat16), whole)


@pytest.mark.parametrize("bad", [float("inf"), float("-inf"), float("nan")])
def test_a_weight_that_is_not_finite_is_refused_by_name(bad: float) -> None:
    values = torch.randn(4, 5)
    values[2, 3] = bad
    with pytest.raises(
        NonFiniteWeightError, match=r"q_proj\.weight has .* \(frozen_weights: int8\), whose rows"
    ):
        quantize(values, name="q_proj.weight")
