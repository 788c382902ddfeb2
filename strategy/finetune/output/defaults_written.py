"""Fills the run file that a run leaves with defaults of other packages' classes, which later versions may change."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping
from inspect import signature
from typing import Any

from peft import LoraConfig

from thunder_memsave import optim
from thunder_memsave.finetune.run_file.classes.class_kinds import (
    DATASET,
    IMPLEMENTATIONS,
    OPTIMIZER,
)
from thunder_memsave.finetune.run_file.classes.class_spec import import_class
from thunder_memsave.finetune.run_file.config import ClassSpec, RunConfig

_PLAIN = (bool, int, float, str)
_LEFT_OUT = ("inference_mode", "megatron_core")
"""Fields of peft that no run uses."""


def with_defaults(config: RunConfig) -> RunConfig:
    """Return the run with the defaults of its optimizer, its dataset and LoRA; those that are null stay out.

    Raises:
        ConfigError: a class cannot be imported.
    """
    lora, dataset, optimizer = config.lora, config.data.dataset.copy(), config.optimizer.copy()
    dataset["init_args"] = _dataset_arguments(dataset)
    optimizer["init_args"] = _optimizer_arguments(optimizer)
    return dataclasses.replace(
        config,
        lora=None if lora is None else _filled(LoraConfig, lora, left_out=_LEFT_OUT),
        optimizer=optimizer,
        data=dataclasses.replace(config.data, dataset=dataset),
    )


def _dataset_arguments(spec: ClassSpec) -> dict[str, Any]:
    cls = import_class(spec, where="data.dataset", default_module=DATASET.default_module)
    return _filled(cls, spec.get("init_args") or {})


def _optimizer_arguments(spec: ClassSpec) -> dict[str, Any]:
    """Fill in what follows from the class alone: not how it computes, nor what it lacks with states in fewer bits."""
    cls = import_class(spec, where="optimizer", default_module=OPTIMIZER.default_module)
    left_out = set(IMPLEMENTATIONS)
    if of_fewer_bits := getattr(optim, cls.__name__, None):
        left_out |= set(signature(cls).parameters) - set(signature(of_fewer_bits).parameters)
    return _filled(cls, spec.get("init_args") or {}, left_out=left_out)


def _filled(
    cls: Any, given: Mapping[str, Any], *, left_out: Collection[str] = ()
) -> dict[str, Any]:
    defaults = {
        parameter.name: _as_yaml(parameter.default)
        for parameter in signature(cls).parameters.values()
        if parameter.name not in (*given, *left_out) and _is_plain(parameter.default)
    }
    return {**given, **defaults}


def _is_plain(value: object) -> bool:
    if isinstance(value, tuple | list):
        return all(map(_is_plain, value))
    return isinstance(value, _PLAIN)


def _as_yaml(value: Any) -> Any:
    return [_as_yaml(each) for each in value] if isinstance(value, tuple | list) else value
