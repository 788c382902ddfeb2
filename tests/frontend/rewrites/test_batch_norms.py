"""BatchNorm, convolutions and pools run as PyTorch's own kernels: all of eager's bits, whatever a plan recomputes."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from thunder_memsave.budget.memory_planner import MemoryPlanner
from thunder_memsave.compiler.compiled_module import CompiledModule
from thunder_memsave.config import MemoryConfig
from thunder_memsave.measure.devices import device_at

STEPS = 3
KINDS: dict[str, dict[str, Any]] = {
    "default": {},
    "momentum": {"momentum": 0.3},
    "not_affine": {"affine": False},
    "of_the_batch": {"track_running_stats": False},
}


class Normed(nn.Module):
    """Two convolutions with BatchNorm, one of which is read by two others."""

    def __init__(self, *, inplace: bool = False, **kind: Any) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 4, 3, stride=2)
        self.norm, self.last = nn.BatchNorm2d(4, **kind), nn.BatchNorm2d(4, **kind)
        self.activation = nn.Hardswish(inplace=inplace)
        self.form = nn.Bilinear(4, 4, 2)

    def forward(self, x: Tensor) -> Tensor:
        y = self.activation(self.norm(self.first(x)))
        z = F.relu6(self.last(self.second(F.max_pool2d(y, 2))))
        pooled = F.adaptive_avg_pool2d(z, 1).flatten(1)
        return self.form(pooled, F.hardsigmoid(F.avg_pool2d(y, 9).flatten(1)))


def planner(policy: Any) -> MemoryPlanner:
    return MemoryPlanner(
        MemoryConfig(policy=policy), device=device_at(torch.device("cpu")), budget_bytes=None
    )


def assert_bits(model: nn.Module, *, policy: str | None = None, steps: int = STEPS) -> None:
    """Compare all numbers of some steps with those of eager."""
    eager = copy.deepcopy(model)
    ours = CompiledModule(model, planner=None if policy is None else planner(policy))
    for seed in range(steps):
        x = torch.randn(2, 3, 9, 9, generator=torch.Generator().manual_seed(seed))
        results = []
        for module in (ours, eager):
            module.zero_grad()
            y = module(x)
            if y.requires_grad:
                (y * torch.arange(1.0, 1 + y.numel()).view_as(y)).sum().backward()
            results.append(y)
        assert torch.equal(*results)
        for p, q in zip(model.parameters(), eager.parameters(), strict=True):
            assert (p.grad is None) == (q.grad is None)
            assert p.grad is None or q.grad is None or torch.equal(p.grad, q.grad)
        for (name, b), c in zip(model.named_buffers(), eager.buffers(), strict=True):
            assert torch.equal(b, c), name


@pytest.mark.parametrize("policy", [None, "keep_all", "recompute_all"])
@pytest.mark.parametrize("kind", KINDS)
def test_training_has_eagers_bits_and_updates_statistics_once(
    kind: str, policy: str | None
) -> None:
    torch.manual_seed(0)
    model = Normed(**KINDS[kind])
    assert_bits(model, policy=policy)
    if kind != "of_the_batch":
        assert model.norm.num_batches_tracked is not None
        assert model.norm.num_batches_tracked.item() == STEPS


@pytest.mark.parametrize("inplace", [False, True])
def test_evaluation_reads_the_statistics(inplace: bool) -> None:
    torch.manual_seed(0)
    model = Normed(inplace=inplace)
    assert_bits(model)
    assert_bits(model.eval())
    with torch.no_grad():
        assert_bits(model)


def test_statistics_follow_the_batches_without_gradients() -> None:
    torch.manual_seed(0)
    model = Normed()
    with torch.no_grad():
        assert_bits(model)
    assert model.norm.num_batches_tracked is not None
    assert model.norm.num_batches_tracked.item() == STEPS


def test_frozen_weights_get_no_gradient() -> None:
    torch.manual_seed(0)
    model = Normed()
    for part in (model.first.weight, model.norm.weight, model.last.bias):
        part.requires_grad_(False)
    assert_bits(model, policy="recompute_all")


def test_a_norm_computed_again_reads_the_statistics_of_before() -> None:
    """Backward holds none of BatchNorm's results: it is of those that a plan may recompute."""
    torch.manual_seed(0)
    compiled = CompiledModule(Normed(), planner=planner("recompute_all"))
    compiled(torch.randn(2, 3, 9, 9)).sum().backward()
    names = [str(b.sym.name) for b in compiled.captures[0].backward_traces[-1].bound_symbols]
    assert names.count("aten_batch_norm_with_update_functional") == 2
    assert not any(name.startswith("copy_") for name in names)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
@pytest.mark.parametrize("is_last", [False, True])
def test_other_dtypes_and_layouts(dtype: torch.dtype, is_last: bool) -> None:
    torch.manual_seed(0)
    layout = torch.channels_last if is_last else torch.contiguous_format
    model = nn.Sequential(nn.BatchNorm2d(3), nn.Hardswish()).to(dtype)
    eager = copy.deepcopy(model)
    x = torch.randn(2, 3, 5, 5, dtype=dtype).to(memory_format=layout)
    found = []
    for module in (CompiledModule(model), eager):
        given = x.clone(memory_format=torch.preserve_format).requires_grad_()
        module(given).square().sum().backward()
        assert given.grad is not None
        found.append([given.grad, *(p.grad for p in module.parameters()), *module.buffers()])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
