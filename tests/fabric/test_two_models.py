"""A GAN and an average of its weights: two models and optimizers, in pieces, in one process and on two ranks."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.fabric import Fabric
from torch import Tensor, nn
from torch.nn import functional as F

from harness.fabric import make_fabric, on_fabric_rank, run_on_fabric_ranks

# Dynamo looks at it, and hides the warning unless warnings are errors.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 5), nn.Linear(5, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(x).tanh())


class Branching(nn.Module):
    """Reads a number, so that it runs in pieces: eager leaves and a parameter of its own, and a compiled block."""

    def __init__(self, width: int, out: int) -> None:
        super().__init__()
        self.block, self.out = Block(width), nn.Linear(width, out)
        self.scale = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        h = self.block(x * self.scale)
        return self.out(h if h.abs().max().item() < 1e6 else h / 2)


def models() -> tuple[Branching, Branching]:
    """Return a generator and a discriminator."""
    torch.manual_seed(0)
    return Branching(3, 4), Branching(4, 1)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def batches(seed: int, rank: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(10 * seed + rank)
    return torch.randn(6, 4, generator=generator), torch.randn(6, 3, generator=generator)


def trained(
    state: dict[str, Any],
    ranks: Sequence[int],
    steps: Sequence[int],
    backward: Callable[[Tensor], Any],
) -> None:
    """Train on the batches of these ranks; the average follows the generator's weights."""
    generator, discriminator = state["generator"], state["discriminator"]
    for step in steps:
        data = [batches(step, rank) for rank in ranks]
        discriminator.zero_grad()
        fakes = [generator(noise) for _, noise in data]
        for (real, _), fake in zip(data, fakes, strict=True):
            backward(F.softplus(-discriminator(real)).mean() / len(ranks))
            backward(F.softplus(discriminator(fake.detach())).mean() / len(ranks))
        state["of_discriminator"].step()
        generator.zero_grad()
        for fake in fakes:
            backward(F.softplus(-discriminator(fake)).mean() / len(ranks))
        state["of_generator"].step()
        with torch.no_grad():
            for average, p in zip(
                state["average"].parameters(), generator.parameters(), strict=True
            ):
                average.lerp_(p, 0.3)


def set_up(fabric: Fabric | None) -> dict[str, Any]:
    generator, discriminator = models()
    pairs: list[Any] = [(m, sgd(m)) for m in (generator, discriminator)]
    if fabric is not None:
        pairs = [fabric.setup(*pair) for pair in pairs]
    names = ("generator", "of_generator", "discriminator", "of_discriminator")
    state = dict(zip(names, [one for pair in pairs for one in pair], strict=True))
    return state | {"average": copy.deepcopy(state["generator"])}


def check(fabric: Fabric, path: Path) -> None:
    expected, state = set_up(None), set_up(fabric)
    trained(expected, range(fabric.world_size), range(2), torch.Tensor.backward)
    trained(state, [fabric.global_rank], range(2), fabric.backward)
    x = torch.ones(2, 3)
    for name in ("generator", "average"):
        with torch.no_grad():
            torch.testing.assert_close(state[name](x), expected[name](x))
    fabric.save(path, state)
    resumed = set_up(fabric)
    fabric.load(path, resumed)
    for each in (state, resumed):
        trained(each, [fabric.global_rank], [2], fabric.backward)
    for name in ("generator", "discriminator", "average"):
        pairs = zip(
            state[name].state_dict().values(), resumed[name].state_dict().values(), strict=True
        )
        assert all(torch.equal(one, other) for one, other in pairs), name


def test_a_gan_trains_as_in_eager_and_resumes(tmp_path: Path) -> None:
    check(make_fabric(), tmp_path / "checkpoint")


@on_fabric_rank
def check_ranks(path: Path) -> None:
    check(make_fabric(devices=2, sharding="zero3"), path)


def test_a_gan_on_shards_trains_on_the_batches_of_both_ranks(tmp_path: Path) -> None:
    run_on_fabric_ranks(check_ranks, 2, tmp_path / "checkpoint")


def test_a_model_of_which_a_layer_was_exchanged_since_is_copied() -> None:
    """An average of weights begins with a copy, also of a model that was changed by hand."""
    eager = nn.Sequential(*(nn.Linear(3, 3) for _ in range(3)))
    model = make_fabric().setup_module(eager)
    x = torch.ones(2, 3)
    model(x).sum().backward()
    eager[1] = copy.deepcopy(eager[0])
    del eager[2]
    copied = copy.deepcopy(model)
    copied(x).sum().backward()
    assert torch.equal(copied(x), eager(x))
    assert all(p.grad is not None for p in copied.parameters())
