"""Finds the modules that a user has pinned: their activations are kept or recomputed, whatever the plan prefers."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Sequence
from fnmatch import fnmatchcase

from thunder_memsave.config import MemoryConfig
from thunder_memsave.planner.actions import KEEP, RECOMPUTE, Action
from thunder_memsave.settings.problems import ConfigError

_NUM_SHOWN = 3


def pin_of(memory: MemoryConfig, module: str) -> Action | None:
    """Return the action asked for a module's activations, by its own name or that of a module around it.

    Args:
        memory: The patterns.
        module: Dotted name of the module; the model itself is ''.
    """
    names = tuple(with_ancestors(module))
    if any_matches(memory.keep, names):
        return KEEP
    return RECOMPUTE if any_matches(memory.recompute, names) else None


def check_pins(memory: MemoryConfig, modules: Iterable[str]) -> None:
    """Refuse patterns that name no module, and modules that both lists name.

    Args:
        memory: The patterns.
        modules: Dotted names of all modules of the model, as `named_modules` gives them.

    Raises:
        ConfigError: a pattern matches nothing, or both lists name a module.
    """
    names = tuple(modules)
    for key, patterns in (("keep", memory.keep), ("recompute", memory.recompute)):
        check_patterns(key, patterns, names)
    for name in names:
        around = tuple(with_ancestors(name))
        if any_matches(memory.keep, around) and any_matches(memory.recompute, around):
            raise ConfigError(
                f"memory.keep and memory.recompute both name {name!r}, or a module around it; remove one of them.",
                key="memory.recompute",
            )


def check_patterns(key: str, patterns: Sequence[str], names: Sequence[str]) -> None:
    """Refuse patterns of a key of `memory` that name none of a model's modules.

    Raises:
        ConfigError: one names nothing.
    """
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in names):
            raise _matches_nothing(key, pattern, names)


def _matches_nothing(key: str, pattern: str, names: Sequence[str]) -> ConfigError:
    nearest = difflib.get_close_matches(pattern, names, n=_NUM_SHOWN, cutoff=0.3)
    examples = ", ".join(map(repr, nearest or [name for name in names if name][:_NUM_SHOWN]))
    return ConfigError(
        f"memory.{key} has {pattern!r}, which names no module of this model; its modules are such as {examples}, and "
        "'*' stands for any part of a name.",
        key=f"memory.{key}",
    )


def with_ancestors(module: str) -> Iterator[str]:
    """Yield the name of a module, and those of the modules around it, the model itself left out."""
    while module:
        yield module
        module = module.rpartition(".")[0]


def any_matches(patterns: Sequence[str], names: Sequence[str]) -> bool:
    """Tell whether a pattern names one of these modules."""
    return any(fnmatchcase(name, pattern) for name in names for pattern in patterns)
