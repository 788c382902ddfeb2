"""The strategy under `sharding: none` is DDP: it passes Lightning's tests of DDP."""

from __future__ import annotations

import copy

import pytest
import torch
from lightning.fabric import Fabric
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from harness.fabric import all_gathered, make_fabric, on_fabric_rank, run_on_fabric_ranks
from thunder_memsave.sharding.sharded_parameter import as_rows
from thunder_memsave.strategy import ThunderMemsaveStrategy

NUM_RANKS = 2
NUM_STEPS = 20


class Convolutions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 5, 3)
        self.second = nn.Conv2d(5, 6, 3, stride=2)
        self.head = nn.Linear(6 * 4 * 4, 10)

    def forward(self, images: Tensor) -> Tensor:
        x = nn.functional.max_pool2d(torch.relu(self.first(images)), 2)
        return self.head(torch.relu(self.second(x)).flatten(1))


def build() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(1)
    model = Convolutions()
    return model, torch.optim.SGD(model.parameters(), lr=0.05)


def train(fabric: Fabric, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    generator = torch.Generator().manual_seed(fabric.global_rank)
    for _ in range(NUM_STEPS):
        images = torch.rand(4, 3, 20, 20, generator=generator)
        labels = torch.randint(10, (4,), generator=generator)
        nn.functional.cross_entropy(model(images), labels).backward()
        optimizer.step()
        optimizer.zero_grad()


def test_final_weights_equal_ddp() -> None:
    run_on_fabric_ranks(check_final_weights, NUM_RANKS)


@on_fabric_rank
def check_final_weights() -> None:
    fabric = make_fabric(devices=NUM_RANKS, sharding="none")
    model, optimizer = fabric.setup(*build())
    train(fabric, model, optimizer)
    reference, reference_optimizer = build()
    initial = {name: value.clone() for name, value in reference.state_dict().items()}
    train(fabric, DistributedDataParallel(reference), reference_optimizer)
    for name, expected in reference.state_dict().items():
        # DDP reduces buckets, we tensors: the sum of two is the same, float32 rounds elsewhere.
        torch.testing.assert_close(model.state_dict()[name], expected, rtol=1e-6, atol=1e-7)
        assert not torch.allclose(expected, initial[name], rtol=1e-3)


def test_statistics_of_batch_norms_equal_those_of_ddp() -> None:
    run_on_fabric_ranks(check_statistics, NUM_RANKS)


@on_fabric_rank
def check_statistics() -> None:
    for sharding in ("none", "zero2"):
        fabric = make_fabric(devices=NUM_RANKS, sharding=sharding)
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))
        reference = DistributedDataParallel(copy.deepcopy(model))
        ours = fabric.setup(model)
        generator = torch.Generator().manual_seed(fabric.global_rank)
        for _ in range(3):
            rows = torch.rand(8, 4, generator=generator)
            ours(rows).sum().backward()
            reference(rows).sum().backward()
            for name, expected in reference.module.named_buffers():
                torch.testing.assert_close(dict(model.named_buffers())[name], expected)
        mean = all_gathered(fabric, model[1].get_buffer("running_mean"))
        assert not torch.equal(mean[0], mean[1])  # each forward updates a rank's own


def test_clipping_halves_what_it_is_told_to_halve() -> None:
    run_on_fabric_ranks(check_clipping, NUM_RANKS)


@on_fabric_rank
def check_clipping() -> None:
    for precision in ("32-true", "bf16-mixed"):
        for sharding in ("none", "zero2"):
            fabric = make_fabric(devices=NUM_RANKS, sharding=sharding, precision=precision)
            check_clipping_by_norm(fabric)
            check_clipping_by_value(fabric)


def equal_gradients(fabric: Fabric) -> tuple[nn.Module, torch.optim.Optimizer, Tensor]:
    """Return a model whose gradients are all equal, and its whole gradient."""
    linear = nn.Linear(32, 3, bias=False)
    nn.init.constant_(linear.weight, 0.01)
    model, optimizer = fabric.setup(linear, torch.optim.Adam(linear.parameters(), lr=0.1))
    fabric.backward(model(torch.full((1, 32), 0.1)).sum())
    return model, optimizer, whole_gradient(fabric, model)


def whole_gradient(fabric: Fabric, model: nn.Module) -> Tensor:
    (weight,) = model.parameters()
    assert weight.grad is not None
    strategy = fabric.strategy
    assert isinstance(strategy, ThunderMemsaveStrategy)
    assert strategy.data_parallel is not None
    if not strategy.data_parallel.shards:
        return weight.grad.clone()
    return all_gathered(fabric, as_rows(weight.grad)).flatten(0, 1)[:3]


def check_clipping_by_norm(fabric: Fabric) -> None:
    model, optimizer, before = equal_gradients(fabric)
    half = before.norm().item() / 2
    norm = fabric.clip_gradients(model, optimizer, max_norm=half)
    torch.testing.assert_close(norm, before.norm())
    clipped = whole_gradient(fabric, model).norm().item()
    assert clipped == pytest.approx(half, rel=1e-5)  # torch divides by the norm plus 1e-6
    optimizer.step()
    optimizer.zero_grad()


def check_clipping_by_value(fabric: Fabric) -> None:
    model, optimizer, before = equal_gradients(fabric)
    half = before[0, 0].item() / 2
    fabric.clip_gradients(model, optimizer, clip_val=half)
    torch.testing.assert_close(whole_gradient(fabric, model), torch.full((3, 32), half))
    optimizer.step()
    optimizer.zero_grad()
