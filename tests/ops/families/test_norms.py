"""Layer norm: a kernel for each of what may be frozen, with the bits of eager PyTorch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import pytest
import torch
from thunder.core.devices import Device
from thunder.core.dtypes import to_dtype
from thunder.core.proxies import TensorProxy
from thunder.core.trace import TraceCtx, tracectx
from torch import Tensor, nn
from torch.nn import functional as F

from harness.parity import Twins
from thunder_memsave.compiler.compiled_module import CompiledModule
from thunder_memsave.ops.claim import kernels_executor
from thunder_memsave.ops.families.norms import layer_norm

ROWS, COLUMNS = 5, 12


class Norms(nn.Module):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.both = nn.LayerNorm(COLUMNS, dtype=dtype)
        self.no_bias = nn.LayerNorm(COLUMNS, bias=False, dtype=dtype)
        for p in self.parameters():
            nn.init.normal_(p)

    def forward(self, x: Tensor) -> Tensor:
        return self.no_bias(F.gelu(self.both(x)))


def total(output: Tensor) -> Tensor:
    return output.float().square().sum()


def kernels_in(traces: Sequence[TraceCtx], of: str) -> Counter[str]:
    """How often each whose name begins so runs, of the last of the traces."""
    names = [b.sym.name for b in traces[-1].bound_symbols]
    return Counter(n for n in names if "_kernel" in n and n.startswith(of))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_layer_norm_has_the_bits_of_eager(dtype: torch.dtype) -> None:
    twins = Twins(Norms(dtype))
    x = torch.randn(3, ROWS, COLUMNS, dtype=dtype)
    twins.assert_equal(x, loss=total, rtol=0.0, atol=0.0)
    assert kernels_in(twins.compiled.captures[-1].backward_traces, "layer_norm") == {
        "layer_norm_kernel_backward": 1,  # the batch needs no gradient
        "layer_norm_kernel_affine_backward": 2,
    }


def test_frozen_parameters_of_a_layer_norm_get_no_gradient_and_no_kernel() -> None:
    twins = Twins(Norms(torch.float32))
    twins.change(lambda m: m.both.requires_grad_(False))
    x = torch.randn(3, ROWS, COLUMNS, requires_grad=True)
    twins.assert_equal(x, loss=total, rtol=0.0, atol=0.0)
    assert kernels_in(twins.compiled.captures[-1].backward_traces, "layer_norm") == {
        "layer_norm_kernel_backward": 2,
        "layer_norm_kernel_affine_backward": 1,
    }


def test_a_layer_norm_of_other_dtypes_than_its_parameters_is_as_in_eager() -> None:
    twins = Twins(Norms(torch.float32))
    x = torch.randn(3, ROWS, COLUMNS).to(torch.bfloat16)
    twins.assert_equal(x, loss=total, rtol=2e-2, atol=2e-2)


def test_no_rows_are_as_in_eager() -> None:
    twins = Twins(Norms(torch.float32))
    twins.assert_equal(torch.randn(0, COLUMNS), loss=total, rtol=0.0, atol=0.0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_what_a_trace_for_cuda_says_of_layer_norm_is_what_pytorch_says(dtype: torch.dtype) -> None:
    value = torch.empty(2, ROWS, COLUMNS, device="meta", dtype=dtype)
    results = layer_norm(value, 1, None, None, 1e-5)
    with tracectx(TraceCtx(None)):
        proxy = TensorProxy(
            shape=tuple(value.shape), device=Device("cuda:0"), dtype=to_dtype(dtype)
        )
        said = kernels_executor.opmap["layer_norm_kernel"].meta(proxy, 1, None, None, 1e-5)
    assert [(tuple(s.shape), s.dtype) for s in said] == [
        (tuple(r.shape), to_dtype(r.dtype)) for r in results
    ]


def test_gradients_are_computed_through_a_call_without_gradients_too() -> None:
    compiled = CompiledModule(Norms(torch.float32))
    with torch.no_grad():
        result = compiled(torch.randn(ROWS, COLUMNS))
    assert not result.requires_grad
    assert kernels_in(compiled.captures[-1].forward_traces, "layer_norm") == {
        "layer_norm_kernel": 2
    }
