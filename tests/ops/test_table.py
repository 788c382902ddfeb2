"""Every row of the table keeps its word: values, gradients, what is saved and scratch are as PyTorch's."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path

import pytest
import torch
from thunder.core.proxies import TensorProxy
from thunder.core.symbol import BoundSymbol
from torch import Tensor

from harness.operations import SAMPLES, Samples
from harness.parity import Twins
from harness.traces import saved_for_backward
from thunder_memsave.measure.layouts import Layout, Value, contiguous
from thunder_memsave.measure.op_profile import Operation, OpProfile, OpProfiles
from thunder_memsave.measure.scratch import MeasuredScratch, bounded_scratch
from thunder_memsave.ops.operation import Kernel
from thunder_memsave.ops.table import OPERATIONS, scratch_bytes

ELSEWHERE = {
    "linear_cross_entropy": "ops/families/test_linear_cross_entropy.py",
    "linear_cross_entropy_in_fp8": "ops/families/test_linear_cross_entropy_in_fp8.py",
    "windowed_attention": "ops/families/test_windowed_attention.py",
}
"""Rows that need more than one call, or none of torch's, with the tests that have it."""

KERNELS = {k.name: k for operation in OPERATIONS for k in operation.kernels}
TORCHS = (
    "aten_native_layer_norm_backward",
    "aten_scaled_dot_product_flash_attention_for_cpu",
    "aten_scaled_dot_product_flash_attention_for_cpu_backward",
)
"""PyTorch's own operators of which the table knows the scratch on a CPU."""
WITH_KERNELS = [name for name, sample in SAMPLES.items() if sample.kernel]


def total(outputs: dict[str, Tensor]) -> Tensor:
    return torch.stack([v.float().square().sum() for v in outputs.values()]).sum()


def trained(names: Sequence[str], dtype: torch.dtype, tolerance: float) -> Twins:
    twins = Twins(Samples(names, dtype))
    twins.assert_equal(loss=total, rtol=tolerance, atol=tolerance)
    return twins


@cache
def with_kernels() -> Twins:
    """All of which one kernel computes the operation, another its gradient."""
    return trained(WITH_KERNELS, torch.float32, 0.0)


@cache
def with_torchs() -> Twins:
    """All that PyTorch's own operators compute."""
    names = [name for name in SAMPLES if name not in WITH_KERNELS]
    return trained(names, torch.float32, 0.0)


def kernel_calls(twins: Twins) -> list[tuple[Kernel, BoundSymbol]]:
    symbols = twins.compiled.captures[-1].forward_traces[-1].bound_symbols
    return [(KERNELS[b.sym.name], b) for b in symbols if b.sym.name in KERNELS]


def test_every_row_is_tried() -> None:
    tried = {sample.of for sample in SAMPLES.values() if sample.of} | set(ELSEWHERE)
    assert tried == {operation.name for operation in OPERATIONS}
    tests = Path(__file__).parent.parent
    assert all((tests / path).is_file() for path in ELSEWHERE.values())


def test_names_in_the_table_are_used_once() -> None:
    kernels = [k for operation in OPERATIONS for k in operation.kernels]
    operators = [name for k in kernels for name in (k.name, *(d.name for d in k.derivatives))]
    for names in ([o.name for o in OPERATIONS], operators):
        assert len(set(names)) == len(names)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
def test_kernels_give_the_bits_of_eager_in_every_dtype(dtype: torch.dtype) -> None:
    trained(WITH_KERNELS, dtype, 0.0)


def test_kernels_give_the_bits_of_eager_and_run_where_the_table_says() -> None:
    ran = [kernel.name for kernel, _ in kernel_calls(with_kernels())]
    assert sorted(ran) == sorted(SAMPLES[name].kernel for name in WITH_KERNELS)


def test_what_no_kernel_of_ours_takes_gives_the_bits_of_eager() -> None:
    assert not kernel_calls(with_torchs())


def test_what_a_kernel_reads_for_its_gradient_is_what_the_trace_saves_of_it() -> None:
    twins = with_kernels()
    saved = {t.name for t in saved_for_backward(twins.compiled.captures[-1].forward_traces[-1])}
    calls = kernel_calls(twins)
    for kernel, bsym in calls:
        outputs = bsym.output if isinstance(bsym.output, tuple) else (bsym.output,)
        values = {
            **dict(zip(kernel.takes, bsym.args, strict=True)),
            **dict(zip(kernel.results, outputs, strict=True)),
        }
        tensors = {name: v.name for name, v in values.items() if isinstance(v, TensorProxy)}
        gets_one = [d for d in kernel.derivatives if any(n in tensors for n in d.of)]
        read = {name for d in gets_one for name in d.reads} & set(tensors)
        assert {name for name, of in tensors.items() if of in saved} == read, kernel.name


@pytest.mark.parametrize("twins", [with_kernels, with_torchs])
def test_no_operator_takes_more_scratch_than_the_table_says(
    twins: Callable[[], Twins], tmp_path: Path
) -> None:
    measure, tried = MeasuredScratch(directory=tmp_path), set()

    def compare(operation: Operation, found: OpProfile) -> int:
        measured = measure(operation, found)
        assert bounded_scratch(operation, found) >= measured, found.key
        tried.add(found.key.partition("[")[0])
        return measured

    profiles = OpProfiles(scratch=compare)
    calls = list(calls_in_table(twins()))
    for bsym in calls:
        values = [Value(contiguous(p), n) for n, p in enumerate(bsym.flat_proxy_args)]
        profiles.profile(bsym, values)
    assert tried == {bsym.sym.name for bsym in calls}
    ours = {o for _, b in kernel_calls(twins()) for o in KERNELS[b.sym.name].operators}
    assert tried >= (ours or set(TORCHS))


def calls_in_table(twins: Twins) -> Iterator[BoundSymbol]:
    """Yield the calls of forward and backward of which the table knows the scratch on a CPU."""
    names = {o for kernel in KERNELS.values() for o in kernel.operators} | set(TORCHS)
    captured = twins.compiled.captures[-1]
    for trace in (captured.forward_traces[-1], captured.backward_traces[-1]):
        yield from (b for b in trace.bound_symbols if b.sym.name in names)


def test_indices_are_sorted_in_memory_of_a_gpu_only() -> None:
    for device, nbytes in (("cuda:0", 4 * 8 * 6), ("cpu", 0)):
        indices = Layout((2, 3), (3, 1), 0, torch.int64, device, 48)
        grad = Layout((2, 3, 4), (12, 4, 1), 0, torch.float32, device, 96)
        assert scratch_bytes("aten_embedding_dense_backward", [grad, indices]) == nbytes
        assert scratch_bytes("aten_embedding", [grad, indices]) == 0
