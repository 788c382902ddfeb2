"""Refuses callbacks with hooks that a run would not call, or not with the arguments that they need."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence

from thunder_memsave.callbacks.hooks import HOOKS
from thunder_memsave.settings.problems import ConfigError, raise_all, suggestion

# Fabric's optimizer passes all arguments to it, but `fabric.call` only those that a hook names.
_TAKES_ALL = "on_after_optimizer_step"

_LIGHTNING = ("lightning", "pytorch_lightning")


def check_hooks(cls: type, *, where: str) -> None:
    """Refuse methods `on_*` that are never called, and hooks with arguments that are never passed.

    Raises:
        ConfigError: there is such a hook; the message names the one that is probably meant.
    """
    names = [name for name in dir(cls) if name.startswith("on_") and callable(getattr(cls, name))]
    messages = (message for name in names for message in _problems(cls, name))
    key = f"{where}.class_path"
    raise_all([ConfigError(f"{key} is {cls.__name__}, {text}", key=key) for text in messages])


def _problems(cls: type, name: str) -> Iterator[str]:
    if name in HOOKS:
        yield from _wrong_arguments(cls, name)
    elif not _is_of_lightning(cls, name):
        near = suggestion(name, HOOKS)
        others = f"; the hooks are {', '.join(HOOKS)}. Give another name to what is none of them."
        yield f"whose {name} is not a hook, so that nothing would call it{others if near == '.' else near}"


def _wrong_arguments(cls: type, name: str) -> Iterator[str]:
    passed, parameters = HOOKS[name], _parameters(cls, name)
    needed = [
        each.name
        for each in parameters
        if each.default is each.empty
        and each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD)
        and (each.name not in passed or each.kind is each.POSITIONAL_ONLY)
    ]
    if needed:
        yield (
            f"whose {name} needs {_quoted(needed)}, which a run does not pass by name; it passes {_quoted(passed)}"
            f"{_way_out(cls, name)}."
        )
    takes_any = any(each.kind is each.VAR_KEYWORD for each in parameters)
    missing = [each for each in passed if each not in {p.name for p in parameters}]
    if name == _TAKES_ALL and missing and not takes_any:
        yield f"whose {name} must take {_quoted(passed)}, but has no {_quoted(missing)}."


def _parameters(cls: type, name: str) -> Sequence[inspect.Parameter]:
    """List the parameters of a call on an object; methods that are not written in Python may take anything."""
    try:
        parameters = list(inspect.signature(getattr(cls, name)).parameters.values())
    except (TypeError, ValueError):
        return [inspect.Parameter("any", inspect.Parameter.VAR_KEYWORD)]
    return parameters[1:] if inspect.isfunction(inspect.getattr_static(cls, name)) else parameters


def _is_of_lightning(cls: type, name: str) -> bool:
    """Tell whether Lightning's own classes have the name: a hook of its Trainer is not a misspelt one of ours."""
    of = (base for base in inspect.getmro(cls) if name in vars(base))
    return any(base.__module__.partition(".")[0] in _LIGHTNING for base in of)


def _way_out(cls: type, name: str) -> str:
    owner = next(base for base in inspect.getmro(cls) if name in vars(base))
    if owner.__module__.partition(".")[0] not in _LIGHTNING:
        return ""
    return f". It is {owner.__name__}'s own, for Lightning's Trainer; do not derive from that"


def _quoted(names: Sequence[str]) -> str:
    return ", ".join(map(repr, names))
