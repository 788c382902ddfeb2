"""Steps with fusion have the bits of steps without, whatever the plan, and take exactly the bytes predicted."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx

from harness.fused_steps import Model, Ran, batch, step
from thunder_memsave.compiler.compile_call import CallCompiler
from thunder_memsave.compiler.explain_steps import explain_steps
from thunder_memsave.config import CompileConfig
from thunder_memsave.fusion import inductor, region


@pytest.fixture
def compiler() -> None:
    if (reason := inductor.why_unavailable("cpu")) is not None:
        pytest.skip(reason)


@pytest.fixture
def one_by_one() -> Iterator[None]:
    """Regions run their operators one by one: what is cut is seen without compiling it."""

    def eager(graph: Any, inputs: Any) -> Any:
        return graph

    inductor.warn_unavailable.cache_clear()
    with (
        patch.object(inductor, "compile_graph", eager),
        patch.object(inductor, "describe", lambda: "one by one"),  # no kernel's scratch is theirs
        patch.dict(region._regions, clear=True),
    ):
        yield


DTYPES = [
    torch.float32,
    pytest.param(
        torch.bfloat16,
        marks=pytest.mark.skipif(
            not inductor.keeps_rounding("cpu"), reason="nothing of 16 bits fuses with this PyTorch"
        ),
    ),
]


def assert_same(ours: Ran, theirs: Ran) -> None:
    assert len(ours.bits) == len(theirs.bits) > 2
    assert all(map(torch.equal, ours.bits, theirs.bits))


def assert_kept_promise(fused: Ran, unfused: Ran, *, fuses: bool = True) -> None:
    assert fused.num_regions > 0 or not fuses
    assert fused.measured_bytes == fused.predicted_bytes
    assert fused.predicted_bytes <= unfused.predicted_bytes
    parts = ("mm", "attention", "bernoulli", "dropout", "gather", "scatter", "reduce", "wait")
    assert fused.order_of(*parts) == unfused.order_of(*parts) != []


def of_fusion(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Lines of the log about fusion."""
    return [r.getMessage() for r in caplog.records if r.name.startswith("thunder_memsave.fusion")]


def in_dtype(dtype: torch.dtype) -> nn.Module:
    return Model().to(dtype)


@pytest.mark.usefixtures("compiler")
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_fused_step_has_the_bits_of_an_unfused_one_at_no_more_memory(dtype: torch.dtype) -> None:
    build, inputs = partial(in_dtype, dtype), batch(dtype)
    unfused = step(build, inputs, fusion=False)
    fused = step(build, inputs, fusion=True)
    assert_same(fused, unfused)
    assert_kept_promise(fused, unfused)


@pytest.mark.usefixtures("compiler")
def test_what_a_plan_recomputes_has_the_bits_of_what_it_keeps() -> None:
    kept = step(Model, batch(), fusion=False)
    unfused = step(Model, batch(), fusion=False, policy="recompute_all")
    fused = step(Model, batch(), fusion=True, policy="recompute_all")
    assert_same(fused, kept)
    assert_kept_promise(fused, unfused)


@pytest.mark.usefixtures("one_by_one")
def test_equal_layers_have_equal_regions_however_many_there_are() -> None:
    # Backward begins where the step holds the most, so that its first layers are cut smaller.
    few = step(partial(Model, 6), batch(), fusion=True)
    many = step(partial(Model, 12), batch(), fusion=True)
    assert few.distinct == many.distinct != set()
    assert many.num_regions > few.num_regions


@pytest.mark.usefixtures("one_by_one")
def test_the_list_of_steps_says_what_was_fused() -> None:
    ran = step(Model, batch(), fusion=True)
    text = explain_steps([ran.compiled])
    expected = (
        f"fuse: {ran.num_regions} regions, {len(ran.distinct)} of them distinct, in place of "
    )
    assert expected in text
    assert "fuse: " not in explain_steps([step(Model, batch(), fusion=False).compiled])


@pytest.mark.parametrize("is_cuda", [False, True])
def test_auto_fuses_on_a_gpu_alone(is_cuda: bool) -> None:
    tensors: Any = {"x": SimpleNamespace(is_cuda=False), "y": SimpleNamespace(is_cuda=is_cuda)}
    settings = CompileConfig(), CompileConfig(fusion=False), CompileConfig(fusion=True)
    fuses = [
        CallCompiler(config=each, data_parallel=None)._fusion(tensors) is not None
        for each in settings
    ]
    assert fuses == [is_cuda, False, True]


