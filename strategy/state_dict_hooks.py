"""`state_dict()` of a sharded module gives real rows, and `load_state_dict()` takes them back."""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import Any

import torch
from torch import Tensor, nn

from thunder_memsave.sharded_parameter import ShardedParameter

_INSTALLED = "_thunder_memsave_state_dict_hooks"


def install_state_dict_hooks(module: nn.Module) -> None:
    """Adds the hooks to each submodule that owns a sharded parameter, once.

    Per owner, so that `state_dict()` of a part of the model is right as well. No communication.
    """
    for owner in module.modules():
        owns = any(isinstance(p, ShardedParameter) for p in owner._parameters.values())
        if owns and not hasattr(owner, _INSTALLED):
            setattr(owner, _INSTALLED, True)
            owner.register_state_dict_post_hook(_drop_padding)
            owner.register_load_state_dict_pre_hook(_add_padding)


def _drop_padding(
    owner: nn.Module, state_dict: MutableMapping[str, Any], prefix: str, local_metadata: object
) -> None:
    """Leaves Parameters alone: `state_dict(keep_vars=True)` asks for the objects themselves."""
    for name, p in owner._parameters.items():
        entry = state_dict.get(prefix + name)
        if isinstance(p, ShardedParameter) and isinstance(entry, Tensor) and entry is not p:
            state_dict[prefix + name] = entry[: p._num_real_rows]


def _add_padding(
    owner: nn.Module, state_dict: MutableMapping[str, Any], prefix: str, *_: object
) -> None:
    """Makes a shard of what is this rank's real rows, or of the whole tensor."""
    for name, p in owner._parameters.items():
        entry = state_dict.get(prefix + name)
        if isinstance(p, ShardedParameter) and isinstance(entry, Tensor):
            state_dict[prefix + name] = _as_shard(entry, p)


def _as_shard(given: Tensor, p: ShardedParameter) -> Tensor:
    """Other shapes go through unchanged, for `load_state_dict` to report with all the rest."""
    real = given
    if given.shape == p.unsharded_shape and given.shape[0] != p._num_real_rows:
        real = given[p._first_row : p._first_row + p._num_real_rows]
    if real.shape != (p._num_real_rows, *p.unsharded_shape[1:]):
        return given
    shard = torch.zeros(p.shape, dtype=given.dtype, device=given.device)
    shard[: p._num_real_rows] = real
    return shard
