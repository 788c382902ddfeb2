"""`frozen_weights: fp8` on two ranks: fp8 numbers are gathered, and all results are those of weights cast once."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from lightning.fabric import Fabric
from safetensors.torch import save_file
from thunder.core.proxies import FutureTensorProxy
from thunder.core.trace import TraceCtx
from torch import Tensor, nn

from harness.fabric import make_fabric, on_fabric_rank, run_on_fabric_ranks
from harness.fp8_linears import ops, results
from harness.memory import measured_memory
from harness.rank_memory import letting_go
from thunder_memsave import load_on_setup
from thunder_memsave.distributed.agreement import OtherRankError, together
from thunder_memsave.fp8.weights import frozen
from thunder_memsave.materialize import fill
from thunder_memsave.ops.families.collectives import gathers
from thunder_memsave.sharding.quantized_parameter import Fp8ParameterError, hold_fp8
from thunder_memsave.sharding.row_errors import ShardedParameterError
from thunder_memsave.sharding.rows import take_rows
from thunder_memsave.stored_weights import walk

RECIPES = ("delayed", "current", "block")
FP8 = torch.float8_e4m3fn


class Net(nn.Module):
    """Frozen linears whose rows per rank are not whole blocks of 128, after a trained factor."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(160, 400)
        self.down = nn.Linear(400, 160, bias=False)
        self.requires_grad_(False)
        self.factor = nn.Parameter(torch.ones(160))

    def forward(self, x: Tensor) -> Tensor:
        return (x + self.down(torch.tanh(self.up(x * self.factor)))).square().mean()


def make() -> Net:
    torch.manual_seed(0)
    return Net().to(torch.bfloat16)


def batch(rank: int, number: int) -> Tensor:
    generator = torch.Generator().manual_seed(10 * number + rank)
    return torch.randn(8, 160, generator=generator).to(torch.bfloat16)


def fabric_of(sharding: str, recipe: str, kept: str, **others: Any) -> Fabric:
    history = {"amax_history_len": 4} if recipe == "delayed" else {}
    fp8 = {"recipe": recipe, "frozen_weights": kept, **history}
    return make_fabric(
        devices=2, sharding=sharding, precision="bf16-true", fp8=fp8, timeout="2min", **others
    )


def set_up(fabric: Fabric, model: nn.Module) -> tuple[Any, Any]:
    trained = [p for p in model.parameters() if p.requires_grad]
    return fabric.setup(model, torch.optim.SGD(trained, lr=0.1))


def step(fabric: Fabric, model: Any, optimizer: Any, number: int) -> list[Tensor]:
    loss = model(batch(fabric.global_rank, number))
    fabric.backward(loss)
    found = [loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]
    optimizer.step()
    optimizer.zero_grad()
    return found


def test_two_ranks(tmp_path: Path) -> None:
    run_on_fabric_ranks(check_ranks, 2, tmp_path)


@on_fabric_rank
def check_ranks(directory: Path) -> None:
    for sharding, recipe in (*(("zero3", recipe) for recipe in RECIPES), ("zero2", "delayed")):
        check_training(sharding, recipe)
    check_bytes_and_peak()
    check_checkpoints(directory)
    check_files(directory)
    check_a_rank_that_cannot_cast()


def check_training(sharding: str, recipe: str) -> None:
    found = []
    for kept in ("compute", "fp8"):
        fabric = fabric_of(sharding, recipe, kept)
        model, optimizer = set_up(fabric, make())
        found.append([v for n in range(3) for v in step(fabric, model, optimizer, n)])
        if kept == "fp8":
            check_traces(model, sharding)
    assert len(found[0]) == len(found[1]) == 3 * (1 + 1)
    assert all(map(torch.equal, *found))


def check_traces(model: Any, sharding: str) -> None:
    """Gathers send fp8 numbers, which GEMMs read directly; only backward transposes them."""
    (compiled,) = model._forward_module.captures
    forward, backward = compiled.forward_traces[-1], compiled.backward_traces[-1]
    assert {str(whole.dtype) for whole in gathered_weights(forward)} == {
        "thunder.dtypes.float8_e4m3fn"
    }
    assert len(gathered_weights(backward)) == (2 if sharding == "zero3" else 0)
    assert len(ops(forward, "quantize")) == 2  # inputs
    assert not ops(forward, "transpose")
    assert results(backward, "transpose") == {(160, 400): 1, (400, 160): 1}


def gathered_weights(trace: TraceCtx) -> list[FutureTensorProxy]:
    """Return the futures of gathered weights, without biases and factors."""
    whole = [w for bsym in trace.bound_symbols for _, w in gathers(bsym)]
    return [w for w in whole if len(w.shape) == 2]


def gathered_bytes(model: Any) -> int:
    """Return the bytes gathered in forward and backward."""
    (compiled,) = model._forward_module.captures
    traces = (compiled.forward_traces[-1], compiled.backward_traces[-1])
    found = [w for trace in traces for w in gathered_weights(trace)]
    return sum(w.numel * w.dtype.bytes for w in found)


