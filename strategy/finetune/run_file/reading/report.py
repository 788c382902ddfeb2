"""Writes all problems of a run as one report: each with its place, sorted by place."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from thunder_memsave.settings.problems import ConfigError, ConfigErrors

_MAX_WIDTH = 60


@dataclass(frozen=True, kw_only=True, slots=True)
class Source:
    """The run file and the command line from which keys come."""

    path: Path | None = None
    name: str | None = None
    """Name of the run file in messages; its path if left out."""

    lines: Mapping[str, int] = field(default_factory=dict)
    overrides: Mapping[str, str] = field(default_factory=dict)
    """Overridden keys and the arguments that override them."""

    @property
    def shown(self) -> str:
        """Name of the run file in messages."""
        return str(self.path) if self.name is None else self.name


@dataclass(frozen=True, kw_only=True, slots=True, order=True)
class _Entry:
    """A line of the report, sorted by its fields: run file, overrides, data, the rest."""

    group: int
    file: str
    line: int
    place: str
    message: str

    def __str__(self) -> str:
        return f"  {self.place}: {self.message}" if self.place else f"  {self.message}"


def report(error: ConfigError, source: Source) -> str:
    """Write one line per problem; without a run file only the message."""
    problems = ConfigErrors([error]).problems
    if source.path is None:
        return "error: " + "\n".join(map(str, problems))
    lines = list(map(str, sorted(_entry(problem, source) for problem in problems)))
    lines = list(dict.fromkeys(lines))
    noun = "problem" if len(lines) == 1 else "problems"
    return "\n".join([f"error: {source.shown} cannot be used; {len(lines)} {noun}:", *lines])


def _entry(problem: ConfigError, source: Source) -> _Entry:
    if problem.place is None:
        return _entry_of_key(problem.key, str(problem), source)
    message = str(problem).removeprefix(f"{problem.place}: ")
    file, line = _file_and_line(problem.place)
    is_run_file = source.path is not None and file in (str(source.path), source.shown)
    file = source.shown if is_run_file else file
    place = file if line is None else f"{file}:{line}"
    if line is None:
        line = 0 if is_run_file else sys.maxsize  # the rest of a data file's problems
    group = 0 if is_run_file else 2
    return _Entry(group=group, file=file, line=line, place=place, message=message)


def _file_and_line(place: str) -> tuple[str, int | None]:
    file, _, line = place.rpartition(":")
    return (file, int(line)) if file and line.isdecimal() else (place, None)


def _entry_of_key(key: str | None, message: str, source: Source) -> _Entry:
    if key is None:
        return _Entry(group=3, file="", line=0, place="", message=message)
    typed, path = list(source.overrides), source.shown
    # After the key and what contains it: the parts of a section that the file does not have.
    for name in (*_from_inside(key), *(each for each in typed if each.startswith(f"{key}."))):
        if name in source.overrides:
            place = _short(source.overrides[name])
            return _Entry(group=1, file="", line=typed.index(name), place=place, message=message)
        if name in source.lines:
            line = source.lines[name]
            return _Entry(group=0, file=path, line=line, place=f"{path}:{line}", message=message)
    return _Entry(group=0, file=path, line=0, place=path, message=message)


def _from_inside(key: str) -> Sequence[str]:
    """List `a.b[0].c`, `a.b[0]`, `a.b`, `a`."""
    ends = [match.start() for match in re.finditer(r"[.\[]", key)]
    return [key, *(key[:end] for end in reversed(ends))]


def _short(argument: str) -> str:
    argument = " ".join(argument.split())
    return argument if len(argument) <= _MAX_WIDTH else f"{argument[: _MAX_WIDTH - 3]}..."
