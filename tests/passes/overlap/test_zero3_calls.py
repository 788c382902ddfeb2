"""zero3 with a window and buckets gives zero2's bits however forward and backward follow each other."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_gather_tensor

from harness.distributed import run_on_ranks
from harness.traces import (
    fake_ranks,
    live_gathered,
    num_calls,
    saved_for_backward,
    unlimited_planner,
)
from thunder_memsave.compiler.compiled_module import CompiledModule
from thunder_memsave.config import MemoryConfig
from thunder_memsave.distributed.data_parallel import DataParallel
from thunder_memsave.sharding.rows import shard_module


class Weights(nn.Module):
    """Uses weights in ways that are hard to repeat: at random, through an opaque operator, in groups, tied."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(6, 7), nn.LayerNorm(7)
        self.second, self.third = nn.Linear(7, 6, bias=False), nn.Linear(6, 7)
        self.third.weight = self.first.weight
        self.scale = nn.Parameter(torch.rand(7) + 1)
        self.frozen = nn.Parameter(torch.rand(5, 6), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.first(x))
        y = nn.functional.linear(y, nn.functional.dropout(self.second.weight, 0.5, self.training))
        y = y + torch.polygamma(1, self.frozen.detach() + 1).sum()
        return self.third(y.tanh()) * self.scale.exp()


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 7), nn.Linear(7, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x).tanh())


Calls = Callable[[nn.Module, Tensor], None]


def step(module: nn.Module, x: Tensor) -> None:
    module(x).square().sum().backward()


def evaluates_between(module: nn.Module, x: Tensor) -> None:
    loss = module(x).square().sum()
    module.eval()
    with torch.no_grad():
        module(x + 1)
    module.train()
    loss.backward()


def two_forwards_first(module: nn.Module, x: Tensor) -> None:
    first, second = module(x).square().sum(), module(x * 2).sum()
    first.backward()
    second.backward()


def two_forwards_backwards_in_reverse(module: nn.Module, x: Tensor) -> None:
    first, second = module(x).square().sum(), module(x * 2).sum()
    second.backward()
    first.backward()


def backward_twice(module: nn.Module, x: Tensor) -> None:
    output = module(x)
    output.sum().backward(retain_graph=True)
    output.square().sum().backward()


def trains_between(module: nn.Module, x: Tensor) -> None:
    """The second forward reads the new weights: earlier gathers are not reused."""
    step(module, x)
    torch.optim.SGD(module.parameters(), lr=0.1).step()
    step(module, x)


CALLS: tuple[Calls, ...] = (
    step,
    evaluates_between,
    two_forwards_first,
    two_forwards_backwards_in_reverse,
    backward_twice,
    trains_between,
)


def gradients(
    build: Callable[[], nn.Module], calls: Calls, rank: int, **settings: Any
) -> list[Tensor]:
    torch.manual_seed(0)
    model = build()
    assert dist.group.WORLD is not None
    data_parallel = DataParallel(group=dist.group.WORLD, **settings)
    shard_module(model, data_parallel)
    module = CompiledModule(model, data_parallel=data_parallel)
    torch.manual_seed(1)
    calls(module, torch.randn(4, 6, generator=torch.Generator().manual_seed(rank)))
    return [p.grad for p in model.parameters() if p.grad is not None]


class Gathering(Plain):
    """Calls a collective itself, and reads its result right after it."""

    def forward(self, x: Tensor) -> Tensor:
        assert dist.group.WORLD is not None
        everyone = all_gather_tensor(x, 0, dist.group.WORLD)
        return super().forward(x) + everyone.sum()


def check_collective_of_the_user(rank: int) -> None:
    """Large enough to take a while; the strategy's collectives overlap with it, in another group."""
    torch.manual_seed(0)
    model = Gathering()
    x = torch.randn(5000, 6, generator=torch.Generator().manual_seed(rank))
    expected = model(x).detach()
    group = dist.new_group()
    data_parallel = DataParallel(mode="zero3", group=group, prefetch=10**6, bucket_bytes=10**6)
    shard_module(model, data_parallel)
    module = CompiledModule(model, data_parallel=data_parallel)
    for _ in range(5):
        torch.testing.assert_close(module(x), expected)


class TorchsOwn(nn.Module):
    """Its weights are read by layers and functions of several operators each."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.weight = nn.LSTM(6, 6), nn.Parameter(torch.randn(4, 6))

    def forward(self, x: Tensor) -> Tensor:
        hidden, _ = self.layer(x)
        return torch.cdist(hidden, self.weight.flip(0)).cumsum(0)


def check_functions_of_torch(rank: int) -> None:
    torch.manual_seed(0)
    model = TorchsOwn()
    reference, batches = copy.deepcopy(model), torch.randn(2, 5, 6)
    assert dist.group.WORLD is not None
    data_parallel = DataParallel(mode="zero3", group=dist.group.WORLD)
    shard_module(model, data_parallel)
    step(CompiledModule(model, data_parallel=data_parallel), batches[rank])
    for batch in batches:
        (reference(batch).square().sum() / 2).backward()
    for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        assert ours.grad is not None
        assert theirs.grad is not None
        torch.testing.assert_close(ours.grad, theirs.grad.chunk(2)[rank])


def check_all(rank: int) -> None:
    check_collective_of_the_user(rank)
    check_functions_of_torch(rank)
    zero3: dict[str, Any] = {"mode": "zero3", "prefetch": 10**6, "bucket_bytes": 10**6}
    for build, calls in [*((Weights, calls) for calls in CALLS), (Plain, step)]:
        reference = gradients(build, calls, rank, mode="zero2")
        ours = gradients(build, calls, rank, **zero3)
        assert len(ours) == len(reference) >= 4
        for measured, expected in zip(ours, reference, strict=True):
            assert torch.equal(measured, expected), (build, calls)


def test_every_order_of_calls_gives_the_bits_of_zero2(tmp_path: Path) -> None:
    run_on_ranks(check_all, 2, tmp_path / "rendezvous")


def mostly_frozen() -> nn.Module:
    """Backward needs every weight, for the gradient of its input."""
    torch.manual_seed(0)
    layers = [layer for _ in range(4) for layer in (nn.Linear(16, 16, bias=False), nn.GELU())]
    model = nn.Sequential(*layers)
    model[:-2].requires_grad_(False)
    return model


@pytest.mark.parametrize("policy", ["plan", "keep_all"])
def test_a_plan_keeps_nothing_that_is_derived_from_a_gather(policy: Any) -> None:
    model = mostly_frozen()
    with fake_ranks(2) as data_parallel:
        shard_module(model, data_parallel)
        planner = unlimited_planner(MemoryConfig(policy=policy), data_parallel)
        module = CompiledModule(model, data_parallel=data_parallel, planner=planner)
        module(torch.ones(2, 16, requires_grad=True))
    (result,) = module.captures
    forward, (backward,) = result.forward_traces[-1], result.backward_traces
    assert not live_gathered(forward)[-1].live
    assert max(t.numel for t in saved_for_backward(forward)) == 8 * 16  # rows of this rank
    assert num_calls(forward, "all_gather") == num_calls(backward, "all_gather") == 4
