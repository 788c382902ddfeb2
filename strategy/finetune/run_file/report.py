"""Writes all problems of a run as one report: each with its place, sorted by place."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from thunder_memsave.settings import ConfigError, ConfigErrors

# Messages about rows of data begin with the file and the line.
_PLACE = re.compile(r"(?P<place>(?P<file>\S[^:\n]*):(?P<line>\d+)): (?P<text>.*)", re.DOTALL)
_MAX_WIDTH = 60


@dataclass(frozen=True, kw_only=True, slots=True)
class Source:
    """Where the keys of a run come from."""

    path: Path | None = None
    name: str | None = None
    """Of the run file in messages; its path if left out."""

    lines: Mapping[str, int] = field(default_factory=dict)
    overrides: Mapping[str, str] = field(default_factory=dict)
    """Overridden keys and the arguments that did it."""

    @property
    def shown(self) -> str:
        """The run file as messages name it."""
        return str(self.path) if self.name is None else self.name


@dataclass(frozen=True, kw_only=True, slots=True, order=True)
class _Entry:
    """One line of the report, in the order of its fields: run file, overrides, data, the rest."""

    group: int
    file: str
    line: int
    place: str
    message: str

    def __str__(self) -> str:
        return f"  {self.place}: {self.message}" if self.place else f"  {self.message}"


def report(error: ConfigError, source: Source) -> str:
    """Write one line per problem; without a run file the message alone."""
    problems = ConfigErrors([error]).problems
    if source.path is None:
        return "error: " + "\n".join(map(str, problems))
    lines = list(map(str, sorted(_entry(problem, source) for problem in problems)))
    lines = list(dict.fromkeys(lines))
    noun = "problem" if len(lines) == 1 else "problems"
    return "\n".join([f"error: {source.shown} cannot be used; {len(lines)} {noun}:", *lines])


def _entry(problem: ConfigError, source: Source) -> _Entry:
    message, place = str(problem), problem.place
    if place is not None and place.partition(":")[0] == str(source.path):
        place = source.shown + place.removeprefix(str(source.path))
    match = _PLACE.fullmatch(message if place is None else f"{place}: {message}")
    if match is not None:
        is_run_file = match["file"] == source.shown
        return _Entry(
            group=0 if is_run_file else 2,
            file=match["file"],
            line=int(match["line"]),
            place=match["place"],
            message=match["text"],
        )
    if place is not None:
        is_run_file = place == source.shown
        return _Entry(
            group=0 if is_run_file else 2,
            file=place,
            line=0 if is_run_file else sys.maxsize,  # the rest of a data file's problems
            place=place,
            message=message.removeprefix(f"{place}: "),
        )
    return _entry_of_key(problem.key, message, source)


def _entry_of_key(key: str | None, message: str, source: Source) -> _Entry:
    if key is None:
        return _Entry(group=3, file="", line=0, place="", message=message)
    typed, path = list(source.overrides), source.shown
    for name in _from_inside(key):
        if name in source.overrides:
            place = _short(source.overrides[name])
            return _Entry(group=1, file="", line=typed.index(name), place=place, message=message)
        if name in source.lines:
            line = source.lines[name]
            return _Entry(group=0, file=path, line=line, place=f"{path}:{line}", message=message)
    for name in typed:
        if name.startswith(f"{key}."):  # a section of which the file has nothing
            place = _short(source.overrides[name])
            return _Entry(group=1, file="", line=typed.index(name), place=place, message=message)
    return _Entry(group=0, file=path, line=0, place=path, message=message)


def _from_inside(key: str) -> Sequence[str]:
    """List `a.b[0].c`, `a.b[0]`, `a.b`, `a`."""
    ends = [match.start() for match in re.finditer(r"[.\[]", key)]
    return [key, *(key[:end] for end in reversed(ends))]


def _short(argument: str) -> str:
    argument = " ".join(argument.split())
    return argument if len(argument) <= _MAX_WIDTH else f"{argument[: _MAX_WIDTH - 3]}..."
