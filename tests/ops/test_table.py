"""Every row of the table keeps its word: values, gradients, what is saved and memory inside are as PyTorch's."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from thunder.core.proxies import TensorProxy
from thunder.core.symbol import BoundSymbol
from thunder.torch import _torch_to_thunder_function_map
from torch import Tensor

from harness.operations import SAMPLES, Samples
from harness.parity import Twins
from harness.traces import saved_for_backward
from thunder_memsave.compiler.choices import executors_of
from thunder_memsave.config import CompileConfig
from thunder_memsave.measure.layouts import Layout, Value, contiguous
from thunder_memsave.measure.op_profile import Operation, OpProfile, OpProfiles
from thunder_memsave.measure.scratch import MeasuredScratch, bounded_scratch
from thunder_memsave.ops.claim import kernels_executor
from thunder_memsave.ops.operation import Kernel
from thunder_memsave.ops.table import OPERATIONS, scratch_bytes

_WHOLE = ("convolution", "pool", "batch_norm", "group_norm", "instance_norm", "bilinear")
ELSEWHERE = {
    **dict.fromkeys((*_WHOLE, "piecewise_activation"), "ops/families/test_whole_kernels.py"),
    "exponential": "frontend/joint/test_one_call.py",
    "rrelu": "frontend/joint/test_one_call.py",
    "random": "compiler/test_random_replay.py",
    "wait_tensor": "passes/overlap/test_zero3_calls.py",
    "windowed_attention": "ops/families/test_windowed_attention.py",
}
"""Rows that need more than one call, or none of torch's, with the tests that have it."""

KERNELS = {k.name: k for operation in OPERATIONS for k in operation.kernels}
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


def kernel_calls(twins: Twins) -> list[tuple[Kernel, BoundSymbol]]:
    symbols = twins.compiled.captures[-1].forward_traces[-1].bound_symbols
    return [(KERNELS[b.sym.name], b) for b in symbols if b.sym.name in KERNELS]


def test_every_row_is_tried() -> None:
    tried = {sample.of for sample in SAMPLES.values()} | set(ELSEWHERE)
    assert tried == {operation.name for operation in OPERATIONS}
    tests = Path(__file__).parent.parent
    assert all((tests / path).is_file() for path in ELSEWHERE.values())


def test_names_in_the_table_are_used_once() -> None:
    kernels = [k for operation in OPERATIONS for k in operation.kernels]
    operators = [name for k in kernels for name in (k.name, *(d.name for d in k.derivatives))]
    for names in ([o.name for o in OPERATIONS], operators):
        assert len(set(names)) == len(names)


@pytest.mark.parametrize("row", OPERATIONS, ids=lambda row: row.name)
def test_what_a_row_does_not_lower_is_known_to_thunder(row: Any) -> None:
    is_torchs = row.has_whole_derivative and row.runs_torchs_own
    is_ours = row.lower is not None or row.run is not None
    if not is_ours and row.wrong_gradient is None and not is_torchs:
        assert all(f in _torch_to_thunder_function_map for f in row.functions)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
def test_kernels_give_the_bits_of_eager_in_every_dtype(dtype: torch.dtype) -> None:
    trained(WITH_KERNELS, dtype, 0.0)


def test_kernels_give_the_bits_of_eager_and_run_where_the_table_says() -> None:
    ran = [kernel.name for kernel, _ in kernel_calls(with_kernels())]
    assert sorted(ran) == sorted(SAMPLES[name].kernel for name in WITH_KERNELS)


def test_what_no_kernel_of_ours_takes_gives_the_numbers_of_eager() -> None:
    names = [name for name in SAMPLES if name not in WITH_KERNELS]
    twins = trained(names, torch.float32, 1e-6)
    assert not kernel_calls(twins)


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
        assert read <= kernel.saves
        assert {name for name, of in tensors.items() if of in saved} == read, kernel.name


def test_no_kernel_takes_more_memory_inside_than_its_row_says(tmp_path: Path) -> None:
    measure, tried = MeasuredScratch(directory=tmp_path), []

    def compare(operation: Operation, found: OpProfile) -> int:
        measured = measure(operation, found)
        assert bounded_scratch(operation, found) >= measured, found.key
        tried.append(found.key.partition("[")[0])
        return measured

    profiles = OpProfiles(scratch=compare)
    for bsym in symbols_of_kernels(with_kernels()):
        values = [Value(contiguous(p), n) for n, p in enumerate(bsym.flat_proxy_args)]
        profiles.profile(bsym, values)
    on_cpu = {SAMPLES[name].kernel for name in WITH_KERNELS}
    assert set(tried) == {o for name in on_cpu for o in KERNELS[name].operators}


def symbols_of_kernels(twins: Twins) -> Iterator[BoundSymbol]:
    names = {o for kernel in KERNELS.values() for o in kernel.operators}
    captured = twins.compiled.captures[-1]
    for trace in (captured.forward_traces[-1], captured.backward_traces[-1]):
        yield from (b for b in trace.bound_symbols if b.sym.name in names)


def test_indices_are_sorted_in_memory_of_a_gpu_only() -> None:
    for device, nbytes in (("cuda:0", 4 * 8 * 6), ("cpu", 0)):
        indices = Layout((2, 3), (3, 1), 0, torch.int64, device, 48)
        grad = Layout((2, 3, 4), (12, 4, 1), 0, torch.float32, device, 96)
        assert scratch_bytes("embedding_backward", [grad, indices]) == nbytes
        assert scratch_bytes("embedding", [grad, indices]) == 0


def test_kernels_of_what_may_fuse_are_left_to_an_executor_that_fuses() -> None:
    assert kernels_executor in executors_of(CompileConfig())
    assert kernels_executor in executors_of(CompileConfig(executors=("torch",)))
    assert kernels_executor not in executors_of(CompileConfig(executors=("torchcompile",)))
