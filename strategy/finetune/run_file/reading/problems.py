"""Collects all problems of a run, so that one mistake does not hide the next."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeVar

from thunder_memsave.finetune.run_file.keys.unknown_keys import UnknownKeyError
from thunder_memsave.settings.problems import ConfigError, ConfigErrors, MissingKeyError, belongs_to

T = TypeVar("T")


class Problems:
    """The problems found so far; a check whose inputs are broken is skipped.

    Args:
        found: Problems that earlier checks found.
    """

    def __init__(self, found: Iterable[ConfigError] = ()) -> None:
        self._found: list[ConfigError] = []
        self.add(*found)

    def add(self, *problems: ConfigError) -> None:
        """Add problems, except those that follow from others: about a refused key, or the absence of what one meant."""
        if not problems:
            return
        known, meant = set(self._refused_keys()), set(self._meant_keys())
        for each in ConfigErrors(problems).problems:
            is_absence = isinstance(each, MissingKeyError)
            if each.key not in known and not (is_absence and each.key in meant):
                self._found.append(each)

    def check(self, step: Callable[[], T], *, reads: Sequence[str], about: str) -> T | None:
        """Run one check, and record the problem that it raises.

        Args:
            step: Raises `ConfigError`, or returns what later steps need.
            reads: The keys and sections that it depends on.
            about: The key to blame for a problem that names none.

        Returns:
            The result; None if the step was skipped or found a problem.
        """
        if any(self.is_broken(key) for key in reads):
            return None
        try:
            with belongs_to(about):
                return step()
        except ConfigError as error:
            self.add(error)
            return None

    def is_broken(self, key: str) -> bool:
        """Tell whether there is a problem with this key, a part of it, or a section that contains it."""
        broken_keys = (*self._refused_keys(), *self._meant_keys())
        return any(_contains(key, broken) or _contains(broken, key) for broken in broken_keys)

    @property
    def found(self) -> tuple[ConfigError, ...]:
        """All problems so far."""
        return tuple(self._found)

    def raise_all(self) -> None:
        """Raise all problems, if there are any.

        Raises:
            ConfigErrors: there are problems.
        """
        if self._found:
            raise ConfigErrors(self._found)

    def _refused_keys(self) -> Iterator[str]:
        return (problem.key for problem in self._found if problem.key is not None)

    def _meant_keys(self) -> Iterator[str]:
        for problem in self._found:
            if isinstance(problem, UnknownKeyError):
                yield from problem.meant


def _contains(outer: str, inner: str) -> bool:
    return inner == outer or inner.startswith((f"{outer}.", f"{outer}["))
