"""Turns values that users write in YAML or Python into the type of a setting, and says in words which values fit."""

from __future__ import annotations

import enum
import inspect
import math
import os
import sys
import types
from collections.abc import (
    Callable,
    Collection,
    Iterable,
    Iterator,
    Mapping,
    MutableMapping,
    MutableSequence,
    Sequence,
    Set,
)
from dataclasses import dataclass
from datetime import timedelta
from typing import (
    Annotated,
    Any,
    Literal,
    NewType,
    NotRequired,
    Required,
    Union,
    get_args,
    get_origin,
    is_typeddict,
)

from thunder_memsave.errors import ThunderMemsaveError
from thunder_memsave.settings.problems import ConfigError, suggestion
from thunder_memsave.settings.quantities import (
    parse_bytes,
    parse_bytes_or_fraction,
    parse_duration,
)

Bytes = NewType("Bytes", int)
"""A number of bytes; users write `256MiB`, `8G`, `60GB` or an integer."""

BytesOrFraction = NewType("BytesOrFraction", float)
"""A number of bytes (an int, as for `Bytes`), or a fraction (a float above 0, at most 1): `0.8` or `80%`."""

_PARSERS: dict[Any, Callable[[Any], Any]] = {
    Bytes: parse_bytes,
    BytesOrFraction: parse_bytes_or_fraction,
    timedelta: parse_duration,
}

_WORDS: dict[Any, str] = {
    int: "a whole number",
    float: "a number",
    str: "a text",
    bool: "true or false",
    None: "null",
    types.NoneType: "null",
    Bytes: "bytes, such as 256MiB",
    BytesOrFraction: "bytes, such as 60GiB, or a part, such as 80%",
    timedelta: "a duration",
    tuple[str, ...]: "a list of names",
}

_PLURALS = {
    "a whole number": "whole numbers",
    "a number": "numbers",
    "a text": "texts",
    "a mapping": "mappings",
}

# Other tools' names for our choices.
_OTHER_NAMES = {
    **dict.fromkeys(("bf16", "bf16-true", "bf16-mixed", "fp16", "float16"), "bfloat16"),
    **dict.fromkeys(("fp32", "32", "32-true", "float", "float64"), "float32"),
    "flash_attention_2": "sdpa",
}

_UNIONS = (Union, types.UnionType)
QUALIFIERS = (Annotated, Required, NotRequired)

# What PyYAML makes of the values of a type, or Python users write.
_KINDS: dict[Any, tuple[type, ...]] = {
    **{kind: (kind,) for kind in (str, int, bool, types.NoneType)},
    None: (types.NoneType,),
    float: (float, int),
    Literal: (object,),
    **dict.fromkeys(_PARSERS, (object,)),
    **dict.fromkeys((list, tuple, set, frozenset, Sequence, Iterable, Collection), (list, tuple)),
    **dict.fromkeys((MutableSequence, Set), (list, tuple)),
    **dict.fromkeys((dict, Mapping, MutableMapping), (Mapping,)),
}


