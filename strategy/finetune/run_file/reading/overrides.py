"""Applies `--key=value` arguments of the command line to the values of a run file."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, get_origin, is_typeddict

from thunder_memsave.finetune.run_file.config import RunConfig
from thunder_memsave.finetune.run_file.keys.unknown_keys import unknown_key
from thunder_memsave.finetune.run_file.reading.arguments import split_arguments
from thunder_memsave.settings.schema import bare, below, hints_of
from thunder_memsave.settings.section import ConfigError, ConfigErrors
from thunder_memsave.settings.value_kinds import fits, is_section
from thunder_memsave.settings.yaml_file import parse_yaml


@dataclass(frozen=True, kw_only=True, slots=True)
class Override:
    """One key from the command line."""

    key: str
    text: str
    argument: str
    """The argument as it was typed, for messages."""


def parse_overrides(arguments: Sequence[str]) -> list[Override]:
    """Read `--key=value`, `key=value` and `--key value`.

    Raises:
        ConfigErrors: an argument is not an override.
    """
    overrides, problems = [], []
    for each in split_arguments(arguments):
        key, typed = each.name.removeprefix("--"), " ".join(each.typed)
        if key and each.value is not None:
            # On the command line, other tools write a dash for an underscore in a key.
            overrides.append(Override(key=key.replace("-", "_"), text=each.value, argument=typed))
        else:
            message = (
                f"{typed!r} is not an override; write --key=value, such as --train.max_steps=10."
            )
            problems.append(ConfigError(message))
    if problems:
        raise ConfigErrors(problems)
    return overrides


def apply_override(values: dict[str, Any], override: Override) -> None:
    """Set a key in the nested values of a run file.

    Raises:
        ConfigError: there is no such key, or the value is not YAML.
    """
    hint = _hint(override.key)
    value = _value(override, hint)
    *sections, last = override.key.split(".")
    for section in sections:
        if values.get(section) is None:
            values[section] = {}
        values = values[section]
        if not isinstance(values, dict):
            return  # the file is wrong there, which is reported with its line
    values[last] = value


def _value(override: Override, hint: Any) -> Any:
    try:
        value = parse_yaml(override.text)
    except ConfigError as error:
        if fits(hint, override.text) and hint is not Any:
            return override.text
        raise ConfigError(
            f"the value of --{override.key} is not YAML: {error}", key=override.key
        ) from error
    # Nobody quotes a directory's name on the command line because it is a number.
    takes_text = not fits(hint, value) and fits(hint, override.text)
    return override.text if takes_text else value


def _hint(key: str) -> Any:
    """Return the type of a key, or `Any` inside free-form values.

    Raises:
        ConfigError: there is no such key.
    """
    hint: Any = RunConfig
    done = ""
    for name in key.split("."):
        if get_origin(hint) is dict or hint is Any:
            return Any
        if not (is_section(hint) or is_typeddict(hint)):
            message = f"{key} is not a key: {done} has none below it; write --{done}=VALUE."
            raise ConfigError(message, key=key)
        known = hints_of(hint)
        section = name.partition("[")[0]
        if section != name and section in known:
            message = (
                f"{key} is within the list {section}, which is given whole: --{section}=[...]."
            )
            raise ConfigError(message, key=key)
        if name not in known:
            raise unknown_key(name, where=done, known=list(known))
        hint, done = bare(known[name]), below(done, name)
    return known[name]
