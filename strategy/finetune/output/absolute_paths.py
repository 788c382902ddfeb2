"""Makes the paths of a run file independent of the directory that the command was started in."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from thunder_memsave.finetune.run_file.config import ClassSpec, RunConfig

_ARGUMENTS = ("path", "val_path")
"""Arguments of data classes that are paths."""


def with_absolute_paths(config: RunConfig) -> RunConfig:
    """Return the run with whole paths: of the model if it is a directory, of data files that exist, and of the output.

    A path to nothing stays as it is, as it may be a name, such as one of the hub.
    """
    dataset = config.data.dataset
    arguments = {
        name: _absolute(value) if name in _ARGUMENTS else value
        for name, value in (dataset.get("init_args") or {}).items()
    }
    spec = ClassSpec(class_path=dataset["class_path"], init_args=arguments)
    resume = config.resume if isinstance(config.resume, bool) else _absolute(config.resume)
    return dataclasses.replace(
        config,
        model=dataclasses.replace(config.model, name_or_path=_absolute(config.model.name_or_path)),
        data=dataclasses.replace(config.data, dataset=spec),
        output_dir=str(Path(config.output_dir).absolute()),
        resume=resume,
    )


def _absolute(value: Any) -> Any:
    """Return existing paths whole, also in lists and under `path` of their entries; anything else as it is."""
    if isinstance(value, list):
        return [_absolute(each) for each in value]
    if isinstance(value, Mapping):
        return {k: _absolute(v) if k == "path" else v for k, v in value.items()}
    is_path = isinstance(value, str) and bool(value) and Path(value).exists()
    return str(Path(value).absolute()) if is_path else value
