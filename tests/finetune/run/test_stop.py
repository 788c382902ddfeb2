"""Runs that end early: their messages, what they leave, and that they can be resumed."""

from __future__ import annotations

import errno
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch.distributed as dist
from lightning.fabric import Fabric

from harness.forked_python import ForkedPython
from harness.language_model import run_values, write_run_file
from thunder_memsave.callbacks.checkpoint import CheckpointInfo, list_checkpoints, step_of
from thunder_memsave.callbacks.metrics_csv import read_metrics
from thunder_memsave.distributed.lost_ranks import CollectiveError
from thunder_memsave.finetune.cli import main
from thunder_memsave.finetune.output.run_directory import RunDirectory, how_to_go_on
from thunder_memsave.finetune.process import signals
from thunder_memsave.finetune.process.processes import LocalProcesses
from thunder_memsave.finetune.process.signals import EXIT_SAVED
from thunder_memsave.finetune.process.stop import RankLostError, RunInterruptedError
from thunder_memsave.finetune.run.early_end import _less_memory, explained, is_saved, stopped_error
from thunder_memsave.finetune.run.job import Job
from thunder_memsave.finetune.run.train import _first_step

LEAVING_SECONDS = 5.0
"""Longest time from the end of the step to the end of a run that got a signal."""

STEP_SECONDS = 1.0
"""Longest step of these runs on an idle machine."""


def write_long_run(directory: Path, model: Path, **checkpoint: Any) -> Path:
    values = run_values(
        directory,
        model,
        train={"max_steps": 5000},
        checkpoint={"every_n_steps": 2, "keep_last": 2, **checkpoint},
        # A run of another length is identical up to its end.
        lr_scheduler={"name": "constant", "warmup_steps": 0},
    )
    del values["data"]["dataset"]["init_args"]["val_fraction"]  # saves one capture
    return write_run_file(directory, values)


TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
LAUNCHES = {
    "alone": [],
    "devices": [],
    "torchrun": [*TORCHRUN, "--signals-to-handle=SIGTERM,SIGINT,SIGUSR1"],
}
NUM_CHILDREN = {"alone": 0, "devices": 1, "torchrun": 2}


def start(path: Path, *overrides: str, launch: str) -> subprocess.Popen[str]:
    devices = ["--devices=2"] if launch == "devices" else []
    train = ["-m", "thunder_memsave", "train", path, *devices, *overrides]
    return ForkedPython(
        [*LAUNCHES[launch], *train],
        num_children=NUM_CHILDREN[launch],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        start_new_session=True,
    )


def end_when(
    is_time: Callable[[], bool], process: subprocess.Popen[str], end: Callable[[], None]
) -> str:
    """Wait for the process, and return its standard error."""
    try:
        while not is_time():
            assert process.poll() is None, process.communicate()[1]
            time.sleep(0.01)
        end()
        return process.communicate(timeout=120)[1]
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()


def end_at_first_checkpoint(
    process: subprocess.Popen[str], directory: Path, end: Callable[[], None]
) -> str:
    return end_when(lambda: bool(list_checkpoints(directory / "checkpoints")), process, end)


def num_steps_done(directory: Path) -> int:
    return max((int(row["step"]) for row in read_metrics(directory / "metrics.csv")), default=0)


SAYS_LAUNCH = {"alone": ("", ""), "devices": ("", " --devices=2")}
SAYS_LAUNCH["torchrun"] = ("torchrun --nproc-per-node 2 --no-python ", "")

# The signal, and the exit code if all is saved; torchrun has its own.
SIGNALS = {
    "alone": (signal.SIGINT, 130, "interrupted"),
    "devices": (signal.SIGTERM, EXIT_SAVED, "ended by SIGTERM"),
    "torchrun": (signal.SIGUSR1, 1, "ended by SIGUSR1"),
}


