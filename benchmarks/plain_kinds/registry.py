"""Collects plain modules by their names, each with the inputs that it is called with."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

Batch = dict[str, Any]
Input = Callable[[torch.Generator], Any]
Kind = TypeVar("Kind", bound=type[nn.Module])


@dataclass(frozen=True, kw_only=True)
class Plain:
    """One module, which is made without arguments, and its inputs."""

    group: str
    """The file that it is in."""
    make: Callable[[], nn.Module]
    inputs: dict[str, Input]
    """By the names of the arguments of `forward`; those of `args` are given by position."""
    draws: bool
    """Whether its results depend on random numbers, also in evaluation if it says so."""
    is_smooth: bool
    """Whether its gradients are those of its outputs, as finite differences show; not so if straight-through."""

    def made(self) -> nn.Module:
        """Make the module; always with the same parameters."""
        torch.manual_seed(0)
        return self.make()

    def batch(self, seed: int) -> Batch:
        """Make the inputs of a step."""
        generator = torch.Generator().manual_seed(seed)
        return {name: made(generator) for name, made in self.inputs.items()}


PLAIN: dict[str, Plain] = {}
"""All modules that were imported, by the names of their classes."""


def plain(
    *, draws: bool = False, is_smooth: bool = True, **inputs: Input
) -> Callable[[Kind], Kind]:
    """Register a module with its inputs."""

    def register(kind: Kind) -> Kind:
        assert kind.__name__ not in PLAIN, f"there are two {kind.__name__}"
        group = kind.__module__.rpartition(".")[2]
        PLAIN[kind.__name__] = Plain(
            group=group, make=kind, inputs=inputs, draws=draws, is_smooth=is_smooth
        )
        return kind

    return register


def floats(*shape: int) -> Input:
    """Normal numbers, which get a gradient."""
    return lambda generator: torch.randn(*shape, generator=generator).requires_grad_()


def data(*shape: int) -> Input:
    """Normal numbers, which get no gradient, as those of a data set."""
    return lambda generator: torch.randn(*shape, generator=generator)


def ints(high: int, *shape: int) -> Input:
    """Integers from 0 to below `high`."""
    return lambda generator: torch.randint(0, high, shape, generator=generator)


def bools(*shape: int) -> Input:
    """Booleans, two thirds of them true."""
    return lambda generator: torch.rand(*shape, generator=generator) < 2 / 3


def always(value: Any) -> Input:
    """Give the same value in each step."""
    return lambda _: value.clone() if isinstance(value, Tensor) else value


def several(*inputs: Input) -> Input:
    """Give a tuple of inputs."""
    return lambda generator: tuple(made(generator) for made in inputs)


def mlp(*widths: int) -> nn.Sequential:
    """Linear layers with tanh between them."""
    layers: list[nn.Module] = []
    for inner, outer in itertools.pairwise(widths):
        layers += [nn.Linear(inner, outer), nn.Tanh()]
    return nn.Sequential(*layers[:-1])
