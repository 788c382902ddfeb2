"""Asks in each call if modules of the layers that Dynamo did not see got hooks.

Half of Dynamo's guards of a layer ask if a dictionary of hooks is empty, six for each module. For 21 layers of 13
modules it takes 80 ms to build them (2 cores); a walk through the modules takes 0.1 ms of a call.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from operator import attrgetter
from typing import Any

from torch import nn

_TABLE = re.compile(r"(?P<modules>(?:\._modules\['\w+'\])*)\.(?P<name>_\w+_hooks\w*)")
"""What leads from a layer to a dictionary of hooks of one of its modules, in the name of a source."""
_MODULE = re.compile(r"\['(\w+)'\]")
HookTable = tuple[tuple[str, ...], str]
"""The path from a layer to a module, and the name of a dictionary of hooks there."""


def hook_table(name: str) -> HookTable | None:
    """Return the dictionary of hooks that the end of a source's name leads to; None: it leads to something else."""
    found = _TABLE.fullmatch(name)
    return (tuple(_MODULE.findall(found["modules"])), found["name"]) if found else None


def no_hooks(
    tables: Iterable[HookTable], keys: Sequence[str]
) -> Callable[[nn.Module | None], bool]:
    """Return a function that says of a list of layers if dictionaries of hooks are there and empty.

    Args:
        tables: Those that are asked for in each layer.
        keys: The keys of the layers in their list.
    """
    names_of: dict[tuple[str, ...], list[str]] = defaultdict(list)
    for path, name in tables:
        names_of[path].append(name)
    asked = [(path, _getter(names)) for path, names in names_of.items()]

    def are_empty(layers: nn.Module | None) -> bool:
        try:
            for key in keys:
                for path, tables_of in asked:
                    module: Any = layers._modules[key]  # type: ignore[union-attr]  # caught below
                    for name in path:
                        module = module._modules[name]
                    if any(tables_of(module)):
                        return False
        except (AttributeError, KeyError):  # another module, or none
            return False
        return True

    return are_empty


def _getter(names: Sequence[str]) -> Callable[[nn.Module], Sequence[Any]]:
    get = attrgetter(*names)
    return get if len(names) > 1 else lambda module: (get(module),)
