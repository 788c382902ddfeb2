"""NF4 with double quantisation has the bits of bitsandbytes, whatever the weight."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from harness.nf4_tensors import (
    DTYPES,
    NUM_KINDS,
    bits,
    by_bitsandbytes,
    digest,
    parts_of,
    weight,
)
from thunder_memsave.stored_weights.format import NonFiniteWeightError
from thunder_memsave.stored_weights.nf4 import tables
from thunder_memsave.stored_weights.nf4.layout import GROUP, GROUP_BYTES, num_bytes
from thunder_memsave.stored_weights.nf4.numbers import dequantize, quantize

GOLDEN: dict[str, dict[str, str]] = json.loads(
    (Path(__file__).parent / "golden.json").read_text(encoding="utf-8")
)
"""Digests of what bitsandbytes 0.50.2 makes of `weight(number)` on the CPU, by number."""


@pytest.fixture(scope="module")
def bitsandbytes() -> Any:
    return pytest.importorskip(
        "bitsandbytes", reason="bitsandbytes is not installed; the digests are compared"
    )


@pytest.mark.skipif(
    torch.backends.cpu.get_cpu_capability() not in ("AVX2", "AVX512"),
    reason="the mean of the scales, which bitsandbytes leaves to torch, has other last bits there",
)
def test_bits_are_those_recorded_of_bitsandbytes() -> None:
    assert len(GOLDEN) == 60
    for number, expected in GOLDEN.items():
        values = weight(int(number))
        stored = quantize(values, name="w")
        found = {"weight": digest(values)} | {
            name: digest(part) for name, part in parts_of(stored, values.numel()).items()
        }
        for dtype in DTYPES:
            found[str(dtype)] = digest(dequantize(stored, values.shape, dtype))
        assert found == expected, number


@pytest.mark.filterwarnings("ignore")
def test_a_thousand_weights_have_the_bits_of_bitsandbytes(bitsandbytes: Any) -> None:
    tables_of = bitsandbytes.functional
    assert torch.equal(tables.scale_numbers(torch.zeros(1)), tables_of.create_dynamic_map())
    for number in range(1000):
        values = weight(number)
        expected, _ = by_bitsandbytes(values, bitsandbytes)
        found = parts_of(quantize(values, name="w"), values.numel())
        assert all(torch.equal(found[name], expected[name]) for name in expected), number


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("dtype", DTYPES)
def test_dequantised_weights_have_the_bits_of_bitsandbytes(
    bitsandbytes: Any, dtype: torch.dtype
) -> None:
    """Except for denormal numbers of bfloat16, which an instruction of AVX-512 replaces by 0 there."""
    with torch.compiler.set_stance("force_eager"):
        for number in range(10 * NUM_KINDS):
            values = weight(number)
            expected = by_bitsandbytes(values, bitsandbytes)[1](dtype)
            found = dequantize(quantize(values, name="w"), values.shape, dtype)
            if dtype == torch.bfloat16:
                flushed = (expected == 0) & (found.abs() < torch.finfo(dtype).smallest_normal)
                found = torch.where(flushed, expected, found)
            assert torch.equal(bits(found), bits(expected)), number


@pytest.mark.parametrize("n", [1, 2, 63, 64, 65, GROUP - 1, GROUP, GROUP + 1, 3 * GROUP + 129])
def test_a_weight_takes_half_a_byte_for_each_element_and_its_scales(n: int) -> None:
    stored = quantize(torch.randn(n), name="w")
    assert stored.dtype == torch.uint8
    assert stored.nbytes == num_bytes(n)
    offset = 4
    assert num_bytes(n) == -(-n // 2) + -(-n // 64) + 4 * -(-n // 16384) + offset
    assert num_bytes(GROUP) - offset == GROUP_BYTES


def test_bits_do_not_depend_on_how_many_groups_are_done_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    values = torch.randn(5 * GROUP + 1000)
    stored = quantize(values, name="w")
    whole = dequantize(stored, values.shape, torch.float32)
    monkeypatch.setattr("thunder_memsave.stored_weights.nf4.numbers._GROUPS_AT_ONCE", 2)
    assert torch.equal(quantize(values, name="w"), stored)
    assert torch.equal(dequantize(stored, values.shape, torch.float32), whole)


def test_bits_do_not_depend_on_the_number_of_threads() -> None:
    values = torch.randn(64 * 100_000)  # so many scales that torch splits their sum over threads
    stored = quantize(values, name="w")
    before = torch.get_num_threads()
    torch.set_num_threads(4)
    try:
        assert torch.equal(quantize(values, name="w"), stored)
        assert torch.get_num_threads() == 4
    finally:
        torch.set_num_threads(before)


def test_the_relative_error_is_that_of_nf4() -> None:
    """8 to 10 % of a normal distribution's deviation, as in QLoRA's paper; a bug in scales would give more."""
    values = torch.randn(256, 1024, generator=torch.Generator().manual_seed(0))
    error = dequantize(quantize(values, name="w"), values.shape, torch.float32) - values
    assert 0.08 < float(error.square().mean().sqrt()) < 0.10


@pytest.mark.parametrize("bad", [float("inf"), float("-inf"), float("nan")])
@pytest.mark.parametrize("place", [0, 70, 199])
def test_a_weight_that_is_not_finite_is_refused_by_name(bad: float, place: int) -> None:
    values = torch.randn(200)
    values[place] = bad
    with pytest.raises(NonFiniteWeightError, match=r"layers\.3\.q_proj\.weight has elements that"):
        quantize(values, name="layers.3.q_proj.weight")
