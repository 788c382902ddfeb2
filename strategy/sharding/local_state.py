"""Marks rows in the `state_dict` of sharded modules and their optimizers; `load_state_dict` takes rows or wholes."""

from __future__ import annotations

from collections.abc import Callable, MutableMapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from thunder_memsave.sharding.rows import is_state_of_rows, local_rows, padded_rows
from thunder_memsave.sharding.sharded_parameter import (
    ShardedParameter,
    StateRows,
    as_rows,
    is_sharded,
    mark_state,
    unquantized_dtype,
)


def hide_padding(module: nn.Module) -> None:
    """Install hooks: `state_dict()` returns this rank's rows without padding; `load_state_dict()` takes rows or wholes.

    No communication: of a whole weight each rank takes its own rows. The values refuse to be written to a file, where
    they would look whole. With `keep_vars=True` the values are the parameters themselves, padding included.
    """
    for submodule in module.modules():
        if any(is_sharded(p) for p in submodule._parameters.values() if p is not None):
            submodule.register_state_dict_post_hook(_cut_padding)
            submodule.register_load_state_dict_pre_hook(_add_padding)


def _cut_padding(
    module: nn.Module, state_dict: MutableMapping[str, Any], prefix: str, _: dict[str, Any]
) -> None:
    for name, parameter in module._parameters.items():
        value = state_dict.get(prefix + name)
        # With keep_vars the value is the parameter.
        if isinstance(parameter, ShardedParameter) and not isinstance(value, nn.Parameter | None):
            state_dict[prefix + name] = mark_state(local_rows(value, parameter), parameter)


def _add_padding(
    module: nn.Module,
    state_dict: MutableMapping[str, Any],
    prefix: str,
    metadata: dict[str, Any],
    *_: object,
) -> None:
    if metadata.get("assign_to_params_buffers"):
        raise ValueError(
            "load_state_dict(assign=True) would replace the parameters that the optimizer and the "
            "compiled forward hold; leave assign out."
        )
    for name, parameter in module._parameters.items():
        value = state_dict.get(prefix + name)
        # Also what reads a file as it is copied, such as litgpt's `lazy_load`.
        if isinstance(parameter, ShardedParameter) and hasattr(value, "shape"):
            state_dict[prefix + name] = _padded(value, parameter, prefix + name)


def _padded(value: Any, parameter: ShardedParameter, name: str) -> Any:
    """Return this rank's rows with padding, of the rows or of the whole weight; anything else as it is."""
    real = local_rows(parameter, parameter)
    if value.shape not in (real.shape, parameter.unsharded_shape):
        return value  # load_state_dict reports the mismatch with all the others
    if not isinstance(value, Tensor):
        value = torch.empty(value.shape, dtype=parameter.dtype).copy_(value)
    if unquantized_dtype(parameter) is not None and value.dtype != parameter.dtype:
        raise ValueError(
            f"load_state_dict() got {name!r} in {value.dtype}, and this model holds only fp8 numbers of that weight "
            "(fp8.frozen_weights: fp8), which have a scale; load it before fabric.setup()."
        )
    return padded_rows(value, parameter)


def keep_state_whole(optimizer: Optimizer) -> None:
    """Install hooks: `state_dict()` marks moments as this rank's rows, and `load_state_dict()` takes rows or wholes.

    No communication. The marked values refuse to be written to a file; `full_tensor()` gathers them, and so does
    `fabric.save`. The optimizer's own state is what it was.
    """
    optimizer.register_state_dict_post_hook(_mark_moments)
    optimizer.register_load_state_dict_pre_hook(_own_moments)


def _mark_moments(optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    def marked(key: str, value: Any, p: ShardedParameter) -> Any:
        is_of_rows = isinstance(value, Tensor) and is_state_of_rows(
            optimizer, key, value.shape, p.shape
        )
        return mark_state(as_rows(value), p) if is_of_rows else value

    return _with_moments(optimizer, state_dict, marked)


def _own_moments(optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    def own(key: str, value: Any, p: ShardedParameter) -> Any:
        if isinstance(value, StateRows):
            return as_rows(value)
        # Where a weight of one row is as long as each rank's padded rows, the same holds.
        is_whole = isinstance(value, Tensor) and is_state_of_rows(
            optimizer, key, value.shape, p.unsharded_shape
        )
        return padded_rows(value, p) if is_whole else value

    return _with_moments(optimizer, state_dict, own)


def _with_moments(
    optimizer: Optimizer,
    state_dict: dict[str, Any],
    change: Callable[[str, Any, ShardedParameter], Any],
) -> dict[str, Any]:
    """Return a state dict with other values for the state of sharded parameters."""
    current = [p for group in optimizer.param_groups for p in group["params"]]
    numbers = [n for group in state_dict["param_groups"] for n in group["params"]]
    of = {n: p for n, p in zip(numbers, current, strict=False) if isinstance(p, ShardedParameter)}
    state = {
        n: {key: change(key, value, of[n]) for key, value in values.items()} if n in of else values
        for n, values in state_dict["state"].items()
    }
    return {**state_dict, "state": state}
