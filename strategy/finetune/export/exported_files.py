"""Writes a trained model without holding a whole one in memory: its adapter, or all of its weights."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from thunder_memsave.finetune.export.export import is_adapted, save_as_peft_does, saved_by_peft
from thunder_memsave.finetune.export.merged import MergedWeights, place_of
from thunder_memsave.finetune.export.model_card import write_card
from thunder_memsave.finetune.export.trained_model import TrainedModel
from thunder_memsave.finetune.model.build import build_base
from thunder_memsave.finetune.model.hub import model_directory
from thunder_memsave.finetune.model.safetensors_files import WeightSpec, write_weights
from thunder_memsave.finetune.model.weight_names import stored_names
from thunder_memsave.materialize.pending_weights import open_weights
from thunder_memsave.materialize.stacked_source import Stack


@dataclass(frozen=True, slots=True)
class Part:
    """A part of a stack: rows of one of its entries."""

    own: str
    """The stack's name in the model."""
    number: int
    rows: slice

    def of(self, stack: Tensor) -> Tensor:
        """Return the part of this stack."""
        return stack[self.number, self.rows]


@dataclass(frozen=True, kw_only=True, slots=True)
class PlainModel:
    """The contents of a whole model's files."""

    weights: tuple[WeightSpec, ...]
    own_names: Mapping[str, str]
    """Name in the files -> name in the model; parts of stacks are not in it."""
    parts: Mapping[str, Part]
    """Name in the files -> the part of a stack."""
    model: Any
    """The model without an adapter, on the meta device, with the config that is written."""
    merged: MergedWeights
    _last: dict[str, Tensor] = field(default_factory=dict, compare=False, repr=False)
    """The last stack of which a part was read, as its parts are read one after the other."""

    def read(self, weight: WeightSpec) -> Tensor:
        """Read a weight, not yet rounded to the dtype of the files."""
        if (part := self.parts.get(weight.name)) is None:
            return self.whole(weight.name)
        if part.own not in self._last:
            self._last.clear()
            self._last[part.own] = self.whole(part.own)
        return part.of(self._last[part.own])

    def whole(self, name: str) -> Tensor:
        """Read a weight by its name in the files, or a stack by its name in the model."""
        return self.merged.read(self.own_names.get(name, name))


def write_adapter(trained: TrainedModel, directory: Path) -> None:
    """Write the adapter as peft itself saves it, the tokenizer, and a model card."""
    model: Any = trained.model
    is_saved = saved_by_peft(model)
    names = [name for name in model.state_dict(keep_vars=True) if is_saved(name)]
    save_as_peft_does(model, directory, {name: trained.read(name) for name in names})
    trained.tokenizer.save_pretrained(directory)
    write_card(directory, {"exported from": trained.checkpoint.name})


def whole_model(trained: TrainedModel, *, dtype: torch.dtype) -> PlainModel:
    """Lay out the files of the model with its adapter merged.

    The files have the names and the order of the base model's own files. Tied weights stay tied, unless the
    run trained one of them apart from the other.
    """
    model: Any = build_base(trained.config) if is_adapted(trained.model) else trained.model
    groups = names_of_tensors(model)
    if any(not _is_one(trained.model, names) for names in groups):
        model = _untied(model)
        groups = names_of_tensors(model)
    stored = stored_names(model, _names_in_files(trained))
    tensors = model.state_dict(keep_vars=True)
    own_names, parts, specs = {}, {}, []
    for names_of_one in groups:
        own = next((name for name in names_of_one if name in stored.of), names_of_one[0])
        if own in stored.stacks:
            of_one = _parts(own, stored.stacks[own], tensors[own])
            parts.update(of_one)
            specs += [_spec(name, part.of(tensors[own]), dtype) for name, part in of_one.items()]
        else:
            file_name = stored.of.get(own, own)
            own_names[file_name] = own
            specs.append(_spec(file_name, tensors[own], dtype))
    return PlainModel(
        weights=tuple(specs),
        own_names=own_names,
        parts=parts,
        model=model,
        merged=MergedWeights(trained.model, trained.read),
    )


def write_whole_model(
    plain: PlainModel, tokenizer: Any, directory: Path, *, dtype: torch.dtype, max_file_bytes: int
) -> int:
    """Write config, tokenizer and weights, and return the bytes of the weights."""
    config = copy.deepcopy(plain.model.config)
    config.architectures = [type(plain.model).__name__]
    config.dtype = dtype
    config.save_pretrained(directory)
    if plain.model.can_generate():
        plain.model.generation_config.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return write_weights(directory, plain.weights, plain.read, max_file_bytes=max_file_bytes)


def names_of_tensors(model: nn.Module) -> list[list[str]]:
    """Group the names of parameters and persistent buffers by tensor; tied weights share a group."""
    groups: dict[int, list[str]] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        groups.setdefault(id(tensor), []).append(name)
    return list(groups.values())


def _is_one(trained: nn.Module, names: Sequence[str]) -> bool:
    return len({place_of(trained, name).identity for name in names}) == 1


def _untied(model: Any) -> Any:
    config = copy.deepcopy(model.config)
    config.tie_word_embeddings = False
    with torch.device("meta"):
        untied = type(model)._from_config(config, dtype=model.dtype)
    if hasattr(model, "generation_config"):
        untied.generation_config = model.generation_config
    return untied


def _parts(own: str, stack: Stack, whole: Tensor) -> dict[str, Part]:
    """Cut a stack as the files have it, whose parts in one entry are equally large."""
    size = whole.shape[1] // len(stack.parts[0])
    return {
        name: Part(own, number, slice(place * size, (place + 1) * size))
        for number, names in enumerate(stack.parts)
        for place, name in enumerate(names)
    }


def _names_in_files(trained: TrainedModel) -> list[str]:
    settings = trained.config.model
    return (
        [] if settings.config is not None else list(open_weights(model_directory(settings)).names())
    )


def _spec(name: str, tensor: Tensor, dtype: torch.dtype) -> WeightSpec:
    dtype = dtype if tensor.is_floating_point() else tensor.dtype
    return WeightSpec(name=name, shape=tensor.shape, dtype=dtype)
