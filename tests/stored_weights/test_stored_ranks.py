"""`frozen_weights` on several ranks: bytes are gathered, and the weights have the bits of one rank."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.fabric import Fabric
from safetensors.torch import save_file
from torch import Tensor, nn

from harness.fabric import make_fabric, on_fabric_rank, run_on_fabric_ranks
from harness.predicted_peaks import peak_on_a_rank
from thunder_memsave import load_on_setup
from thunder_memsave.distributed.agreement import OtherRankError
from thunder_memsave.ops.families.collectives import gathers
from thunder_memsave.sharding.row_errors import ShardedParameterError
from thunder_memsave.stored_weights.format import NonFiniteWeightError, StoredFormat
from thunder_memsave.stored_weights.formats import format_named


class Net(nn.Module):
    """Frozen linears whose rows are no multiple of 64 elements, after a trained factor."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(161, 401)
        self.down = nn.Linear(401, 161, bias=False)
        self.requires_grad_(False)
        self.factor = nn.Parameter(torch.ones(161))

    def forward(self, x: Tensor) -> Tensor:
        return (x + self.down(torch.tanh(self.up(x * self.factor)))).square().mean()


FORMATS = pytest.mark.parametrize("name", ["nf4", "int8"])


def make() -> Net:
    torch.manual_seed(0)
    return Net()


def dequantised(kept_in: StoredFormat) -> Net:
    model = make()
    for linear in (model.up, model.down):
        linear.weight.data = kept_in.round_trip(linear.weight, name="w")
    return model


def batch(rank: int, number: int) -> Tensor:
    generator = torch.Generator().manual_seed(10 * number + rank)
    return torch.randn(8, 161, generator=generator)


def fabric_of(num_ranks: int, sharding: Any, kept: str | None, **others: Any) -> Fabric:
    settings = {"devices": num_ranks, "sharding": sharding, "timeout": "2min", **others}
    return make_fabric(frozen_weights=kept, **settings)


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


@FORMATS
def test_two_ranks(name: str, tmp_path: Path) -> None:
    run_on_fabric_ranks(check_two_ranks, 2, name, tmp_path)


@FORMATS
def test_three_ranks(name: str) -> None:
    run_on_fabric_ranks(check_three_ranks, 3, name)


@FORMATS
def test_four_ranks(name: str) -> None:
    run_on_fabric_ranks(check_four_ranks, 4, name)


@on_fabric_rank
def check_two_ranks(name: str, directory: Path) -> None:
    kept_in = format_named(name)
    for sharding in ("zero2", "zero3"):
        check_training(2, sharding, kept_in)
    check_peak(kept_in)
    check_files_and_checkpoints(directory, kept_in)
    check_a_weight_that_is_not_finite(kept_in)


@on_fabric_rank
def check_three_ranks(name: str) -> None:
    for sharding in ("zero2", "zero3"):
        check_training(3, sharding, format_named(name))


@on_fabric_rank
def check_four_ranks(name: str) -> None:
    for sharding in ("zero2", "zero3", {"mode": "hybrid", "size": 2}):
        check_training(4, sharding, format_named(name))


def check_training(num_ranks: int, sharding: Any, kept_in: StoredFormat) -> None:
    found = []
    for kept, model in ((None, dequantised(kept_in)), (kept_in.name, make())):
        fabric = fabric_of(num_ranks, sharding, kept)
        module, optimizer = set_up(fabric, model)
        found.append([v for n in range(3) for v in step(fabric, module, optimizer, n)])
    assert len(found[0]) == len(found[1]) == 3 * (1 + 1)
    assert all(map(torch.equal, *found))
    whole = fabric.strategy.get_module_state_dict(module)
    for name, parameter in make().named_parameters():
        if name in ("up.weight", "down.weight"):
            assert torch.equal(whole[name], kept_in.quantize(parameter, name=name)), name
    if isinstance(sharding, dict):
        check_bytes(module, sharding["size"], "zero3", kept_in)
    else:
        check_bytes(module, num_ranks, sharding, kept_in)


def check_bytes(module: Any, num_ranks: int, sharding: str, kept_in: StoredFormat) -> None:
    """Held and gathered weights are bytes; padding is less than a byte, or a row, for each rank."""
    of_ranks = []
    for linear in (module.module.up, module.module.down):
        shape = torch.Size([linear.out_features, linear.in_features])
        num_rows, *rest = kept_in.stored_shape(shape)
        of_ranks.append(-(-num_rows // num_ranks) * math.prod(rest))
        assert linear.weight.nbytes == of_ranks[-1]
    (compiled,) = module._forward_module.captures
    forward, backward = compiled.forward_traces[-1], compiled.backward_traces[-1]
    sent = [[w for b in t.bound_symbols for _, w in gathers(b)] for t in (forward, backward)]
    of_weights = [[w for w in found if "uint8" in str(w.dtype)] for found in sent]
    assert [w.numel for w in of_weights[0]] == [num_ranks * n for n in of_ranks]
    assert len(of_weights[1]) == (2 if sharding == "zero3" else 0)
    for found in sent:
        assert not [w for w in found if w.numel > num_ranks * 401 and "uint8" not in str(w.dtype)]
    made_again = [b for b in backward.bound_symbols if b.sym.name == f"{kept_in.name}_dequantized"]
    assert len(made_again) == (2 if sharding == "zero3" else 0)


def check_peak(kept_in: StoredFormat) -> None:
    """The peak of a step is the predicted one."""
    fabric = fabric_of(2, "zero3", kept_in.name)
    model, optimizer = set_up(fabric, make())
    for number in range(2):
        step(fabric, model, optimizer, number)
    x = batch(fabric.global_rank, 0)
    measured = peak_on_a_rank(model, lambda: fabric.backward(model(x)))
    call = fabric.strategy._planned_call()  # type: ignore[attr-defined]
    assert x.nbytes + measured == pytest.approx(call.profile.peak_bytes, rel=0.01)
    model.zero_grad()


def check_files_and_checkpoints(directory: Path, kept_in: StoredFormat) -> None:
    fabric = fabric_of(2, "zero3", kept_in.name)
    path = fabric.broadcast(directory) / "model.safetensors"
    if fabric.global_rank == 0:
        save_file(make().state_dict(), path)
    fabric.barrier()
    with fabric.init_module(empty_init=True):
        made = Net()
    load_on_setup(made, path)
    loaded, optimizer = set_up(fabric, made)
    expected, its_optimizer = set_up(fabric, make())
    checkpoint = fabric.broadcast(directory) / "checkpoint"
    fabric.save(checkpoint, {"model": expected})
    torch.manual_seed(7)
    other, others_optimizer = set_up(fabric, Net())
    fabric.load(checkpoint, {"model": other})
    steps = [
        step(fabric, model, its, 0)
        for model, its in (
            (loaded, optimizer),
            (expected, its_optimizer),
            (other, others_optimizer),
        )
    ]
    assert all(map(torch.equal, steps[0], steps[1]))
    assert all(map(torch.equal, steps[2], steps[1]))
    with pytest.raises(ShardedParameterError, match=r"linear\(\) was asked to use 'down\.w"):
        other.module.down(torch.randn(8, 401))


def check_a_weight_that_is_not_finite(kept_in: StoredFormat) -> None:
    """Every rank refuses it, whichever has its rows."""
    model = make()
    model.down.weight.data[160, 3] = torch.inf
    with pytest.raises((NonFiniteWeightError, OtherRankError), match=r"down\.weight has elements"):
        fabric_of(2, "zero3", kept_in.name).setup(model)
