"""Attention within a sliding window: what CUDA's kernel is asked for, its values, its work, and what is not its."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from thunder.core.proxies import TensorProxy
from thunder.core.trace import TraceCtx, tracectx
from torch import Tensor, nn

from harness.flash_kernels import band, flash_on_cpu
from harness.kernels_called import TORCHS_OWN, kernel_called
from harness.on_cuda import facts, on_cuda
from thunder_memsave.aten.record import AtenRecord
from thunder_memsave.compiler.compile_call import CallCompiler, Compiled
from thunder_memsave.config import CompileConfig
from thunder_memsave.frontend.calls import Call
from thunder_memsave.measure.layouts import Layout
from thunder_memsave.ops.families.windowed_attention import cuda_windowed, windowed_attention
from thunder_memsave.ops.table import scratch_bytes

ROWS, HEADS, KEYS, LENGTH, WIDTH = 2, 4, 2, 12, 8
BACKWARD = cuda_windowed.derivatives[0]


def operands(num_keys: int = KEYS) -> list[Tensor]:
    torch.manual_seed(0)
    shapes = [(ROWS, n, LENGTH, WIDTH) for n in (HEADS, num_keys, num_keys)]
    return [torch.randn(s, dtype=torch.float64) for s in shapes]


def by_definition(query: Tensor, key: Tensor, value: Tensor, window: int) -> Tensor:
    """Softmax of the scores of a position with itself and the `window - 1` before it."""
    key, value = (t.repeat_interleave(HEADS // t.shape[1], 1) for t in (key, value))
    distance = torch.arange(LENGTH)[:, None] - torch.arange(LENGTH)[None, :]
    sees = (distance >= 0) & (distance < window)
    scores = (query @ key.mT / WIDTH**0.5).masked_fill(~sees, -torch.inf)
    return scores.softmax(-1) @ value


@pytest.fixture
def _flash_on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    flash_on_cpu(monkeypatch)


@pytest.mark.usefixtures("_flash_on_cpu")
@pytest.mark.parametrize("num_keys", [HEADS, KEYS], ids=["heads", "grouped queries"])
@pytest.mark.parametrize("window", [1, 2, 5, LENGTH - 1])
def test_values_and_gradients_are_those_of_the_definition(window: int, num_keys: int) -> None:
    heads = operands(num_keys)
    grad = torch.randn_like(heads[0])
    leaves = [t.clone().requires_grad_() for t in heads]
    expected = by_definition(leaves[0], leaves[1], leaves[2], window)
    expected_grads = torch.autograd.grad(expected, leaves, grad)
    output, logsumexp = cuda_windowed.run(*heads, window, None)
    grads = BACKWARD.run(grad, *heads, output, logsumexp, window, None)
    mask = band(LENGTH, window)
    q, k, v = heads
    eager = windowed_attention(q, k, v, mask, window=window, enable_gqa=True)
    torch.testing.assert_close(eager, expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(output, expected, rtol=1e-12, atol=1e-12)
    for ours, theirs in zip(grads, expected_grads, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


@pytest.mark.usefixtures("_flash_on_cpu")
def test_keys_outside_of_the_window_get_exactly_no_gradient() -> None:
    heads, window, position = operands(), 4, 9
    grad = torch.zeros_like(heads[0])
    grad[:, :, position] = 1
    output, logsumexp = cuda_windowed.run(*heads, window, None)
    _, of_key, of_value = BACKWARD.run(grad, *heads, output, logsumexp, window, None)
    for found in (of_key, of_value):
        seen = found[:, :, position - window + 1 : position + 1]
        assert bool((seen != 0).all())
        assert bool((found[:, :, : position - window + 1] == 0).all())
        assert bool((found[:, :, position + 1 :] == 0).all())


@pytest.mark.parametrize("num_keys", [HEADS, KEYS], ids=["heads", "grouped queries"])
def test_what_the_trace_says_of_the_kernel_is_what_pytorch_says(num_keys: int) -> None:
    shapes = [(ROWS, n, LENGTH, WIDTH) for n in (HEADS, num_keys, num_keys)]
    heads = [torch.empty(s, device="meta", dtype=torch.bfloat16) for s in shapes]
    results = cuda_windowed.run(*heads, 5, None)
    grads = BACKWARD.run(heads[0], *heads, *results, 5, None)
    with tracectx(TraceCtx(None)):
        proxies = [on_cuda(h) for h in heads]
        said = cuda_windowed.meta(*proxies, 5, None)
        said_grads = BACKWARD.meta(proxies[0], *proxies, *said, 5, None)
    assert facts(said) == facts(results)
    assert facts(said_grads) == facts(grads)


@pytest.mark.parametrize(
    ("dtype", "width", "dropout_p", "capability", "kernel"),
    [
        (torch.bfloat16, 64, 0.0, (9, 0), "cuda_windowed_attention"),
        (torch.float16, 256, 0.0, (8, 9), "cuda_windowed_attention"),
        (torch.bfloat16, 208, 0.0, (9, 0), "cuda_windowed_attention"),
        (torch.bfloat16, 208, 0.0, (8, 9), "cuda_efficient_attention"),
        (torch.bfloat16, 208, 0.0, (12, 0), "cuda_efficient_attention"),
        (torch.bfloat16, 64, 0.0, (7, 5), "cuda_efficient_attention"),
        (torch.float32, 64, 0.0, (9, 0), "cuda_efficient_attention"),
        (torch.bfloat16, 64, 0.1, (9, 0), TORCHS_OWN),
    ],
)
def test_where_no_kernel_takes_the_window_there_is_a_mask(
    dtype: torch.dtype,
    width: int,
    dropout_p: float,
    capability: tuple[int, int],
    kernel: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, logger="thunder_memsave.ops.families.windowed_attention")
    shapes = [(ROWS, n, LENGTH, width) for n in (HEADS, KEYS)]
    query, key = (torch.empty(s, device="meta", dtype=dtype) for s in shapes)
    mask = torch.empty(LENGTH, LENGTH, device="meta", dtype=torch.bool)
    settings: Any = {"window": 5, "dropout_p": dropout_p, "enable_gqa": True}
    found = kernel_called(
        windowed_attention, query, key, key, mask, **settings, capability=capability
    )
    assert found == kernel
    is_masked = kernel != "cuda_windowed_attention"
    assert ("no kernel takes a window of 5 positions" in caplog.text) is is_masked


@pytest.mark.parametrize("window", [1, 5, LENGTH - 1])
def test_the_work_is_that_of_the_window(window: int) -> None:
    heads = [torch.empty(t.shape, device="meta", dtype=torch.bfloat16) for t in operands()]
    with AtenRecord() as forward:
        results = cuda_windowed.run(*heads, window, None)
    with AtenRecord() as backward:
        BACKWARD.run(heads[0], *heads, *results, window, None)
    # Half of the window's own square is missing at the start of a row, as half of a causal square is.
    pairs = ROWS * HEADS * (window * LENGTH - window * window / 2)
    assert (forward.flops, backward.flops) == (2 * 2 * pairs * WIDTH, 2 * 5 * pairs * WIDTH)


def test_backward_is_bounded_as_flash_attention_is() -> None:
    def layout(*shape: int) -> Layout:
        return Layout(shape, (0,) * len(shape), 0, torch.bfloat16, "cuda", 0)

    heads, keys = layout(1, 4, 256, 160), layout(1, 2, 256, 160)
    found = scratch_bytes(BACKWARD.name, [heads, heads, keys, keys, heads, layout(1, 4, 256)])
    # Wider heads than 128 are rounded up to multiples of 64.
    assert found == 4 * 256 * 4 * (192 + 1) + 2 * 2 * 4 * 256 * 160 + 4 * 512


class Masked(nn.Module):
    def __init__(self, mask: Any) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones((), dtype=torch.bfloat16))
        self.mask = mask

    def forward(self, x: Tensor) -> Tensor:
        heads = x * self.scale
        return nn.functional.scaled_dot_product_attention(heads, heads, heads, self.mask(x))


def _triangles(x: Tensor) -> Tensor:
    return torch.ones(LENGTH, LENGTH, dtype=torch.bool, device=x.device).tril().triu(-4)


def _distances(x: Tensor) -> Tensor:
    positions = torch.arange(LENGTH, device=x.device)
    distance = positions[:, None] - positions[None]
    return ((distance >= 0) & (distance < 5))[None, None].expand(2, 1, LENGTH, LENGTH)


def _future_too(x: Tensor) -> Tensor:
    return torch.ones(LENGTH, LENGTH, dtype=torch.bool, device=x.device).tril(1).triu(-4)


def _with_a_sink(x: Tensor) -> Tensor:
    mask = torch.ones(LENGTH, LENGTH, dtype=torch.bool, device=x.device)
    return mask.tril().triu(-4) | (torch.arange(LENGTH, device=x.device) == 0)


def _nothing(x: Tensor) -> Tensor:
    return torch.zeros(LENGTH, LENGTH, dtype=torch.bool, device=x.device)


def planned(mask: Any) -> Compiled:
    """Compile attention under a mask for a GPU that is not here."""
    model, x = Masked(mask), torch.randn(2, 3, LENGTH, 64, dtype=torch.bfloat16)
    compiler = CallCompiler(
        config=CompileConfig(), data_parallel=None, target=torch.device("cuda:0")
    )
    return compiler.compile(model, Call.of(model, (x,), {}), name="forward", reason="first call")


def names_and_squares(compiled: Compiled) -> tuple[list[str], set[str]]:
    traces = (compiled.forward_traces[-1], compiled.backward_traces[-1])
    symbols = [b for trace in traces for b in trace.bound_symbols]
    proxies = [p for b in symbols for p in (*b.flat_proxy_args, *b.flat_proxy_outs)]
    return (
        [b.sym.name for b in symbols if "attention" in b.sym.name],
        {p.name for p in proxies if isinstance(p, TensorProxy) and p.shape.count(LENGTH) > 1},
    )


@pytest.mark.parametrize("mask", [_triangles, _distances])
def test_on_cuda_a_window_is_recognised_by_its_values_and_nobody_makes_its_mask(mask: Any) -> None:
    compiled = planned(mask)
    names, squares = names_and_squares(compiled)
    assert names == ["cuda_windowed_attention", "cuda_windowed_attention_backward"]
    assert not squares
    (call,) = [
        b for b in compiled.forward_traces[-1].bound_symbols if b.sym.name == cuda_windowed.name
    ]
    assert call.args[3] == 5


@pytest.mark.parametrize("mask", [_future_too, _with_a_sink, _nothing])
def test_on_cuda_any_other_mask_stays(mask: Any) -> None:
    names, squares = names_and_squares(planned(mask))
    assert names == ["cuda_efficient_attention", "cuda_efficient_attention_backward"]
    assert squares