class SectionBase:
    """Marks the classes that `schema` reads, whose objects are mappings in YAML."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class Must:
    """A condition on the values of a type, for `Annotated`; a text there describes the type."""

    text: str
    """The condition, after "must"."""

    holds: Callable[[Any], bool]


def at_least(least: int, advice: str = "") -> Must:
    """Make the condition of whole numbers that are not less.

    Args:
        least: The smallest number.
        advice: The end of the sentence that refuses others.
    """
    return Must(f"be a whole number of at least {least}{advice}", lambda value: value >= least)


Whole = Annotated[int, at_least(0)]
Positive = Annotated[int, at_least(1)]


class MisfitError(ThunderMemsaveError, ValueError):
    """A value does not fit a type.

    Args:
        clause: The sentence after the name of the value; empty if the value is of another kind altogether.
    """

    def __init__(self, clause: str = "") -> None:
        super().__init__(clause)
        self.clause = clause


def convert(hint: Any, value: Any) -> Any:
    """Convert a value to a type.

    Args:
        hint: A type annotation. A type without YAML values (a tensor, a user's class) fits any
            value if it stands alone: the constructor may convert.
        value: The value from YAML, or one of the type.

    Raises:
        MisfitError: the value does not fit.
    """
    origin, arguments = get_origin(hint) or hint, get_args(hint)
    if origin in _UNIONS:
        return _one_of(arguments, value)
    if origin in QUALIFIERS:
        return _conditioned(convert(arguments[0], value), arguments[1:], as_yaml(value))
    if origin in _PARSERS:
        return _parsed(_PARSERS[hint], value)
    if origin in (int, float) and isinstance(value, str):
        return _number(origin, value)
    kinds = _kinds(origin)
    if kinds is None:
        return value
    if not _is_of(kinds, value) or (origin is Literal and not _is_choice(arguments, value)):
        raise MisfitError
    if list in kinds:
        return _items(origin, arguments, value)
    if Mapping in kinds and arguments:
        return {key: convert(arguments[1], each) for key, each in value.items()}
    if origin is float and abs(value) > sys.float_info.max and isinstance(value, int):
        raise MisfitError
    return float(value) if origin is float else value


def is_section(hint: Any) -> bool:
    """Tell whether a type is a section of settings."""
    return isinstance(hint, type) and issubclass(hint, SectionBase)


def fits(hint: Any, value: object) -> bool:
    """Tell whether a value fits a type, as for `convert`."""
    try:
        convert(hint, value)
    except MisfitError:
        return False
    return True


def unquoted(hint: Any, value: Any) -> Any:
    """Return quoted numbers, such as `"2e-4"`, as numbers where a type takes no texts; other values unchanged."""
    values = value if isinstance(value, list | tuple) else [value]
    if not any(isinstance(each, str) for each in values) or not fits(hint, value):
        return value
    read = convert(hint, value)
    items = read if isinstance(read, list | tuple) else [read]
    is_number = get_origin(hint) not in _PARSERS and hint not in _PARSERS
    return read if is_number and any(type(each) in (int, float) for each in items) else value


def wanted(hint: Any) -> str:
    """Describe in words the values that fit a type, such as `a whole number or null`."""
    return " or ".join(dict.fromkeys(_words(hint)))


def as_yaml(value: object) -> str:
    """Format a value for a message: null, true and false as in YAML."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return repr(value)


def meant(hint: Any, value: object) -> str:
    """Return the end of a sentence, with what was probably meant by a value that does not fit."""
    alternatives = (hint, *get_args(hint))
    if any(get_origin(each) in (list, tuple) and fits(each, [value]) for each in alternatives):
        return f", such as [{value!r}]."
    choices = [c for each in alternatives if get_origin(each) is Literal for c in get_args(each)]
    other_name = _OTHER_NAMES.get(str(value).lower())
    return (
        f"; did you mean {other_name!r}?" if other_name in choices else suggestion(value, choices)
    )


def hint_of(parameter: inspect.Parameter, hints: dict[str, Any]) -> Any:
    """Return a parameter's type by its annotation, else by its default, else `Any`."""
    hint = hints.get(parameter.name, Any)
    if hint is not Any or parameter.default is parameter.empty:
        return hint
    kind = type(parameter.default)
    return {bool: bool, int: float, float: float}.get(kind, Any)


def _number(kind: type[int] | type[float], text: str) -> int | float:
    """Read a number that was quoted, such as `"2e-4"`."""
    try:
        number = kind(text)
    except ValueError:
        raise MisfitError from None
    if not math.isfinite(number):
        raise MisfitError
    return number


def _one_of(alternatives: Sequence[Any], value: Any) -> Any:
    known = [each for each in alternatives if _is_known(each)]
    # A quoted number is a text where a text fits too.
    known.sort(key=lambda each: isinstance(value, str) and not _takes_text(each))
    clause = ""
    for each in known or [Any]:
        try:
            return convert(each, value)
        except MisfitError as error:
            clause = clause or error.clause
    words = [repr(word) for each in known if get_origin(each) is Literal for word in get_args(each)]
    words = [word for word in words if word not in clause]
    raise MisfitError(f"{clause} Or write {' or '.join(words)}." if clause and words else clause)


def _conditioned(value: Any, conditions: Sequence[Any], shown: str) -> Any:
    for condition in conditions:
        if isinstance(condition, Must) and not condition.holds(value):
            raise MisfitError(f" is {shown}, but must {condition.text}.")
    return value


def _is_of(kinds: tuple[type, ...], value: object) -> bool:
    # True and False are whole numbers only for Python.
    is_flag = type(value) is bool and bool not in kinds and object not in kinds
    return isinstance(value, kinds) and not is_flag


def _is_choice(choices: Sequence[object], value: object) -> bool:
    return any(value == each and type(value) is type(each) for each in choices)


def _parsed(parse: Callable[[Any], Any], value: Any) -> Any:
    if value is None:
        raise MisfitError
    try:
        return parse(value)
    except ConfigError as error:
        raise MisfitError(f": {error}") from None


def _items(origin: Any, arguments: tuple[Any, ...], value: Sequence[Any]) -> Any:
    if origin is not tuple or not arguments or arguments[-1] is Ellipsis:
        arguments = (arguments[0] if arguments else Any,) * len(value)
    if len(value) != len(arguments):
        raise MisfitError
    items = map(convert, arguments, value)
    return tuple(items) if origin is tuple else list(items)


def _is_known(hint: Any) -> bool:
    """Tell whether YAML has values of this type."""
    origin = get_origin(hint) or hint
    return origin in (*_UNIONS, *QUALIFIERS, *_PARSERS) or _kinds(origin) is not None


def _kinds(origin: Any) -> tuple[type, ...] | None:
    """Return the types of the values in YAML; None if there are none."""
    if origin in _KINDS:
        return _KINDS[origin]
    if is_typeddict(origin):
        return (Mapping,)
    if isinstance(origin, type) and issubclass(origin, enum.Enum | os.PathLike):
        return (str,)
    return (origin,) if is_section(origin) else None


def _takes_text(hint: Any) -> bool:
    kinds = _kinds(get_origin(hint) or hint)
    return kinds is not None and str in kinds


def _words(hint: Any) -> Iterator[str]:
    origin, arguments = get_origin(hint), get_args(hint)
    if origin in _UNIONS:
        # null comes last, and a whole number is a number.
        for argument in sorted(arguments, key=lambda each: each is types.NoneType):
            if not (argument is int and float in arguments) and _is_known(argument):
                yield from _words(argument)
    elif origin in QUALIFIERS:
        names = [each for each in arguments[1:] if isinstance(each, str)]
        yield from names or _words(arguments[0])
    elif hint in _WORDS:
        yield _WORDS[hint]
    elif origin is Literal:
        choices = [repr(each) for each in arguments]
        yield f"one of {', '.join(choices)}" if len(choices) > 2 else " or ".join(choices)
    elif origin is tuple and arguments[-1] is not Ellipsis:
        yield f"a list of {len(arguments)}: {', '.join(map(wanted, arguments))}"
    elif list in (kinds := _kinds(origin or hint) or ()):
        items = wanted(arguments[0]) if arguments else ""
        yield f"a list of {_PLURALS.get(items, items)}" if items else "a list"
    else:
        yield "a text" if str in kinds else "a mapping"
