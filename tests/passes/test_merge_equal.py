"""Equal casts and views are computed once, with the same bits and fewer bytes; what the caller gets stays apart."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn

from harness.memory import measured_peak_bytes
from thunder_memsave.aten.record import storage_id
from thunder_memsave.budget.memory_planner import MemoryPlanner
from thunder_memsave.compiler.compiled_module import CompiledModule
from thunder_memsave.config import CompileConfig, MemoryConfig
from thunder_memsave.planner.devices import device
from thunder_memsave.planner.search.solve import Policy

WIDTH, NUM_ROWS = 32, 256


class Branches(nn.Module):
    """Several linear layers of one normalised input, in mixed precision; its result is a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.linears = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))

    def forward(self, x: Tensor) -> tuple[Tensor]:
        x = self.norm(x * 2.0)
        with torch.autocast("cpu", torch.bfloat16):
            found = [linear(x) for linear in self.linears]
        return ((found[0] * found[1] + found[2]).float().square().mean(),)


@dataclass
class Ran:
    gradients: list[Tensor]
    predicted_bytes: int
    measured_bytes: int
    num_casts: int
    """Of what is as large as the input."""


def run(*, leave_out: tuple[str, ...], policy: Policy) -> Ran:
    torch.manual_seed(0)
    model, x = Branches(), torch.randn(8, NUM_ROWS // 8, WIDTH)
    planner = MemoryPlanner(MemoryConfig(policy=policy), device=device("cpu"), budget_bytes=None)
    compiled = CompiledModule(model, planner=planner, config=CompileConfig(leave_out=leave_out))
    compiled(x)[0].backward()
    gradients = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    measured = measured_peak_bytes(lambda: compiled(x)[0].backward())
    held = sum(t.nbytes for t in (*model.parameters(), x))
    (call,) = planner.calls
    forward = call.joint.bound_symbols
    casts = [b for b in forward if b.sym.name == "to" and b.output.numel == x.numel()]
    return Ran(gradients, call.profile.peak_bytes, measured + held, len(casts))


@pytest.mark.parametrize("policy", ["keep_all", "recompute_all"])
def test_one_cast_serves_all_readers_with_the_same_bits(policy: Policy) -> None:
    merged, apart = (run(leave_out=names, policy=policy) for names in ((), ("merge_equal",)))

    assert merged.num_casts == apart.num_casts - 2
    assert len(merged.gradients) == 5
    assert all(map(torch.equal, merged.gradients, apart.gradients))
    assert merged.predicted_bytes == merged.measured_bytes <= apart.predicted_bytes
    if policy == "keep_all":
        assert merged.predicted_bytes == apart.predicted_bytes - 2 * 2 * NUM_ROWS * WIDTH


class Twins(nn.Module):
    """Returns two casts of one value, and two of its input."""

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        y = x * 2.0
        return (y.to(torch.bfloat16), y.to(torch.bfloat16), x.double(), x.double())


@pytest.mark.parametrize("requires_grad", [False, True])
def test_what_the_caller_gets_is_memory_of_its_own(requires_grad: bool) -> None:
    x = torch.randn(4, 8, requires_grad=requires_grad)

    found = CompiledModule(Twins())(x)

    assert len({storage_id(t) for t in found}) == 4
    assert all(map(torch.equal, found, Twins()(x)))
