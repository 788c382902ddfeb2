"""`frontend: interpreter` gives what eager gives, notices what its prologue checks, and refuses the rest by name."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from harness.distributed import run_on_ranks
from harness.parity import weighted_sum
from thunder_memsave.compiler.compiled_module import CompiledModule
from thunder_memsave.config import CompileConfig
from thunder_memsave.distributed.data_parallel import DataParallel
from thunder_memsave.errors import CaptureError
from thunder_memsave.sharding.rows import shard_module

INTERPRETER = CompileConfig(frontend="interpreter")


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 7), nn.Linear(7, 3)
        self.unused = nn.Linear(4, 4)
        self.squared = False

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        y = self.second(torch.tanh(self.first(x)))
        return {"y": y * y if self.squared else y}


def _gradients(model: nn.Module, y: Tensor) -> dict[str, Tensor | None]:
    model.zero_grad()
    weighted_sum(y).backward()
    return {name: p.grad for name, p in model.named_parameters()}


def test_outputs_and_gradients_match_eager_and_captures_are_reused() -> None:
    model, x = Model(), torch.randn(3, 4)
    compiled = CompiledModule(model, config=INTERPRETER)
    for _ in range(2):
        ours, theirs = compiled(x), model(x)
        torch.testing.assert_close(ours, theirs)
        ours_gradients = _gradients(model, ours["y"])
        torch.testing.assert_close(ours_gradients, _gradients(model, theirs["y"]))
        assert ours_gradients["unused.weight"] is None
    assert len(compiled.captures) == 1


def test_shapes_attributes_and_grad_mode_are_noticed() -> None:
    model = Model()
    compiled = CompiledModule(model, config=INTERPRETER)
    compiled(torch.randn(3, 4))
    x = torch.randn(5, 4)
    torch.testing.assert_close(compiled(x), model(x))
    with torch.no_grad():
        assert not compiled(x)["y"].requires_grad
    model.squared = True
    torch.testing.assert_close(compiled(x), model(x))
    reasons = [c.capture.reason for c in compiled.captures]
    assert len(reasons) == 4
    assert "grad mode changed" in reasons


def test_autocast_and_other_methods_are_refused_by_name() -> None:
    compiled = CompiledModule(Model(), config=INTERPRETER)
    with (
        torch.autocast("cpu", torch.bfloat16),
        pytest.raises(CaptureError, match=r"interpreter does not support torch\.autocast"),
    ):
        compiled(torch.randn(3, 4))
    with pytest.raises(CaptureError, match="interpreter compiles forward only"):
        compiled.call_method("extra_repr")


def test_what_the_interpreter_cannot_trace_is_refused_by_name() -> None:
    class DataDependent(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * 2 if x.sum() > 0 else x

    with pytest.raises(
        CaptureError, match=r"cannot be interpreted.*frontend: dynamo captures more"
    ):
        CompiledModule(DataDependent(), config=INTERPRETER)(torch.randn(3))


def _sharded(rank: int, mode: str) -> None:
    torch.manual_seed(0)
    model, reference = Model(), Model()
    reference.load_state_dict(model.state_dict())
    for m in (model, reference):
        m.first.bias.requires_grad_(False)
    data_parallel = DataParallel(mode=mode, group=dist.group.WORLD)  # type: ignore[arg-type]
    if mode == "zero2":
        shard_module(model, data_parallel)
    compiled = CompiledModule(model, config=INTERPRETER, data_parallel=data_parallel)
    optimizers = [
        torch.optim.AdamW([p for p in m.parameters() if p.requires_grad], 1e-2)
        for m in (model, reference)
    ]
    batches = torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(1))
    for _ in range(3):
        ours = weighted_sum(compiled(batches[rank])["y"])
        theirs = sum(weighted_sum(reference(b)["y"]) for b in batches) / 2
        assert isinstance(theirs, Tensor)
        for loss, optimizer in zip((ours, theirs), optimizers, strict=True):
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        mean = ours.detach().clone()
        dist.all_reduce(mean)
        torch.testing.assert_close(mean / 2, theirs.detach(), rtol=1e-5, atol=1e-6)
    assert len(compiled.captures) == 1


def test_sharded_and_replicated_training_equals_one_process(tmp_path: Path) -> None:
    run_on_ranks(_both_modes, 2, tmp_path / "rendezvous")


def _both_modes(rank: int) -> None:
    for mode in ("zero2", "none"):
        _sharded(rank, mode)
