"""MXFP4: dequantised numbers have the bits of transformers', quantised ones those of the specification's rule."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from transformers.integrations.mxfp4 import FP4_VALUES, convert_moe_packed_tensors

from harness.mxfp4_tensors import bits
from thunder_memsave.stored_weights import mxfp4
from thunder_memsave.stored_weights.format import DTYPES, NonFiniteWeightError

NUM_KINDS = 8


def all_pairs() -> tuple[Tensor, Tensor]:
    """Return codes and scales in which each of 256 bytes of codes is in a block of each of 256 scales."""
    codes = torch.arange(256, dtype=torch.uint8).view(1, 1, 16, 16).expand(2, 256, 16, 16)
    scales = torch.arange(256, dtype=torch.uint8).view(1, 256, 1).expand(2, 256, 16)
    return codes.contiguous(), scales.contiguous()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("at_once", [4 * 2**20, 5 * 512, 3])
def test_every_byte_with_every_scale_has_the_bits_of_transformers(
    dtype: torch.dtype, at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Infinite numbers, denormal ones and both zeros among them; and however many elements are done at once."""
    monkeypatch.setattr("thunder_memsave.stored_weights.mxfp4._ELEMENTS_AT_ONCE", at_once)
    codes, scales = all_pairs()
    expected = convert_moe_packed_tensors(codes, scales, dtype=dtype)
    assert expected.isinf().any()
    assert bool((expected == 0).any())
    stored = torch.cat([scales.flatten(1), codes.flatten(1)], dim=1)
    found = mxfp4.dequantize_transposed(stored, expected.shape, dtype)
    assert found.is_contiguous()
    assert torch.equal(bits(found), bits(expected))
    other = mxfp4.dequantize(stored, expected.transpose(1, 2).shape, dtype)
    assert torch.equal(bits(other.transpose(1, 2)), bits(expected))


def weight(number: int) -> Tensor:
    """Return a weight whose kind, size and dtype follow from the number."""
    generator = torch.Generator().manual_seed(number)
    rows, blocks = torch.randint(1, 6, (2,), generator=generator).tolist()
    values = torch.randn(rows, 32 * blocks, generator=generator, dtype=torch.float64)
    match number % NUM_KINDS:
        case 1:
            values[:, :32] = 0
        case 2:
            values *= 1e-38  # scales at their smallest, and denormal elements
        case 3:
            values *= 1e38 / values.abs().max()
        case 4:
            values = (values * 8).round() / 4  # many are half-way between two numbers
        case 5:
            values[:, ::32] *= 1e4
        case 6:
            values = 2.0 ** torch.randint(-40, 40, values.shape, generator=generator).double()
        case 7:
            values = values.sign() * 7.999  # rounds to 8, which there is not
    return values.to(DTYPES[number // NUM_KINDS % 3]).nan_to_num(posinf=65504.0, neginf=-65504.0)


def by_the_rule(block: Tensor) -> tuple[int, list[int]]:
    """Return the scale and the codes of 32 elements, in float64, by looking at all numbers that there are."""
    values = block.double().tolist()
    largest = max(map(abs, values))
    exponent = -127 if largest == 0 else max(math.frexp(largest)[1] - 1 - 2, -127)
    codes = []
    for value in values:
        scaled = abs(value) / 2.0**exponent
        nearest = min(range(8), key=lambda code: (abs(FP4_VALUES[code] - scaled), code % 2))
        codes.append(nearest + 8 * (math.copysign(1.0, value) < 0))
    return exponent + 127, codes


def test_bytes_are_those_of_the_rule_computed_number_by_number() -> None:
    seen = set()
    for number in range(6 * NUM_KINDS):
        values = weight(number)
        scales, codes = mxfp4.split(
            mxfp4.quantize(values, name="w"), torch.Size([len(values), 1, values.shape[1]])
        )
        for block, scale, packed in zip(
            values.view(-1, 32), scales.flatten(), codes.reshape(-1, 16), strict=True
        ):
            found = torch.stack([packed & 15, packed >> 4], dim=1).flatten().tolist()
            assert (int(scale), found) == by_the_rule(block), number
            seen |= set(found)
    assert seen == set(range(16))


def test_a_half_is_rounded_to_the_even_code_and_beyond_six_to_six() -> None:
    values = torch.zeros(1, 32)
    values[0, :9] = torch.tensor([0.25, 0.75, 1.25, 1.75, -2.5, 3.5, 5.0, 7.9, -7.9])
    stored = mxfp4.quantize(values, name="w")
    found = mxfp4.dequantize(stored, values.shape, torch.float32)
    assert stored[0, 0] == 127
    assert found[0, :9].tolist() == [0.0, 1.0, 1.0, 2.0, -2.0, 4.0, 4.0, 6.0, -6.0]


def test_a_weight_takes_half_a_byte_for_each_element_and_a_byte_for_each_block() -> None:
    for shape in ((5, 96), (3, 7, 64)):
        values = torch.randn(shape)
        stored = mxfp4.quantize(values, name="w")
        assert stored.dtype == torch.uint8
        assert stored.shape == mxfp4.stored_shape(values.shape)
        assert stored.nbytes == values.numel() // 2 + values.numel() // 32


def test_a_transposed_stack_has_the_bytes_of_its_matrices_transposed() -> None:
    values = torch.randn(3, 64, 7)
    stored = mxfp4.quantize_transposed(values, name="w")
    of_each = [mxfp4.quantize(expert.T.contiguous(), name="w").flatten() for expert in values]
    for whole, matrix in zip(stored, of_each, strict=True):
        scales, codes = mxfp4.split(matrix.view(7, -1), torch.Size([7, 1, 64]))
        assert torch.equal(whole, torch.cat([scales.flatten(), codes.flatten()]))
    found = mxfp4.dequantize_transposed(stored, values.shape, torch.float32)
    assert torch.equal(mxfp4.quantize_transposed(found, name="w"), stored)


def test_a_row_does_not_depend_on_others_nor_on_how_many_are_done_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    values = torch.randn(3, 37, 64)
    stored = mxfp4.quantize(values, name="w")
    assert torch.equal(torch.cat([mxfp4.quantize(v[None], name="w") for v in values]), stored)
    monkeypatch.setattr("thunder_memsave.stored_weights.mxfp4._ELEMENTS_AT_ONCE", 5 * 64)
    assert torch.equal(mxfp4.quantize(values, name="w"), stored)


@pytest.mark.parametrize("bad", [float("inf"), float("-inf"), float("nan")])
def test_a_weight_that_is_not_finite_is_refused_by_name(bad: float) -> None:
    values = torch.randn(4, 64)
    values[2, 40] = bad
    with pytest.raises(
        NonFiniteWeightError,
        match=r"up has elements .* \(frozen_weights: mxfp4\), whose blocks of 32",
    ):
        mxfp4.quantize(values, name="up")
