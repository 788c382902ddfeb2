"""Splits a command line into options with their values, and other words."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Argument:
    """An option with its value, or a word by itself."""

    name: str
    """Text before the `=`, with its dashes."""

    value: str | None
    """Text after the `=`, or the next word; None if there is no value."""

    typed: tuple[str, ...]
    """The words of the command line: one, or two for `--name value`."""


def split_arguments(arguments: Sequence[str], *, flags: Collection[str] = ()) -> Iterator[Argument]:
    """Yield `--name=value`, `--name value`, `name=value` and single words, in order.

    Args:
        arguments: The words of a command line.
        flags: Options without a value, after which the next word stands by itself.
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