@pytest.mark.parametrize(
    "launch", ["alone", pytest.param("devices", marks=pytest.mark.soak), "torchrun"]
)
def test_a_signal_finishes_the_step_saves_it_and_says_how_the_run_goes_on(
    launch: str, tmp_path: Path, one_layer: Path
) -> None:
    directory = tmp_path / "run"
    path = write_long_run(tmp_path, one_layer, every_n_steps=None)
    number, exit_code, what = SIGNALS[launch]
    process = start(path, launch=launch)
    error = end_when(
        lambda: num_steps_done(directory) >= 3, process, lambda: process.send_signal(number)
    )
    assert process.returncode == exit_code
    (saved,) = list_checkpoints(directory / "checkpoints")
    assert step_of(saved) == num_steps_done(directory)
    (told,) = [line for line in error.splitlines() if line.startswith(number.name)]
    assert told.endswith(
        "the step is finished and saved, then the run ends; a second one ends it at once."
    )
    (line,) = [line for line in error.splitlines() if line.startswith(what)]
    before, after = SAYS_LAUNCH[launch]
    resume = f"{before}thunder-memsave train {directory / 'config.yaml'}{after} --resume=auto"
    start_of_line = f"{what} at step {step_of(saved)}: the last checkpoint is {saved}"
    assert line == f"{start_of_line}; go on with: {resume}"
    # torchrun prints a traceback of its own.
    assert "thunder_memsave" not in error.partition("Traceback")[2].replace(str(saved), "")
    assert launch == "torchrun" or error == f"{told}\n{line}\n"
    assert (directory / "loss.png").exists()
    if launch == "devices":
        arguments = [*resume.split()[1:], f"--train.max_steps={step_of(saved) + 1}"]
        assert started_by_name(arguments).returncode == 0


class Lives:
    """A run that is ended by signals again and again, and resumed."""

    def __init__(self, directory: Path, one_layer: Path, *, seed: int) -> None:
        self.directory, self.random = directory / "run", Random(seed)
        self.path = write_long_run(directory, one_layer)

    def live(self, *, num_steps: int, launch: str = "alone") -> float:
        """Train until a signal at some moment after a few steps: in a step, in a save or in between.

        Returns:
            Seconds from the signal to the end of the process.
        """
        number = self.random.choice([signal.SIGTERM, signal.SIGUSR1])
        delay_s = self.random.uniform(0.0, 0.3)
        first = num_steps_done(self.directory) + num_steps
        process = start(self.path, "--resume=auto", launch=launch)
        signalled_at = 0.0

        def send() -> None:
            nonlocal signalled_at
            time.sleep(delay_s)
            signalled_at = time.monotonic()
            process.send_signal(number)

        error = end_when(lambda: num_steps_done(self.directory) >= first, process, send)
        seconds = time.monotonic() - signalled_at
        assert process.returncode == EXIT_SAVED, (number, delay_s, error)
        last = step_of(list_checkpoints(self.directory / "checkpoints")[-1])
        assert last == num_steps_done(self.directory) >= first
        assert f"ended by {number.name} at step {last}: " in error
        print(f"{number.name} after {delay_s:.3f} s, at step {last}: left in {seconds:.2f} s")
        return seconds

    def check_bits(self, *, launch: str = "alone") -> None:
        """Run to the end, and once more without interruption."""
        num_steps = num_steps_done(self.directory) + 1
        other = self.directory.with_name("uninterrupted")
        for arguments in (["--resume=auto"], [f"--output_dir={other}"]):
            process = start(self.path, *arguments, f"--train.max_steps={num_steps}", launch=launch)
            error = process.communicate(timeout=600)[1]
            assert process.returncode == 0, error
        weights = [d / "adapter" / "adapter_model.safetensors" for d in (self.directory, other)]
        assert weights[0].read_bytes() == weights[1].read_bytes()


@pytest.mark.line("stop")
def test_a_run_that_is_ended_by_signals_has_the_weights_of_one_that_is_not(
    tmp_path: Path, one_layer: Path
) -> None:
    lives = Lives(tmp_path, one_layer, seed=0)
    lives.live(num_steps=2)
    lives.check_bits()


@pytest.mark.soak
@pytest.mark.line("stop")
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(("launch", "num_lives"), [("alone", 15), ("devices", 5)])
def test_twenty_signals_at_random_moments_lose_nothing(
    launch: str,
    num_lives: int,
    tmp_path: Path,
    one_layer: Path,
    record_property: Callable[[str, object], None],
) -> None:
    lives = Lives(tmp_path, one_layer, seed=1)
    seconds = [lives.live(num_steps=1 + n % 5, launch=launch) for n in range(num_lives)]
    record_property("measured", f"{num_lives} saved, left in {max(seconds):.1f} s at most")
    assert max(seconds) < LEAVING_SECONDS + STEP_SECONDS
    lives.check_bits(launch=launch)


