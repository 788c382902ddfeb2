"""Turns values that users write in YAML or Python into typed, checked fields."""

from __future__ import annotations

import dataclasses
import difflib
import re
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from fractions import Fraction
from typing import Any, Literal, NewType, TypeVar, Union, get_args, get_origin, get_type_hints

from thunder_memsave.errors import ThunderMemsaveError

SectionT = TypeVar("SectionT")

_SECONDS_PER_UNIT = {"s": 1, "min": 60, "h": 3600, "d": 86400}
_DURATION = re.compile(r"(\d+(?:\.\d+)?)\s*(s|min|h|d)")

Bytes = NewType("Bytes", int)
"""A number of bytes; users write `256MiB`, `8G`, `60GB` or an integer."""

BytesOrFraction = NewType("BytesOrFraction", float)
"""A number of bytes (an int, as for `Bytes`), or a fraction (a float above 0, at most 1): `0.8` or `80%`."""

Whole = NewType("Whole", int)
"""An integer of at least 0; a field of type int takes one of at least 1."""

# A letter alone means 1024 of the next smaller unit, as for `docker run --memory` and Slurm's `--mem`.
_BYTES_PER_UNIT = {
    **dict.fromkeys(("b", "byte", "bytes"), 1),
    **{f"{letter}b": 1000**power for power, letter in enumerate("kmgt", start=1)},
    **{
        f"{letter}{ending}": 1024**power
        for power, letter in enumerate("kmgt", start=1)
        for ending in ("ib", "i", "")
    },
}
_NUMBER = r"((?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+))"
_BYTES = re.compile(rf"{_NUMBER}\s*([a-z]+)", re.IGNORECASE)
_PART = re.compile(rf"{_NUMBER}\s*(%)|(0?\.[0-9]+|1\.0*)")


class ConfigError(ThunderMemsaveError, ValueError):
    """A setting cannot be used; the message says which, why, and what to write instead.

    Reports find the line by its `key`, unless it has a `place`.
    """

    code = 2


class ConfigErrors(ConfigError):  # noqa: N818 - several of them
    """All errors in a run's settings, found in one pass.

    Args:
        problems: At least one; a `ConfigErrors` among them is flattened.
    """

    def __init__(self, problems: Sequence[ConfigError]) -> None:
        self.problems: tuple[ConfigError, ...] = tuple(_flattened(problems))
        super().__init__("\n".join(map(str, self.problems)))

    def __reduce__(self) -> tuple[type[ConfigErrors], tuple[Sequence[ConfigError]], dict[str, Any]]:
        return ConfigErrors, (self.problems,), vars(self)


def _flattened(problems: Sequence[ConfigError]) -> Iterator[ConfigError]:
    for problem in problems:
        yield from problem.problems if isinstance(problem, ConfigErrors) else (problem,)


@contextmanager
def belongs_to(key: str) -> Iterator[None]:
    """Give errors raised inside this key, unless they have one."""
    try:
        yield
    except ConfigError as error:
        for problem in ConfigErrors([error]).problems:
            problem.key = problem.key or key
        raise


class Section:
    """Base of sections: checks and converts every field, however the section was made."""

    __slots__ = ()

    def __post_init__(self) -> None:
        for name, hint in get_type_hints(type(self)).items():
            value = _convert(hint, getattr(self, name), where=f"{type(self).__name__}.{name}")
            object.__setattr__(self, name, value)


def parse_section(
    cls: type[SectionT], value: str | Mapping[str, Any] | SectionT | None, *, where: str
) -> SectionT:
    """Make a section from a value that a user wrote.

    Args:
        cls: A dataclass that derives from `Section`.
        value: Its fields; or a string for its first field; or a ready section; or None for the
            defaults.
        where: The section's name in messages, such as `strategy.sharding`.

    Raises:
        ConfigError: a field is unknown or has a value of the wrong type.
    """
    if isinstance(value, cls):
        return value
    names = field_names(cls)
    if isinstance(value, str):
        # Messages name the section, as the user wrote it, without the field.
        (first, hint), *_ = get_type_hints(cls).items()
        return cls(**{first: _convert(hint, value, where=where)})
    given = require_mapping({} if value is None else value, where=where)
    problems: list[ConfigError] = list(unknown_keys(given, known=names, where=where))
    hints = get_type_hints(cls)
    converted: dict[str, Any] = {}
    for key in given.keys() & hints.keys():
        try:
            converted[key] = _convert(hints[key], given[key], where=f"{where}.{key}")
        except ConfigError as error:
            problems.append(error)
    raise_all(problems)
    return cls(**converted)


