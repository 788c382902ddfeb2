from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from thunder_memsave.callbacks import (
    EarlyStopping,
    MetricsCSV,
    MetricsLogger,
    ModelCheckpoint,
    ThroughputMonitor,
)
from thunder_memsave.finetune.output.run_directory import RunDirectory
from thunder_memsave.finetune.run import callbacks as callbacks_module
from thunder_memsave.finetune.run.callbacks import (
    build_callbacks,
    build_loggers,
    check_early_stopping,
    check_keep_best,
    check_logger_package,
)
from thunder_memsave.finetune.run_file.config import (
    CheckpointConfig,
    ClassSpec,
    EvalConfig,
    RunConfig,
)
from thunder_memsave.settings.problems import ConfigError


def callbacks_of(tmp_path: Path, *specs: Any, **settings: Any) -> list[Any]:
    config = RunConfig(callbacks=list(specs), **settings)
    return build_callbacks(config, RunDirectory(root=tmp_path))


def loggers_of(tmp_path: Path, *specs: Any) -> list[Any]:
    return build_loggers(RunConfig(loggers=list(specs)), RunDirectory(root=tmp_path))


def names(callbacks: list[Any]) -> list[str]:
    return [type(callback).__name__ for callback in callbacks]


def test_those_that_measure_stand_before_those_that_write_and_the_checkpoint_is_last(
    tmp_path: Path,
) -> None:
    callbacks = callbacks_of(tmp_path, {"class_path": "EarlyStopping"})
    assert names(callbacks) == [
        *("ThroughputMonitor", "LearningRateMonitor", "MemoryMonitor", "EarlyStopping"),
        *("MetricsCSV", "LossCurve", "ProgressBar", "ModelCheckpoint"),
    ]
    assert callbacks[4].monitors == tuple(callbacks[:4])


def test_a_callback_of_a_default_class_replaces_the_default(tmp_path: Path) -> None:
    spec = {"class_path": "ThroughputMonitor", "init_args": {"peak_tflops": 100.0}}
    callbacks = callbacks_of(tmp_path, spec, {"class_path": "MetricsCSV"})
    assert names(callbacks).count("ThroughputMonitor") == names(callbacks).count("MetricsCSV") == 1
    assert isinstance(callbacks[0], ThroughputMonitor)
    assert callbacks[0].peak_tflops == 100.0
    (writer,) = (callback for callback in callbacks if isinstance(callback, MetricsCSV))
    assert writer.path == tmp_path / "metrics.csv"
    assert callbacks[0] in writer.monitors


def test_a_checkpoint_of_the_run_file_writes_where_runs_look_for_it(tmp_path: Path) -> None:
    callbacks = callbacks_of(tmp_path, {"class_path": "ModelCheckpoint"})
    assert isinstance(callbacks[-1], ModelCheckpoint)
    assert callbacks[-1].directory == tmp_path / "checkpoints"


def test_two_callbacks_of_one_class_may_be_added(tmp_path: Path) -> None:
    specs = [
        {"class_path": "EarlyStopping", "init_args": {"monitor": name}}
        for name in ("val_loss", "val_perplexity")
    ]
    added = [c for c in callbacks_of(tmp_path, *specs) if isinstance(c, EarlyStopping)]
    assert [callback.monitor for callback in added] == ["val_loss", "val_perplexity"]


def test_metrics_go_to_loggers_where_there_are_some(tmp_path: Path) -> None:
    callbacks = callbacks_of(tmp_path, loggers=[{"class_path": "CSVLogger"}])
    (logger,) = (callback for callback in callbacks if isinstance(callback, MetricsLogger))
    assert logger.hyperparameters is not None
    assert logger.hyperparameters["train"]["seed"] == 42


def test_a_constructor_that_refuses_is_told_by_its_place(tmp_path: Path) -> None:
    spec = {"class_path": "EarlyStopping", "init_args": {"patience": 0}}
    with pytest.raises(ConfigError, match=r"callbacks\[0\]: EarlyStopping refuses .* at least 1"):
        callbacks_of(tmp_path, spec)


