"""Reads a run file and command-line overrides into a checked `RunConfig`, without torch."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from typing_extensions import override

from thunder_memsave.finetune.run_file.config import RunConfig
from thunder_memsave.finetune.run_file.keys.unknown_keys import unknown_key
from thunder_memsave.finetune.run_file.reading.arguments import Argument
from thunder_memsave.finetune.run_file.reading.checks import check_config
from thunder_memsave.finetune.run_file.reading.overrides import apply_override, parse_overrides
from thunder_memsave.finetune.run_file.reading.problems import Problems
from thunder_memsave.settings.problems import ConfigError, ConfigErrors
from thunder_memsave.settings.schema import Reader
from thunder_memsave.settings.yaml_file import PlainDumper, YamlFile, parse_yaml, read_yaml

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


def plain_values(config: RunConfig) -> dict[str, Any]:
    """Return a configuration's values as YAML and JSON have them."""
    values: dict[str, Any] = parse_yaml(dump_run_config(config))
    return values


def _apply(given: Sequence[Argument], file: YamlFile, problems: Problems) -> dict[str, str]:
    typed: dict[str, str] = {}
    for each in given:
        typed[each.key] = each.shown
        try:
            apply_override(file.values, each)
        except ConfigError as error:
            error.key = each.key  # the whole key, by which the report finds the argument
            problems.add(error)
            continue
        for key in [key for key in file.lines if key.startswith(each.key)]:
            # `train.epoch` is not inside `train.epochs`.
            if key[len(each.key) :][:1] in ("", ".", "["):
                del file.lines[key]
    return typed


class _RunFileReader(Reader):
    """Knows other tools' names for keys, and examples of sections."""

    @override
    def unknown(self, key: str, *, where: str, known: Sequence[str]) -> ConfigError:
        return unknown_key(key, where=where, known=known)

    @override
    def example(self, where: str) -> str:
        return _EXAMPLES.get(where, "")


def _read_config(values: dict[str, Any], problems: Problems) -> RunConfig:
    _complete_optimizer(values)
    reader = _RunFileReader()
    config = reader.section(RunConfig, values, where="")
    problems.add(*reader.problems)
    check_config(config, problems)
    return config


def _complete_optimizer(values: dict[str, Any]) -> None:
    """Give arguments without a class to the default class, on top of its default arguments."""
    given, default = values.get("optimizer"), RunConfig().optimizer
    if isinstance(given, dict) and "class_path" not in given:
        arguments = given.get("init_args") or {}
        if isinstance(arguments, dict):
            arguments = {**default["init_args"], **arguments}
        values["optimizer"] = {**given, "class_path": default["class_path"], "init_args": arguments}