def parse_duration(text: str | timedelta) -> timedelta:
    """Turn `90s`, `30min`, `1.5h` or `2d` into a time span.

    Raises:
        ConfigError: the unit is missing or unknown, or the time span is not positive.
    """
    if isinstance(text, timedelta):
        duration = text
    else:
        match = _DURATION.fullmatch(text.strip()) if isinstance(text, str) else None
        if match is None:
            raise ConfigError(
                f"{text!r} is not a duration; write a number and one of the units s, min, h, d, "
                "such as '30min'."
            )
        duration = timedelta(seconds=float(match[1]) * _SECONDS_PER_UNIT[match[2]])
    if duration <= timedelta(0):
        raise ConfigError(f"the duration {text!r} is not positive.")
    return duration


def parse_bytes(value: str | int) -> int:
    """Turn `256MiB` or `256M` (1024 * 1024 bytes each), `60GB` (10**9 each) or an integer into bytes.

    Fractions of a byte are dropped: `1.3GiB` is 1,395,864,371 bytes.

    Raises:
        ConfigError: the unit is missing or unknown, or the number is negative or less than a byte.
    """
    if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
        return value
    match = _BYTES.fullmatch(value.strip()) if isinstance(value, str) else None
    unit = _BYTES_PER_UNIT.get(match[2].lower()) if match else None
    num_bytes = Fraction(match[1]) * unit if match and unit else Fraction(-1)
    if num_bytes < 0 or 0 < num_bytes < 1:
        raise ConfigError(
            f"{value!r} is not a number of bytes; write a number and one of the units KiB, MiB, GiB, TiB or K, M, G, T "
            "(1024 each), KB, MB, GB, TB (1000 each) or B, such as '256MiB', '1.5G' or '60GB', or a whole number."
        )
    return int(num_bytes)


def parse_bytes_or_fraction(value: str | int | float) -> int | float:
    """Turn `60GiB` or an integer into bytes, `80%` into 0.8, and leave a fraction such as 0.85 as it is.

    Raises:
        ConfigError: the value is neither, or a fraction that is not above 0 and at most 1.
    """
    part = _part(value)
    if part is None:
        try:
            return parse_bytes(value)  # type: ignore[arg-type]
        except ConfigError as error:
            raise ConfigError(
                f"{error} Or a part of the device's memory, such as '80%' or 0.8."
            ) from None
    if not 0 < part <= 1:
        raise ConfigError(
            f"{value!r} is not a fraction of the device's memory; write a number above 0 and at most 1, such as 0.8 or "
            "'80%', or bytes, such as '60GiB'."
        )
    return part


def _part(value: str | int | float) -> float | None:
    """Return the value of a fraction or a percentage; None for anything else."""
    if isinstance(value, float):
        return value
    match = _PART.fullmatch(value.strip()) if isinstance(value, str) else None
    if match is None:
        return None
    return float(Fraction(match[1]) / 100 if match[2] else Fraction(match[3]))


def _convert(hint: Any, value: Any, *, where: str) -> Any:
    """Convert a value to the field's type, one of those that `config` uses."""
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is Literal:
        return _one_of(value, arguments, where=where)
    if origin in (Union, types.UnionType):
        if value is None and types.NoneType in arguments:
            return None
        return _convert_union(arguments, value, where=where)
    if origin is tuple:
        return _names(value, where=where)
    if hint is timedelta:
        return _quantity(parse_duration, value, where=where)
    if hint is Bytes:
        return _quantity(parse_bytes, value, where=where)
    if hint is BytesOrFraction:
        return _quantity(parse_bytes_or_fraction, value, where=where)
    if hint is str:
        return _text(value, where=where)
    if hint is bool:
        return _flag(value, where=where)
    if hint is int or hint is Whole:
        return _count(value, least=1 if hint is int else 0, where=where)
    assert isinstance(hint, type), f"{where} has a type that is not parsed: {hint}"
    assert dataclasses.is_dataclass(hint), f"{where} has a type that is not parsed: {hint}"
    return parse_section(hint, value, where=where)


