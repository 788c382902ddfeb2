"""Scratch inside kernels is measured once, and bounded where it cannot be measured."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from harness.memory import measured_peak_bytes
from thunder_memsave.measure.layouts import Value, layout_of
from thunder_memsave.measure.op_profile import Operation, OpProfile
from thunder_memsave.measure.scratch import MeasuredScratch, bounded_scratch

_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu


def operation(run: Callable[..., Any], *tensors: Tensor, opaque: bool = False) -> Operation:
    values = [Value(layout_of(t), number) for number, t in enumerate(tensors)]
    return Operation(run, values, not opaque)


def profile_of(key: str, *made: Tensor, moved_bytes: int = 1) -> OpProfile:
    sizes = tuple(t.untyped_storage().nbytes() for t in made)
    return OpProfile(
        results=(),
        num_argument_storages=0,
        made_bytes=sizes,
        peak_bytes=sum(sizes),
        moved_bytes=moved_bytes,
        key=key,
    )


def test_scratch_is_the_memory_allocated_beside_the_results(tmp_path: Path) -> None:
    heads = torch.randn(1, 2, 64, 16)
    results = _flash(heads, heads, heads)
    measured = measured_peak_bytes(lambda: _flash(heads, heads, heads))
    found = profile_of("aten_scaled_dot_product_flash_attention_for_cpu[]", *results)
    scratch_bytes = MeasuredScratch(directory=tmp_path)(
        operation(_flash, heads, heads, heads), found
    )
    assert scratch_bytes == measured - found.peak_bytes > 0


def test_the_bound_is_above_the_measurement(tmp_path: Path) -> None:
    for rows in (16, 300, 1100):
        heads = torch.randn(1, 2, rows, 32)
        attention = operation(_flash, heads, heads, heads)
        found = profile_of(
            f"aten_scaled_dot_product_flash_attention_for_cpu[]({rows})",
            *_flash(heads, heads, heads),
        )
        measured = MeasuredScratch(directory=tmp_path)(attention, found)
        assert bounded_scratch(attention, found) >= measured


def test_flash_attention_on_cuda_is_bounded_by_what_its_source_allocates() -> None:
    with torch.device("meta"):
        query = torch.empty(2, 8, 100, 64, dtype=torch.bfloat16)
        key = torch.empty(2, 2, 100, 64, dtype=torch.bfloat16)
        grad = torch.empty_like(query)
    on_cuda = [
        Value(layout_of(t)._replace(device="cuda:0"), n)
        for n, t in enumerate((grad, query, key, key))
    ]
    attention = Operation(_flash, on_cuda, True)
    accumulated, sums, shared = 4 * 2 * 8 * 128 * 64, 4 * 2 * 8 * 128, 2 * 2 * query.numel()
    backward = profile_of("sdpaex_attention_backward[]")
    state = 4 * 512  # of a generator, and what cuDNN takes more
    assert bounded_scratch(attention, backward) == accumulated + sums + shared + state
    assert bounded_scratch(attention, profile_of("sdpaex_attention_forward[]")) == 0


def test_a_plan_for_another_device_has_the_scratch_of_that_device() -> None:
    heads = torch.empty(1, 2, 64, 32, device="meta", dtype=torch.bfloat16)
    here, there = (
        [Value(layout_of(heads)._replace(device=device), n) for n in range(4)]
        for device in ("cpu", "cuda:0")
    )
    backward = profile_of("cuda_flash_attention_backward[]")
    planned = bounded_scratch(Operation(_flash, here, True), backward, device_type="cuda")
    assert planned == bounded_scratch(Operation(_flash, there, True), backward) > 0


def test_an_operation_is_measured_once_and_kept_on_disk(tmp_path: Path) -> None:
    x = torch.randn(8, 8)
    runs: list[int] = []

    def double(x: Tensor) -> Tensor:
        runs.append(1)
        return x + x.clone()

    doubling, found = operation(double, x), profile_of("double[]", x)
    first = MeasuredScratch(directory=tmp_path)
    assert first(doubling, found) == first(doubling, found) == 4 * 64
    first.save()
    num_runs = len(runs)
    assert MeasuredScratch(directory=tmp_path)(doubling, found) == 4 * 64
    assert len(runs) == num_runs


def test_a_measurement_holds_for_that_number_of_threads_and_these_kernels(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each thread has a buffer of a depthwise convolution's gradient; a plan for fewer threads once counted all."""
    x, weight = torch.zeros(4, 16, 16, 16), torch.zeros(16, 1, 3, 3)

    def differentiate(x: Tensor, weight: Tensor) -> Any:
        settings = ([1, 1], [1, 1], [1, 1], False, [0, 0], 16, [True, True, False])
        return torch.ops.aten.convolution_backward(x, x, weight, None, *settings)

    measuring = MeasuredScratch(directory=tmp_path)
    found, one = (
        profile_of("convolution_backward[]", x, weight),
        operation(differentiate, x, weight),
    )
    peaks = {}
    for num_threads, is_enabled in ((2, True), (1, True), (1, False), (2, False)):
        torch.set_num_threads(num_threads)
        monkeypatch.setattr(torch.backends.mkldnn, "enabled", is_enabled)
        scratch_bytes = measuring(one, found)
        peak_bytes = measured_peak_bytes(lambda: differentiate(x, weight))
        assert scratch_bytes == peak_bytes - found.peak_bytes
        peaks[num_threads, is_enabled] = peak_bytes
    assert len(set(peaks.values())) > 1
    measuring.save()
    assert len(list(tmp_path.iterdir())) == len(peaks)


def test_the_users_random_numbers_stay_the_same(tmp_path: Path) -> None:
    x = torch.randn(8)
    before = torch.random.get_rng_state()
    MeasuredScratch(directory=tmp_path)(operation(torch.rand_like, x), profile_of("rand[]", x))
    assert torch.equal(torch.random.get_rng_state(), before)


def test_an_operation_that_refuses_zeros_is_bounded_and_that_is_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def choosy(x: Tensor) -> Tensor:
        raise ValueError("no zeros, please")

    with caplog.at_level(logging.INFO):
        x = torch.ones(2)
        found = profile_of("choosy[]", x)
        assert MeasuredScratch(directory=tmp_path)(operation(choosy, x), found) == 0
    assert "choosy[] could not be measured, so its scratch is bounded: no zeros" in caplog.text


def test_opaque_functions_are_not_called(tmp_path: Path) -> None:
    unknown = operation(lambda _: pytest.fail("it ran"), torch.ones(2), opaque=True)
    assert MeasuredScratch(directory=tmp_path)(unknown, profile_of("unknown[]")) == 0


def test_inside_of_the_users_own_profiler_nothing_is_measured(tmp_path: Path) -> None:
    x = torch.ones(2)
    measuring = operation(lambda _: pytest.fail("it ran"), x)
    with profile(activities=[ProfilerActivity.CPU], acc_events=True):
        assert MeasuredScratch(directory=tmp_path)(measuring, profile_of("x[]", x)) == 0
