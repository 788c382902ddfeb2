"""Each document of packed rows is attended to as it would be alone: on the CPU, and by what CUDA is asked for."""

from __future__ import annotations

import logging
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from thunder.core.trace import TraceCtx, tracectx
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from harness.flash_kernels import band, flash_on_cpu
from harness.kernels_called import kernel_called
from harness.on_cuda import facts, on_cuda
from thunder_memsave.aten.record import AtenRecord
from thunder_memsave.measure.layouts import Layout, Value
from thunder_memsave.measure.op_profile import Operation
from thunder_memsave.measure.run_alone import ready_to_run
from thunder_memsave.ops.families.packed_attention import (
    band_of,
    boundaries_of,
    documents,
    packed_attention,
    packed_mask,
    runs,
)
from thunder_memsave.ops.families.packed_kernels import _packed_attention, cpu_packed, cuda_packed
from thunder_memsave.ops.table import scratch_bytes

ROWS, HEADS, KEYS, LENGTH, WIDTH = 2, 4, 2, 12, 8
ENDS = torch.tensor([[3, 8, 8], [1, 9, 12]], dtype=torch.int32)
BOUNDARIES = boundaries_of(ENDS, LENGTH)
PARTS = [(0, 0, 3), (0, 3, 8), (1, 0, 1), (1, 1, 9), (1, 9, 12)]


def operands(num_keys: int = KEYS, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.randn(ROWS, n, LENGTH, WIDTH, dtype=dtype) for n in (HEADS, num_keys, num_keys)]


