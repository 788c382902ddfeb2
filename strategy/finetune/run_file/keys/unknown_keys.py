"""Finds the key that the user probably meant by a key that does not exist."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Sequence
from typing import Any

from thunder_memsave.finetune.run_file.config import RunConfig
from thunder_memsave.finetune.run_file.keys.foreign_names import foreign_name
from thunder_memsave.settings.problems import ConfigError, suggestion_or_all
from thunder_memsave.settings.schema import bare, hints_of
from thunder_memsave.settings.value_kinds import is_section

_NEAR = 0.75

# Sections with the arguments of any class.
_WITH_NAMES_OF_THEIR_OWN = ("adapter", "callbacks", "loggers")


class UnknownKeyError(ConfigError):
    """A key does not exist.

    Args:
        message: Text for the user.
        key: The key's dotted name.
        meant: The keys that it probably stands for; their absence is not reported again.
    """

    def __init__(self, message: str, *, key: str | None = None, meant: Sequence[str] = ()) -> None:
        super().__init__(message, key=key)
        self.meant = tuple(meant)


def unknown_key(key: str, *, where: str, known: Sequence[str], of: str = "") -> UnknownKeyError:
    """Make an error about an unknown key, naming the one that is probably meant.

    Args:
        key: The key without its section.
        where: The section's dotted name; empty for the top of the run file.
        known: The keys that the section has.
        of: Description of what lacks the key, for a message; the section if left out.
    """
    name = f"{where}.{key}" if where else key
    is_ours = not where.startswith(_WITH_NAMES_OF_THEIR_OWN)
    foreign = foreign_name(key) if is_ours else None
    if foreign is not None and name not in foreign.here:
        return UnknownKeyError(foreign.explain(name), key=name, meant=foreign.here)
    # A key of the same section takes precedence over one of another, unless that has the very name.
    if is_ours:
        elsewhere, is_its_name = _elsewhere(key)
        is_far = not difflib.get_close_matches(key, known, n=1, cutoff=_NEAR)
        if elsewhere and (is_its_name or (is_far and not where.endswith("init_args"))):
            message = f"{name} is {' or '.join(elsewhere)} here."
            return UnknownKeyError(message, key=name, meant=elsewhere)
    if "init_args" in known and not difflib.get_close_matches(key, known, n=1):
        argument = f"{where}.init_args.{key}"
        message = (
            f"{name} is not a key of {where!r}; an argument of the class belongs under init_args: "
            f"write {argument}."
        )
        return UnknownKeyError(message, key=name, meant=[argument])
    of = of or (f"a key of {where!r}" if where else "a key of a run file")
    nearest = difflib.get_close_matches(key, known, n=1)
    meant = [f"{where}.{each}" if where else each for each in nearest]
    message = f"{name} is not {of}{suggestion_or_all(key, known)}"
    return UnknownKeyError(message, key=name, meant=meant)


def schema_keys(cls: Any = RunConfig, *, where: str = "") -> Iterator[str]:
    """Yield the dotted name of every key and section that the run file can have."""
    for name, hint in hints_of(cls).items():
        yield f"{where}{name}"
        if is_section(bare(hint)):
            yield from schema_keys(bare(hint), where=f"{where}{name}.")


def _elsewhere(key: str) -> tuple[list[str], bool]:
    """List the keys of other sections with this name, or nearly, and tell whether it is the very name."""
    by_name: dict[str, list[str]] = {}
    for name in schema_keys():
        by_name.setdefault(name.rpartition(".")[2], []).append(name)
    nearest = difflib.get_close_matches(key, by_name, n=1, cutoff=_NEAR)
    return (by_name[nearest[0]], nearest[0] == key) if nearest else ([], False)
