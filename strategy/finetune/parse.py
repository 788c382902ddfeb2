"""Reads a run file and command-line overrides into a checked `RunConfig`."""

from __future__ import annotations

import dataclasses
import re
import types
from argparse import ArgumentError
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Union, get_args, get_origin, get_type_hints

import jsonargparse
import yaml

from thunder_memsave.config import load_yaml, parse_strategy, refuse_keys
from thunder_memsave.finetune.checks import config_problems
from thunder_memsave.finetune.config import ClassSpec, RunConfig
from thunder_memsave.settings import ConfigError, field_names, suggestion

# Sections of the run file that this version knows by name only.
_RESERVED_SECTIONS = ("memory", "fp8")

# PyYAML follows YAML 1.1, where a number with an exponent needs a dot and a sign.
_EXPONENT_NUMBER = re.compile(r"[-+]?\d+(\.\d*)?[eE][-+]?\d+")

# What a value must be, in the words of somebody who writes YAML.
_KINDS = {
    "int": "a whole number",
    "float": "a number",
    "str": "a text",
    "bool": "true or false",
    "dict": "a mapping",
    "NoneType": "null",
}


def load_run_config(path: str | Path, overrides: Sequence[str] = ()) -> RunConfig:
    """Read a run file, apply `--key=value` overrides and check the result.

    Raises:
        ConfigError: the file or an override is wrong; the message lists what is known to be.
    """
    values = _numbers(load_yaml(path))
    for override in overrides:
        _apply_override(values, override)
    for name in _RESERVED_SECTIONS:
        refuse_keys(values.pop(name, None), where=name)
    problems = list(_structure_problems(values, RunConfig, where=""))
    if problems:
        raise ConfigError(_listed(path, problems))
    _complete_optimizer(values)
    config = _instantiate(values, path)
    problems = [*_strategy_problems(config), *config_problems(config)]
    if problems:
        raise ConfigError(_listed(path, problems))
    return config


def dump_run_config(config: RunConfig) -> str:
    """Write a configuration as YAML with every key, as `load_run_config` reads it."""
    return yaml.safe_dump(dataclasses.asdict(config), sort_keys=False)


def run_parser() -> jsonargparse.ArgumentParser:
    """Make the parser that checks types and prints the help of every key."""
    # Process-wide, but it only adds the texts under our fields to the help.
    jsonargparse.set_parsing_settings(docstring_parse_attribute_docstrings=True)
    parser = jsonargparse.ArgumentParser(prog="thunder-memsave train CONFIG", exit_on_error=False)
    parser.add_class_arguments(RunConfig, nested_key=None, fail_untyped=True)
    return parser


def _apply_override(values: dict[str, Any], override: str) -> None:
    """Set `a.b.c` in nested mappings from a token `--a.b.c=value`, or `a.b.c=value`."""
    key, equals, text = override.removeprefix("--").partition("=")
    if not equals or not key:
        raise ConfigError(
            f"{override!r} is not an override; write --key=value, such as --train.max_steps=10."
        )
    *sections, last = key.split(".")
    for section in sections:
        if not isinstance(values.get(section), dict):
            values[section] = {}
        values = values[section]
    values[last] = _parse_value(text, key=key)


def _parse_value(text: str, *, key: str) -> Any:
    try:
        return _numbers(yaml.safe_load(text))
    except yaml.YAMLError as error:
        raise ConfigError(f"the value of --{key} is not YAML: {error}") from error


