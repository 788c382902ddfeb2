"""Ctrl-C, SIGTERM and SIGUSR1 finish a step or end the run, tested in processes of their own."""

from __future__ import annotations

import signal
import subprocess
import sys
from types import SimpleNamespace
from typing import Any, cast

import pytest

from thunder_memsave.finetune.process import signals
from thunder_memsave.finetune.process.signals import _WithoutInterrupts

BEGIN = """
import ctypes, os, signal, sys, threading, time
from thunder_memsave.finetune.process import signals

def send(number):
    threading.Thread(target=os.kill, args=(os.getpid(), number), daemon=True).start()

def until(is_true):
    # The thread that handles signals has its own pace.
    for _ in range(6000):
        if is_true():
            return
        time.sleep(0.01)
    sys.exit("never came")

def reads():
    # Bytes of signals that the thread has read.
    return num_reads[0]

num_reads = [0]
read = signals._Watch._read

def counted(watch):
    value = read(watch)
    num_reads[0] += 1
    return value

signals._Watch._read = counted

told = []
say = signals._say

def kept(text):
    say(text)
    told.append(text)

signals._say = kept

def hang_and_get(number):
    # Waits in C, where Python runs no handler, as a collective does; an exception is swallowed, as libraries do.
    libc, mutex = ctypes.CDLL(None), ctypes.create_string_buffer(64)
    libc.pthread_mutex_lock(mutex)
    try:
        send(number)
        libc.pthread_mutex_lock(mutex)
    except KeyboardInterrupt:
        libc.pthread_mutex_lock(mutex)

signal.signal(signal.SIGINT, signal.default_int_handler)  # pytest-xdist's workers ignore it
signals.watch_signals()
"""

FINISHES = "the step is finished and saved, then the run ends; a second one ends it at once.\n"
AT_ONCE = "--resume=auto goes on from the last checkpoint, if there is one.\n"


def run(code: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["env", *(f"{k}={v}" for k, v in variables.items()), sys.executable, "-c", BEGIN + code],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )


def test_where_there_is_no_step_to_finish_a_signal_raises() -> None:
    code = """
for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT):
    signals.watch_signals()
    try:
        signal.raise_signal(number)
    except KeyboardInterrupt:
        print(signals.received().name)
signals.stop_watching()
print(signal.getsignal(signal.SIGTERM) is signal.SIG_DFL)
"""
    result = run(code)
    assert result.stdout == "SIGTERM\nSIGUSR1\nSIGINT\nTrue\n"
    assert result.stderr == ""


def test_where_there_is_one_it_is_noted_and_told() -> None:
    code = """
signals.finish_steps(True)
signal.raise_signal(signal.SIGUSR1)
until(lambda: told)
print(signals.received())
"""
    result = run(code)
    assert result.stderr == f"SIGUSR1: {FINISHES}"
    assert result.stdout == "10\n"
    assert run(code, LOCAL_RANK="1").stderr == ""


def test_a_second_signal_ends_a_process_that_hangs_in_a_collective() -> None:
    code = """
signals._same_signal_seconds = lambda: 0.0
signals.finish_steps(True)
signal.raise_signal(signal.SIGTERM)
until(lambda: told)
hang_and_get(signal.SIGUSR1)
"""
    result = run(code)
    assert result.returncode == 128 + signal.SIGUSR1
    assert result.stderr == f"SIGTERM: {FINISHES}ended at once by SIGUSR1; {AT_ONCE}"


def test_the_same_signal_again_at_once_is_no_second_one() -> None:
    code = """
signals._same_signal_seconds = lambda: {}
signals.finish_steps(True)
signal.raise_signal(signal.SIGTERM)
until(lambda: reads() == 1)
signal.raise_signal(signal.SIGTERM)
until(lambda: reads() == 2)
print('lives')
"""
    assert run(code.format(1000.0)).stdout == "lives\n"
    # The thread ends it, which may take a while.
    assert run(code.format(0.0) + "time.sleep(60)").returncode == 128 + signal.SIGTERM


def test_under_torchrun_a_signal_is_longer_the_same_one_which_it_hands_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    alone = signals._same_signal_seconds()
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert signals._same_signal_seconds() > 2 * alone > 0


def test_work_before_the_first_step_ends_at_once_even_where_it_does_not_listen() -> None:
    result = run("hang_and_get(signal.SIGTERM)")
    assert result.returncode == 128 + signal.SIGTERM
    assert result.stderr == f"ended at once by SIGTERM; {AT_ONCE}"


def test_a_signal_after_all_is_saved_ends_with_that_exit_code() -> None:
    code = """
signals.finish_steps(True)
signals._same_signal_seconds = lambda: 0.0
signal.raise_signal(signal.SIGTERM)
until(lambda: told)
signals.finish_steps(False)
signals.end_as(signals.EXIT_SAVED)
hang_and_get(signal.SIGTERM)
"""
    result = run(code)
    assert result.returncode == 75
    assert result.stderr == f"SIGTERM: {FINISHES}"


def test_a_first_signal_after_the_reason_of_the_end_was_told_changes_neither() -> None:
    result = run("signals.end_as(1)\nsend(signal.SIGTERM)\ntime.sleep(60)")
    assert (result.returncode, result.stderr) == (1, "")


def test_an_export_that_does_not_listen_ends_as_saved() -> None:
    for number, exit_code in ((signal.SIGUSR1, 75), (signal.SIGINT, 130)):
        code = f"""
signals._AT_ONCE_SECONDS = 0.2
signals.all_is_saved()
hang_and_get(signal.{number.name})
"""
        result = run(code)
        assert result.returncode == exit_code
        assert result.stderr == f"ended at once by {number.name}; {AT_ONCE}"


def test_a_signal_that_is_ignored_stays_ignored() -> None:
    code = """
signals.stop_watching()
signal.signal(signal.SIGINT, signal.SIG_IGN)
signals.watch_signals()
signal.raise_signal(signal.SIGINT)
print(signals.received())
"""
    assert run(code).stdout == "None\n"


def test_other_signals_with_a_handler_neither_end_the_run_nor_count_as_second_ones() -> None:
    """torch's data loaders handle SIGCHLD."""
    code = """
signal.signal(signal.SIGCHLD, lambda number, frame: None)
signals._same_signal_seconds = lambda: 0.0
signals.finish_steps(True)
signal.raise_signal(signal.SIGCHLD)
until(lambda: reads() == 1)
signal.raise_signal(signal.SIGTERM)
until(lambda: told)
signal.raise_signal(signal.SIGCHLD)
until(lambda: reads() == 3)
print(signals.received().name)
"""
    result = run(code)
    assert result.stdout == "SIGTERM\n"
    assert result.stderr == f"SIGTERM: {FINISHES}"
    assert result.returncode == 0


def test_a_forked_process_does_not_answer_for_its_parent() -> None:
    code = """
ready, is_ready = os.pipe()
child = os.fork()
if child == 0:
    os.write(is_ready, b" ")
    time.sleep(60)
    os._exit(0)
os.read(ready, 1)
os.kill(child, signal.SIGTERM)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
time.sleep(0.5)
print(signals.received())
"""
    assert run(code).stdout == f"{-signal.SIGTERM}\nNone\n"


def test_python_does_not_report_a_ctrl_c_that_it_drops() -> None:
    reported: list[object] = []
    report = _WithoutInterrupts(reported.append)
    dropped, other = (
        cast(Any, SimpleNamespace(exc_value=each)) for each in (KeyboardInterrupt(), ValueError())
    )
    report(dropped)
    report(other)
    assert reported == [other]
