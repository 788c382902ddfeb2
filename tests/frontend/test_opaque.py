"""Functions that are called as they are have the same names in every process."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from thunder.core.trace import TraceCtx, tracectx
from torch import Tensor, nn

from thunder_memsave.compiler.compiled_module import CompiledModule
from thunder_memsave.frontend.opaque import OpaqueExecutor


def names_of(*functions: Callable[..., Any]) -> list[str]:
    trace, opaque = TraceCtx(), OpaqueExecutor()
    with tracectx(trace):
        for function in functions:
            opaque.call(function, torch.empty(2), (), {})
    return [bsym.sym.name for bsym in trace.scopes[-1]]


def test_operations_are_named_after_their_function_and_numbered_in_the_order_of_their_calls() -> (
    None
):
    expected = ["ones_of_torch_0", "grid_sample_of_torch_nn_functional_1", "ones_of_torch_2"]
    assert names_of(torch.ones, torch.nn.functional.grid_sample, torch.ones) == expected


def test_names_are_such_as_python_code_may_have_and_say_no_address() -> None:
    overload = torch.ops.aten.add.Tensor
    names = names_of(overload, lambda: None, partial(torch.ones, 2), torch.Tensor.add_)
    assert names[0] == "add_Tensor_of_torch__ops_aten_0"
    assert names[1].startswith("lambda_of_")
    assert names[2] == "partial_of_functools_2"
    assert names[3].startswith("add_of_")
    assert all(map(str.isidentifier, names))


def test_the_executors_name_and_text_are_the_same_in_every_process() -> None:
    first, second = OpaqueExecutor(), OpaqueExecutor()
    assert (str(first.name), repr(first)) == (str(second.name), repr(second))


class FromSpectrum(nn.Module):
    """`istft` looks at the numbers of its window."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("window", torch.hann_window(8))

    def forward(self, x: Tensor) -> Tensor:
        assert isinstance(self.window, Tensor)
        spectrum = torch.stft(x, 8, 4, window=self.window, return_complex=True)
        return torch.istft(spectrum * 2, 8, 4, window=self.window, length=x.shape[-1])


def test_a_function_that_looks_at_numbers_runs_where_no_gradient_is_needed() -> None:
    model, x = FromSpectrum(), torch.randn(2, 32)
    assert torch.equal(CompiledModule(model)(x), model(x))
