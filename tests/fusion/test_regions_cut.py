"""What regions take in: concatenations with memory of their own, views before them, and what reads through views."""

from __future__ import annotations

from functools import partial
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx

from harness.fused_steps import WIDTH, Ran, step
from harness.memory import measured_peak_bytes
from thunder_memsave.budget.memory_planner import MemoryPlanner
from thunder_memsave.compiler.compiled_module import CompiledModule
from thunder_memsave.config import CompileConfig, MemoryConfig
from thunder_memsave.fusion import inductor, region, runs
from thunder_memsave.planner.devices import device

ATEN = torch.ops.aten
HEADS = 4
X = torch.randn(2, 32, WIDTH, generator=torch.Generator().manual_seed(1))


class Turned(nn.Module):
    """A rotary embedding between products of matrices, whose gradient is laid out anew."""

    def __init__(self, num_layers: int = 2) -> None:
        super().__init__()
        self.inner = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(num_layers))
        self.outer = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(num_layers))
        self.turn = nn.Parameter(torch.linspace(0, 1, WIDTH // HEADS), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        for inner, outer in zip(self.inner, self.outer, strict=True):
            heads = inner(x).view(*x.shape[:-1], HEADS, -1).transpose(1, 2)
            first, second = heads.chunk(2, dim=-1)
            turned = heads * self.turn + torch.cat([-second, first], dim=-1) * (1 - self.turn)
            scores = turned @ turned.transpose(-2, -1)
            x = x + outer((scores @ heads).transpose(1, 2).reshape(x.shape))
        return x.square().mean()


class ViewedBefore(nn.Module):
    """Halves of a view that is made before a product of matrices; several regions may read them."""

    def __init__(self) -> None:
        super().__init__()
        # Frozen: backward reads the sum alone.
        self.one, self.two = (nn.Linear(WIDTH, WIDTH).requires_grad_(False) for _ in range(2))
        self.weight = nn.Parameter(torch.ones(WIDTH // HEADS))

    def forward(self, x: Tensor) -> Tensor:
        heads = self.one(x).view(*x.shape[:-1], HEADS, -1)
        other = self.two(x).view(heads.shape)
        scaled = heads * other
        half = heads.shape[-1] // 2
        first, second = heads[..., :half], heads[..., half:]
        turned = torch.cat([-second, first], dim=-1) * 0.5
        return ((scaled + turned * other) * self.weight).square().mean()


def ran(*, fusion: bool) -> Ran:
    return step(Turned, {"x": X}, fusion=fusion)


def partly_turned(heads: Tensor, turn: Tensor) -> list[Tensor]:
    """A rotary embedding of a part of each head, as of Phi 3, where it is all of it: nothing is joined with it."""
    heads = ATEN.transpose.int(heads, 1, 2)
    part, rest = (ATEN.slice.Tensor(heads, 3, *ends) for ends in ((0, 8), (8, 16)))
    first, second = (ATEN.slice.Tensor(part, 3, *ends) for ends in ((0, 4), (4, 8)))
    turned = ATEN.cat.default([ATEN.neg.default(second), first], -1)
    added = ATEN.add.Tensor(ATEN.mul.Tensor(part, turn), ATEN.mul.Tensor(turned, turn))
    return [ATEN.cat.default([added, rest], -1)]


def test_a_concatenation_of_transposed_operands_is_laid_out_as_pytorch_does() -> None:
    if (reason := inductor.why_unavailable("cpu")) is not None:
        pytest.skip(reason)
    inputs = torch.randn(4, 32, 4, 8), torch.randn(1, 1, 32, 8)
    (expected,) = partly_turned(*inputs)
    strides = []
    for is_kept in (True, False):
        with torch.no_grad(), inductor.options():
            graph = make_fx(partly_turned, tracing_mode="fake")(*inputs)
            if is_kept:
                region._keep_order(graph)
            (found,) = inductor.compile_graph(graph, inputs)(*inputs)
        assert torch.equal(found, expected)
        strides.append(found.stride())
    assert strides[0] == expected.stride()
    assert strides[1] != expected.stride(), "a canary: inductor follows the operands"


@pytest.mark.parametrize("most", [2, 3, 4, 64])
def test_a_view_whose_halves_other_regions_read_stays(most: int) -> None:
    unfused = step(ViewedBefore, {"x": X}, fusion=False)
    with patch.object(runs, "MOST", most):
        fused = step(ViewedBefore, {"x": X}, fusion=True)
    assert all(map(torch.equal, fused.bits, unfused.bits))
    assert fused.num_regions > 0
    assert fused.predicted_bytes == fused.measured_bytes <= unfused.predicted_bytes


def test_a_concatenation_is_in_a_region_with_what_reads_it() -> None:
    fused, unfused = ran(fusion=True), ran(fusion=False)
    # In each layer's forward, and in its backward, where the gradients of the halves become one.
    assert unfused.order_of("cat").count("aten_cat") == 4
    assert fused.order_of("cat") == []
    assert all(map(torch.equal, fused.bits, unfused.bits))
    assert fused.predicted_bytes == fused.measured_bytes <= unfused.measured_bytes


def test_copies_that_read_through_views_are_in_regions_too() -> None:
    fused, unfused = ran(fusion=True), ran(fusion=False)
    clones = [len(r.order_of("clone")) for r in (unfused, fused)]
    assert clones[1] < clones[0]


def test_views_that_a_region_alone_reads_are_made_in_it() -> None:
    """The halves of the heads, which are no views of the trace any more."""
    fused, unfused = ran(fusion=True), ran(fusion=False)
    views = [len(r.order_of("slice_Tensor", "split")) for r in (unfused, fused)]
    assert views[0] >= 2
    assert views[1] == 0


class Flattened(nn.Module):
    """Results that are read in another shape: by one product, by two, and in both shapes."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.inner, self.outer = (nn.Parameter(torch.eye(WIDTH) * n) for n in (0.5, 0.25))

    def forward(self, x: Tensor) -> Tensor:
        rows = (x * 2 + 1).view(-1, WIDTH)
        made = (rows @ self.inner).view(x.shape)
        summed = made * 3 + x
        flat = summed.view(-1, WIDTH)
        found = flat @ self.outer
        if self.kind == "twice":
            found = found + flat @ self.inner
        if self.kind == "both shapes":
            found = found + (summed @ self.inner.T).square().view(-1, WIDTH) * summed[0, 0, 0]
        if self.kind == "view of a view":
            found = found + (flat.view(-1, 2 * WIDTH) @ self.outer.repeat(2, 1)).repeat(2, 1)
        return found.square().mean()


@pytest.mark.parametrize("policy", ["keep_all", "recompute_all"])
@pytest.mark.parametrize("kind", ["once", "twice", "both shapes", "view of a view"])
def test_a_result_that_is_read_in_another_shape_alone_is_made_in_that(
    kind: str, policy: str
) -> None:
    runs = [
        step(partial(Flattened, kind), {"x": X.clone()}, fusion=fusion, policy=policy)
        for fusion in (True, False)
    ]
    fused, unfused = runs
    views = [len(r.order_of("aten_view")) for r in runs]
    assert views[0] < views[1]
    assert all(map(torch.equal, fused.bits, unfused.bits))
    assert fused.predicted_bytes == fused.measured_bytes <= unfused.measured_bytes


def test_no_numbers_at_all_fuse_as_they_did() -> None:
    empty = {"x": torch.zeros(0, 32, WIDTH)}
    fused, unfused = (step(partial(Flattened, "once"), empty, fusion=f) for f in (True, False))
    assert fused.num_regions > 0
    assert fused.measured_bytes == fused.predicted_bytes <= unfused.measured_bytes


class Rows(nn.Module):
    """Rows of one matrix are added, so that their gradients are parts of its gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.eye(WIDTH) * 0.5)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        first = (x * 2 + self.weight[0]).view(-1, WIDTH) @ self.weight
        second = (x * 2 + self.weight[1]).view(-1, WIDTH) @ self.weight
        return first, second


def peak_bytes(*, fusion: bool) -> tuple[int, int]:
    """Return the predicted and the measured peak of a step whose outputs are both given gradients."""
    model = Rows()
    planner = MemoryPlanner(
        MemoryConfig(policy="keep_all"), device=device("cpu"), budget_bytes=None
    )
    module = CompiledModule(model, planner=planner, config=CompileConfig(fusion=fusion))
    x = torch.ones(3, 4, WIDTH, requires_grad=True)
    gradient = torch.ones(12, WIDTH)

    def run() -> None:
        torch.autograd.backward(module(x), [gradient, gradient])
        model.zero_grad()
        x.grad = None

    run()
    return planner.calls[-1].profile.peak_bytes, measured_peak_bytes(run)


def test_parts_of_a_gradient_are_held_until_they_are_added() -> None:
    fused, unfused = peak_bytes(fusion=True), peak_bytes(fusion=False)
    assert all(a <= b for a, b in zip(fused, unfused, strict=True))
