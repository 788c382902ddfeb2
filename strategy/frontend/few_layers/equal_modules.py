"""Compares modules: equal ones have the same code and shapes, and tell in which attributes they differ."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from thunder_memsave.sharding.rows import whole_shape
from thunder_memsave.sharding.sharded_parameter import is_sharded, stored_weight

_PLAIN = (bool, float, str, bytes, type(None), torch.dtype, torch.device, torch.layout)
_DATA = (int, float, str, list, tuple, dict, set)
"""Types of attributes that may differ: whoever reads one finds out."""
_OF_EVERY_MODULE = frozenset(vars(nn.Module()))
"""Attributes that PyTorch reads when it calls a module, such as its hooks."""


def differences(modules: Sequence[nn.Module]) -> list[dict[str, Any]] | None:
    """Compare modules; return the attributes in which they differ, such as `layer_idx`, by their dotted names.

    None: they differ in more, such as their code or the shapes of their weights.
    """
    first, *others = modules
    differing: set[str] = set()
    if not all(_are_equal(first, other, "", differing) for other in others):
        return None
    return [{name: _attribute(module, name) for name in sorted(differing)} for module in modules]


def _attribute(module: nn.Module, name: str) -> Any:
    path, _, attribute = name.rpartition(".")
    return vars(module.get_submodule(path))[attribute]


def _are_equal(one: nn.Module, other: nn.Module, path: str, differing: set[str]) -> bool:
    if type(one) is not type(other) or vars(one).keys() != vars(other).keys():
        return False
    for name, value in vars(one).items():
        counterpart = vars(other)[name]
        if name in ("_parameters", "_buffers"):
            if not _are_tensors_equal(value, counterpart):
                return False
        elif name == "_modules":
            if list(value) != list(counterpart):
                return False
            for child, module in value.items():
                below, matching = f"{path}{child}.", counterpart[child]
                if module is not matching and not _are_equal(module, matching, below, differing):
                    return False
        elif not _are_values_equal(value, counterpart):
            is_data = type(value) is type(counterpart) and isinstance(value, _DATA)
            if not is_data or name in _OF_EVERY_MODULE:
                return False
            differing.add(f"{path}{name}")
    return True


def _are_tensors_equal(
    ones: Mapping[str, Tensor | None], others: Mapping[str, Tensor | None]
) -> bool:
    return list(ones) == list(others) and all(
        a is b or (a is not None and b is not None and _facts(a) == _facts(b))
        for a, b in zip(ones.values(), others.values(), strict=True)
    )


def _facts(tensor: Tensor) -> tuple[Any, ...]:
    stored = stored_weight(tensor)
    whole = whole_shape(tensor) if is_sharded(tensor) else None
    of_stored = None if stored is None else (stored.shape, stored.dtype)
    own = (type(tensor), tensor.shape, tensor.dtype, tensor.device, tensor.requires_grad)
    return (*own, tensor.stride(), whole, of_stored)


def _are_values_equal(one: Any, other: Any) -> bool:
    if one is other:
        return True
    if type(one) is not type(other):
        return False
    if isinstance(one, Mapping):
        return list(one) == list(other) and all(_are_values_equal(one[k], other[k]) for k in one)
    if isinstance(one, functools.partial):
        ones, others = ((p.func, p.args, p.keywords, vars(p)) for p in (one, other))
        return _are_values_equal(ones, others)
    if isinstance(one, (list, tuple)):
        pairs = zip(one, other, strict=False)
        return len(one) == len(other) and all(_are_values_equal(a, b) for a, b in pairs)
    if isinstance(one, (set, frozenset)):
        return bool(one == other)
    return isinstance(one, (int, *_PLAIN)) and bool(one == other)
