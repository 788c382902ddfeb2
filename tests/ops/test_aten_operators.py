"""ATen operators have the same names in every process, and what they make is known without numbers."""

from __future__ import annotations

import pytest
import torch
from thunder.core.proxies import TensorProxy
from thunder.core.trace import TraceCtx, tracectx
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from harness.fused_steps import step
from thunder_memsave.ops.aten_operators import (
    _INSTEAD,
    aten_executor,
    makes_new_memory,
    proxy_like,
    record,
)
from thunder_memsave.ops.random_ops import draws_random_numbers
from thunder_memsave.ops.table import write_numbers

ATEN = torch.ops.aten
LOSSES = ("mse_loss", "smooth_l1_loss", "soft_margin_loss", "binary_cross_entropy")
"""All whose one number is in the memory of all, among operators of PyTorch's own samples (`op_db` of torch 2.13)."""


def test_an_operator_is_one_symbol_whose_meta_gives_what_was_recorded() -> None:
    trace = TraceCtx()
    with tracectx(trace):
        x = proxy_like(torch.empty(3, 4))
        made = record(ATEN.topk.default, (x, 2), {}, expected=torch.empty(3, 4).topk(2))
        noise = record(ATEN.exponential.default, (x,), {}, expected=torch.empty(3, 4))
        record(ATEN.topk.default, (noise, 2), {}, expected=torch.empty(3, 4).topk(2))
        again = trace.scopes[-1][0].sym.meta(x, 2)
    first, second, third = trace.scopes[-1]
    assert (first.sym.name, second.sym.name) == ("aten_topk", "aten_exponential")
    assert first.sym is third.sym
    assert first.sym.executor is aten_executor
    assert [draws_random_numbers(b) for b in (first, second)] == [False, True]
    assert makes_new_memory(first)
    for ours, expected in zip(again, made, strict=True):
        assert isinstance(ours, TensorProxy)
        assert (ours.shape, ours.dtype) == (expected.shape, expected.dtype)


def test_operators_of_a_library_whose_names_differ_by_an_underscore_are_two() -> None:
    with torch.library._scoped_library("memsave_names", "DEF") as library:
        for name in ("scaled", "_scaled"):
            library.define(f"{name}(Tensor x) -> Tensor")
        trace = TraceCtx()
        with tracectx(trace):
            x = proxy_like(torch.empty(3))
            for name in ("scaled", "_scaled"):
                operator = getattr(torch.ops.memsave_names, name).default
                record(operator, (x,), {}, expected=torch.empty(3))
        first, second = trace.scopes[-1]
    assert first.sym.name != second.sym.name


def test_views_may_share_memory_by_their_schema() -> None:
    trace = TraceCtx()
    with tracectx(trace):
        x = proxy_like(torch.empty(3, 4))
        record(ATEN.t.default, (x,), {}, expected=torch.empty(4, 3))
        record(ATEN.flip.default, (x, [0]), {}, expected=torch.empty(3, 4))
    assert [makes_new_memory(b) for b in trace.scopes[-1]] == [False, True]


def test_views_work_with_other_strides_than_those_that_were_traced() -> None:
    view, complex_view = (_INSTEAD[o] for o in (ATEN.view.default, ATEN.view_as_complex.default))
    x = torch.randn(2, 6)
    for value in (x, torch.randn(2, 2, 3).permute(2, 1, 0), torch.randn(13)[1:].view(6, 2)):
        assert torch.equal(view(value, [12]), value.flatten())
        pairs = value if value.shape[-1] == 2 else value.view(6, 2)
        assert torch.equal(complex_view(pairs), torch.view_as_complex(pairs.contiguous().clone()))
    assert complex_view(x.view(6, 2)).data_ptr() == x.data_ptr()


def test_the_workspace_of_a_recurrent_layer_has_the_bytes_of_a_run() -> None:
    operator = ATEN.mkldnn_rnn_layer.default
    run = _INSTEAD[operator]
    layer = torch.nn.LSTM(8, 6)
    state = torch.zeros(1, 2, 6)
    settings: tuple[object, ...] = (False, [], 2, 6, 1, True, False, False, True)
    tensors = [torch.randn(5, 2, 8), *layer.parameters(), state, state.clone()]
    workspace = run(*tensors, *settings)[3]
    mode = FakeTensorMode()
    fakes = [mode.from_tensor(t.detach()) for t in tensors]
    with mode:
        predicted = run(*fakes, *settings)[3]
    assert predicted.numel() == workspace.numel() > 0


def test_a_grouped_product_is_measured_with_all_rows_in_one_group() -> None:
    ends = torch.zeros(3, dtype=torch.int32)
    matrix, stack = torch.empty(8, 4), torch.empty(3, 4, 6)
    for first, second, rows in (
        (matrix, stack, 8),
        (torch.empty(3, 5, 4), torch.empty(4, 9), 9),
        (matrix.T, torch.empty(8, 2), 8),
    ):
        write_numbers("aten_grouped_mm", [first, second, ends])
        assert ends.tolist() == [rows] * 3


@pytest.mark.parametrize("reduction", [0, 1, 2])
@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_leaves_the_memory_of_all_numbers(name: str, reduction: int) -> None:
    operator = getattr(ATEN, name).default
    given = torch.rand(4, 8), torch.rand(4, 8).round()
    settings = (None, reduction) if name == "binary_cross_entropy" else (reduction,)
    ours, theirs = _INSTEAD[operator](*given, *settings), operator(*given, *settings)
    assert torch.equal(ours, theirs)
    assert ours.untyped_storage().nbytes() == ours.nbytes
    if reduction:
        assert theirs.untyped_storage().nbytes() == given[0].nbytes, "a canary: PyTorch leaves it"


class TwoLosses(nn.Module):
    """The first is held beside what the second one makes."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        return nn.functional.mse_loss(y * x, x) + y.square().mean()


def test_a_step_with_such_losses_takes_the_bytes_that_were_predicted() -> None:
    ran = step(TwoLosses, {"x": torch.randn(512, 16)}, fusion=False)
    assert ran.predicted_bytes == ran.measured_bytes
