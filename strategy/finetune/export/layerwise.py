"""Runs a model that is on the meta device, on the CPU, with the weights of one layer at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

Read = Callable[[str], Tensor]
_REPORT = "such a model cannot be run layer by layer, so its export cannot be verified."


@torch.no_grad()
def logits_of(model: nn.Module, input_ids: Tensor, read: Read) -> Tensor:
    """Compute logits in float64, so that two models differ by their weights and not by rounding.

    Besides one layer, the modules outside of layer lists are in memory: embeddings, the last norm, the head.

    Args:
        model: A transformers model, adapted or not; tensors that are not on meta are used as they are.
        input_ids: (batch, length), on the CPU.
        read: Returns a parameter or persistent buffer by its name in `model`.

    Returns:
        (batch, length, vocabulary) in float64.
    """
    layers = dict(_layers(model, ""))
    model.eval()
    hooks = [
        hook for name, layer in layers.items() for hook in _fill_when_called(layer, name, read)
    ]
    try:
        with _experts_in_turn(model), _filled(model, "", read, skip=set(map(id, layers.values()))):
            output: Any = model(input_ids=input_ids, use_cache=False)
    finally:
        for hook in hooks:
            hook.remove()
    return output.logits.double()  # type: ignore[no-any-return]


@contextmanager
def _experts_in_turn(model: nn.Module) -> Iterator[None]:
    """Let a mixture call one expert after the other: grouped products, transformers' default, know no float64."""
    configs = [module.config for module in model.modules() if isinstance(module, PreTrainedModel)]
    before = [(config, config._experts_implementation) for config in configs]
    try:
        for config in configs:
            config._experts_implementation = "eager"
        yield
    finally:
        for config, implementation in before:
            config._experts_implementation = implementation


def _layers(module: nn.Module, name: str) -> Iterator[tuple[str, nn.Module]]:
    """Yield the members of the outermost module lists."""
    for child_name, child in module.named_children():
        path = f"{name}.{child_name}" if name else child_name
        if isinstance(module, nn.ModuleList):
            yield path, child
        else:
            yield from _layers(child, path)


def _fill_when_called(layer: nn.Module, name: str, read: Read) -> Iterator[Any]:
    filled: list[Any] = []

    def fill(*_: object) -> None:
        filled.append(_filled(layer, name, read, skip=set()))
        filled[-1].__enter__()

    def empty(*_: object) -> None:
        filled.pop().__exit__(None, None, None)

    yield layer.register_forward_pre_hook(fill)
    yield layer.register_forward_hook(empty)


@contextmanager
def _filled(module: nn.Module, name: str, read: Read, *, skip: set[int]) -> Iterator[None]:
    """Replace a module's tensors by float64 values inside the context, and restore them afterwards."""
    owners = list(_owners(module, name, skip))
    kept = [(owner, dict(owner._parameters), dict(owner._buffers)) for _, owner in owners]
    values: dict[int, Tensor] = {}  # tied twins stay one
    try:
        for path, owner in owners:
            both: tuple[dict[str, Any], ...] = (owner._parameters, owner._buffers)
            for tensors in both:
                for key, tensor in tensors.items():
                    if tensor is not None:
                        tensors[key] = _value(
                            key, tensor, path=path, owner=owner, read=read, values=values
                        )
        yield
    finally:
        for owner, parameters, buffers in kept:
            owner._parameters.update(parameters)
            owner._buffers.update(buffers)


def _owners(module: nn.Module, name: str, skip: set[int]) -> Iterator[tuple[str, nn.Module]]:
    if id(module) in skip:
        return
    yield name, module
    for child_name, child in module.named_children():
        yield from _owners(child, f"{name}.{child_name}" if name else child_name, skip)


def _value(
    name: str, tensor: Tensor, *, path: str, owner: nn.Module, read: Read, values: dict[int, Tensor]
) -> Tensor:
    full_name = f"{path}.{name}" if path else name
    if id(tensor) not in values:
        is_parameter = isinstance(tensor, nn.Parameter)
        if tensor.is_meta and name in owner._non_persistent_buffers_set:
            raise ValueError(f"nothing says what the buffer {full_name} starts as; {_REPORT}")
        value = read(full_name) if tensor.is_meta else tensor.detach()
        value = value.double() if value.is_floating_point() else value
        values[id(tensor)] = nn.Parameter(value, False) if is_parameter else value
    return values[id(tensor)]