def alone(query: Tensor, key: Tensor, value: Tensor, window: int | None = None) -> Tensor:
    """Softmax of the scores of each document, by its definition."""
    result = torch.zeros_like(query)
    for row, start, end in PARTS:
        q, k, v = (t[row, :, start:end] for t in (query, key, value))
        k, v = (t.repeat_interleave(HEADS // t.shape[0], 0) for t in (k, v))
        scores = (q @ k.mT / WIDTH**0.5).masked_fill(~band(end - start, window), -torch.inf)
        result[row, :, start:end] = scores.softmax(-1) @ v
    return result


def differentiated(run: Any, heads: list[Tensor], grad: Tensor) -> tuple[Tensor, ...]:
    leaves = [t.clone().requires_grad_() for t in heads]
    output = run(*leaves)
    return (output.detach(), *torch.autograd.grad(output, leaves, grad))


def kernel_results(
    kernel: Any, heads: list[Tensor], grad: Tensor, window: int | None = None
) -> tuple[Tensor, ...]:
    output, logsumexp = kernel.run(*heads, BOUNDARIES, None, window)
    grads = kernel.derivatives[0].run(grad, *heads, output, logsumexp, BOUNDARIES, None, window)
    return (output, *grads)


@pytest.fixture
def _flash_on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    flash_on_cpu(monkeypatch)


@pytest.mark.usefixtures("_flash_on_cpu")
@pytest.mark.parametrize("num_keys", [HEADS, KEYS], ids=["heads", "grouped queries"])
@pytest.mark.parametrize("how", ["cpu kernel", "cuda kernel", "eager", "mask"])
@pytest.mark.parametrize("window", [None, 1, 4, 8])
def test_values_and_gradients_are_those_of_each_document_alone(
    how: str, num_keys: int, window: int | None
) -> None:
    heads, grad = operands(num_keys), torch.randn(ROWS, HEADS, LENGTH, WIDTH, dtype=torch.float64)
    expected = differentiated(partial(alone, window=window), heads, grad)
    if how == "eager":
        found = differentiated(
            lambda *t: packed_attention(*t, BOUNDARIES, enable_gqa=True, window=window), heads, grad
        )
    elif how == "mask":
        mask = packed_mask(BOUNDARIES, ROWS, LENGTH, window)
        grad[0, :, 8:] = 0  # under a mask, padding attends to padding
        expected = differentiated(partial(alone, window=window), heads, grad)
        found = differentiated(
            lambda q, k, v: F.scaled_dot_product_attention(q, k, v, mask, enable_gqa=True),
            heads,
            grad,
        )
        found[0][0, :, 8:] = 0
    else:
        kernel = cpu_packed if how == "cpu kernel" else cuda_packed
        found = kernel_results(kernel, heads, grad, window)
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


@pytest.mark.usefixtures("_flash_on_cpu")
@pytest.mark.parametrize("kernel", [cpu_packed, cuda_packed], ids=lambda k: k.name)
def test_padding_and_other_documents_get_exactly_nothing(kernel: Any) -> None:
    heads, grad = operands(), torch.zeros(ROWS, HEADS, LENGTH, WIDTH, dtype=torch.float64)
    grad[0, :, 3:8] = 1  # of the second document of the first row
    grad[0, :, 8:] = torch.inf  # of its padding
    output, *grads = kernel_results(kernel, heads, grad)
    assert bool((output[0, :, 8:] == 0).all())
    for found in grads:
        assert bool((found[0, :, 3:8] != 0).any())
        found[0, :, 3:8] = 0
        assert bool((found == 0).all())


@pytest.mark.usefixtures("_flash_on_cpu")
@pytest.mark.parametrize("kernel", [cpu_packed, cuda_packed], ids=lambda k: k.name)
def test_keys_outside_of_the_window_get_exactly_nothing(kernel: Any) -> None:
    heads, grad = operands(), torch.zeros(ROWS, HEADS, LENGTH, WIDTH, dtype=torch.float64)
    grad[1, :, 7] = 1  # of the second document of the second row, from 1 to 9
    _, _, *of_keys = kernel_results(kernel, heads, grad, window=3)
    for found in of_keys:
        assert bool((found[1, :, 5:8] != 0).all())
        found[1, :, 5:8] = 0
        assert bool((found == 0).all())


def test_on_a_cpu_only_documents_longer_than_the_window_have_a_mask() -> None:
    heads = operands()
    with AtenRecord() as record:
        cpu_packed.run(*heads, BOUNDARIES, None, 8)
    causal = sum((end - start) ** 2 for _, start, end in PARTS)
    assert record.flops == 2 * HEADS * WIDTH * causal
    assert band_of(8, 8, heads[0]) is None
    added = band_of(8, 7, heads[0])
    assert added is not None
    assert torch.equal(added == 0, band(8, 7))
    assert torch.equal(added == -torch.inf, ~band(8, 7))


def test_neighbours_of_one_length_are_one_call_with_the_bits_of_each_alone() -> None:
    torch.manual_seed(0)
    length = 96
    ends = torch.tensor([[32, 64, 96, 96], [16, 32, 80, 90]], dtype=torch.int32)
    boundaries = boundaries_of(ends, length)
    assert list(runs(boundaries, 2, length)) == [
        (0, 0, 32, 3),
        (1, 0, 16, 2),
        (1, 32, 48, 1),
        (1, 80, 10, 1),
    ]
    # In the order of memory that models have.
    heads = [torch.randn(2, length, n, WIDTH).transpose(1, 2) for n in (HEADS, KEYS, KEYS)]
    grad = torch.randn(2, length, HEADS, WIDTH).transpose(1, 2)
    output, logsumexp = cpu_packed.run(*heads, boundaries, None)
    grads = cpu_packed.derivatives[0].run(grad, *heads, output, logsumexp, boundaries, None)
    for document in documents(boundaries, 2, length):
        own = [document.of(t) for t in heads]
        alone = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(*own, 0.0, True)
        for found, expected in zip((output, logsumexp), alone, strict=True):
            assert torch.equal(document.of(found), expected)
        run = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
        gradients = run(document.of(grad), *own, *alone, 0.0, True)
        for found, expected in zip(grads, gradients, strict=True):
            assert torch.equal(document.of(found), expected)


def test_eight_documents_of_a_row_are_two_calls_in_all() -> None:
    query = torch.randn(1, 4096, 2, 8).transpose(1, 2)
    boundaries = boundaries_of(torch.arange(512, 4097, 512, dtype=torch.int32)[None], 4096)
    with profile(activities=[ProfilerActivity.CPU]) as seen:
        results = cpu_packed.run(query, query, query, boundaries, None)
        backward = cpu_packed.derivatives[0].run
        backward(query, query, query, query, *results, boundaries, None)
    calls = {e.key: e.count for e in seen.key_averages() if "_flash_attention_for_cpu" in e.key}
    operator = "aten::_scaled_dot_product_flash_attention_for_cpu"
    assert calls == {operator: 1, f"{operator}_backward": 1}


def test_boundaries_are_cumulative_lengths_over_all_rows() -> None:
    assert BOUNDARIES.tolist() == [0, 3, 8, 8, 12, 13, 21, 24, 24]
    assert BOUNDARIES.dtype is torch.int32
    assert list(documents(BOUNDARIES, ROWS, LENGTH)) == PARTS
    empty = boundaries_of(torch.zeros(1, 3, dtype=torch.int32), LENGTH)
    assert list(documents(empty, 1, LENGTH)) == []


def test_the_mask_of_a_window_lets_a_position_see_only_so_many() -> None:
    mask = packed_mask(boundaries_of(torch.tensor([[3, 4]], dtype=torch.int32), 4), 1, 4, 2)
    assert mask.int().tolist() == [[[[1, 0, 0, 0], [1, 1, 0, 0], [0, 1, 1, 0], [0, 0, 0, 1]]]]


def test_the_mask_lets_a_position_see_its_own_document_up_to_itself() -> None:
    mask = packed_mask(boundaries_of(torch.tensor([[2, 3]], dtype=torch.int32), 4), 1, 4)
    assert mask.int().tolist() == [[[[1, 0, 0, 0], [1, 1, 0, 0], [0, 0, 1, 0], [0, 0, 0, 1]]]]


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_packed_rows_are_measured_as_whole_documents(direction: str) -> None:
    seen: list[Tensor] = []
    names = {"forward": cpu_packed.name, "backward": cpu_packed.derivatives[0].name}
    heads = Layout((ROWS, 1, LENGTH, 1), (LENGTH, LENGTH, 1, 1), 0, torch.float32, "cpu", 96)
    numbers = Layout((9,), (1,), 0, torch.int32, "cpu", 36)
    operation = Operation(
        lambda *tensors: seen.extend(tensors),
        [Value(heads, 0), Value(numbers, 1)],
        True,
        names[direction],
    )
    with ready_to_run(operation) as run:
        run()
    assert list(documents(seen[-1], ROWS, LENGTH)) == [(0, 0, LENGTH), (1, 0, LENGTH)]


@pytest.mark.parametrize("num_keys", [HEADS, KEYS], ids=["heads", "grouped queries"])
def test_what_the_trace_says_of_cudas_kernel_is_what_pytorch_says(num_keys: int) -> None:
    shapes = [(ROWS, n, LENGTH, WIDTH) for n in (HEADS, num_keys, num_keys)]
    heads = [torch.empty(s, device="meta", dtype=torch.bfloat16) for s in shapes]
    boundaries = BOUNDARIES.to("meta")
    results = cuda_packed.run(*heads, boundaries, None)
    grads = cuda_packed.derivatives[0].run(heads[0], *heads, *results, boundaries, None)
    with tracectx(TraceCtx(None)):
        proxies = [on_cuda(h) for h in heads]
        said = cuda_packed.meta(*proxies, on_cuda(boundaries), None)
        said_grads = cuda_packed.derivatives[0].meta(
            proxies[0], *proxies, *said, on_cuda(boundaries), None
        )
    assert facts(said) == facts(results)
    assert facts(said_grads) == facts(grads)


@pytest.mark.parametrize(
    ("dtype", "kernel"),
    [
        (torch.bfloat16, "cuda_packed_attention"),
        (torch.float32, "cuda_efficient_attention"),
    ],
)
def test_without_a_kernel_that_takes_the_operands_there_is_a_mask(
    dtype: torch.dtype, kernel: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="thunder_memsave.ops.families.packed_kernels")
    heads = operands(dtype=dtype)
    found = kernel_called(_packed_attention, *heads, BOUNDARIES, enable_gqa=True, window=4)
    assert found == kernel
    said = "no kernel takes packed rows of torch.float32 with 8 numbers per head"
    assert (said in caplog.text) is (dtype is torch.float32)


def test_backward_on_cuda_has_room_for_the_end_of_each_document() -> None:
    heads = Layout((1, 4, 256, 64), (0,) * 4, 0, torch.bfloat16, "cuda", 0)
    keys = Layout((1, 2, 256, 64), (0,) * 4, 0, torch.bfloat16, "cuda", 0)
    logsumexp = Layout((4, 256), (0,) * 2, 0, torch.float32, "cuda", 0)
    boundaries = Layout((9,), (1,), 0, torch.int32, "cuda", 0)
    operator = cuda_packed.derivatives[0].name
    found = scratch_bytes(operator, [heads, heads, keys, keys, heads, logsumexp, boundaries])
    accumulated = 4 * (256 + 128 * 8) * 4 * (64 + 1)
    expanded = 2 * 2 * 4 * 256 * 64
    assert found == accumulated + expanded + 4 * 512
