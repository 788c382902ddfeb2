"""BatchNorm with `momentum=None` is one graph, under a plan too; PyTorch's own forward is none."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from thunder_memsave.budget.memory_planner import MemoryPlanner
from thunder_memsave.compat import average_batch_norms
from thunder_memsave.compiler.compiled_module import CompiledModule
from thunder_memsave.config import MemoryConfig
from thunder_memsave.measure.devices import device_at

STEPS = 4


class Upstream(nn.BatchNorm1d):
    """As PyTorch has it."""

    def forward(self, input: Tensor) -> Tensor:
        return average_batch_norms.upstream()(self, input)


def test_canary_pytorchs_forward_is_not_one_graph() -> None:
    compiled = torch.compile(Upstream(5, momentum=None), backend="eager", fullgraph=True)
    with pytest.raises(torch._dynamo.exc.TorchDynamoException):
        compiled(torch.ones(3, 5))


def model(*, affine: bool = True) -> nn.Sequential:
    torch.manual_seed(0)
    norm = nn.BatchNorm2d(5, momentum=None, affine=affine)
    return nn.Sequential(nn.Conv2d(3, 5, 3), norm, nn.Hardswish())


def compiled(module: nn.Module, policy: Any) -> CompiledModule:
    if policy is None:
        return CompiledModule(module)
    config = MemoryConfig(policy=policy)
    device = device_at(torch.device("cpu"))
    return CompiledModule(module, planner=MemoryPlanner(config, device=device, budget_bytes=None))


@pytest.mark.parametrize("policy", [None, "recompute_all"])
@pytest.mark.parametrize("affine", [True, False])
def test_training_has_eagers_bits_and_statistics_are_the_averages(
    affine: bool, policy: str | None
) -> None:
    eager = model(affine=affine)
    ours: Any = copy.deepcopy(eager)
    run = compiled(ours, policy)
    for seed in range(STEPS):
        x = torch.randn(2, 3, 7, 7, generator=torch.Generator().manual_seed(seed))
        found: list[list[Any]] = []
        for module in (run, eager):
            module.zero_grad()
            y = module(x)
            y.square().sum().backward()
            found.append([y, *(p.grad for p in module.parameters())])
        assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
    assert ours[1].num_batches_tracked == STEPS
    # The kernel averages an unrounded mean: one rounding of float32 in each step.
    for new, old in zip(ours.buffers(), eager.buffers(), strict=True):
        torch.testing.assert_close(new, old, rtol=STEPS * 2**-24, atol=STEPS * 2**-26)
    assert len(run.captures) == 1


def test_evaluation_reads_the_averages() -> None:
    eager, x = model(), torch.randn(2, 3, 7, 7)
    eager(x)
    eager.eval()
    assert torch.equal(CompiledModule(copy.deepcopy(eager))(x), eager(x))