def _convert_union(hints: Iterable[Any], value: Any, *, where: str) -> Any:
    """Return a word of the union's `Literal`, or convert the value to the union's one other type."""
    others = [hint for hint in hints if hint is not types.NoneType]
    words = [word for hint in others if get_origin(hint) is Literal for word in get_args(hint)]
    others = [hint for hint in others if get_origin(hint) is not Literal]
    if value in words or not others:
        return _one_of(value, words, where=where)
    (hint,) = others
    try:
        return _convert(hint, value, where=where)
    except ConfigError as error:
        alternative = f" Or write {' or '.join(map(repr, words))}." if words else ""
        raise ConfigError(f"{error}{alternative}", key=error.key) from None


def _one_of(value: object, choices: Iterable[str], *, where: str) -> str:
    for choice in choices:
        if value == choice:
            return choice
    raise ConfigError(
        f"{where} is {value!r}, but must be one of {', '.join(map(repr, choices))}"
        f"{suggestion(value, choices)}",
        key=where,
    )


def _names(value: object, *, where: str) -> tuple[str, ...]:
    if not isinstance(value, list | tuple) or not all(isinstance(name, str) for name in value):
        example = value if isinstance(value, str) else "torch"
        raise ConfigError(
            f"{where} is {value!r}, but must be a list of names, such as [{example!r}].", key=where
        )
    return tuple(value)


def _text(value: object, *, where: str) -> str:
    if not isinstance(value, str) or not value:
        raise ConfigError(f"{where} is {value!r}, but must be a text.", key=where)
    return value


def _quantity(parse: Callable[[Any], Any], value: Any, *, where: str) -> Any:
    try:
        return parse(value)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}", key=where) from None


def _flag(value: object, *, where: str) -> bool:
    if not isinstance(value, bool):
        raise ConfigError(f"{where} is {value!r}, but must be true or false.", key=where)
    return value


def _count(value: object, *, least: int, where: str) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ConfigError(
            f"{where} is {value!r}, but must be a whole number of at least {least}.", key=where
        )
    return value


def require_mapping(value: Any, *, where: str) -> Mapping[str, Any]:
    """Return the value; refuse it if it is no mapping with names for keys."""
    if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
        raise ConfigError(
            f"{where} is {value!r}, but must be a mapping of names to values.", key=where
        )
    return value


def raise_all(problems: Sequence[ConfigError]) -> None:
    """Raise the problems, if there are any: a single one as it is, several together."""
    if problems:
        raise problems[0] if len(problems) == 1 else ConfigErrors(problems)


def refuse_unknown(given: Mapping[str, Any], *, known: list[str], where: str) -> None:
    """Refuse every key that is not known, with the nearest one that is."""
    raise_all(list(unknown_keys(given, known=known, where=where)))


def unknown_keys(
    given: Mapping[str, Any], *, known: list[str], where: str
) -> Iterator[ConfigError]:
    """Yield a problem for every key that is not known."""
    for key in given:
        if key not in known:
            yield ConfigError(
                f"{where}.{key} is not a key of {where!r}{suggestion_or_all(key, known)}",
                key=f"{where}.{key}",
            )


def suggestion_or_all(key: str, known: Sequence[str]) -> str:
    """Return the end of a sentence: with the nearest known name, or else with all of them."""
    nearest = suggestion(key, known)
    return nearest if nearest != "." else f"; its keys are {', '.join(sorted(known))}."


def suggestion(value: object, known: Iterable[str]) -> str:
    """Return the end of a sentence, with the nearest known name if one is near."""
    nearest = difflib.get_close_matches(str(value), list(known), n=1)
    return f"; did you mean {nearest[0]!r}?" if nearest else "."


def field_names(cls: Any) -> list[str]:
    """Return the names of a dataclass's fields in their order."""
    return [field.name for field in dataclasses.fields(cls)]
