"""Runs that end early: what they say, what they leave, and that they go on."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from lightning.fabric import Fabric

from harness.language_model import run_values, write_run_file
from thunder_memsave.callbacks.checkpoint import CheckpointInfo, list_checkpoints
from thunder_memsave.finetune.cli import main
from thunder_memsave.finetune.job import Job
from thunder_memsave.finetune.processes import LocalProcesses
from thunder_memsave.finetune.run_directory import RunDirectory, how_to_go_on
from thunder_memsave.finetune.stop import RunInterruptedError, _WithoutInterrupts
from thunder_memsave.finetune.train import _as_told, _explained


def write_long_run(directory: Path, model_directory: Path) -> Path:
    train, checkpoint = {"max_steps": 5000}, {"every_n_steps": 2, "keep_last": 2}
    values = run_values(directory, model_directory, train=train, checkpoint=checkpoint)
    del values["data"]["dataset"]["init_args"]["val_fraction"]  # one capture less to wait for
    return write_run_file(directory, values)


LAUNCHES = {
    "alone": [],
    "devices": [],
    "torchrun": ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"],
}


def start(path: Path, *overrides: str, launch: str) -> subprocess.Popen[str]:
    devices = ["--devices=2"] if launch == "devices" else []
    return subprocess.Popen(
        [
            # pytest-xdist's workers ignore the signal, and what they start would too.
            *("env", "--default-signal=INT", sys.executable, *LAUNCHES[launch]),
            *("-m", "thunder_memsave", "train", str(path), *devices, *overrides),
        ],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        start_new_session=True,
    )


def end_at_first_checkpoint(
    process: subprocess.Popen[str], directory: Path, end: Callable[[], None]
) -> str:
    """Returns standard error."""
    try:
        while not list_checkpoints(directory / "checkpoints"):
            assert process.poll() is None, process.communicate()[1]
            time.sleep(0.01)
        end()
        return process.communicate(timeout=60)[1]
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()


SAYS_LAUNCH = {"alone": ("", ""), "devices": ("", " --devices=2")}
SAYS_LAUNCH["torchrun"] = ("torchrun --nproc-per-node 2 --no-python ", "")


@pytest.mark.parametrize("launch", list(LAUNCHES))
def test_ctrl_c_says_once_where_the_run_is_and_how_it_goes_on(
    launch: str, tmp_path: Path, model_directory: Path
) -> None:
    directory = tmp_path / "run"
    process = start(write_long_run(tmp_path, model_directory), launch=launch)
    # A terminal sends it to the whole foreground group.
    press = partial(os.killpg, process.pid, signal.SIGINT)
    error = end_at_first_checkpoint(process, directory, press)
    (line,) = [line for line in error.splitlines() if line.startswith("interrupted at step ")]
    last = list_checkpoints(directory / "checkpoints")[-1]
    before, after = SAYS_LAUNCH[launch]
    resume = f"{before}thunder-memsave train {directory / 'config.yaml'}{after} --resume=auto"
    assert line.endswith(f": the last checkpoint is {last}; go on with: {resume}")
    # torchrun ends with a traceback and an exit code of its own.
    assert "thunder_memsave" not in error.partition("Traceback")[2].replace(str(last), "")
    if launch != "torchrun":
        assert process.returncode == 130
        assert error == f"{line}\n"
    assert (directory / "loss.png").exists()
    arguments = [*resume.split()[1:], f"--train.max_steps={int(last.name[5:]) + 1}"]
    if launch == "alone":
        assert main(arguments) == 0
    elif launch == "devices":
        assert started_by_name(arguments).returncode == 0


def started_by_name(arguments: list[str]) -> subprocess.CompletedProcess[bytes]:
    """By the script, as a user types it; the other process is another thing to start."""
    script = Path(sys.executable).with_name("thunder-memsave")
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run([script, *arguments], env=environment, check=False)


def test_a_process_that_dies_ends_the_run_with_one_message(
    tmp_path: Path, model_directory: Path
) -> None:
    directory = tmp_path / "run"
    process = start(write_long_run(tmp_path, model_directory), launch="devices")

    def kill() -> None:
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        os.kill(int(children[0]), signal.SIGKILL)

    error = end_at_first_checkpoint(process, directory, kill)
    assert process.returncode == 1
    (line,) = error.splitlines()
    assert line.startswith("error: process 1 of 2 was ended by SIGKILL at step ")
    assert line.endswith("config.yaml --devices=2 --resume=auto")


def test_gradients_that_are_not_finite_end_all_ranks_with_one_message(
    tmp_path: Path, model_directory: Path
) -> None:
    values = run_values(tmp_path, model_directory, train={"max_steps": 20})
    values["optimizer"]["init_args"]["lr"] = 1e6
    del values["data"]["dataset"]["init_args"]["val_fraction"]
    process = start(write_run_file(tmp_path, values), launch="torchrun")
    error = process.communicate(timeout=300)[1]
    assert process.returncode == 1
    (line,) = [line for line in error.splitlines() if line.startswith("error: step ")]
    (last,) = list_checkpoints(tmp_path / "run" / "checkpoints")[-1:]
    failed = int(last.name.removeprefix("step-")) + 1
    assert line.startswith(f"error: step {failed} was not taken: its loss is ")
    assert "lower the learning rate (optimizer.init_args.lr; it was 1e+06" in line
    assert line.endswith("config.yaml --optimizer.init_args.lr=LOWER --resume=auto")
    assert "finetune/" not in error.replace(line, "")


def test_ctrl_c_before_the_training_is_one_line(
    tmp_path: Path,
    model_directory: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def interrupted(*args: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("thunder_memsave.finetune.train.prepare", interrupted)
    path = write_long_run(tmp_path, model_directory)
    handler = signal.getsignal(signal.SIGINT)
    try:
        assert main(["train", str(path)]) == 130
    finally:
        signal.signal(signal.SIGINT, handler)
    assert capsys.readouterr().err == "interrupted before training began; start it again.\n"
    assert not (tmp_path / "run").exists()


def test_without_a_checkpoint_the_run_starts_again(tmp_path: Path) -> None:
    directory = RunDirectory(root=tmp_path / "my run")
    text = how_to_go_on(directory, num_processes=1, started_from=None)
    command = f"thunder-memsave train '{directory.config}' --resume=auto"
    assert text == f"there is no checkpoint yet; start again with: {command}"


def test_a_run_without_a_checkpoint_of_its_own_starts_again_from_where_it_started(
    tmp_path: Path,
) -> None:
    other = CheckpointInfo(path=tmp_path / "step-00000004", world_size=1, values={})
    directory = RunDirectory(root=tmp_path / "run")
    text = how_to_go_on(directory, num_processes=1, started_from=other)
    assert f"the last checkpoint is {other.path}, which this run started from" in text
    assert text.endswith(f"--resume={other.path} --output_dir=ANOTHER")


def test_a_run_on_nodes_is_resumed_on_as_many(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "8")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    text = how_to_go_on(RunDirectory(root=tmp_path), num_processes=8, started_from=None)
    assert "torchrun --nnodes 2 ... --nproc-per-node 4 --no-python thunder-memsave" in text


def test_python_does_not_report_a_ctrl_c_that_it_drops() -> None:
    reported: list[object] = []
    report = _WithoutInterrupts(reported.append)
    dropped, other = (
        cast(Any, SimpleNamespace(exc_value=each)) for each in (KeyboardInterrupt(), ValueError())
    )
    report(dropped)
    report(other)
    assert reported == [other]


def test_before_the_training_there_is_nothing_to_go_on_from(tmp_path: Path) -> None:
    job = cast(Job, SimpleNamespace(directory=RunDirectory(root=tmp_path / "run")))
    fabric = Fabric(accelerator="cpu", devices=1)
    told = _as_told(KeyboardInterrupt(), fabric, job, {"step": 0}, LocalProcesses())
    assert isinstance(told, RunInterruptedError)
    assert str(told) == "interrupted before training began; start it again."
    died = "process 1 of 2 was ended by SIGKILL"
    expected = f"{died} before training began, so the run ends too; start it again."
    assert _explained(died, fabric, job, {"step": 0}) == expected
