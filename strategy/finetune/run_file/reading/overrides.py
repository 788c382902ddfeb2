"""Applies `--key=value` arguments of the command line to the values of a run file."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, get_origin, is_typeddict

from thunder_memsave.finetune.run_file.config import RunConfig
from thunder_memsave.finetune.run_file.keys.unknown_keys import unknown_key
from thunder_memsave.finetune.run_file.reading.arguments import Argument, split_arguments
from thunder_memsave.settings.problems import ConfigError, raise_all
from thunder_memsave.settings.schema import bare, below, hints_of
from thunder_memsave.settings.value_kinds import fits, is_section
from thunder_memsave.settings.yaml_file import parse_yaml


def parse_overrides(arguments: Sequence[str]) -> list[Argument]:
    """Read `--key=value`, `key=value` and `--key value`.

    Raises:
        ConfigErrors: an argument is not an override.
    """
    overrides = list(split_arguments(arguments))
    raise_all(
        [
            ConfigError(
                f"{each.shown!r} is not an override; write --key=value, such as --train.max_steps=10."
            )
            for each in overrides
            if each.value is None or not each.key
        ]
    )
    return overrides


def apply_override(values: dict[str, Any], override: Argument) -> None:
    """Set a key in the nested values of a run file.

    Raises:
        ConfigError: there is no such key, or the value is not YAML.
    """
    hint = _hint(override.key)
    value = _value(override, hint)
    *sections, last = override.key.split(".")
    done = ""
    for section in sections:
        done = below(done, section)
        inner, shorthand = values.get(section), getattr(bare(_hint(done)), "shorthand", "")
        if inner is None:
            values[section] = {}
        elif shorthand and isinstance(inner, str):
            values[section] = {shorthand: inner}
        values = values[section]
        if not isinstance(values, dict):
            return  # the file is wrong there, which is reported with its line
    values[last] = value


def _value(override: Argument, hint: Any) -> Any:
    text = override.value or ""
    try:
        value = parse_yaml(text)
    except ConfigError as error:
        if fits(hint, text) and hint is not Any:
            return text
        raise ConfigError(
            f"the value of --{override.key} is not YAML: {error}", key=override.key
        ) from error
    # Nobody quotes a directory's name on the command line because it is a number.
    takes_text = not fits(hint, value) and fits(hint, text)
    return text if takes_text else value


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
