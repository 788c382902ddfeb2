"""Defines the errors of settings, which name the key, and the ends of their sentences."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from thunder_memsave.errors import ThunderMemsaveError


class ConfigError(ThunderMemsaveError, ValueError):
    """A setting cannot be used; the message says which, why, and what to write instead.

    Reports find the line by its `key`, unless it has a `place`.
    """

    code = 2


class MissingKeyError(ConfigError):
    """A setting without a default was not given."""


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


def raise_all(problems: Sequence[ConfigError]) -> None:
    """Raise the problems, if there are any: a single one as it is, several together."""
    if problems:
        raise problems[0] if len(problems) == 1 else ConfigErrors(problems)


def refuse_unknown(given: Mapping[str, Any], *, known: Sequence[str], where: str) -> None:
    """Refuse every key that is not known, with the nearest one that is."""
    raise_all([unknown_key(key, known=known, where=where) for key in given if key not in known])


def unknown_key(key: str, *, known: Sequence[str], where: str) -> ConfigError:
    """Make an error about a key that a section does not have."""
    name = f"{where}.{key}"
    return ConfigError(f"{name} is not a key of {where!r}{suggestion_or_all(key, known)}", key=name)


def suggestion_or_all(key: str, known: Sequence[str]) -> str:
    """Return the end of a sentence: with the nearest known name, or else with all of them."""
    nearest = suggestion(key, known)
    return nearest if nearest != "." else f"; its keys are {', '.join(sorted(known))}."


def suggestion(value: object, known: Iterable[str]) -> str:
    """Return the end of a sentence, with the nearest known name if one is near."""
    nearest = difflib.get_close_matches(str(value), list(known), n=1)
    return f"; did you mean {nearest[0]!r}?" if nearest else "."
