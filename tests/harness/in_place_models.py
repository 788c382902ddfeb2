"""Small models that write in place: five as people write them, and any number that are drawn at random."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

BATCH, LENGTH, WIDTH = 2, 6, 8


class Residual(nn.Module):
    """Adds to what a linear has made of three dimensions, as Falcon and DeBERTa do."""

    def __init__(self) -> None:
        super().__init__()
        self.linears = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor) -> tuple[Tensor]:
        for linear in self.linears:
            h = F.linear(x, cast(nn.Linear, linear).weight)
            h += x
            x = F.dropout(torch.sin(h), 0.1)
        return (x.square().mean(),)


class Activations(nn.Module):
    """Has activations and dropout in place, one after the other, as vision models have."""

    def __init__(self) -> None:
        super().__init__()
        kinds: tuple[Callable[[], nn.Module], ...] = (
            lambda: nn.ReLU(inplace=True),
            lambda: nn.SiLU(inplace=True),
            lambda: nn.Hardswish(inplace=True),
        )
        self.layers = nn.Sequential()
        for kind in kinds:
            self.layers.extend([nn.Linear(WIDTH, 2 * WIDTH), kind(), nn.Dropout(0.2, inplace=True)])
            self.layers.append(nn.Linear(2 * WIDTH, WIDTH))

    def forward(self, x: Tensor) -> tuple[Tensor]:
        return (self.layers(x).square().mean(),)


class Scores(nn.Module):
    """Changes scores by masks and slices before their softmax."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> tuple[Tensor]:
        for _ in range(3):
            scores = self.query(x) @ self.key(x).transpose(1, 2)
            scores.mul_(0.5)
            scores.masked_fill_(scores > 1.0, 0.25)
            scores[:, 0] = 0.0
            x = F.dropout(scores.softmax(-1), 0.1) @ x
        return (x.square().mean(),)


class Views(nn.Module):
    """Writes through views: a flat one, and one with two dimensions changed for each other."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(3 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> tuple[Tensor]:
        for _ in range(3):
            h = F.silu(self.up(x).view(-1, 3 * WIDTH), inplace=True).view(BATCH, LENGTH, -1)
            y = self.down(F.dropout(h, 0.1)).transpose(0, 1)
            y.add_(x.transpose(0, 1))
            x = y.transpose(0, 1)
        return (x.square().mean(),)


class Counted(nn.Module):
    """Writes to a buffer that it reads, to statistics, and to what it has made."""

    seen: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.ones(()))
        self.linears = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.norm = nn.BatchNorm1d(LENGTH)

    def forward(self, x: Tensor) -> tuple[Tensor]:
        for linear in self.linears:
            h = linear(x * self.seen)
            self.seen.add_(1.0)
            h.clamp_(-1.0, 1.0).mul_(x.sigmoid())
            x = F.dropout(self.norm(h), 0.1, inplace=True)
        return (x.square().mean(),)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "a residual": Residual,
    "activations": Activations,
    "scores": Scores,
    "views": Views,
    "a counter": Counted,
}

# Each changes `{c}`, which is new, given another value of the same shape.
_CHANGES = (
    "{c} += {b}",
    "{c}.add_({b}, alpha=0.5)",
    "{c}.mul_({b}.sigmoid())",
    "{c}.mul_({c}.sigmoid())",
    "{c}.clamp_(-0.5, 0.5)",
    "{c}[:, 0] = 0.25",
    "{c}[:, 1:3] = {b}[:, :2]",
    "{c}.masked_fill_({b} > 0.1, 0.25)",
    "{c} = F.relu({c}, inplace=True)",
    "F.silu({c}, inplace=True)",
    "{c} = F.dropout({c}, 0.5, True, True)",
    "{c} = F.mish({c}.reshape(-1, 8), True).reshape(2, 6, 8)",
    "{c}.copy_({b})",
    "{c} -= {b}",
)
_FRESH = (
    "F.linear({a}, self.weight)",
    "F.linear({a}, self.weight, self.bias)",
    "{a} * 1.5",
    "torch.sin({a})",
    "F.linear({a}.transpose(0, 1), self.weight).transpose(0, 1)",
)
_PLAIN = (
    "{c} = F.gelu({a})",
    "{c} = F.dropout({a}, 0.5)",
    "{c} = {a} * torch.tanh({b})",
    "{c} = F.softmax({a} + {b}, -1)",
    "{c} = {a} * self.seen; self.seen.add_(1.0)",
)


class Drawn(nn.Module):
    """One weight, one buffer that forward may write to."""

    def __init__(self, forward: Callable[[nn.Module, Tensor], Tensor]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / 2)
        self.bias = nn.Parameter(torch.randn(WIDTH) / 2)
        self.register_buffer("seen", torch.ones(()))
        self._forward = forward

    def forward(self, x: Tensor) -> tuple[Tensor]:
        return (self._forward(self, x),)


def source(seed: int, *, num_values: int = 7) -> str:
    """The text of `run(self, x)`."""
    draw = random.Random(seed)
    lines, pool = ["y = F.linear(x, self.weight)"], ["x", "y"]
    for number in range(num_values):
        names = {"a": draw.choice(pool[-3:]), "b": draw.choice(pool), "c": f"v{number}"}
        if draw.random() < 0.3:
            lines.append(draw.choice(_PLAIN).format(**names))
        else:
            changes = draw.choices(_CHANGES, k=draw.choice([1, 1, 2, 3]))
            lines += [f"v{number} = {draw.choice(_FRESH).format(**names)}"]
            lines += [change.format(**names) for change in changes]
        pool.append(f"v{number}")
    body = "\n    ".join([*lines, f"return ({pool[-1]} * y + {pool[-2]}).square().mean()"])
    return f"def run(self, x):\n    {body}\n"


def drawn(seed: int) -> nn.Module:
    """The model of a seed."""
    scope: dict[str, object] = {"torch": torch, "F": F}
    exec(compile(source(seed), f"in place {seed}", "exec"), scope)
    return Drawn(scope["run"])  # type: ignore[arg-type]
