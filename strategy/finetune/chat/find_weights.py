"""Finds the newest weights of a run: what it exported at its end, or else those of a checkpoint."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from thunder_memsave.callbacks.checkpoint import is_checkpoint_name, list_checkpoints
from thunder_memsave.finetune.chat.options import BASE
from thunder_memsave.finetune.chat.run_path import require_directory
from thunder_memsave.finetune.export.export_command import ExportOptions, run_export
from thunder_memsave.finetune.model.hub import model_directory
from thunder_memsave.finetune.output.run_directory import RunDirectory
from thunder_memsave.finetune.run_file.config import ModelConfig, RunConfig
from thunder_memsave.finetune.run_file.reading.parse import load_run_config
from thunder_memsave.settings.problems import ConfigError

_ADAPTER_CONFIG, _MODEL_CONFIG = "adapter_config.json", "config.json"


@dataclass(frozen=True, kw_only=True, slots=True)
class FoundWeights:
    """Directories to load from."""

    shown: str
    """What it is, for the user."""
    base: Path
    """The whole model, or the one below the adapter."""
    adapter: Path | None
    config: RunConfig | None
    """The run that trained it; None of an exported directory by itself."""


def find_weights(path: Path, temporary: Path, *, base: str | None = None) -> FoundWeights:
    """Find what a run trained.

    Args:
        path: A run's directory, one of its checkpoints, or a directory with an adapter or model.
        temporary: An empty directory, for the export of a checkpoint.
        base: Where the base model is now; None: where it was.

    Raises:
        ConfigError: there is nothing that can be loaded, or its base model is not there.
    """
    require_directory(path)
    overrides = () if base is None else (f"{BASE}={base}",)
    if (path / _ADAPTER_CONFIG).is_file() or (path / _MODEL_CONFIG).is_file():
        return _exported(path, _run_config_near(path, overrides), base=base)
    config = _run_config(path, overrides)
    newest = None if is_checkpoint_name(path.resolve().name) else _newest_export(path)
    if newest is not None:
        return _exported(newest, config)
    return _of_checkpoint(path, config, temporary, overrides)


def _of_checkpoint(
    path: Path, config: RunConfig, temporary: Path, overrides: tuple[str, ...]
) -> FoundWeights:
    """Export a checkpoint; an adapter on weights that the run made itself can only be exported with them."""
    made_base = config.model.config is not None
    has_adapter = config.lora is not None or config.adapter is not None
    out = temporary / "exported"
    merge = made_base and has_adapter
    run_export(ExportOptions(run=path, out=out, merge=merge, overrides=overrides))
    found = _exported(out, config)
    return FoundWeights(
        shown=f"the newest weights in {path}", base=found.base, adapter=found.adapter, config=config
    )


def _newest_export(path: Path) -> Path | None:
    """Return the run's export, unless a checkpoint is newer, of a run that goes on."""
    run = RunDirectory(root=path)
    exports = [
        each
        for each, file in ((run.adapter, _ADAPTER_CONFIG), (run.model, _MODEL_CONFIG))
        if (each / file).is_file()
    ]
    if not exports:
        return None
    newest = max(exports, key=_time_of)
    checkpoints = list_checkpoints(run.checkpoints)
    is_older = bool(checkpoints) and _time_of(newest) < _time_of(checkpoints[-1])
    return None if is_older else newest


def _time_of(directory: Path) -> float:
    """Return when the newest file of a directory was written."""
    return max(file.stat().st_mtime for file in directory.iterdir())


def _exported(
    directory: Path, config: RunConfig | None, *, base: str | None = None
) -> FoundWeights:
    if not (directory / _ADAPTER_CONFIG).is_file():
        return FoundWeights(shown=str(directory), base=directory, adapter=None, config=config)
    if config is not None:
        settings = config.model
    else:
        settings = _base_of(directory) if base is None else ModelConfig(name_or_path=base)
    return FoundWeights(
        shown=f"{directory} on {settings.name_or_path}",
        base=model_directory(settings),
        adapter=directory,
        config=config,
    )


def _base_of(adapter: Path) -> ModelConfig:
    """Return the model that an adapter names as its base."""
    path = adapter / _ADAPTER_CONFIG
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        return ModelConfig(name_or_path=str(values["base_model_name_or_path"]))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{path} does not name the adapter's base model.") from error


def _run_config(path: Path, overrides: Sequence[str]) -> RunConfig:
    root = path.resolve().parents[1] if is_checkpoint_name(path.resolve().name) else path
    run = RunDirectory(root=root)
    if not run.config.is_file():
        raise ConfigError(
            f"{path} is no run: it has no {run.config.name}, {_ADAPTER_CONFIG} or weights; name the output_dir of a "
            "run, such as runs/first."
        )
    return load_run_config(run.config, overrides)


def _run_config_near(path: Path, overrides: Sequence[str]) -> RunConfig | None:
    """Return the run whose adapter/ or model/ a directory is, if it is one."""
    run = RunDirectory(root=path.resolve().parent)
    is_its = path.resolve() in (run.adapter, run.model) and run.config.is_file()
    return load_run_config(run.config, overrides) if is_its else None
