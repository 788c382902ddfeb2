from __future__ import annotations

import csv
import errno
import math
import os
import random
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import pytest
import torch
from lightning.fabric import Fabric

from thunder_memsave.callbacks import (
    LearningRateMonitor,
    MemoryMonitor,
    MetricsCSV,
    ModelCheckpoint,
    step_directories,
)
from thunder_memsave.callbacks.all_ranks import DiskError
from thunder_memsave.callbacks.checkpoint import read_info
from thunder_memsave.callbacks.random_state import random_state, set_random_state
from thunder_memsave.callbacks.step_directories import Best, best_checkpoints, list_checkpoints
from thunder_memsave.callbacks.verified import load_checkpoint, newest_valid
from thunder_memsave.finetune.output.run_directory import RunDirectory, how_to_go_on

CPU = torch.device("cpu")


def cpu_fabric(*callbacks: object) -> Fabric:
    return Fabric(accelerator="cpu", devices=1, callbacks=list(callbacks))


def rows_of(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def test_the_learning_rate_of_every_group_is_a_metric() -> None:
    first, second = torch.nn.Parameter(torch.zeros(1)), torch.nn.Parameter(torch.zeros(1))
    groups = [{"params": [first], "lr": 0.5}, {"params": [second], "lr": 0.25}]
    metrics: dict[str, Any] = {}
    cpu_fabric(LearningRateMonitor()).call(
        "on_train_batch_end", metrics=metrics, optimizer=torch.optim.SGD(groups)
    )
    assert metrics == {"lr": 0.5, "lr_1": 0.25}


def test_every_step_and_evaluation_is_a_row(tmp_path: Path) -> None:
    path = tmp_path / "new" / "metrics.csv"
    fabric = cpu_fabric(MetricsCSV(path, columns=("step", "loss", "val_loss")))
    fabric.call("on_train_start", fabric=fabric, step=0)
    fabric.call("on_validation_end", fabric=fabric, step=0, metrics={"val_loss": 3.5})
    fabric.call("on_train_batch_end", fabric=fabric, step=1, metrics={"loss": 2.5, "other": 1})
    assert path.read_text() == "step,loss,val_loss\n0,,3.5\n1,2.5,\n"


def test_a_resumed_run_drops_rows_after_its_checkpoint_and_half_a_line(tmp_path: Path) -> None:
    path = tmp_path / "metrics.csv"
    path.write_text("step,loss\n1,3.0\n2,2.0\n3,1.5\n4,1.")
    fabric = cpu_fabric(MetricsCSV(path, columns=("step", "loss")))
    fabric.call("on_train_start", fabric=fabric, step=2)
    fabric.call("on_train_batch_end", fabric=fabric, step=3, metrics={"loss": 1.25})
    assert [row["loss"] for row in rows_of(path)] == ["3.0", "2.0", "1.25"]


def test_metrics_of_the_monitors_are_columns(tmp_path: Path) -> None:
    path = tmp_path / "metrics.csv"
    writer = MetricsCSV(path, columns=("step",), monitors=[LearningRateMonitor(), MemoryMonitor()])
    fabric = cpu_fabric(writer)
    fabric.call("on_train_start", fabric=fabric, step=0)
    assert path.read_text() == "step,lr,process_peak_rss_gib\n"


def test_a_new_run_starts_a_new_file(tmp_path: Path) -> None:
    path = tmp_path / "metrics.csv"
    path.write_text("step,loss\n1,3.0\n")
    fabric = cpu_fabric(MetricsCSV(path, columns=("step", "loss")))
    fabric.call("on_train_start", fabric=fabric, step=0)
    assert rows_of(path) == []


def draw() -> tuple[float, float, float]:
    return random.random(), float(np.random.rand()), float(torch.rand(()))


def test_random_states_go_through_a_file_and_draw_the_same_again(tmp_path: Path) -> None:
    torch.save(random_state(CPU), tmp_path / "state.pt")
    expected = draw()
    assert draw() != expected
    set_random_state(torch.load(tmp_path / "state.pt", weights_only=True), CPU)
    assert draw() == expected


def test_a_full_disk_costs_rows_and_not_the_run_and_no_row_is_torn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "metrics.csv"
    fabric = cpu_fabric(MetricsCSV(path, columns=("step", "loss")))
    fabric.call("on_train_start", fabric=fabric, step=0)

    def step(number: int) -> None:
        fabric.call("on_train_batch_end", fabric=fabric, step=number, metrics={"loss": 2.5})

    def torn(self: object, row: object) -> None:
        with path.open("a") as file:
            file.write("2,2")
        raise OSError(errno.ENOSPC, "No space left on device", str(path))

    step(1)
    with monkeypatch.context() as patch:
        patch.setattr(csv.DictWriter, "writerow", torn)
        step(2)
        step(3)
    step(4)
    assert rows_of(path) == [{"step": "1", "loss": "2.5"}, {"step": "4", "loss": "2.5"}]
    assert caplog.text.count("metrics.csv could not be written (No space left on device: ") == 1
    assert "rows of steps from 2 on are missing in it; training goes on." in caplog.text


def test_rows_wait_for_numbers_that_no_host_has_read_and_those_after_them_too(
    tmp_path: Path,
) -> None:
    path = tmp_path / "metrics.csv"
    writer = MetricsCSV(path, columns=("step", "loss", "val_loss"))
    fabric = cpu_fabric(writer)
    fabric.call("on_train_start", fabric=fabric, step=0)
    taken: dict[str, Any] = {"loss": torch.tensor(2.5)}
    left_out: dict[str, Any] = {"loss": torch.tensor(float("nan"))}
    fabric.call("on_train_batch_end", fabric=fabric, step=1, metrics=taken)
    fabric.call("on_train_batch_end", fabric=fabric, step=2, metrics=left_out)
    fabric.call("on_validation_end", fabric=fabric, step=2, metrics={"val_loss": 3.0})
    assert rows_of(path) == []
    taken["loss"] = 2.5
    left_out.clear()
    fabric.call("on_train_batch_end", fabric=fabric, step=3, metrics={"loss": 1.5})
    steps = [(row["step"], row["loss"], row["val_loss"]) for row in rows_of(path)]
    assert steps == [("1", "2.5", ""), ("2", "", "3.0"), ("3", "1.5", "")]
    fabric.call("on_train_batch_end", fabric=fabric, step=4, metrics={"loss": torch.tensor(0.5)})
    fabric.call("on_exception", fabric=fabric)
    assert (rows_of(path)[-1]["step"], rows_of(path)[-1]["loss"]) == ("4", "0.5")


def test_a_start_that_cannot_write_metrics_warns_too(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    fabric = cpu_fabric(MetricsCSV(tmp_path / "file" / "metrics.csv"))
    fabric.call("on_train_start", fabric=fabric, step=0)
    fabric.call("on_train_batch_end", fabric=fabric, step=1, metrics={"loss": 2.5})
    assert caplog.text.count("metrics.csv could not be written (") == 1
    (tmp_path / "file").unlink()
    fabric.call("on_train_batch_end", fabric=fabric, step=2, metrics={"loss": 2.5})
    (row,) = rows_of(tmp_path / "file" / "metrics.csv")
    assert (row["step"], row["loss"]) == ("2", "2.5")


def state_of(value: float, step: int) -> dict[str, Any]:
    model = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.constant_(model.weight, value)
    return {"model": model, "step": step, "name": "run"}


def run_steps(directory: Path, num_steps: int, **settings: Any) -> Fabric:
    callback = ModelCheckpoint(directory, **settings)
    fabric = cpu_fabric(callback)
    fabric.call("on_train_start", fabric=fabric, step=0)
    for step in range(1, num_steps + 1):
        fabric.call("on_train_batch_end", fabric=fabric, step=step, state=state_of(step, step))
    fabric.call("on_train_end", fabric=fabric, step=num_steps, state=state_of(num_steps, num_steps))
    return fabric


def test_checkpoints_come_every_n_steps_and_at_the_end_and_old_ones_go(tmp_path: Path) -> None:
    run_steps(tmp_path, 7, every_n_steps=2, keep_last=3)
    assert [path.name for path in list_checkpoints(tmp_path)] == [
        "step-00000004",
        "step-00000006",
        "step-00000007",
    ]
    assert not list(tmp_path.glob(".partial-*"))


def test_a_run_that_went_back_replaces_the_later_checkpoints(tmp_path: Path) -> None:
    run_steps(tmp_path, 9, every_n_steps=3, keep_last=3)
    callback = ModelCheckpoint(tmp_path, keep_last=3)
    fabric = cpu_fabric(callback)
    fabric.call("on_train_start", fabric=fabric, step=3)
    callback.save(fabric, state_of(4.0, 4), step=4)
    assert [path.name for path in list_checkpoints(tmp_path)] == ["step-00000003", "step-00000004"]


def test_a_new_run_beside_later_checkpoints_deletes_neither(tmp_path: Path) -> None:
    run_steps(tmp_path, 9, every_n_steps=8, keep_last=2)
    run_steps(tmp_path, 3, every_n_steps=1, keep_last=1)
    steps = [path.name[-1] for path in list_checkpoints(tmp_path)]
    assert steps == ["3", "8", "9"]


def test_the_best_stay_besides_the_last_ones_also_in_a_run_that_goes_on(tmp_path: Path) -> None:
    losses = {1: 5.0, 2: 3.0, 3: math.nan, 4: 4.0, 5: 3.0}

    def run(steps: Sequence[int], **settings: Any) -> list[str]:
        callback = ModelCheckpoint(tmp_path, every_n_steps=1, keep_last=1, **settings)
        fabric = cpu_fabric(callback)
        fabric.call("on_train_start", fabric=fabric, step=steps[0] - 1)
        for step in steps:
            metrics = {"val_loss": losses[step]}
            fabric.call("on_validation_end", fabric=fabric, step=step, metrics=metrics)
            state = state_of(1.0, step)
            fabric.call("on_train_batch_end", fabric=fabric, step=step, state=state)
        # A checkpoint without an evaluation at its own step has no value.
        fabric.call("on_train_batch_end", fabric=fabric, step=9, state=state_of(1.0, 9))
        return [path.name[-1] for path in list_checkpoints(tmp_path)]

    assert run([1, 2, 3], keep_best=1) == ["2", "9"]
    assert run([4, 5], keep_best=2) == ["2", "5", "9"]
    best = Best(metric="val_loss", num_kept=9)
    assert [path.name[-1] for path in best_checkpoints(tmp_path, best)] == ["2", "5"]
    assert run([4], keep_best=1, best_mode="max") == ["4", "9"]
    callback = ModelCheckpoint(tmp_path, keep_best=1, best_of="accuracy")
    with pytest.raises(ValueError, match=r"kept by 'accuracy', but an evaluation gives \['val_lo"):
        callback.on_validation_end(step=1, metrics={"val_loss": 1.0})


def test_a_checkpoint_that_cannot_be_deleted_is_warned_of_and_is_no_failed_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(path: Path) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr(step_directories, "_delete", refuse)
    run_steps(tmp_path, 2, every_n_steps=1, keep_last=1)
    assert [path.name[-1] for path in list_checkpoints(tmp_path)] == ["1", "2"]
    told = f"{tmp_path / 'step-00000001'} is no longer needed and could not be deleted (Permission"
    assert told in caplog.text
    assert "no checkpoint of step" not in caplog.text


def keep_files_of(step: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the files of this step's checkpoint undeletable, under whichever name."""

    def rmtree(path: Path, rmtree: Callable[[Path], None] = shutil.rmtree) -> None:
        if Path(path).name.endswith(f"step-{step:08d}"):
            raise OSError(errno.EBUSY, "Device or resource busy", str(path))
        rmtree(path)

    monkeypatch.setattr(shutil, "rmtree", rmtree)


def test_files_that_cannot_be_deleted_fail_no_save_after_that(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    keep_files_of(1, monkeypatch)
    run_steps(tmp_path, 6, every_n_steps=1, keep_last=1)
    assert [path.name for path in list_checkpoints(tmp_path)] == ["step-00000006"]
    left_over = tmp_path / ".partial-step-00000001"
    assert left_over.exists()
    told = f"{left_over} is no longer needed and could not be deleted (Device or resource busy: "
    assert caplog.text.count(told) == 4
    assert "no checkpoint of step" not in caplog.text


def test_files_of_a_replaced_checkpoint_that_stay_fail_no_save_and_get_no_name_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    run_steps(tmp_path, 1, every_n_steps=1)
    keep_files_of(1, monkeypatch)
    run_steps(tmp_path, 6, every_n_steps=1, keep_last=1)
    assert [path.name for path in list_checkpoints(tmp_path)] == ["step-00000006"]
    left_over = [path.name for path in tmp_path.iterdir() if path.name.startswith(".partial")]
    assert sorted(left_over) == [".partial-.partial-old-step-00000001", ".partial-step-00000001"]
    assert "no checkpoint of step" not in caplog.text


def test_what_is_in_the_way_of_a_save_fails_it_and_not_the_next_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / ".partial-step-00000003").mkdir()
    keep_files_of(3, monkeypatch)
    run_steps(tmp_path, 5, every_n_steps=1, keep_last=9)
    assert [path.name[-1] for path in list_checkpoints(tmp_path)] == ["1", "2", "4", "5"]
    assert caplog.text.count("no checkpoint of step") == 1
    assert "no checkpoint of step 3 was written, because a file cannot be" in caplog.text


@pytest.mark.parametrize("number", [errno.ESTALE, errno.EIO, errno.EACCES])
def test_a_directory_that_cannot_be_listed_hides_no_failed_save(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(path: Path) -> NoReturn:
        raise OSError(number, os.strerror(number), str(path))

    for name in ("is_dir", "iterdir", "mkdir"):
        monkeypatch.setattr(Path, name, refuse)
    callback = ModelCheckpoint(tmp_path / "run", every_n_steps=1)
    fabric = cpu_fabric(callback)
    fabric.call("on_train_start", fabric=fabric, step=0)
    for step in (1, 2):
        fabric.call("on_train_batch_end", fabric=fabric, step=step, state=state_of(step, step))
    unknown = f"; the last one is unknown ({os.strerror(number)}: {tmp_path / 'run'}). Training"
    assert caplog.text.count(unknown) == 2
    with pytest.raises(DiskError, match=r"of step 3 was .* is unknown \(.* This was the 3rd save"):
        fabric.call("on_train_batch_end", fabric=fabric, step=3, state=state_of(3, 3))


def test_a_directory_that_cannot_be_listed_hides_not_why_a_run_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: Path) -> NoReturn:
        raise OSError(errno.ESTALE, "Stale file handle", str(path))

    monkeypatch.setattr(Path, "is_dir", refuse)
    run = RunDirectory(root=tmp_path)
    told = how_to_go_on(run, num_processes=1, started_from=None)
    assert told == (
        f"the last checkpoint is unknown, for {run.checkpoints} cannot be listed (Stale file handle: "
        f"{run.checkpoints}); see that the disk works, and go on with: thunder-memsave train {run.config} --resume=auto"
    )


def test_a_checkpoint_that_was_being_replaced_at_a_kill_gets_its_name_back(tmp_path: Path) -> None:
    run_steps(tmp_path, 1, every_n_steps=1)
    (path,) = list_checkpoints(tmp_path)
    replaced = path.rename(tmp_path / ".partial-old-step-00000001")
    (tmp_path / ".partial-step-00000001").mkdir()
    valid = newest_valid(cpu_fabric(), tmp_path)
    assert valid is not None
    assert valid.path == path
    path.rename(replaced)
    run_steps(tmp_path, 2, every_n_steps=2)
    assert sorted(found.name[-1] for found in tmp_path.iterdir()) == ["1", "2"]


def test_the_end_is_not_saved_twice(tmp_path: Path) -> None:
    saved: list[int] = []

    class Witness:
        def on_save_checkpoint(self, *, step: int) -> None:
            saved.append(step)

    callback = ModelCheckpoint(tmp_path, every_n_steps=2)
    fabric = cpu_fabric(callback, Witness())
    fabric.call("on_train_batch_end", fabric=fabric, step=2, state=state_of(1.0, 2))
    fabric.call("on_train_end", fabric=fabric, step=2, state=state_of(1.0, 2))
    assert saved == [2]


def test_a_checkpoint_gives_back_weights_values_and_random_state(tmp_path: Path) -> None:
    fabric = run_steps(tmp_path, 3)
    expected = draw()
    (path,) = list_checkpoints(tmp_path)
    info = read_info(path)
    assert (info.world_size, info.values) == (1, {"step": 3, "name": "run"})
    state = state_of(0.0, 0)
    load_checkpoint(fabric, info, state)
    assert (float(state["model"].weight.detach()), state["step"]) == (3.0, 3)
    assert draw() == expected


def test_a_step_saved_again_replaces_its_checkpoint(tmp_path: Path) -> None:
    callback = ModelCheckpoint(tmp_path)
    fabric = cpu_fabric(callback)
    for value in (1.0, 2.0):
        callback.save(fabric, state_of(value, 1), step=1)
    (path,) = list_checkpoints(tmp_path)
    state = state_of(0.0, 0)
    load_checkpoint(fabric, read_info(path), state)
    assert float(state["model"].weight.detach()) == 2.0
    assert len(list(tmp_path.iterdir())) == 1


def test_what_a_kill_left_unfinished_is_no_checkpoint_and_is_cleared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    callback = ModelCheckpoint(tmp_path)
    fabric = cpu_fabric(callback)

    def killed(*args: object, **kwargs: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(fabric, "save", killed)
        with pytest.raises(KeyboardInterrupt):
            callback.save(fabric, state_of(1.0, 1), step=1)
    assert list_checkpoints(tmp_path) == []
    callback.save(fabric, state_of(1.0, 2), step=2)
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000002"]
