"""torchrun with one process trains as one process without a group does."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from harness.fabric import make_fabric, on_fabric_rank, run_on_fabric_ranks
from thunder_memsave.strategy import ThunderMemsaveStrategy


def step_of_one(directory: Path) -> None:
    """Take a step in bfloat16, and write what ran, its gradients and a checkpoint."""
    fabric = make_fabric(sharding="zero3")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2)).to(torch.bfloat16)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    module, optimizer = fabric.setup(model, optimizer)
    fabric.backward(module(torch.ones(3, 4, dtype=torch.bfloat16)).sum())
    assert isinstance(fabric.strategy, ThunderMemsaveStrategy)
    captures = [c for m in fabric.strategy._modules for c in m.captures]
    traces = [(c.forward_traces[-1], c.backward_traces[-1]) for c in captures]
    text = "\n".join(_operations(trace) for pair in traces for trace in pair)
    (directory / "traces.txt").write_text(text)
    torch.save([p.grad for p in model.parameters()], directory / "gradients.pt")
    optimizer.step()
    fabric.save(directory / "checkpoint", {"model": module, "optimizer": optimizer})


def _operations(trace: object) -> str:
    """Return the trace without its header, which has what Thunder numbered in this process."""
    return "\n".join(line for line in str(trace).splitlines() if " = " in line or "return" in line)


@on_fabric_rank
def write_with_a_group(directory: Path) -> None:
    step_of_one(directory)
    assert dist.get_world_size() == 1


def test_a_group_of_one_runs_what_no_group_runs(tmp_path: Path) -> None:
    alone, in_group = tmp_path / "alone", tmp_path / "in_group"
    for directory in (alone, in_group):
        directory.mkdir()
    step_of_one(alone)
    run_on_fabric_ranks(write_with_a_group, 1, in_group)
    expected = (alone / "traces.txt").read_text()
    assert "aten_addmm" in expected
    assert (in_group / "traces.txt").read_text() == expected
    assert "reduce" not in expected
    of_group = torch.load(in_group / "gradients.pt", weights_only=True)
    of_alone = torch.load(alone / "gradients.pt", weights_only=True)
    assert all(torch.equal(a, b) for a, b in zip(of_alone, of_group, strict=True))
    assert sorted(f.name for f in (in_group / "checkpoint").iterdir()) == sorted(
        f.name for f in (alone / "checkpoint").iterdir()
    )
