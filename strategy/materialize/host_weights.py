"""Chooses the frozen weights that stay on the host, marks them before they have values, and puts them there."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from thunder_memsave.budget.pins import any_matches, check_patterns, with_ancestors
from thunder_memsave.config import StrategyConfig
from thunder_memsave.ops.host_copies.weights import keep_on_host, mark, place_of
from thunder_memsave.planner.offload.copies import LEAST_BYTES
from thunder_memsave.settings.problems import ConfigError

_KEY = "memory.offload_weights"


def mark_for_host(
    module: nn.Module, config: StrategyConfig, place: torch.device, *, num_ranks: int
) -> list[nn.Parameter]:
    """Mark the frozen weights that `memory.offload_weights` names, and return them.

    Args:
        module: The model, wholly or partly on meta.
        config: The strategy's settings.
        place: The device that computes.
        num_ranks: Number of processes.

    Raises:
        ConfigError: a pattern names no module, or modules without large frozen weights; or there are several
            processes, or fp8.
    """
    patterns = config.memory.offload_weights
    if not patterns:
        return []
    if num_ranks > 1:
        raise ConfigError(
            f"{_KEY} is for one process, and there are {num_ranks}, which could share the weights instead: set "
            "strategy.sharding to 'zero3', or leave it out.",
            key=_KEY,
        )
    if config.fp8 is not None:
        raise ConfigError(
            f"{_KEY} keeps weights on the host as they are, and fp8 keeps copies of them on the device; leave one of "
            "them out. model.frozen_weights makes weights smaller, and goes with it.",
            key=_KEY,
        )
    check_patterns("offload_weights", patterns, [name for name, _ in module.named_modules()])
    found = _chosen(module, patterns)
    if not found:
        raise ConfigError(
            f"{_KEY} names modules without frozen weights of at least {LEAST_BYTES:,} bytes; only frozen ones can stay "
            "on the host: train with `lora`, or leave it out.",
            key=_KEY,
        )
    for p in found:
        mark(p, place)
    return found


def _chosen(module: nn.Module, patterns: Sequence[str]) -> list[nn.Parameter]:
    found: dict[int, nn.Parameter] = {}
    for name, owner in module.named_modules():
        if not any_matches(patterns, tuple(with_ancestors(name))):
            continue
        for p in owner._parameters.values():
            if p is not None and not p.requires_grad and p.nbytes >= LEAST_BYTES:
                found[id(p)] = p
    return list(found.values())


def put_on_host(module: nn.Module) -> None:
    """Put the marked weights that have values into memory of the host; the device's, if they had any, is free."""
    for p in module.parameters():
        if (place := place_of(p)) is not None:
            keep_on_host(p, place)


def move(module: nn.Module, device: torch.device) -> None:
    """Move a module to a device, but for the weights that stay on the host."""

    def moved(tensor: Tensor) -> Tensor:
        return tensor if place_of(tensor) is not None else tensor.to(device)

    module._apply(moved)
