"""Splits a command line into options with their values, and what is no option."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Argument:
    """An option with its value, or a word by itself."""

    name: str
    """What stands before the `=`, with its dashes."""

    value: str | None
    """None: there is none."""

    typed: tuple[str, ...]
    """One word of the command line, or two: `--name value`."""


def split_arguments(arguments: Sequence[str], *, flags: Collection[str] = ()) -> Iterator[Argument]:
    """Yield `--name=value`, `--name value`, `name=value` and single words, in their order.

    Args:
        arguments: Of a command line.
        flags: Options that take no value, so that the next word is not theirs.
    """
    words = list(arguments)
    while words:
        word = words.pop(0)
        name, equals, value = word.partition("=")
        takes_next = word.startswith("--") and word not in flags
        if equals:
            yield Argument(name=name, value=value, typed=(word,))
        elif takes_next and words and not words[0].startswith("--"):
            value = words.pop(0)
            yield Argument(name=name, value=value, typed=(word, value))
        else:
            yield Argument(name=name, value=None, typed=(word,))