@pytest.mark.parametrize(
    ("init_args", "every_n_steps", "has_validation", "message"),
    [
        ({}, 2, False, "no validation data; give data.dataset.init_args a val_path or"),
        ({}, None, True, "eval.every_n_steps is null, so that none comes before the end; set it"),
        ({"monitor": "loss"}, 2, True, "monitors 'loss', which evaluations do not have; monitor "),
    ],
)
def test_early_stopping_that_could_not_work_is_refused(
    init_args: dict[str, Any],
    every_n_steps: int | None,
    has_validation: bool,
    message: str,
) -> None:
    spec: ClassSpec = {"class_path": "EarlyStopping", "init_args": init_args}
    config = RunConfig(eval=EvalConfig(every_n_steps=every_n_steps), callbacks=[spec])
    with pytest.raises(ConfigError, match=message) as caught:
        check_early_stopping(config, has_validation=has_validation)
    assert caught.value.key == "callbacks[0]"


class AddsMetrics:
    """A user-defined callback, which may add the metric that early stopping monitors."""

    def on_validation_end(self) -> None: ...


def test_early_stopping_may_watch_what_another_callback_adds() -> None:
    watching: ClassSpec = {"class_path": "EarlyStopping", "init_args": {"monitor": "accuracy"}}
    adding: ClassSpec = {"class_path": f"{__name__}.AddsMetrics"}
    check_early_stopping(RunConfig(callbacks=[adding, watching]), has_validation=True)


@pytest.mark.parametrize(
    ("best_of", "has_validation", "message"),
    [
        ("val_loss", False, "no validation data; give data.dataset.init_args a val_path or a val_"),
        ("accuracy", True, "best_of is 'accuracy', which evaluations do not have; write 'val_loss"),
    ],
)
def test_the_best_of_what_there_is_not_is_refused(
    best_of: str, has_validation: bool, message: str
) -> None:
    kept = CheckpointConfig(keep_best=1, best_of=best_of)
    with pytest.raises(ConfigError, match=message):
        check_keep_best(RunConfig(checkpoint=kept), has_validation=has_validation)
    adding: ClassSpec = {"class_path": f"{__name__}.AddsMetrics"}
    check_keep_best(RunConfig(checkpoint=kept, callbacks=[adding]), has_validation=True)


def test_the_checkpoint_callback_is_as_the_section_says_and_knows_the_run_file(
    tmp_path: Path,
) -> None:
    section = CheckpointConfig(every_n_steps=4, keep_last=3, keep_best=2, asynchronous=True)
    saves = callbacks_of(tmp_path, checkpoint=section, eval=EvalConfig(every_n_steps=2))[-1]
    assert (saves.every_n_steps, saves.keep_last, saves.asynchronous) == (4, 3, True)
    assert (saves.best.metric, saves.best.num_kept, saves.best.mode) == ("val_loss", 2, "min")
    assert saves.config["eval"]["every_n_steps"] == 2


def test_the_package_of_a_logger_is_looked_for_without_making_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = {"tensorboardX"}
    monkeypatch.setattr(
        callbacks_module, "find_spec", lambda name: object() if name in found else None
    )
    check_logger_package({"class_path": "TensorBoardLogger"}, where="loggers[0]")
    check_logger_package({"class_path": "CSVLogger"}, where="loggers[0]")
    with pytest.raises(ConfigError, match=r"loggers\[1\]\.class_path is MLFlowLogger, .* mlflow$"):
        check_logger_package({"class_path": "MLFlowLogger"}, where="loggers[1]")


def test_a_logger_writes_into_the_run_unless_it_says_where(tmp_path: Path) -> None:
    elsewhere = {"class_path": "CSVLogger", "init_args": {"save_dir": str(tmp_path / "logs")}}
    first, second = loggers_of(tmp_path / "run", {"class_path": "CSVLogger"}, elsewhere)
    assert Path(first.save_dir) == tmp_path / "run"
    assert Path(second.save_dir) == tmp_path / "logs"
    assert not (tmp_path / "run").exists()


class NeedsPackage:
    """A logger whose package is not installed."""

    def __init__(self, *, save_dir: str) -> None:
        raise ModuleNotFoundError("No module named 'x'", name="x")


class WandbLogger(NeedsPackage):
    """A logger named like Lightning's; the real one may be installed or not."""


@pytest.mark.parametrize(("name", "package"), [("NeedsPackage", "x"), ("WandbLogger", "wandb")])
def test_a_logger_without_its_package_names_what_to_install(
    name: str, package: str, tmp_path: Path
) -> None:
    path = f"{__name__}.{name}"
    message = rf"loggers\[0\]\.class_path is {name}, .* not installed: pip install {package}$"
    with pytest.raises(ConfigError, match=message) as caught:
        loggers_of(tmp_path, {"class_path": path})
    assert caught.value.key == "loggers[0]"
