"""Splits a command line into options with their values, and other words."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from difflib import get_close_matches

from thunder_memsave.finetune.run_file.config import RunConfig
from thunder_memsave.settings.problems import ConfigError

_NEAR = 0.8
"""Likeness of two words, from 0 to 1, from which one may be meant by the other."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Argument:
    """An option with its value, or a word by itself."""

    name: str
    """Text before the `=`, with its dashes."""

    value: str | None
    """Text after the `=`, or the next word; None if there is no value."""

    typed: tuple[str, ...]
    """The words of the command line: one, or two for `--name value`."""

    @property
    def key(self) -> str:
        """The key that it overrides; other tools write a dash for an underscore in one."""
        return self.name.removeprefix("--").replace("-", "_")

    @property
    def shown(self) -> str:
        """The argument for messages, as it was typed."""
        return " ".join(self.typed)


def take_options(
    arguments: Sequence[str], examples: Mapping[str, str], *, flags: Collection[str] = ()
) -> tuple[dict[str, str], list[Argument]]:
    """Split a command's own options from its other arguments.

    Args:
        arguments: The words of the command line.
        examples: Each option with a value for messages.
        flags: Options without a value.

    Returns:
        The values of the options, and the other arguments.

    Raises:
        ConfigError: an option has no value.
    """
    given: dict[str, str] = {}
    rest: list[Argument] = []
    for each in split_arguments(arguments, flags=flags):
        if each.name not in (*examples, *flags):
            rest.append(each)
        elif each.value is None and each.name not in flags:
            example = f"{each.name}={examples[each.name]}"
            raise ConfigError(f"{each.name} needs a value, such as {example}.")
        else:
            given[each.name] = each.value or ""
    return given, rest


def refuse_misspelt(arguments: Sequence[str], options: Collection[str], *, command: str) -> None:
    """Refuse what is neither a key nor an option of a command, but nearly one of the latter.

    Raises:
        ConfigError: there is such an argument.
    """
    keys = {field.name for field in fields(RunConfig)}
    for each in split_arguments(arguments, flags=options):
        if each.name.startswith("--") and each.key.partition(".")[0] not in keys:
            nearest = get_close_matches(each.name, options, n=1, cutoff=_NEAR)
            if nearest and each.name not in options:
                raise ConfigError(
                    f"{command} has no option {each.name!r}; did you mean {nearest[0]!r}?"
                )


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