def _numbers(value: Any) -> Any:
    """Turn the strings that YAML 1.2 reads as floats, such as 1e-4, into floats."""
    if isinstance(value, dict):
        return {key: _numbers(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_numbers(item) for item in value]
    if isinstance(value, str) and _EXPONENT_NUMBER.fullmatch(value):
        return float(value)
    return value


def _structure_problems(values: Any, cls: type, *, where: str) -> Iterator[str]:
    """Find unknown keys, sections that are no mappings, and nulls where a value is needed."""
    if not isinstance(values, Mapping):
        yield f"{where} is {values!r}, but must be a mapping of names to values."
        return
    known = field_names(cls)
    for key, value in values.items():
        if key not in known:
            yield f"{_section_named(where)} has no key {key!r}{suggestion(key, known)}"
            continue
        name = f"{where}.{key}" if where else key
        hint = get_type_hints(cls)[key]
        if dataclasses.is_dataclass(hint):
            yield from _structure_problems(value, hint, where=name)  # type: ignore[arg-type]
        elif hint is ClassSpec:
            yield from _class_problems(value, where=name)
        elif value is None and not _is_optional(hint):
            # jsonargparse takes null for every type.
            yield f"{name} is null, but needs a value; leave it out for the default."


def _class_problems(value: Any, *, where: str) -> Iterator[str]:
    known = list(get_type_hints(ClassSpec))
    if not isinstance(value, Mapping):
        yield f"{where} is {value!r}, but must be a mapping with {' and '.join(known)}."
        return
    for key in value:
        if key not in known:
            yield f"{where} has no key {key!r}{suggestion(key, known)}"
    if not isinstance(value.get("class_path", ""), str):
        yield f"{where}.class_path is {value['class_path']!r}, but must be the name of a class."
    if not isinstance(value.get("init_args") or {}, Mapping):
        yield f"{where}.init_args is {value['init_args']!r}, but must be a mapping."


def _complete_optimizer(values: dict[str, Any]) -> None:
    """Let arguments without a class go to the default class, over its default arguments."""
    given = values.get("optimizer")
    if isinstance(given, dict) and "class_path" not in given:
        default = RunConfig().optimizer
        given["class_path"] = default["class_path"]
        given["init_args"] = {**default.get("init_args", {}), **(given.get("init_args") or {})}


def _section_named(where: str) -> str:
    return f"section {where!r}" if where else "the run file"


def _is_optional(hint: Any) -> bool:
    return get_origin(hint) in (Union, types.UnionType) and types.NoneType in get_args(hint)


def _instantiate(values: dict[str, Any], path: str | Path) -> RunConfig:
    parser = run_parser()
    try:
        # The dataclasses have the defaults; jsonargparse would merge a default class's arguments.
        parsed = parser.parse_object(values, defaults=False)
    except ArgumentError as error:
        raise ConfigError(_listed(path, [_readable(error, values)])) from error
    # `instantiate_classes` is the older name; jsonargparse 5 removes it.
    instantiate = getattr(parser, "instantiate", None) or parser.instantiate_classes
    fields = instantiate(parsed)
    return RunConfig(**{name: fields[name] for name in values})


def _readable(error: ArgumentError, values: Mapping[str, Any]) -> str:
    """Reduce jsonargparse's message to one sentence: the key, its value, what it takes."""
    text = " ".join(str(error).replace("typing.", "").split())
    text = re.sub(r"<class '(\w+)'>", r"\1", text)
    key = re.match(r'Parser key "([^"]+)":', text)
    kinds = re.findall(r"Expected (?:a )?(Literal\[[^\]]*\]|\w+)", text)
    if not (key and kinds):
        return text
    wanted = " or ".join(_KINDS.get(kind, _choices(kind)) for kind in dict.fromkeys(kinds))
    return f"{key[1]} is {_value_at(key[1], values)!r}, but must be {wanted}."


def _value_at(key: str, values: Any) -> Any:
    for name in key.split("."):
        values = values[name]
    return values


def _choices(kind: str) -> str:
    """Write `Literal['a', 'b']` as `'a' or 'b'`."""
    return kind.removeprefix("Literal[").removesuffix("]").replace(", ", " or ")


def _strategy_problems(config: RunConfig) -> list[str]:
    try:
        parse_strategy(config.strategy)
    except ConfigError as error:
        return [str(error)]
    return []


def _listed(path: str | Path, problems: Sequence[str]) -> str:
    return "\n".join([f"{path} cannot be used:", *(f"  - {problem}" for problem in problems)])
