"""The kinds of classes that a run file may name in each place, checked before any object is made."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

from thunder_memsave.finetune.run_file.classes.class_spec import (
    checked_init_args,
    import_class,
)
from thunder_memsave.finetune.run_file.config import ClassSpec
from thunder_memsave.settings.problems import ConfigError


@dataclass(frozen=True, kw_only=True, slots=True)
class ClassKind:
    """The classes that are accepted in one place of the run file."""

    must_be: str
    """Description for messages."""

    default_module: str
    """Module in which a bare name is looked up."""

    accepts: Callable[[Any], bool]

    given_by_us: int = 0
    """Number of leading positional arguments that a run passes."""

    filled: Collection[str] = ()
    """Names of arguments that a run passes if the run file does not."""


def _is_optimizer(cls: Any) -> bool:
    import torch

    return issubclass(cls, torch.optim.Optimizer) and cls is not torch.optim.Optimizer


def _is_dataset(cls: Any) -> bool:
    return callable(getattr(cls, "load", None))


def _is_logger(cls: Any) -> bool:
    from lightning.fabric.loggers import Logger

    return issubclass(cls, Logger) and not inspect.isabstract(cls)


def _is_callback(cls: Any) -> bool:
    return any(name.startswith("on_") and callable(getattr(cls, name)) for name in dir(cls))


OPTIMIZER = ClassKind(
    must_be="a subclass of torch.optim.Optimizer",
    default_module="torch.optim",
    accepts=_is_optimizer,
    given_by_us=1,
)
IMPLEMENTATIONS = ("foreach", "fused", "differentiable", "capturable")
"""Arguments that choose how an optimizer computes, not what; a run file with none of them leaves it to the run."""

DATASET = ClassKind(
    must_be="a dataset: a class with a method 'load', such as ChatJSONL",
    default_module="thunder_memsave.finetune.data",
    accepts=_is_dataset,
)
LOGGER = ClassKind(
    must_be="a Lightning logger, such as TensorBoardLogger",
    default_module="lightning.pytorch.loggers",
    accepts=_is_logger,
    filled=("save_dir", "root_dir"),
)
CALLBACK = ClassKind(
    must_be="a callback: a class with methods such as 'on_train_batch_end'",
    default_module="thunder_memsave.callbacks",
    accepts=_is_callback,
    filled=("directory", "path"),
)


def check_class(spec: ClassSpec, kind: ClassKind, *, where: str) -> Any:
    """Import the class, check that it is of the kind and takes the arguments, and return it.

    Raises:
        ConfigError: it does not exist, is of another kind, or takes other arguments.
    """
    cls = import_class(spec, where=where, default_module=kind.default_module)
    if not kind.accepts(cls):
        raise ConfigError(
            f"{where}.class_path is {spec['class_path']!r}, but must be {kind.must_be}.",
            key=f"{where}.class_path",
        )
    checked_init_args(cls, spec, where=where, given_by_us=kind.given_by_us, filled=kind.filled)
    return cls