@pytest.mark.soak
def test_a_rank_that_stops_is_noticed_in_time_and_named(tmp_path: Path, one_layer: Path) -> None:
    """The timeout is longer than one process may take to start or compile while the other waits."""
    timeout_s, directory = 60, tmp_path / "run"
    path = write_long_run(tmp_path, one_layer)
    process = start(path, f"--strategy.timeout={timeout_s}s", launch="devices")
    stopped_at = 0.0

    def stop() -> None:
        nonlocal stopped_at
        stopped_at = time.monotonic()
        os.kill(child_of(process), signal.SIGSTOP)

    error = end_at_first_checkpoint(process, directory, stop)
    # Besides, the interpreter ends, and the stopped process is.
    assert time.monotonic() - stopped_at < timeout_s + 2 + 8
    assert process.returncode == 1
    (line,) = error.splitlines()
    assert line.startswith("error: rank 0 waited for the ")
    assert (
        "rank 1 did not give up with the others: stopped, busy with something else" in line.lower()
    )
    assert " That was at step " in line
    assert line.endswith("config.yaml --devices=2 --resume=auto")


def child_of(process: subprocess.Popen[str]) -> int:
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    return int(children[0])


def started_by_name(arguments: list[str]) -> subprocess.CompletedProcess[bytes]:
    """Start the script, as a user types it; the other process is started differently."""
    script = Path(sys.executable).with_name("thunder-memsave")
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run([script, *arguments], env=environment, check=False)


def test_a_process_that_dies_ends_the_run_with_one_message(tmp_path: Path, one_layer: Path) -> None:
    directory = tmp_path / "run"
    process = start(write_long_run(tmp_path, one_layer), launch="devices")

    def kill() -> None:
        os.kill(child_of(process), signal.SIGKILL)

    error = end_at_first_checkpoint(process, directory, kill)
    assert process.returncode == 1
    (line,) = error.splitlines()
    assert line.startswith("error: process 1 of 2 was ended by SIGKILL at step ")
    assert line.endswith("config.yaml --devices=2 --resume=auto")


def test_gradients_that_are_not_finite_end_all_ranks_with_one_message(
    tmp_path: Path, one_layer: Path
) -> None:
    values = run_values(tmp_path, one_layer, train={"max_steps": 20})
    values["optimizer"]["init_args"]["lr"] = 1e6
    del values["data"]["dataset"]["init_args"]["val_fraction"]
    process = start(write_run_file(tmp_path, values), launch="torchrun")
    error = process.communicate(timeout=300)[1]
    assert process.returncode == 1
    (line,) = [line for line in error.splitlines() if line.startswith("error: step ")]
    (last,) = list_checkpoints(tmp_path / "run" / "checkpoints")[-1:]
    failed = int(last.name.removeprefix("step-")) + 1
    assert line.startswith(f"error: step {failed} was not taken: its loss is ")
    # 1e+06 falls by the schedule; which step is the first with a NaN is up to kernels.
    rate = re.search(
        r"lower the learning rate \(optimizer\.init_args\.lr; it was ([\d.e+]+) in", line
    )
    assert rate is not None
    assert 5e5 < float(rate[1]) <= 1e6
    assert line.endswith("config.yaml --optimizer.init_args.lr=LOWER --resume=auto")
    assert "finetune/" not in error.replace(line, "")


