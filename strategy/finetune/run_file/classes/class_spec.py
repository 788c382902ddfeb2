"""Makes an object from the `class_path` and `init_args` of a YAML file."""

from __future__ import annotations

import importlib
import inspect
import sys
import traceback
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from thunder_memsave.finetune.run_file.config import ClassSpec
from thunder_memsave.finetune.run_file.keys.unknown_keys import UnknownKeyError, unknown_key
from thunder_memsave.settings.problems import ConfigError, raise_all, suggestion
from thunder_memsave.settings.value_kinds import as_yaml, fits, hint_of, unquoted, wanted


def import_class(spec: ClassSpec, *, where: str, default_module: str) -> Any:
    """Import the class; a bare name is looked up in the default module.

    Raises:
        ConfigError: there is no such module, or no such class in it.
    """
    path, key = spec["class_path"], f"{where}.class_path"
    if not all(part.isidentifier() for part in path.split(".")):
        message = f"{key} is {path!r}, which is not the path of a class, such as torch.optim.AdamW."
        raise ConfigError(message, key=key)
    module_name, _, name = path.rpartition(".")
    module = _import(module_name or default_module, path=path, key=key)
    found = getattr(module, name, None)
    if not inspect.isclass(found):
        classes = [name for name, value in vars(module).items() if inspect.isclass(value)]
        classes += [name for name in getattr(module, "__all__", ()) if name not in classes]
        where_not = "its module" if module_name else module.__name__
        message = f"{key} is {path!r}, but {where_not} has no such class{suggestion(name, classes)}"
        raise ConfigError(message, key=key)
    return found


def checked_init_args(
    cls: Any,
    spec: ClassSpec,
    *,
    where: str,
    given_by_us: int = 0,
    filled: Collection[str] = (),
) -> dict[str, Any]:
    """Check the arguments against the constructor's signature and return them.

    Args:
        cls: The class.
        spec: The mapping with the `init_args`.
        where: The section's name in messages.
        given_by_us: Number of leading positional arguments that the caller passes.
        filled: Names of arguments that the caller passes if they are left out.

    Raises:
        ConfigError: an argument is unknown or has a value of the wrong kind, or a required one is
            missing.
    """
    arguments = unquoted_arguments(cls, spec.get("init_args") or {})
    section = f"{where}.init_args"
    problems = list(argument_problems(cls, arguments, where=section, given_by_us=given_by_us))
    for parameter in _parameters(cls)[given_by_us:]:
        needed = parameter.default is parameter.empty and parameter.kind in (
            parameter.POSITIONAL_OR_KEYWORD,
            parameter.KEYWORD_ONLY,
        )
        key = f"{section}.{parameter.name}"
        is_meant = any(key in each.meant for each in problems if isinstance(each, UnknownKeyError))
        if needed and parameter.name not in (*arguments, *filled) and not is_meant:
            message = f"{section} needs {parameter.name!r} for {cls.__name__}."
            problems.append(ConfigError(message, key=key))
    raise_all(problems)
    return arguments


def argument_problems(
    cls: Any, arguments: dict[str, Any], *, where: str, given_by_us: int = 0
) -> Iterator[ConfigError]:
    """Yield a problem for every argument that the constructor lacks, or whose value has the wrong kind."""
    parameters = {each.name: each for each in _parameters(cls)[given_by_us:]}
    takes_any = any(each.kind is each.VAR_KEYWORD for each in parameters.values())
    known = [name for name, each in parameters.items() if each.kind is not each.VAR_KEYWORD]
    hints = _hints(cls)
    for name, value in arguments.items():
        key = f"{where}.{name}"
        if name in known:
            hint = hint_of(parameters[name], hints)
            if not fits(hint, value):
                message = f"{key} is {as_yaml(value)}, but must be {wanted(hint)}."
                yield ConfigError(message, key=key)
        elif not takes_any:
            yield unknown_key(name, where=where, known=known, of=f"an argument of {cls.__name__}")


def unquoted_arguments(cls: Any, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return a constructor's arguments, with quoted numbers read where it takes numbers."""
    parameters, hints = {each.name: each for each in _parameters(cls)}, _hints(cls)
    return {
        name: unquoted(hint_of(parameters[name], hints), value) if name in parameters else value
        for name, value in arguments.items()
    }


def build(spec: ClassSpec, *positional: Any, where: str, default_module: str) -> Any:
    """Make the object.

    Raises:
        ConfigError: the class or an argument is wrong, also when its constructor says so.
    """
    cls = import_class(spec, where=where, default_module=default_module)
    arguments = checked_init_args(cls, spec, where=where, given_by_us=len(positional))
    try:
        return cls(*positional, **arguments)
    except ConfigError as error:
        error.key = error.key or f"{where}.init_args"
        raise
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"{where}: {cls.__name__} refuses its arguments: {error}", key=f"{where}.init_args"
        ) from error


def _import(module_name: str, *, path: str, key: str) -> Any:
    try:
        return importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        hint = ""
        if error.name is not None and module_name.startswith(error.name):
            hint = "; install its package, or put its directory into PYTHONPATH"
        raise ConfigError(f"{key} is {path!r}: {error}{hint}.", key=key) from error
    except Exception as error:  # the module's own code
        last = traceback.extract_tb(error.__traceback__)[-1]
        raise ConfigError(
            f"{key} is {path!r}, whose module fails at {last.filename}:{last.lineno}: "
            f"{type(error).__name__}: {error}",
            key=key,
        ) from error


def _parameters(cls: Any) -> list[inspect.Parameter]:
    return list(inspect.signature(cls).parameters.values())


def _hints(cls: Any) -> dict[str, Any]:
    """Evaluate the constructor's annotations one by one; `Any` if one cannot be evaluated."""
    hints = {}
    for parameter in _parameters(cls):
        hint = parameter.annotation
        if isinstance(hint, str):
            hint = _evaluated(hint, cls)
        hints[parameter.name] = Any if hint is parameter.empty else hint
    return hints


def _evaluated(annotation: str, cls: Any) -> Any:
    # A dataclass inherits annotations of its bases, which are evaluated in their own modules.
    for base in inspect.getmro(cls):
        names = vars(sys.modules[base.__module__]) if base.__module__ in sys.modules else {}
        try:
            return eval(annotation, dict(names))
        except (AttributeError, NameError, SyntaxError, TypeError):
            continue  # names that only type checkers see: nothing to check against
    return Any
