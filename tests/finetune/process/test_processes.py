"""The other processes of a run, without torchrun."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from harness.forked_python import ForkedPython
from harness.language_model import run_values, write_run_file
from thunder_memsave.finetune.process.processes import LocalProcesses, local_processes
from thunder_memsave.finetune.run_file.config import RunConfig


def child(code: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", code])


def test_a_process_that_ended_with_an_error_is_described() -> None:
    processes = LocalProcesses([child("pass"), child("raise SystemExit(3)")])
    assert processes.died(wait_seconds=30) == "process 2 of 3 ended with exit code 3"
    processes.join()


def test_a_process_that_was_killed_is_described_by_its_signal() -> None:
    sleeper = child("import time; time.sleep(60)")
    processes = LocalProcesses([sleeper])
    assert processes.died() is None
    sleeper.kill()
    assert processes.died(wait_seconds=30) == "process 1 of 2 was ended by SIGKILL"


def test_processes_are_ended_by_force_if_need_be() -> None:
    code = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(60)"
    processes = [child("import time; time.sleep(60)"), child(code)]
    LocalProcesses(processes).end()
    assert all(process.returncode is not None for process in processes)


HANGS = """
import subprocess, sys, time
from thunder_memsave.finetune.process.processes import LocalProcesses
others = LocalProcesses([subprocess.Popen([sys.executable, "-c", "raise SystemExit(7)"])])
others.watch(lambda how: f"{how}, so what now", grace_seconds=0.1)
time.sleep(60)
"""


def test_a_process_that_hangs_because_another_died_ends_with_the_message() -> None:
    start = time.monotonic()
    result = subprocess.run([sys.executable, "-c", HANGS], capture_output=True, check=False)
    assert result.returncode == 1
    assert result.stderr == b"error: process 1 of 2 ended with exit code 7, so what now\n"
    assert time.monotonic() - start < 50


def test_one_process_needs_no_others(monkeypatch: pytest.MonkeyPatch) -> None:
    before = dict(os.environ)
    with local_processes(RunConfig(devices=1)) as processes:
        assert processes.died(wait_seconds=60) is None  # without waiting
        assert dict(os.environ) == before


def test_under_torchrun_none_is_started(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    with local_processes(RunConfig(devices=2)) as processes:
        assert processes._children == ()


def test_a_mistake_in_the_data_is_told_once_by_several_processes(
    tmp_path: Path, model_directory: Path
) -> None:
    path = write_run_file(tmp_path, run_values(tmp_path, model_directory))
    (tmp_path / "rows.jsonl").write_text('{"prompt": "one"}\n')
    command = ["-m", "thunder_memsave", "train", path, "--devices=2"]
    streams = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE}
    process = ForkedPython(command, num_children=1, **streams)
    error = process.communicate()[1]
    assert process.returncode == 2
    assert error.count("rows.jsonl") == 1
    assert "Traceback" not in error
    assert not (tmp_path / "run").exists()


def test_a_process_ends_when_its_starter_is_killed(tmp_path: Path) -> None:
    """A process ends with its starter, even one that waits in a collective."""
    code = f"""
import os, subprocess, sys, time
waiting = '''
import time
from thunder_memsave.finetune.run_file.config import RunConfig
from thunder_memsave.finetune.process.processes import local_processes
with local_processes(RunConfig(devices=2)):
    print("waiting", flush=True)
    time.sleep(60)
'''
os.environ["THUNDER_MEMSAVE_STARTED_BY"] = str(os.getpid())
child = subprocess.Popen([sys.executable, "-c", waiting])
open({str(tmp_path / "pid")!r}, "w").write(str(child.pid))
time.sleep(60)
"""
    starter = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    assert starter.stdout is not None
    assert starter.stdout.readline() == b"waiting\n"
    starter.send_signal(signal.SIGKILL)
    starter.wait()
    starter.stdout.close()
    pid = int((tmp_path / "pid").read_text())
    deadline = time.monotonic() + 30
    while is_running(pid):
        assert time.monotonic() < deadline
        time.sleep(0.1)


def is_running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"
