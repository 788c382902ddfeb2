"""Makes an object from the `class_path` and `init_args` of a YAML file."""

from __future__ import annotations

import importlib
import inspect
from typing import Any

from thunder_memsave.finetune.config import ClassSpec
from thunder_memsave.settings import ConfigError, refuse_unknown, suggestion


def import_class(spec: ClassSpec, *, where: str, default_module: str) -> Any:
    """Import the class; a bare name is looked up in the default module.

    Raises:
        ConfigError: there is no such module, or no such class in it.
    """
    path = spec["class_path"]
    module_name, _, name = path.rpartition(".")
    try:
        module = importlib.import_module(module_name or default_module)
    except ImportError as error:
        raise ConfigError(f"{where}.class_path is {path!r}: {error}.") from error
    found = getattr(module, name, None)
    if not inspect.isclass(found):
        classes = [key for key, value in vars(module).items() if inspect.isclass(value)]
        raise ConfigError(
            f"{where}.class_path is {path!r}, but {module.__name__} has no class {name!r}"
            f"{suggestion(name, classes)}"
        )
    return found


def checked_init_args(cls: Any, spec: ClassSpec, *, where: str, given_by_us: int = 0) -> Any:
    """Check the arguments against the constructor's signature and return them.

    Args:
        cls: The class.
        spec: Whose `init_args` are checked.
        where: The section's name in messages.
        given_by_us: How many leading positional arguments we pass ourselves.

    Raises:
        ConfigError: an argument is unknown, or a needed one is missing.
    """
    arguments = dict(spec.get("init_args") or {})
    parameters = list(inspect.signature(cls).parameters.values())[given_by_us:]
    if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        known = [parameter.name for parameter in parameters]
        refuse_unknown(arguments, known=known, where=f"{where}.init_args")
    for parameter in parameters:
        needed = parameter.default is parameter.empty and parameter.kind in (
            parameter.POSITIONAL_OR_KEYWORD,
            parameter.KEYWORD_ONLY,
        )
        if needed and parameter.name not in arguments:
            raise ConfigError(f"{where}.init_args needs {parameter.name!r} for {cls.__name__}.")
    return arguments


def build(spec: ClassSpec, *positional: Any, where: str, default_module: str) -> Any:
    """Make the object.

    Raises:
        ConfigError: the class or an argument is wrong, also when its constructor says so.
    """
    cls = import_class(spec, where=where, default_module=default_module)
    arguments = checked_init_args(cls, spec, where=where, given_by_us=len(positional))
    try:
        return cls(*positional, **arguments)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{where}: {cls.__name__} refuses its arguments: {error}") from error
