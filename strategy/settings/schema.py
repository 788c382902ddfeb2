"""Reads sections of settings: frozen dataclasses whose fields are checked however they were made."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from types import NoneType
from typing import Any, NotRequired, TypeVar, get_args, get_origin, get_type_hints, is_typeddict

from thunder_memsave.settings.problems import ConfigError, raise_all, unknown_key
from thunder_memsave.settings.value_kinds import (
    QUALIFIERS,
    MisfitError,
    SectionBase,
    as_yaml,
    convert,
    is_section,
    meant,
    wanted,
)

SectionT = TypeVar("SectionT", bound="Section")


class Section(SectionBase):
    """Base of sections: checks and converts every field, however the section was made."""

    __slots__ = ()

    shorthand = ""
    """The field that a value stands for that is no mapping, such as `sharding: zero3`."""

    def __post_init__(self) -> None:
        reader, hints = Reader(), hints_of(type(self))
        given = {name: getattr(self, name) for name in hints}
        for name, value in reader.fields(hints, given, where=type(self).__name__).items():
            object.__setattr__(self, name, value)
        raise_all(reader.problems)


class Reader:
    """Reads settings, and collects what is wrong with them: one mistake does not hide the next."""

    def __init__(self) -> None:
        self.problems: list[ConfigError] = []

    def unknown(self, key: str, *, where: str, known: Sequence[str]) -> ConfigError:
        """Make an error about a key that the section `where` does not have."""
        return unknown_key(key, where=where, known=known)

    def example(self, where: str) -> str:
        """Return a value for this key, to be shown in messages; empty if they need none."""
        return ""

    def section(self, cls: type[SectionT], given: Mapping[Any, Any], *, where: str) -> SectionT:
        """Make a section; fields that are wrong have their defaults."""
        num_before = len(self.problems)
        sound = self.fields(hints_of(cls), given, where=where)
        try:
            return cls(**sound)
        except ConfigError as error:
            if len(self.problems) == num_before:  # else it may follow from a default
                self.problems.append(error)
            return cls()

    def fields(
        self, hints: Mapping[str, Any], given: Mapping[Any, Any], *, where: str
    ) -> dict[str, Any]:
        """Convert the values of the keys that exist; report the others, and values that do not fit."""
        sound: dict[str, Any] = {}
        for key, value in given.items():
            if key not in hints:
                self.problems.append(self.unknown(str(key), where=where, known=list(hints)))
            elif value is not None or get_origin(hints[key]) is not NotRequired:
                try:
                    sound[key] = self.value(hints[key], value, where=below(where, key))
                except ConfigError as error:
                    self.problems.append(error)
        return sound

    def value(self, hint: Any, value: Any, *, where: str) -> Any:
        """Convert a value to a field's type.

        Args:
            hint: The field's annotation.
            value: The value from YAML, or one of the type.
            where: Its name in messages, such as `strategy.sharding`.

        Raises:
            ConfigError: it does not fit; what is wrong inside a section is in `problems`.
        """
        cls = bare(hint)
        if isinstance(value, Mapping) and is_section(cls):
            return self.section(cls, value, where=where)
        if isinstance(value, Mapping) and is_typeddict(cls):
            return self.fields(hints_of(cls), value, where=where)
        if isinstance(value, list) and get_origin(cls) is list:
            (item,) = get_args(cls)
            return [self.value(item, each, where=f"{where}[{n}]") for n, each in enumerate(value)]
        if is_section(cls) and cls.shorthand and not isinstance(value, cls):
            short = hints_of(cls)[cls.shorthand]
            if isinstance(value, str):
                return cls(**{cls.shorthand: self.value(short, value, where=where)})
            hint = short | dict
        try:
            return convert(hint, value)
        except MisfitError as error:
            message = error.clause or self._misfit(hint, value, example=self.example(where))
            raise ConfigError(f"{where}{message}", key=where) from None

    def _misfit(self, hint: Any, value: Any, *, example: str) -> str:
        if value is None and (is_section(hint) or is_typeddict(hint)):
            return " is empty; give it a key, or leave the section out."
        words = wanted(hint)
        if is_typeddict(bare(hint)):
            *names, last = hints_of(bare(hint))
            words = f"a mapping with {', '.join(names)} and {last}"
        elif words == "a mapping":
            words = "a mapping of names to values"
        if value is None:
            return f" is null, but must be {words}; leave it out for the default."
        end = f", such as {example}." if example else meant(hint, value)
        return f" is {as_yaml(value)}, but must be {words}{end}"


def parse_section(cls: type[SectionT], given: Any, *, where: str) -> SectionT:
    """Make a section from a mapping that a user wrote, or return a ready one.

    Args:
        cls: The class of the section.
        given: Its fields.
        where: The section's name in messages, such as `memory`; empty if its keys stand alone.

    Raises:
        ConfigError: a field is unknown, has a value of the wrong type, or contradicts another.
    """
    reader = Reader()
    made: SectionT = reader.value(cls, given, where=where)
    raise_all(reader.problems)
    return made


def hints_of(cls: Any) -> dict[str, Any]:
    """Return the types of a section's fields by their names, with their conditions."""
    return get_type_hints(cls, include_extras=True)


def bare(hint: Any) -> Any:
    """Return a type without its conditions, and without null if that is the only other one."""
    others = [each for each in get_args(hint) if each is not NoneType]
    if get_origin(hint) in QUALIFIERS or (NoneType in get_args(hint) and len(others) == 1):
        return bare(others[0])
    return hint


def below(where: str, key: object) -> str:
    """Return the dotted name of a section's key."""
    return f"{where}.{key}" if where else str(key)


def field_names(cls: Any) -> list[str]:
    """Return the names of a dataclass's fields in their order."""
    return [field.name for field in dataclasses.fields(cls)]
