"""Chooses the frozen weights that stay on the host, and puts them there; they are marked before they have values."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

from thunder_memsave.budget.pins import any_matches, check_patterns, with_ancestors
from thunder_memsave.config import StrategyConfig
from thunder_memsave.ops.host_copies.buffers import is_dense
from thunder_memsave.ops.host_copies.weights import (
    keep_on_host,
    mark,
    place_of,
    unmark,
)
from thunder_memsave.planner.offload.copies import LEAST_BYTES
from thunder_memsave.settings.problems import ConfigError

_KEY = "memory.offload_weights"


def named_for_host(module: nn.Module, config: StrategyConfig) -> list[nn.Parameter]:
    """Return the frozen weights that `memory.offload_weights` names, but for those with gaps between their elements.

    Args:
        module: The model, wholly or partly on meta.
        config: The strategy's settings.

    Raises:
        ConfigError: a pattern names no module, or modules without large frozen weights.
    """
    patterns = config.memory.offload_weights
    if not patterns:
        return []
    names = [name for name, _ in module.named_modules(remove_duplicate=False)]
    check_patterns("offload_weights", patterns, names)
    found = _chosen(module, patterns)
    if not found:
        raise ConfigError(
            f"{_KEY} names modules without frozen weights of at least {LEAST_BYTES:,} bytes; only frozen ones can stay "
            "on the host: train with `lora`, or leave it out.",
            key=_KEY,
        )
    return found


def _chosen(module: nn.Module, patterns: Sequence[str]) -> list[nn.Parameter]:
    found: dict[int, nn.Parameter] = {}
    for name, owner in module.named_modules(remove_duplicate=False):
        if not any_matches(patterns, tuple(with_ancestors(name)) or ("",)):
            continue
        for p in owner._parameters.values():
            if p is None or p.requires_grad or p.nbytes < LEAST_BYTES:
                continue
            if is_dense(p):  # others would come back with other strides
                found[id(p)] = p
    return list(found.values())


def mark_all(module: nn.Module, chosen: Iterable[nn.Parameter], place: torch.device) -> None:
    """Mark the chosen weights for the host, and no others of a module: a set-up before this one may have failed.

    Args:
        module: The model.
        chosen: Its weights that are to stay on the host.
        place: The device that computes.
    """
    for p in module.parameters():
        unmark(p)
    for p in chosen:
        mark(p, place)


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
