"""A linear in fp8 has the expected dtypes and shapes in a trace, and saves no gathered weight."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from thunder.core import dtypes
from torch import nn

from harness.fp8_linears import fp8_module, linears_of, ops
from harness.traces import fake_ranks
from thunder_memsave.compiler.compiled_module import CompiledModule
from thunder_memsave.fp8.kernels import torch_backend
from thunder_memsave.passes.repeatable import why_not_repeatable
from thunder_memsave.sharding.rows import shard_module


def dtype_of(proxy: Any) -> torch.dtype:
    found = dtypes.to_torch_dtype(proxy.dtype)
    assert isinstance(found, torch.dtype)
    return found


@pytest.mark.parametrize(
    ("weights", "autocast", "computed"),
    [
        (torch.float32, None, torch.float32),
        (torch.bfloat16, None, torch.bfloat16),
        (torch.float16, None, torch.float16),
        (torch.float32, torch.bfloat16, torch.bfloat16),
    ],
    ids=["32-true", "bf16-true", "16-true", "bf16-mixed"],
)
def test_products_are_in_the_dtype_of_the_input_and_weights_are_cast_once(
    weights: torch.dtype, autocast: torch.dtype | None, computed: torch.dtype
) -> None:
    linear = nn.Linear(32, 48).to(weights)
    module = fp8_module(nn.Sequential(linear))
    x = torch.randn(8, 32, dtype=weights, requires_grad=True)
    context = nullcontext() if autocast is None else torch.autocast("cpu", autocast)
    with context:
        y = module(x)
    y.sum().backward()
    assert y.dtype == computed
    assert linear.weight.grad is not None
    assert linear.weight.grad.dtype == weights
    (compiled,) = module.captures
    traces = (compiled.forward_traces[-1], compiled.backward_traces[-1])
    products = [b for trace in traces for b in ops(trace, "gemm")]
    assert [dtype_of(b.output) for b in products] == [computed] * 3
    cast = {b.flat_proxy_args[0].name: b for b in ops(traces[0], "quantize")}
    assert dtype_of(cast["t_0_weight"].flat_proxy_args[0]) == weights


@pytest.mark.parametrize(
    ("recipe", "fp8_format", "grad"),
    [
        ("delayed", "HYBRID", torch.float8_e5m2),
        ("delayed", "E4M3", torch.float8_e4m3fn),
        ("current", "HYBRID", torch.float8_e5m2),
        ("block", "E4M3", torch.float8_e4m3fn),
        ("mxfp8", "E4M3", torch.float8_e4m3fn),
        ("mxfp8", "HYBRID", torch.float8_e5m2),
    ],
)
def test_gradients_are_cast_to_the_type_of_the_format(
    recipe: str, fp8_format: str, grad: torch.dtype
) -> None:
    module = fp8_module(nn.Sequential(nn.Linear(32, 96)), recipe=recipe, fp8_format=fp8_format)
    module(torch.randn(8, 32, requires_grad=True)).sum().backward()
    (compiled,) = module.captures
    forward, backward = compiled.forward_traces[-1], compiled.backward_traces[-1]
    inputs = {dtype_of(b.flat_proxy_outs[0]) for b in ops(forward, "quantize")}
    of_grad = "quantize_mx_torch" if recipe == "mxfp8" else "quantize"
    grads = {dtype_of(b.flat_proxy_outs[0]) for b in ops(backward, of_grad)[:1]}
    assert (inputs, grads) == ({torch.float8_e4m3fn}, {grad})


@pytest.mark.parametrize("shape", [(32,), (1, 32), (3, 5, 32), (2, 3, 7, 32)])
def test_inputs_may_have_any_shape_and_number_of_rows(shape: tuple[int, ...]) -> None:
    linear = nn.Linear(32, 48)
    module = fp8_module(nn.Sequential(linear), recipe="current")
    x = torch.randn(shape, requires_grad=True)
    y = module(x)
    assert y.shape == (*shape[:-1], 48)
    y.sum().backward()
    assert x.grad is not None
    assert x.grad.shape == shape
    quantized = [
        torch_backend.dequantize(*torch_backend.quantize_current(t.detach(), torch.float8_e4m3fn))
        for t in (x, linear.weight)
    ]
    expected = quantized[0] @ quantized[1].t() + linear.bias
    torch.testing.assert_close(y, expected)  # but for the order of sums


def test_what_records_amax_may_run_again() -> None:
    module = fp8_module(nn.Sequential(nn.Linear(32, 48)))
    module(torch.randn(8, 32))
    trace = module.captures[0].forward_traces[-1]
    reasons = why_not_repeatable(trace.bound_symbols)
    assert ops(trace, "quantize")
    assert not any(id(b) in reasons for kind in ("quantize", "gemm") for b in ops(trace, kind))


@pytest.mark.parametrize("recipe", ["delayed", "current", "block", "mxfp8", "nvfp4"])
@pytest.mark.parametrize("is_frozen", [False, True], ids=["trained", "frozen"])
def test_no_whole_weight_is_kept_in_fp8_if_weights_are_regathered(
    recipe: str, is_frozen: bool
) -> None:
    layers = [nn.Linear(64, 96, bias=False), nn.Tanh(), nn.Linear(96, 64, bias=False)]
    model = nn.Sequential(*layers)
    model[2].requires_grad_(not is_frozen)
    dtype = torch.bfloat16 if recipe == "nvfp4" else torch.float32
    model.to(dtype)
    with fake_ranks(2) as data_parallel:
        shard_module(model, data_parallel)
        plain = fp8_module(model, recipe=recipe)
        module = CompiledModule(model, data_parallel=data_parallel, fp8=linears_of(plain))
        module(torch.randn(8, 64, dtype=dtype, requires_grad=True))
    forward = module.captures[0].forward_traces[-1]
    whole = {(96, 64), (64, 96)} if recipe != "nvfp4" else {(96, 32), (64, 48)}  # two in a byte
    # Weights with one scale are cast by rows of each rank, before the gather; these have no whole blocks.
    cast, other = {(48, 64), (32, 96)}, whole
    if recipe in ("block", "mxfp8", "nvfp4"):
        cast, other = other, cast
    shapes = {tuple(o.shape) for b in ops(forward, "quantize") for o in b.flat_proxy_outs}
    assert shapes & cast == cast
    assert not shapes & other
    kept = forward.output[1][0]
    in_bytes = [p for p in kept if dtype_of(p).itemsize == 1]
    assert not [p for p in in_bytes if tuple(p.shape) in whole]


def test_without_fp8_a_trace_has_none_of_it() -> None:
    module = CompiledModule(nn.Sequential(nn.Linear(32, 48)))
    module(torch.randn(8, 32))
    forward = module.captures[0].forward_traces[-1]
    assert [a.name for a in forward.args] == ["t_0_weight", "t_0_bias", "t_l_input_"]
    assert not [b for b in forward.bound_symbols if b.sym.name.startswith("fp8")]
