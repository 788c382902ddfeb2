"""Buffers are updated in place where that changes no bit, and nowhere else."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from harness.memory import measured_peak_bytes
from harness.predicted_peaks import planned_bytes
from thunder_memsave.budget.memory_planner import MemoryPlanner
from thunder_memsave.compiler.compiled_module import CompiledModule
from thunder_memsave.config import CompileConfig, MemoryConfig
from thunder_memsave.planner.devices import device

Forward = Callable[["Net", Tensor], Any]


class Net(nn.Module):
    def __init__(self, forward: Forward, **options: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4, **options)
        self.count: Tensor
        self.register_buffer("count", torch.zeros(4))
        self._forward = forward

    def forward(self, x: Tensor) -> Any:
        return self._forward(self, x)


def once(net: Net, x: Tensor) -> Tensor:
    return net.norm(net.layer(x))


def twice(net: Net, x: Tensor) -> Tensor:
    return net.norm(net.norm(net.layer(x)))


def read_after(net: Net, x: Tensor) -> Any:
    y = net.norm(net.layer(x))
    return y, net.norm.running_mean.clone() * 2.0  # type: ignore[union-attr]


def read_before(net: Net, x: Tensor) -> Any:
    return net.layer(x) + net.norm.running_var, net.norm(net.layer(x))


def returned(net: Net, x: Tensor) -> Any:
    return net.norm(net.layer(x)), net.norm.running_mean, net.norm.num_batches_tracked


def counted(net: Net, x: Tensor) -> Any:
    net.count += 1.5
    y = net.norm(net.layer(x)) * net.count.clone()
    net.count.add_(2)
    return y


def summed(net: Net, x: Tensor) -> Tensor:
    return net.norm(net.layer(x)).square().sum()


def compiled(net: Net, **options: Any) -> CompiledModule:
    return CompiledModule(net, config=CompileConfig(**options))


def names(module: CompiledModule) -> list[str]:
    return [b.sym.name for b in module.captures[-1].forward_traces[-1].bound_symbols]


def results(module: nn.Module, net: Net, *, grad_enabled: bool = True) -> list[Tensor]:
    """Return outputs, gradients and buffers of three steps."""
    found: list[Tensor] = []
    for seed in range(3):
        x = torch.randn(5, 4, generator=torch.Generator().manual_seed(seed))
        with torch.set_grad_enabled(grad_enabled):
            outputs = module(x)
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        net.zero_grad()
        if grad_enabled:
            torch.stack([o.square().sum() for o in outputs if o.requires_grad]).sum().backward()
            found += [p.grad.clone() for p in net.parameters() if p.grad is not None]
        found += [o.detach().clone() for o in outputs]
        found += [b.clone() for b in net.buffers()]
    return found


@pytest.mark.parametrize("grad_enabled", [True, False])
@pytest.mark.parametrize("options", [{}, {"affine": False}, {"momentum": 0.4}], ids=str)
@pytest.mark.parametrize(
    "forward", [once, twice, read_after, read_before, returned, counted], ids=lambda f: f.__name__
)
def test_every_bit_is_eagers(forward: Forward, options: dict[str, Any], grad_enabled: bool) -> None:
    net = Net(forward, **options)
    eager = copy.deepcopy(net)
    mine = results(compiled(net), net, grad_enabled=grad_enabled)
    theirs = results(eager, eager, grad_enabled=grad_enabled)
    assert len(mine) == len(theirs)
    assert all(map(torch.equal, mine, theirs))


def test_a_layer_has_no_operation_but_its_own() -> None:
    module = compiled(net := Net(once))
    results(module, net)
    found = names(module)
    assert "batch_norm_in_place" in found
    assert "add_in_place" in found
    assert not {"aten_clone", "copy_"} & set(found)
    module = compiled(net := Net(once), leave_out=("update_in_place",))
    results(module, net)
    assert {"aten_clone", "copy_"} < set(names(module))


def test_new_statistics_that_are_read_stay_tensors_of_their_own() -> None:
    for forward in (twice, read_after):
        module = compiled(net := Net(forward))
        results(module, net)
        assert "batch_norm_in_place" not in names(module), forward


@pytest.mark.parametrize("policy", ["keep_all", "recompute_all"])
def test_the_peak_is_that_of_the_plan(policy: Any) -> None:
    planner = MemoryPlanner(MemoryConfig(policy=policy), device=device("cpu"), budget_bytes=None)
    module = CompiledModule(net := Net(summed), planner=planner)
    x = torch.randn(64, 4)

    def step() -> None:
        module(x).backward()

    step()
    net.zero_grad()
    assert planned_bytes(planner.calls[-1]) == measured_peak_bytes(step)
    assert ("batch_norm_in_place" in names(module)) is (policy == "keep_all")
