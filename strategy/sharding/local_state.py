"""Hides padding rows from `state_dict` and `load_state_dict` of a sharded module."""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import Any

from torch import Tensor, nn

from thunder_memsave.sharding.rows import local_rows
from thunder_memsave.sharding.sharded_parameter import ShardedParameter, is_sharded, mark_state


def hide_padding(module: nn.Module) -> None:
    """Install hooks: `state_dict()` returns this rank's rows without padding, and `load_state_dict()` takes them.

    No communication. The values refuse to be written to a file, where they would look whole. With `keep_vars=True`
    the values are the parameters themselves, padding included.
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
    real = local_rows(parameter, parameter)
    if value.shape == real.shape and isinstance(value, Tensor):
        padded = parameter.detach().new_zeros(parameter.shape)
        padded[: real.shape[0]] = value
        return padded
    if value.shape in (real.shape, parameter.unsharded_shape):
        raise ValueError(
            f"load_state_dict() got the whole weight {name!r} of shape {tuple(value.shape)}, but "
            f"this rank holds {real.shape[0]} of its rows; load whole weights on every rank with "
            "fabric.load_raw(path, model) from their file, or with "
            "fabric.strategy.load_module_state_dict(model, state_dict) from memory."
        )
    return value  # load_state_dict reports the mismatch with all the others