def check_bytes_and_peak() -> None:
    """Weights take half the bytes, held; gathered are fp8 numbers either way; the peak is the predicted one."""
    plans, gathered = {}, {}
    for kept in ("compute", "fp8"):
        fabric = fabric_of("zero3", "current", kept)
        model, optimizer = set_up(fabric, make())
        step(fabric, model, optimizer, 0)
        step(fabric, model, optimizer, 1)
        held = sum(t.nbytes for t in (*model.parameters(), *model.buffers()))
        measured = held + peak_bytes_of_a_step(fabric, model)
        call = fabric.strategy._planned_call()  # type: ignore[attr-defined]
        plans[kept] = call.profile.peak_bytes_by_kind
        gathered[kept] = gathered_bytes(model)
        assert measured == pytest.approx(call.profile.peak_bytes, rel=0.01)
    weights = 2 * 160 * 400 // 2  # elements of each rank
    assert plans["compute"]["parameter"] - plans["fp8"]["parameter"] == weights
    assert gathered["fp8"] == gathered["compute"] == 2 * 2 * 160 * 400


def peak_bytes_of_a_step(fabric: Fabric, model: Any) -> int:
    """Return the peak bytes of forward and backward, with the batch."""
    x = batch(fabric.global_rank, 0)
    with letting_go():
        measured = measured_memory(lambda: fabric.backward(model(x))).peak_bytes
    model.zero_grad()
    return x.nbytes + measured


def check_checkpoints(directory: Path) -> None:
    """Saved as numbers and scales, sharded and full, loaded bit by bit."""
    for state_dict_type in ("sharded", "full"):
        fabric = fabric_of("zero3", "block", "fp8", state_dict_type=state_dict_type)
        model, optimizer = set_up(fabric, make())
        path = fabric.broadcast(directory) / state_dict_type
        fabric.save(path, {"model": model})
        expected = step(fabric, model, optimizer, 0)
        other, optimizer = set_up(fabric, Net().to(torch.bfloat16))
        fabric.load(path, {"model": other})
        assert all(map(torch.equal, step(fabric, other, optimizer, 0), expected))
        whole = fabric.strategy.get_module_state_dict(other)
        assert whole["up.weight"].shape == (400, 160)
        assert whole["up.weight"].dtype == FP8
        assert whole["up.fp8_weight.scale_inv"].shape == (4, 2)
    linear, x = other.module.down, torch.randn(8, 400)
    with pytest.raises(ShardedParameterError, match=r"linear\(\) was asked to use 'down\.w"):
        linear(x)
    with (
        fabric.strategy.summon_full(other),  # type: ignore[attr-defined]
        pytest.raises(Fp8ParameterError, match=r"linear\(\) was asked to use 'down\.weight'"),
    ):
        linear(x)
    assert all(
        map(torch.equal, step(fabric, other, optimizer, 1), step(fabric, model, optimizer, 1))
    )


def check_files(directory: Path) -> None:
    """Each rank reads its rows of one weight and casts them before the next."""
    fabric = fabric_of("zero3", "current", "fp8")
    path = fabric.broadcast(directory) / "model.safetensors"
    if fabric.global_rank == 0:
        save_file(make().state_dict(), path)
    fabric.barrier()
    with fabric.init_module(empty_init=True):
        model = Net()
    load_on_setup(model, path)
    with patch.object(walk, "together", wraps=together) as meetings:
        loaded, optimizer = set_up(fabric, model)
    assert meetings.call_count == 2 + 1  # for each weight, and at the end
    expected, its_optimizer = set_up(fabric, make())
    found = step(fabric, loaded, optimizer, 0)
    assert all(map(torch.equal, found, step(fabric, expected, its_optimizer, 0)))
    check_a_rank_that_cannot_read(fabric, path)


def check_a_rank_that_cannot_read(fabric: Fabric, path: Path) -> None:
    """The other stops too, instead of waiting for the amax of its rows."""
    with fabric.init_module(empty_init=True):
        model = Net()
    load_on_setup(model, path)
    broken = OSError("the disk is gone") if fabric.global_rank == 1 else None
    with (
        patch.object(fill, "take_rows", side_effect=broken, wraps=take_rows),
        pytest.raises((OSError, OtherRankError), match="the disk is gone"),
    ):
        fabric.setup(model)


def check_a_rank_that_cannot_cast() -> None:
    """The other rank fails at the next synchronisation; if nothing is sharded, that is at the end."""
    for sharding, num_meetings in (("zero3", 2), ("none", 1)):
        fabric = fabric_of(sharding, "current", "fp8")
        broken = MemoryError("no room") if fabric.global_rank == 1 else None
        with (
            patch.object(walk, "together", wraps=together) as meetings,
            patch.object(frozen, "hold_fp8", side_effect=broken, wraps=hold_fp8),
            pytest.raises((MemoryError, OtherRankError), match="no room"),
        ):
            fabric.setup(make())
        assert meetings.call_count == num_meetings
