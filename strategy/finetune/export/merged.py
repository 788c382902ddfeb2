"""Weights of a trained model with its adapter merged, under the names of the plain model, one at a time."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import peft
import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils.other import ModulesToSaveWrapper
from torch import Tensor, nn

from thunder_memsave.settings.problems import ConfigError

Read = Callable[[str], Tensor]


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """The place of a plain model's weight in a possibly adapted model."""

    path: str
    """Path of the module: an adapted layer, or the owner of the weight."""
    module: nn.Module
    leaf: str
    """The weight's name inside the module, or inside the adapted layer."""

    @property
    def is_adapted(self) -> bool:
        """Whether an adapter has to be merged into it."""
        return isinstance(self.module, BaseTunerLayer)

    @property
    def identity(self) -> tuple[int, str]:
        """Key that is equal for all names of one tensor."""
        if self.is_adapted:
            return id(self.module), self.leaf
        return id(getattr(self.module, self.leaf)), ""


def place_of(model: nn.Module, name: str) -> Place:
    """Find a weight of the plain model in `model`, which may be adapted."""
    module, path = model, ""
    if isinstance(model, peft.PeftModel):
        module, path = model.get_base_model(), "base_model.model"
    *parents, leaf = name.split(".")
    for part in parents:
        module, path = _unwrapped(module.get_submodule(part), f"{path}.{part}" if path else part)
    return Place(path=path, module=module, leaf=leaf)


class MergedWeights:
    """Merges layer by layer with peft's own formula, in float32 or wider; keeps only the last layer.

    Args:
        model: The result of `build_model`, on the meta device.
        read: Returns a tensor of `model` by its name there.
    """

    def __init__(self, model: nn.Module, read: Read) -> None:
        self._model, self._read_own = model, read
        self._last: tuple[str, dict[str, Tensor]] = ("", {})

    def read(self, name: str) -> Tensor:
        """Return a weight by its name in the plain model, not rounded."""
        place = place_of(self._model, name)
        if not place.is_adapted:
            return self._read_own(f"{place.path}.{place.leaf}" if place.path else place.leaf)
        if self._last[0] != place.path:
            self._last = ("", {})  # free it first
            self._last = (place.path, self._merge(place))
        return self._last[1][place.leaf]

    def _merge(self, place: Place) -> dict[str, Tensor]:
        layer: Any = copy.deepcopy(place.module)  # on meta, except for what peft holds itself
        for owner_path, owner in layer.named_modules():
            prefix = f"{place.path}.{owner_path}" if owner_path else place.path
            _fill(owner, prefix, self._read_own)
        try:
            layer.merge()
        except (NotImplementedError, ValueError) as error:
            raise ConfigError(
                f"peft cannot merge {type(place.module).__name__} at {place.path} ({error}); leave --merge out, which "
                "exports the adapter."
            ) from error
        return {name: t.detach() for name, t in layer.get_base_layer().named_parameters()}


def _unwrapped(module: nn.Module, path: str) -> tuple[nn.Module, str]:
    """Return the trained copy of a module that is trained whole, or the module itself."""
    if isinstance(module, ModulesToSaveWrapper):
        (adapter,) = module.active_adapters
        return module.modules_to_save[adapter], f"{path}.modules_to_save.{adapter}"
    return module, path


def _fill(owner: nn.Module, path: str, read: Read) -> None:
    for name, parameter in owner._parameters.items():
        if parameter is not None:
            value = read(f"{path}.{name}") if parameter.is_meta else parameter.detach()
            wide = torch.promote_types(value.dtype, torch.float32)
            owner._parameters[name] = nn.Parameter(value.to(wide, copy=True), requires_grad=False)
    for name, buffer in owner._buffers.items():
        if buffer is not None and buffer.is_meta:
            owner._buffers[name] = read(f"{path}.{name}")
