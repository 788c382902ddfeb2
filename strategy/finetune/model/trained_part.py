"""The part of a model that its checkpoints hold: all but frozen weights that the model's files have."""

from __future__ import annotations

from collections.abc import Collection

from torch import Tensor, nn

from thunder_memsave.fp8.weights.loaded import weight_of_scale


def trained_part(model: nn.Module, *, in_files: Collection[str]) -> nn.Module:
    """Make a module that shares with `model` what a checkpoint needs, under the same names.

    With adapters that is little, however large the model is.

    Args:
        model: The model after setup, so that its parameters are final.
        in_files: Names that can be read again from the model's own files.
    """
    part = nn.Module()
    for name, value in model.state_dict(keep_vars=True).items():
        # The scale of an fp8 weight is made from the file's weight again, as its numbers are.
        source = weight_of_scale(name) or name
        if value.requires_grad or source not in in_files:
            *path, last = name.split(".")
            _register(_submodule(part, path), last, value)
    return part


def _submodule(part: nn.Module, path: list[str]) -> nn.Module:
    for name in path:
        if name not in part._modules:
            part.add_module(name, nn.Module())
        part = part.get_submodule(name)
    return part


def _register(owner: nn.Module, name: str, value: Tensor) -> None:
    if isinstance(value, nn.Parameter):
        owner.register_parameter(name, value)
    else:
        owner.register_buffer(name, value)
