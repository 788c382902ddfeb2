"""Reads a run file and command-line overrides into a checked `RunConfig`, without torch."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args, get_type_hints

import yaml

from thunder_memsave.config import CompileConfig, StrategyConfig, parse_strategy
from thunder_memsave.finetune.run_file.config import ClassSpec, RunConfig
from thunder_memsave.finetune.run_file.keys.unknown_keys import unknown_key
from thunder_memsave.finetune.run_file.own_sections import OWN_SECTIONS, OwnSection
from thunder_memsave.finetune.run_file.reading.checks import check_config
from thunder_memsave.finetune.run_file.reading.overrides import (
    Override,
    apply_override,
    parse_overrides,
)
from thunder_memsave.finetune.run_file.reading.problems import Problems
from thunder_memsave.settings.section import ConfigError, ConfigErrors, field_names
from thunder_memsave.settings.value_kinds import as_yaml, meant_choice, misfit
from thunder_memsave.settings.yaml_file import PlainDumper, YamlFile, read_yaml

# Examples for a section that is given as a single value.
_EXAMPLES = {
    "model": "{name_or_path: meta-llama/Llama-3.2-1B}",
    "lora": "{r: 16, lora_alpha: 32, target_modules: all-linear}",
    "adapter": "{class_path: IA3Config, init_args: {...}}; LoRA has the section 'lora'",
    "data.dataset": "{class_path: ChatJSONL, init_args: {path: train.jsonl}}",
    "optimizer": "{class_path: torch.optim.AdamW, init_args: {lr: 2e-4}}",
    "lr_scheduler": "{name: cosine, warmup_steps: 0.03}",
    "strategy": "{sharding: zero2}",
    "memory": "{budget: 60GiB}",
    "fp8": "{recipe: delayed}",
    "loggers": "[{class_path: TensorBoardLogger}]",
    "callbacks": "[{class_path: EarlyStopping, init_args: {patience: 3}}]",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class RunFile:
    """A run file with its overrides: the valid part, the problems, and their places."""

    path: Path
    config: RunConfig
    """The run; invalid keys have their defaults here."""

    lines: Mapping[str, int]
    """Line of each key of the file, by its dotted name."""

    overrides: Mapping[str, str]
    """Overridden keys and the arguments that override them, as they were typed."""

    problems: tuple[ConfigError, ...]


def read_run_file(path: str | Path, overrides: Sequence[str] = ()) -> RunFile:
    """Read a run file, apply the overrides and find all problems of the file by itself.

    Checks that need torch, such as of the classes that the file names, are left to `job.prepare`.

    Raises:
        ConfigError: the file cannot be read at all, or an argument is not an override.
    """
    file = read_yaml(path)
    problems = Problems(file.problems)
    given = parse_overrides(overrides)
    if not file.values and not given:
        raise ConfigError(
            "the run file is empty; `thunder-memsave configs list` names some to start from.",
            place=str(path),
        )
    typed = _apply(given, file, problems)
    config = _read_config(file.values, problems)
    return RunFile(
        path=Path(path),
        config=config,
        lines=file.lines,
        overrides=typed,
        problems=problems.found,
    )


def load_run_config(path: str | Path, overrides: Sequence[str] = ()) -> RunConfig:
    """Read a run file with overrides, all of which must be valid.

    Raises:
        ConfigErrors: lists all problems.
    """
    run_file = read_run_file(path, overrides)
    if run_file.problems:
        raise ConfigErrors(run_file.problems)
    return run_file.config


def dump_run_config(config: RunConfig) -> str:
    """Write a configuration as YAML with every key, as `load_run_config` reads it."""
    return yaml.dump(dataclasses.asdict(config), Dumper=PlainDumper, sort_keys=False)


def _apply(given: Sequence[Override], file: YamlFile, problems: Problems) -> dict[str, str]:
    typed: dict[str, str] = {}
    for override in given:
        typed[override.key] = override.argument
        try:
            apply_override(file.values, override)
        except ConfigError as error:
            error.key = override.key  # the whole key, by which the report finds the argument
            problems.add(error)
            continue
        for key in [key for key in file.lines if key.startswith(override.key)]:
            # `train.epoch` is not inside `train.epochs`.
            if key[len(override.key) :][:1] in ("", ".", "["):
                del file.lines[key]
    return typed


def _read_config(values: dict[str, Any], problems: Problems) -> RunConfig:
    sound = _sound_section(values, RunConfig, problems, where="")
    _complete_optimizer(sound)
    config: RunConfig = _made(RunConfig, sound)
    _check_strategy(config.strategy, problems)
    for name, own in OWN_SECTIONS.items():
        _check_own(getattr(config, name), own, problems, where=name)
    check_config(config, problems)
    return config


def _check_strategy(values: Mapping[str, Any], problems: Problems) -> None:
    """Let the strategy check its keys; their names in other tools are known only here."""
    sections = (StrategyConfig, CompileConfig)
    own = [name for cls in sections for name in field_names(cls)]
    known = [name for name in own if name not in ("compile", *OWN_SECTIONS)]
    _check_by(parse_strategy, values, problems, where="strategy", known=known)


def _check_own(
    values: Mapping[str, Any] | None, own: OwnSection, problems: Problems, *, where: str
) -> None:
    if values is not None:
        _check_by(own.parse, values, problems, where=where, known=field_names(own.config))


def _check_by(
    parse: Callable[[object], object],
    values: Mapping[str, Any],
    problems: Problems,
    *,
    where: str,
    known: Sequence[str],
) -> None:
    unknown = [key for key in values if key not in known]
    problems.add(*(unknown_key(str(key), where=where, known=known) for key in unknown))
    try:
        parse({key: value for key, value in values.items() if key not in unknown})
    except ConfigError as error:
        problems.add(error)


def _sound_section(
    values: Mapping[Any, Any], cls: Any, problems: Problems, *, where: str
) -> dict[str, Any]:
    """Return the keys that exist and have values of the right kind; report the others."""
    sound: dict[str, Any] = {}
    hints = get_type_hints(cls)
    for key, value in values.items():
        if key not in hints:
            problems.add(unknown_key(str(key), where=where, known=field_names(cls)))
            continue
        name, hint = f"{where}.{key}" if where else key, hints[key]
        if dataclasses.is_dataclass(hint) and isinstance(value, dict):
            sound[key] = _sound_section(value, hint, problems, where=name)
            continue
        found = list(_value_problems(value, hint, where=name))
        problems.add(*found)
        if not found:
            sound[key] = value
    return sound


def _value_problems(value: Any, hint: Any, *, where: str) -> Iterator[ConfigError]:
    if dataclasses.is_dataclass(hint):
        yield _not_a_mapping(value, where=where)
    elif hint is ClassSpec or (hint == ClassSpec | None and value is not None):
        yield from _class_spec_problems(value, where=where)
    elif hint == list[ClassSpec] and isinstance(value, list):
        for index, item in enumerate(value):
            yield from _class_spec_problems(item, where=f"{where}[{index}]")
    else:
        yield from _kind_problems(value, hint, where=where)


def _class_spec_problems(value: Any, *, where: str) -> Iterator[ConfigError]:
    known = list(get_type_hints(ClassSpec))
    if not isinstance(value, dict):
        yield _not_a_mapping(value, where=where, keys=f" with {' and '.join(known)}")
        return
    for key in value:
        if key not in known:
            yield unknown_key(str(key), where=where, known=known)
    yield from _class_path_problems(value.get("class_path", ""), where=where)
    arguments = value.get("init_args")
    if arguments is not None and not isinstance(arguments, dict):
        message = (
            f"{where}.init_args is {as_yaml(arguments)}, but must be a mapping of names to values."
        )
        yield ConfigError(message, key=f"{where}.init_args")


def _class_path_problems(path: Any, *, where: str) -> Iterator[ConfigError]:
    key = f"{where}.class_path"
    if not isinstance(path, str):
        yield ConfigError(f"{key} is {path!r}, but must be the name of a class.", key=key)
    # The optimizer has a default class, and a missing dataset class is reported with the required keys.
    elif not path and where not in ("optimizer", "data.dataset"):
        yield ConfigError(f"{key} is missing.", key=key)


def _kind_problems(value: Any, hint: Any, *, where: str) -> Iterator[ConfigError]:
    wanted = misfit(hint, value)
    if wanted is None:
        return
    if value is None:
        message = f"{where} is null, but must be {wanted}; leave it out for the default."
    else:
        hint_text = _example(where) + "." if _example(where) else meant_choice(hint, value)
        message = f"{where} is {as_yaml(value)}, but must be {wanted}{hint_text}"
    yield ConfigError(message, key=where)


def _not_a_mapping(value: Any, *, where: str, keys: str = " of names to values") -> ConfigError:
    if value is None:
        message = f"{where} is empty; give it a key, or leave the section out."
    else:
        message = f"{where} is {as_yaml(value)}, but must be a mapping{keys}{_example(where)}."
    return ConfigError(message, key=where)


def _example(where: str) -> str:
    example = _EXAMPLES.get(where)
    return f", such as {example}" if example else ""


def _complete_optimizer(values: dict[str, Any]) -> None:
    """Give arguments without a class to the default class, on top of its default arguments."""
    given = values.get("optimizer")
    if given is not None and "class_path" not in given:
        default = RunConfig().optimizer
        arguments = {**default.get("init_args", {}), **(given.get("init_args") or {})}
        values["optimizer"] = {"class_path": default["class_path"], "init_args": arguments}


def _made(cls: Any, values: Mapping[str, Any]) -> Any:
    """Make the dataclass from checked values; arguments of classes stay as YAML gave them."""
    hints = get_type_hints(cls)
    return cls(**{name: _as_field(hints[name], value) for name, value in values.items()})


def _as_field(hint: Any, value: Any) -> Any:
    if dataclasses.is_dataclass(hint):
        return _made(hint, value)
    alternatives = get_args(hint) or (hint,)
    # Stored as 1.0 however it was written, so that runs compare equal.
    is_number = float in alternatives and int not in alternatives and value is not None
    return float(value) if is_number else value
