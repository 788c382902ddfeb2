"""Tells whether a value from YAML fits a type, and names in words the values that do."""

from __future__ import annotations

import collections.abc
import enum
import inspect
import os
import sys
import types
from collections.abc import Iterator
from typing import (
    Annotated,
    Any,
    Literal,
    NotRequired,
    Required,
    Union,
    get_args,
    get_origin,
    is_typeddict,
)

from thunder_memsave.settings.section import suggestion

_WORDS: dict[Any, str] = {
    int: "a whole number",
    float: "a number",
    str: "a text",
    bool: "true or false",
    dict: "a mapping",
    list: "a list",
    types.NoneType: "null",
}

# Other tools' names for our choices.
_OTHER_NAMES = {
    **dict.fromkeys(("bf16", "bf16-true", "bf16-mixed", "fp16", "float16"), "bfloat16"),
    **dict.fromkeys(("fp32", "32", "32-true", "float", "float64"), "float32"),
    "flash_attention_2": "sdpa",
}

_LISTS = (list, tuple, set, frozenset)
_ABSTRACT_LISTS = (
    collections.abc.Sequence,
    collections.abc.Iterable,
    collections.abc.Collection,
    collections.abc.MutableSequence,
    collections.abc.Set,
)
_MAPPINGS = (dict, collections.abc.Mapping, collections.abc.MutableMapping)


def misfit(hint: Any, value: object) -> str | None:
    """Return what the value must be instead, such as `a whole number or null`; None if it fits.

    Args:
        hint: A type annotation. A type without YAML values (a tensor, a user's class) fits any
            value if it stands alone: the constructor may convert.
        value: The value from YAML.
    """
    return None if fits(hint, value) else wanted(hint)


def wanted(hint: Any) -> str:
    """Describe in words the values that fit a type."""
    return " or ".join(dict.fromkeys(_words(hint)))


def as_yaml(value: object) -> str:
    """Format a value for a message: null, true and false as in YAML."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return repr(value)


def meant_choice(hint: Any, value: object) -> str:
    """Return the end of a sentence, with the choice that was probably meant, if the type has choices."""
    alternatives = (hint, *get_args(hint))
    choices = [c for each in alternatives if get_origin(each) is Literal for c in get_args(each)]
    other_name = _OTHER_NAMES.get(str(value).lower())
    return (
        f"; did you mean {other_name!r}?" if other_name in choices else suggestion(value, choices)
    )


def fits(hint: Any, value: object) -> bool:
    """Tell whether a value from YAML fits a type."""
    origin, arguments = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        known = [argument for argument in arguments if _is_known(argument)]
        return not known or any(fits(argument, value) for argument in known)
    if origin in (Annotated, Required, NotRequired):
        return fits(arguments[0], value)
    if origin is Literal:
        return any(value == choice and type(value) is type(choice) for choice in arguments)
    if not _is_known(hint):
        return True
    if origin is tuple or hint is tuple:
        return _fits_tuple(arguments, value)
    if _is_list(hint, origin):
        items = arguments[0] if arguments else Any
        return isinstance(value, list | tuple) and all(fits(items, item) for item in value)
    if _is_mapping(hint, origin):
        items = arguments[1] if len(arguments) == 2 else Any
        return isinstance(value, dict) and all(fits(items, item) for item in value.values())
    return _fits_plain(hint, value)


def hint_of(parameter: inspect.Parameter, hints: dict[str, Any]) -> Any:
    """Return a parameter's type by its annotation, else by its default, else `Any`."""
    hint = hints.get(parameter.name, Any)
    if hint is not Any or parameter.default is parameter.empty:
        return hint
    kind = type(parameter.default)
    return {bool: bool, int: float, float: float}.get(kind, Any)


def _fits_plain(hint: Any, value: object) -> bool:
    if hint is None or hint is types.NoneType:
        return value is None
    if hint is float:
        if isinstance(value, int) and not isinstance(value, bool):
            return abs(value) <= sys.float_info.max  # it is made a float
        return isinstance(value, float)
    if hint is int:
        return isinstance(value, int) and not isinstance(value, bool)
    if isinstance(hint, type) and issubclass(hint, enum.Enum | os.PathLike):
        return isinstance(value, str)
    return isinstance(value, hint)


def _fits_tuple(arguments: tuple[Any, ...], value: object) -> bool:
    if not isinstance(value, list | tuple):
        return False
    if not arguments or arguments[-1] is Ellipsis:
        return all(fits(arguments[0] if arguments else Any, item) for item in value)
    return len(value) == len(arguments) and all(map(fits, arguments, value))


def _is_known(hint: Any) -> bool:
    """Tell whether YAML has values of this type."""
    if hint is None or hint in _WORDS:
        return True
    origin = get_origin(hint)
    if origin in (Union, types.UnionType, Literal, Annotated, Required, NotRequired):
        return True
    if origin is tuple or hint is tuple or _is_list(hint, origin) or _is_mapping(hint, origin):
        return True
    return isinstance(hint, type) and issubclass(hint, enum.Enum | os.PathLike)


def _is_list(hint: Any, origin: Any) -> bool:
    kinds = (*_LISTS, *_ABSTRACT_LISTS)
    return hint in kinds or origin in kinds


def _is_mapping(hint: Any, origin: Any) -> bool:
    return hint in _MAPPINGS or origin in _MAPPINGS or is_typeddict(hint)


def _words(hint: Any) -> Iterator[str]:
    origin, arguments = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        # null comes last, and a whole number is a number.
        for argument in sorted(arguments, key=lambda each: each is types.NoneType):
            if not (argument is int and float in arguments) and _is_known(argument):
                yield from _words(argument)
    elif origin in (Annotated, Required, NotRequired):
        yield from _words(arguments[0])
    elif origin is Literal:
        yield from map(repr, arguments)
    elif hint in _WORDS:
        yield _WORDS[hint]
    elif hint is None:
        yield "null"
    elif (origin or hint) is tuple and arguments and arguments[-1] is not Ellipsis:
        yield f"a list of {len(arguments)}: {', '.join(' or '.join(_words(a)) for a in arguments)}"
    elif (origin or hint) is tuple or _is_list(hint, origin):
        items = " or ".join(_words(arguments[0])) if arguments else ""
        yield f"a list of {_PLURALS.get(items, items)}" if items else "a list"
    elif _is_mapping(hint, origin):
        yield "a mapping"
    else:
        yield "a text"


_PLURALS = {
    "a whole number": "whole numbers",
    "a number": "numbers",
    "a text": "texts",
    "a mapping": "mappings",
}
