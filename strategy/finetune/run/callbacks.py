"""Makes the callbacks and loggers of a run: the default ones, and those of its run file."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from thunder_memsave.callbacks import (
    EarlyStopping,
    Fp8Monitor,
    LearningRateMonitor,
    MemoryMonitor,
    MetricsCSV,
    MetricsLogger,
    ModelCheckpoint,
    ProgressBar,
    ThroughputMonitor,
)
from thunder_memsave.callbacks.copies import CheckpointCopies
from thunder_memsave.callbacks.loss_curve import LossCurve
from thunder_memsave.finetune.objectives.choose import objective_of
from thunder_memsave.finetune.output.run_directory import RunDirectory
from thunder_memsave.finetune.run_file.classes.class_kinds import CALLBACK, LOGGER
from thunder_memsave.finetune.run_file.classes.class_spec import build, import_class
from thunder_memsave.finetune.run_file.config import ClassSpec, RunConfig
from thunder_memsave.finetune.run_file.reading.parse import plain_values
from thunder_memsave.settings.problems import ConfigError

_OWN_PACKAGE = "thunder_memsave."

# Packages that Lightning's loggers need.
_PACKAGE_OF_LOGGER = {
    "TensorBoardLogger": "tensorboard",
    "WandbLogger": "wandb",
    "MLFlowLogger": "mlflow",
    "CometLogger": "comet-ml",
    "NeptuneLogger": "neptune",
}
_MODULES_OF_LOGGER = {
    "TensorBoardLogger": ("tensorboard", "tensorboardX"),
    "WandbLogger": ("wandb",),
    "MLFlowLogger": ("mlflow",),
    "CometLogger": ("comet_ml",),
}


def build_callbacks(config: RunConfig, directory: RunDirectory) -> list[object]:
    """List the callbacks: those that measure, the run file's, those that write, the checkpoint and its copies.

    One of the run file replaces the default one of its class.

    Raises:
        ConfigError: a class or an argument cannot be used.
    """
    own = [
        _callback(spec, directory, where=f"callbacks[{index}]")
        for index, spec in enumerate(config.callbacks)
    ]
    objective = objective_of(config)
    monitors = _replaced([ThroughputMonitor(), LearningRateMonitor(), MemoryMonitor()], own)
    writers = _replaced(_writers(config, directory), own)
    checkpoint = _replaced([_checkpoint(config, directory)], own)
    placed = {id(callback) for callback in (*monitors, *writers, *checkpoint)}
    added = [callback for callback in own if id(callback) not in placed]
    for writer in writers:
        if isinstance(writer, MetricsCSV):
            writer.monitors = (*monitors, *added)
            own_metrics = (*objective.train_metrics, *objective.evaluation_metrics)
            writer.columns = tuple(dict.fromkeys((*writer.columns, *own_metrics)))
    return [*monitors, *added, *writers, *checkpoint, *_copies(config, checkpoint, directory)]


def check_early_stopping(config: RunConfig, *, has_validation: bool) -> None:
    """Refuse early stopping on evaluations that never happen, or on a metric that they lack.

    Raises:
        ConfigError: early stopping would have no effect, or fail at the first evaluation.
    """
    module = CALLBACK.default_module
    places = {f"callbacks[{index}]": spec for index, spec in enumerate(config.callbacks)}
    classes = {
        where: import_class(spec, where=where, default_module=module)
        for where, spec in places.items()
    }
    is_known, known = _has_own_callbacks_only(config), objective_of(config).evaluation_metrics
    for where, cls in classes.items():
        if cls is EarlyStopping:
            _check_watches_something(config, has_validation=has_validation, where=where)
            monitor = build(places[where], where=where, default_module=module).monitor
            if is_known and monitor not in known:
                raise ConfigError(
                    f"EarlyStopping monitors {monitor!r}, which evaluations do not have; "
                    f"monitor {' or '.join(map(repr, known))}.",
                    key=where,
                )


def check_keep_best(config: RunConfig, *, has_validation: bool) -> None:
    """Refuse to keep the best by evaluations that never happen, or by a metric that they lack.

    Raises:
        ConfigError: there is nothing to compare.
    """
    if not config.checkpoint.keep_best:
        return
    if not has_validation:
        raise ConfigError(
            "checkpoint.keep_best compares evaluations, but the run has no validation data; give "
            "data.dataset.init_args a val_path or a val_fraction, or leave checkpoint.keep_best out.",
            key="checkpoint.keep_best",
        )
    metric, known = config.checkpoint.best_of, objective_of(config).evaluation_metrics
    if _has_own_callbacks_only(config) and metric not in known:
        raise ConfigError(
            f"checkpoint.best_of is {metric!r}, which evaluations do not have; write "
            f"{' or '.join(map(repr, known))}.",
            key="checkpoint.best_of",
        )


def _has_own_callbacks_only(config: RunConfig) -> bool:
    """Tell whether all callbacks are ours; others may add metrics."""
    module = CALLBACK.default_module
    classes = (
        import_class(spec, where=f"callbacks[{index}]", default_module=module)
        for index, spec in enumerate(config.callbacks)
    )
    return all(cls.__module__.startswith(_OWN_PACKAGE) for cls in classes)


def check_fp8_monitor(config: RunConfig) -> None:
    """Refuse to monitor scales if no linear has them.

    Raises:
        ConfigError: `Fp8Monitor` would have no effect.
    """
    fp8 = config.fp8
    if fp8 is not None and fp8.recipe == "delayed":
        return
    for index, spec in enumerate(config.callbacks):
        where = f"callbacks[{index}]"
        cls = import_class(spec, where=where, default_module=CALLBACK.default_module)
        if isinstance(cls, type) and issubclass(cls, Fp8Monitor):
            what = "there is no section fp8" if fp8 is None else f"fp8.recipe is {fp8.recipe!r}"
            raise ConfigError(
                f"Fp8Monitor watches scales that change from step to step, but {what}; set fp8.recipe to 'delayed', or "
                "leave Fp8Monitor out.",
                key=where,
            )


def _check_watches_something(config: RunConfig, *, has_validation: bool, where: str) -> None:
    reason = None
    if not has_validation:
        reason = (
            "the run has no validation data; give data.dataset.init_args a val_path or a "
            "val_fraction"
        )
    elif config.eval.every_n_steps is None:
        reason = "eval.every_n_steps is null, so that none comes before the end; set it"
    if reason is not None:
        message = f"EarlyStopping compares evaluations, but {reason}, or leave EarlyStopping out."
        raise ConfigError(message, key=where)


def check_logger_package(spec: ClassSpec, *, where: str) -> None:
    """Refuse one of Lightning's loggers without its package; creating the logger to find out might write.

    Raises:
        ConfigError: the package is not installed.
    """
    cls = import_class(spec, where=where, default_module=LOGGER.default_module)
    modules = _MODULES_OF_LOGGER.get(cls.__name__, ())
    if modules and not any(find_spec(module) for module in modules):
        raise ConfigError(_missing_package(cls, None, where=where), key=where)


def build_loggers(config: RunConfig, directory: RunDirectory) -> list[Any]:
    """Make the run file's loggers; by default they write into the run's directory.

    Raises:
        ConfigError: a class or an argument cannot be used, or a package is not installed.
    """
    return [
        _logger(spec, directory, where=f"loggers[{index}]")
        for index, spec in enumerate(config.loggers)
    ]


def _callback(spec: ClassSpec, directory: RunDirectory, *, where: str) -> Any:
    cls = import_class(spec, where=where, default_module=CALLBACK.default_module)
    places: dict[type, dict[str, Path]] = {
        ModelCheckpoint: {"directory": directory.checkpoints},
        MetricsCSV: {"path": directory.metrics},
        LossCurve: {"path": directory.loss_curve},
        Fp8Monitor: {"path": directory.root / "fp8.csv"},
    }
    filled = _with_defaults(spec, places.get(cls, {}))
    return build(filled, where=where, default_module=CALLBACK.default_module)


def _with_defaults(spec: ClassSpec, defaults: Mapping[str, Path]) -> ClassSpec:
    given = spec.get("init_args") or {}
    arguments = {**{name: str(path) for name, path in defaults.items()}, **given}
    return ClassSpec(class_path=spec["class_path"], init_args=arguments)


def _replaced(defaults: list[object], own: list[object]) -> list[object]:
    of_class = {type(callback): callback for callback in own}
    return [of_class.get(type(default), default) for default in defaults]


def _writers(config: RunConfig, directory: RunDirectory) -> list[object]:
    every = config.train.log_every_n_steps
    logger = [MetricsLogger(plain_values(config), every_n_steps=every)] if config.loggers else []
    return [
        MetricsCSV(directory.metrics),
        LossCurve(directory.loss_curve, metrics=directory.metrics),
        *logger,
        ProgressBar(),
    ]


def _checkpoint(config: RunConfig, directory: RunDirectory) -> ModelCheckpoint:
    section = config.checkpoint
    return ModelCheckpoint(
        directory.checkpoints,
        every_n_steps=section.every_n_steps,
        keep_last=section.keep_last,
        keep_best=section.keep_best,
        best_of=section.best_of,
        asynchronous=section.asynchronous,
        config=plain_values(config),
    )


def _copies(
    config: RunConfig, checkpoint: list[object], directory: RunDirectory
) -> list[CheckpointCopies]:
    """Copy what the checkpoint callback writes, as soon as it is whole."""
    (saves,) = checkpoint
    assert isinstance(saves, ModelCheckpoint)
    if config.checkpoint.copy_to is None:
        return []
    copies = CheckpointCopies(
        saves.directory,
        config.checkpoint.copy_to,
        keep_last=saves.keep_last,
        best=saves.best,
        beside=[directory.config],
    )
    saves.after_commit = copies.after_commit
    return [copies]


def _logger(spec: ClassSpec, directory: RunDirectory, *, where: str) -> Any:
    cls = import_class(spec, where=where, default_module=LOGGER.default_module)
    takes = inspect.signature(cls).parameters
    places = {name: directory.root for name in ("save_dir", "root_dir") if name in takes}
    filled = _with_defaults(spec, places)
    try:
        return build(filled, where=where, default_module=LOGGER.default_module)
    except ModuleNotFoundError as error:
        raise ConfigError(_missing_package(cls, error, where=where), key=where) from error


def _missing_package(cls: type, error: ModuleNotFoundError | None, *, where: str) -> str:
    package = _PACKAGE_OF_LOGGER.get(cls.__name__, None if error is None else error.name)
    return (
        f"{where}.class_path is {cls.__name__}, which needs a package that is not installed: "
        f"pip install {package}"
        if package is not None
        else f"{where}.class_path is {cls.__name__}, which needs a package: {error}"
    )
