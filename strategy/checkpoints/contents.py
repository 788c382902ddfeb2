"""The `state` of a checkpoint, sorted by kind: modules, optimizers, and the rest."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, MutableMapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from thunder_memsave.sharding.operands import first_of
from thunder_memsave.sharding.sharded_parameter import StateRows


@runtime_checkable
class Stateful(Protocol):
    """An object with state of its own to save, such as a scheduler or a data loader."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state to save."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> Any:
        """Restore a saved state."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Contents:
    """The user's state, by kind. `everything` is the user's own mapping and is filled on load."""

    everything: MutableMapping[str, Any]
    modules: Mapping[str, nn.Module]
    optimizers: Mapping[str, Optimizer]

    @classmethod
    def of(cls, state: MutableMapping[str, Any], *, asked: str) -> Contents:
        """Sort the user's state.

        Raises:
            ValueError: it holds an optimizer, and no module to name its parameters.
        """
        modules = {k: v for k, v in state.items() if isinstance(v, nn.Module)}
        optimizers = {k: v for k, v in state.items() if isinstance(v, Optimizer)}
        if optimizers and not modules:
            raise ValueError(_without_model(asked, state))
        return cls(everything=state, modules=modules, optimizers=optimizers)

    def require_module(self, *, asked: str) -> None:
        """Refuse a checkpoint of shards without a module.

        Raises:
            ValueError: there is none.
        """
        if not self.modules:
            raise ValueError(_without_model(asked, self.everything))

    def others(self) -> dict[str, Any]:
        """Return the entries that are neither modules nor optimizers."""
        known = self.modules.keys() | self.optimizers.keys()
        return {k: v for k, v in self.everything.items() if k not in known}

    def state_of_others(self) -> dict[str, Any]:
        """Return what is saved for those entries."""
        return {
            k: v.state_dict() if isinstance(v, Stateful) else v for k, v in self.others().items()
        }

    def require_keys(self, stored: Iterable[str], path: Path, *, strict: bool) -> None:
        """Check that the checkpoint has every key that was asked for.

        Raises:
            KeyError: a key is missing, and `strict` is set.
        """
        stored = list(stored)
        missing = [key for key in self.everything if key not in stored]
        if strict and missing:
            raise KeyError(
                f"{missing} was to be loaded from {path}, which holds {stored}; ask for those "
                "keys, or pass strict=False to load what there is."
            )

    def restore_others(self, stored: MutableMapping[str, Any]) -> None:
        """Move the stored entries of the others out of `stored` and into the user's state."""
        for key, current in self.others().items():
            if key not in stored:
                continue
            value = stored.pop(key)
            if isinstance(current, Stateful):
                current.load_state_dict(value)
            else:
                self.everything[key] = value


def gathered(state: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    """Return the state with whole tensors for values of a sharded model's `state_dict()`. A collective.

    On other ranks than 0, which write nothing, they are None.
    """
    changed: dict[str, Any] = {k: _gathered(v) for k, v in state.items()}
    return changed


def _gathered(value: Any) -> Any:
    if isinstance(value, StateRows):
        whole = value.full_tensor()
        return whole.cpu() if not dist.is_initialized() or dist.get_rank() == 0 else None
    if isinstance(value, Mapping) and first_of(StateRows, [value]) is not None:
        return {k: _gathered(v) for k, v in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_gathered(v) for v in value)
    return value


def _without_model(asked: str, state: Mapping[str, Any]) -> str:
    return (
        f"{asked} got a state without a model (keys: {list(state)}); pass the model that "
        "setup returned along: {'model': model, ...}."
    )
