"""Muon on shards has the bits of PyTorch's on whole weights, on any number of ranks, and the planned peak."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.optim import AdamW, Muon
from torch.optim.lr_scheduler import LambdaLR

from harness.distributed import run_on_ranks
from harness.fabric import make_fabric, on_fabric_rank, run_on_fabric_ranks
from harness.memory import measured_memory
from harness.rank_memory import letting_go
from thunder_memsave.checkpoints import load_checkpoint, save_checkpoint
from thunder_memsave.config import ConfigError, MemoryConfig
from thunder_memsave.distributed.data_parallel import DataParallel
from thunder_memsave.fabric.refusals import fit_optimizer
from thunder_memsave.measure.step_memory import step_memory
from thunder_memsave.optim.muon import MuonByRows
from thunder_memsave.sharding.rows import gather_full, own_rows, shard_module, take_rows

SETTINGS: list[dict[str, Any]] = [
    {"lr": 0.1},
    {"lr": torch.tensor(0.05), "nesterov": False, "adjust_lr_fn": "match_rms_adamw"},
    {"lr": 0.1, "weight_decay": 0.0, "momentum": 0.5, "ns_steps": 3},
]


class Matrices(nn.Module):
    """Higher, wider, with fewer rows than ranks, in bfloat16."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        shapes = {"high": (9, 4), "wide": (5, 16), "single": (1, 6)}
        for name, shape in shapes.items():
            self.register_parameter(name, nn.Parameter(torch.randn(shape)))
        self.low = nn.Parameter(torch.randn(6, 5, dtype=torch.bfloat16))


def trained(
    settings: dict[str, Any], steps: range, dp: DataParallel | None, load: Path | None = None
) -> tuple[Matrices, Muon]:
    """Take some steps with gradients that depend on nothing but the step."""
    net = Matrices()
    names = [n for n, _ in net.named_parameters() if settings.get("nesterov", True) or n != "low"]
    shapes = {name: net.get_parameter(name).shape for name in names}
    shard_module(net, dp)
    optimizer = Muon([net.get_parameter(name) for name in names], **settings)
    schedule = LambdaLR(
        optimizer, lambda step: 1.0
    )  # puts a step of the class before into the object
    fit_optimizer(optimizer, MemoryConfig())
    assert type(optimizer) is (MuonByRows if dp else Muon)
    if load is not None:
        load_checkpoint(load, {"model": net, "optimizer": optimizer}, data_parallel=dp)
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        for name, shape in shapes.items():
            p = net.get_parameter(name)
            grad = torch.randn(shape, generator=generator).to(p.dtype)
            p.grad = grad if dp is None else take_rows(grad, own_rows(shape, dp))
        optimizer.step()
        schedule.step()
    return net, optimizer


def assert_weights(net: Matrices, expected: Matrices, dp: DataParallel | None) -> None:
    for p, other in zip(net.parameters(), expected.parameters(), strict=True):
        assert torch.equal(gather_full(p, dp), other)


def check_bits(rank: int, root: Path) -> None:
    """Train alike on 1, 2 and 3 ranks, save, and train on from each on each other number."""
    timeout = timedelta(seconds=120)
    made = [dist.new_group(list(range(size)), timeout=timeout) for size in (2, 3)]
    layouts = [None, *(DataParallel(mode="zero3", group=group) for group in made)]
    for number, settings in enumerate(SETTINGS):
        half, whole = (trained(settings, range(n), None)[0] for n in (2, 4))
        for source, dp in enumerate(layouts):
            path = root / f"{number} {source}"
            if rank <= source:
                net, optimizer = trained(settings, range(2), dp)
                assert_weights(net, half, dp)
                state = {"model": net, "optimizer": optimizer}
                save_checkpoint(path, state, state_dict_type="sharded", data_parallel=dp)
            dist.barrier()
            other = layouts[target := (source + 1) % 3]
            if rank <= target:
                net, _ = trained(settings, range(2, 4), other, load=path)
                assert_weights(net, whole, other)


def test_weights_have_the_bits_of_one_rank_and_go_on_from_any_checkpoint(tmp_path: Path) -> None:
    run_on_ranks(check_bits, 3, tmp_path / "rendezvous", tmp_path)


class Mlp(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(64, 192), nn.Tanh(), nn.Linear(192, 64))


@on_fabric_rank
def check_peaks() -> None:
    for mode in ("zero2", "zero3"):
        fabric = make_fabric(devices=2, sharding=mode)
        torch.manual_seed(0)
        model = Mlp()
        matrices = [p for p in model.parameters() if p.dim() == 2]
        vectors = [p for p in model.parameters() if p.dim() == 1]
        called, *optimizers = fabric.setup(
            model, Muon(matrices, lr=0.02, weight_decay=0.0), AdamW(vectors, foreach=False)
        )
        losses = []
        for _ in range(6):
            torch.manual_seed(1)
            loss = called(torch.randn(32, 64)).square().mean()
            fabric.backward(loss)
            losses.append(float(loss))
            for optimizer in optimizers:
                optimizer.step()
            memory = step_memory([optimizers[0].optimizer])
            with letting_go():
                measured = measured_memory(optimizers[0].step).peak_bytes
            assert memory.update_peak_bytes == measured, (memory.update_peak_bytes, measured)
            for optimizer in optimizers:
                optimizer.zero_grad()
        assert losses[-1] < 0.5 * losses[0]
        assert "momentum_buffer" in optimizers[0].state_dict()["state"][0]


def test_the_bytes_of_its_step_are_those_that_are_planned() -> None:
    run_on_fabric_ranks(check_peaks, 2)


def check_refusal(rank: int) -> None:
    class Derived(Muon):
        """May compute anything."""

    net = Matrices()
    group = dist.new_group([0, 1], timeout=timedelta(seconds=120))
    shard_module(net, DataParallel(mode="zero3", group=group))
    with pytest.raises(ConfigError, match=r"Derived computes with whole weights"):
        fit_optimizer(Derived(net.parameters()), MemoryConfig())


def test_a_class_that_is_derived_from_it_is_refused(tmp_path: Path) -> None:
    run_on_ranks(check_refusal, 2, tmp_path / "rendezvous")