def test_without_a_compiler_the_step_is_the_unfused_one_and_one_line_says_so(
    caplog: pytest.LogCaptureFixture,
) -> None:
    inductor.warn_unavailable.cache_clear()
    unfused = step(Model, batch(), fusion=False)
    with (
        patch.object(inductor, "why_unavailable", lambda _: "there is no C++ compiler (no g++)"),
        caplog.at_level(logging.WARNING),
    ):
        fused = [step(Model, batch(), fusion=True) for _ in range(2)]
    assert of_fusion(caplog) == [
        "fusion is on, but there is no C++ compiler (no g++): the step runs unfused, with the same bits and memory."
    ]
    for each in fused:
        assert_same(each, unfused)
        assert each.num_regions == 0
        assert each.measured_bytes == unfused.measured_bytes


def assert_nothing_fuses(caplog: pytest.LogCaptureFixture, *, reason: str) -> None:
    """Compare a step, none of whose regions can run, with an unfused one, and its lines of the log with a reason."""
    unfused = step(Model, batch(), fusion=False)
    with patch.dict(region._regions, clear=True), caplog.at_level(logging.WARNING):
        fused = step(Model, batch(), fusion=True)
    assert_same(fused, unfused)
    assert fused.num_regions == 0
    assert fused.measured_bytes == fused.predicted_bytes == unfused.predicted_bytes
    expected = f"is not fused: {reason}; its operators stay as they are."
    assert of_fusion(caplog)
    assert all(m.endswith(expected) for m in of_fusion(caplog))


def test_where_no_region_can_be_compiled_operators_stay_and_the_log_says_so(
    caplog: pytest.LogCaptureFixture,
) -> None:
    tried = []

    def fail(graph: Any, inputs: Any) -> Any:
        tried.append([node.target for node in graph.graph.nodes])
        raise RuntimeError("disk full\nmore")

    with (
        patch.object(inductor, "compile_graph", fail),
        patch.object(region, "in_slices", lambda graph, inputs: []),
    ):
        assert_nothing_fuses(caplog, reason="RuntimeError: disk full")
    assert len(tried) == len(set(of_fusion(caplog))) == len(of_fusion(caplog))


@pytest.mark.usefixtures("compiler")
def test_a_region_with_other_bits_stays_single_operators(caplog: pytest.LogCaptureFixture) -> None:
    def direct(kernel: Any) -> Any:
        def run(args: list[Tensor]) -> Any:
            return [r.nextafter(r + 1) if r.any() else r for r in kernel(*args)]

        return run

    with patch.object(inductor, "direct", direct):
        assert_nothing_fuses(caplog, reason="inductor's code has other bits")


@pytest.mark.usefixtures("compiler")
def test_a_dim_of_one_element_may_have_any_stride(caplog: pytest.LogCaptureFixture) -> None:
    class OneHead(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.project = nn.Linear(16, 16)

        def forward(self, x: torch.Tensor, turn: torch.Tensor) -> torch.Tensor:
            heads = self.project(x).view(5, 3, 1, 16).transpose(1, 2)
            return (heads * turn[:, None] + heads * 0.5).sum()

    with caplog.at_level(logging.WARNING):
        fused = step(OneHead, batch(), fusion=True)
    assert of_fusion(caplog) == []
    unfused = step(OneHead, batch(), fusion=False)
    assert_same(fused, unfused)
    assert_kept_promise(fused, unfused)


def test_the_code_that_inductor_generated_is_called(compiler: None) -> None:
    def run(x: Tensor, y: Tensor) -> list[Tensor]:
        return [torch.ops.aten.mul.Tensor(x, y), torch.ops.aten.add.Tensor(x, y)]

    x, y = torch.randn(2, 8, 8)
    with torch.no_grad(), inductor.options():
        kernel = inductor.compile_graph(make_fx(run, tracing_mode="fake")(x, y), [x, y])

    direct = inductor.direct(kernel)

    assert getattr(direct, "args", None) != (kernel,), (
        "PyTorch changed what is around it: `_within` must follow it"
    )
    assert all(map(torch.equal, direct([x, y]), kernel(x, y)))
    assert inductor.direct(run)([x, y])[0].equal(x * y), "what is not found is called as it is"
    with pytest.raises(AssertionError):
        direct([x.t(), y])
