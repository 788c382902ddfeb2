"""A run resumes on other processes, under another sharding: no row is lost or seen twice, and losses are the same."""

from __future__ import annotations

import csv
import itertools
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from harness.commands import run_command
from harness.distributed import SOAK_HANG_S
from harness.fabric import run_python
from harness.language_model import run_values, write_model, write_run_file
from harness.seen_rows import seen_rows

# float32 sums in another order
SUM_ORDER = 1e-5
NUM_STEPS, STOP = 6, 3
ROWS_PER_EPOCH = 18  # the last global batch of an epoch is padded


def write_run(directory: Path) -> Path:
    """Write a run file with global batches of 12 rows for 1, 2 or 3 processes, over 3 epochs."""
    values = run_values(
        directory,
        write_model(directory / "model", num_hidden_layers=1),
        train={"global_batch_size": 12, "micro_batch_size": 2, "max_steps": NUM_STEPS},
        checkpoint={"every_n_steps": STOP, "keep_last": 9},
        callbacks=[{"class_path": "harness.seen_rows.SeenRows", "init_args": {"directory": ""}}],
    )
    rows = (directory / "rows.jsonl").read_text().splitlines(keepends=True)
    (directory / "rows.jsonl").write_text("".join(rows[:ROWS_PER_EPOCH]))
    del values["data"]["dataset"]["init_args"]["val_fraction"]  # saves one capture
    return write_run_file(directory, values)


def start(run_file: Path, directory: Path, mode: str, num_processes: int, *more: str) -> None:
    """Run to the end; the rows seen are written beside the run."""
    values = yaml.safe_load(run_file.read_text())
    values["callbacks"][0]["init_args"]["directory"] = str(directory.with_name("seen"))
    values["strategy"] = {"sharding": mode}
    path = directory.with_name("start.yaml")
    path.parent.mkdir(exist_ok=True)
    path.write_text(yaml.safe_dump(values))
    command = ["train", str(path), f"--devices={num_processes}", f"--output_dir={directory}", *more]
    if num_processes > 1:
        run_python(["-m", "thunder_memsave", *command], num_forks=num_processes)
    else:
        run_command(*command)


def go_on(run_file: Path, whole: Path, directory: Path, mode: str, num_processes: int) -> None:
    """Resume from the checkpoint in the middle of another run, as if that had been killed there."""
    name = f"step-{STOP:08d}"
    shutil.copytree(whole / "checkpoints" / name, directory / "checkpoints" / name)
    shutil.copy(whole / "metrics.csv", directory)
    shutil.copy(whole / "config.yaml", directory)
    start(run_file, directory, mode, num_processes, "--resume=auto")


def losses(directory: Path) -> list[float]:
    with (directory / "metrics.csv").open(newline="") as file:
        return [float(row["loss"]) for row in csv.DictReader(file)]


def check_same(whole: Path, resumed: Path) -> None:
    expected, seen = seen_rows(whole.with_name("seen")), seen_rows(resumed.with_name("seen"))
    assert seen == {step: rows for step, rows in expected.items() if step > STOP}
    assert losses(resumed) == pytest.approx(losses(whole), rel=SUM_ORDER)
    assert len(losses(resumed)) == NUM_STEPS


def check_epochs(whole: Path) -> None:
    """Check that each epoch saw every row once."""
    steps = list(seen_rows(whole.with_name("seen")).values())
    for first, second in zip(steps[::2], steps[1::2], strict=True):
        assert set(Counter([*first, *second]).values()) == {1}
        assert len(first) + len(second) == ROWS_PER_EPOCH


def test_a_run_of_two_processes_goes_on_in_one(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run_file = write_run(tmp_path)
    whole, resumed = tmp_path / "whole" / "run", tmp_path / "resumed" / "run"
    start(run_file, whole, "zero3", 2)
    check_epochs(whole)
    go_on(run_file, whole, resumed, "none", 1)
    check_same(whole, resumed)
    said = f"step-{STOP:08d} was written by 2 ranks on cpu, and 1 rank on cpu go on from it: the"
    assert said in caplog.text


@pytest.mark.soak
@pytest.mark.line("reshard")
@pytest.mark.timeout(SOAK_HANG_S)
def test_a_run_goes_on_on_any_other_number_of_processes(
    tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    run_file = write_run(tmp_path)
    starts = [("zero2", 1), ("none", 2), ("zero3", 3)]
    for mode, num_processes in starts:
        whole = tmp_path / f"{mode} on {num_processes}" / "run"
        start(run_file, whole, mode, num_processes)
        check_epochs(whole)
    ways = [*itertools.permutations(starts, 2), (("none", 2), ("hybrid", 2))]
    for first, second in ways:
        whole = tmp_path / f"{first[0]} on {first[1]}" / "run"
        resumed = tmp_path / f"from {first[0]} on {first[1]} to {second[0]} on {second[1]}" / "run"
        go_on(run_file, whole, resumed, *second)
        check_same(whole, resumed)
    record_property("measured", f"{len(ways)} runs went on elsewhere, 0 rows lost or seen twice")