def test_ctrl_c_before_the_training_is_one_line(
    tmp_path: Path,
    one_layer: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def interrupted(*args: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("thunder_memsave.finetune.run.train.prepare", interrupted)
    path = write_long_run(tmp_path, one_layer)
    handler = signal.getsignal(signal.SIGINT)
    assert main(["train", str(path)]) == 130
    assert signal.getsignal(signal.SIGINT) is handler
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


def test_before_the_training_there_is_nothing_to_go_on_from(tmp_path: Path) -> None:
    job = cast(Job, SimpleNamespace(directory=RunDirectory(root=tmp_path / "run")))
    fabric = Fabric(accelerator="cpu", devices=1)
    told = stopped_error(KeyboardInterrupt(), fabric, job, {"step": 0}, LocalProcesses())
    assert isinstance(told, RunInterruptedError)
    assert str(told) == "interrupted before training began; start it again."
    died = "process 1 of 2 was ended by SIGKILL"
    expected = f"{died} before training began, so the run ends too; start it again."
    assert explained(died, fabric, job, {"step": 0}) == expected


def test_once_there_is_a_checkpoint_the_advice_is_what_a_resumed_run_may_change(
    tmp_path: Path,
) -> None:
    directory = RunDirectory(root=tmp_path / "run")
    job = cast(Job, SimpleNamespace(directory=directory, resume_from=None))
    zero3 = "use more processes with strategy.sharding zero3"
    others = "a smaller data.max_seq_length, or lora"
    assert _less_memory(job) == f"{zero3}, {others}"
    (directory.checkpoints / "step-00000002").mkdir(parents=True)
    assert not is_saved(job, {"step": 1})
    assert is_saved(job, {"step": 2})
    assert _less_memory(job) == f"{zero3}, or start a new run in another output_dir with {others}"


def test_a_disk_that_fails_hides_neither_the_end_nor_that_nothing_is_known_to_be_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stale(*_: object) -> None:
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))

    job = cast(
        Job, SimpleNamespace(directory=RunDirectory(root=tmp_path / "run"), resume_from=None)
    )
    fabric = Fabric(accelerator="cpu", devices=1)
    monkeypatch.setattr(Path, "exists", stale)
    monkeypatch.setattr(Path, "is_dir", stale)
    assert not is_saved(job, {"step": 2})
    assert "start a new run in another output_dir" in _less_memory(job)
    told = explained("process 1 of 2 was ended by SIGKILL", fabric, job, {"step": 2})
    assert " at step 2, so the run ends too; the last checkpoint is unknown, for " in told


def test_what_is_said_before_a_checkpoint_is_loaded_names_its_step(tmp_path: Path) -> None:
    info = CheckpointInfo(path=tmp_path / "step-00000004", world_size=1, values={"step": 4})
    assert _first_step(cast(Job, SimpleNamespace(resume_from=info))) == 4
    assert _first_step(cast(Job, SimpleNamespace(resume_from=None))) == 0


@pytest.fixture
def watched() -> Iterator[None]:
    signals.watch_signals()
    yield
    signals.stop_watching()


def test_an_error_after_a_signal_that_waits_for_the_step_is_told_as_what_it_is(
    tmp_path: Path, watched: None
) -> None:
    job = cast(Job, SimpleNamespace(directory=RunDirectory(root=tmp_path / "run")))
    fabric = Fabric(accelerator="cpu", devices=1)
    signals.finish_steps(True)
    signal.raise_signal(signal.SIGTERM)
    lost = CollectiveError("rank 0 waited for rank 1 in vain.")
    told = stopped_error(lost, fabric, job, {"step": 0}, LocalProcesses())
    assert isinstance(told, RankLostError)
    assert str(told) == f"{lost} That was before training began; start it again."
    assert stopped_error(ZeroDivisionError(), fabric, job, {"step": 0}, LocalProcesses()) is None


def test_an_error_that_a_library_made_of_a_signal_is_told_as_the_signal(
    tmp_path: Path, watched: None
) -> None:
    job = cast(Job, SimpleNamespace(directory=RunDirectory(root=tmp_path / "run")))
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGTERM)
    fabric = Fabric(accelerator="cpu", devices=1)
    told = stopped_error(RuntimeError("sorry"), fabric, job, {"step": 0}, LocalProcesses())
    assert isinstance(told, RunInterruptedError)
    assert (told.code, told.is_own) == (143, True)


def test_a_process_that_never_came_is_one_message(tmp_path: Path) -> None:
    job = cast(Job, SimpleNamespace(directory=RunDirectory(root=tmp_path / "run")))
    error = dist.DistStoreError("Timed out after 21 seconds waiting for clients. 1/2 joined.")
    fabric = Fabric(accelerator="cpu", devices=1)
    told = stopped_error(error, fabric, job, {"step": 0}, LocalProcesses())
    assert isinstance(told, RankLostError)
    assert not told.is_of_all_ranks
    expected = "not all processes joined within strategy.timeout: Timed out after 21 seconds"
    assert str(told).startswith(expected)
