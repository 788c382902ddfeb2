"""A forked Python command has what a new one has: arguments, streams, signals, children and exit code."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from harness.forked_python import ForkedPython

SCRIPT = """
import atexit, json, os, signal, subprocess, sys, threading, time

def fact():
    handlers = [str(signal.getsignal(n)) for n in (signal.SIGINT, signal.SIGTERM, signal.SIGCHLD)]
    here = sys.path[0], [p for p in sys.path if p.endswith("/added")], os.getcwd()
    files = sorted(os.listdir("/proc/self/fd"))[:3], threading.active_count()
    variables = os.environ.get("ADDED"), os.environ.get("HOME")
    return __name__, sys.argv, here, variables, handlers, files, os.getppid(), os.getsid(0) == os.getpid()

print(json.dumps(fact()))
print("an error", file=sys.stderr)
print(sys.stdin.read())
atexit.register(print, "at exit")
threading.Thread(target=lambda: (time.sleep(0.1), print("from a thread"))).start()
how = sys.argv[1]
if how == "status":
    sys.exit(7)
if how == "message":
    sys.exit("a message")
if how == "raises":
    raise ValueError("a reason")
if how == "killed":
    os.kill(os.getpid(), signal.SIGKILL)
if how == "starts":
    command = [sys.executable, __file__, "status"]
    child = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True)
    told = json.loads(child.communicate()[0].splitlines()[0])
    print(told[:-2], told[-2] == os.getpid(), child.returncode)
"""


def outcome(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    output, error = process.communicate("to read", timeout=60)
    return process.returncode, output, error


def new_and_forked(arguments: Sequence[object], **options: Any) -> list[tuple[int, str, str]]:
    """Return the exit code and what was printed, of a new Python and of a fork."""
    streams: dict[str, Any] = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    # pytest-xdist's workers ignore SIGINT, and their children would too.
    command = ["env", "--default-signal=INT", sys.executable, *map(str, arguments)]
    new = subprocess.Popen(command, text=True, **streams, **options)
    return [outcome(new), outcome(ForkedPython(arguments, num_children=1, **streams, **options))]


@pytest.mark.parametrize("how", ["returns", "status", "message", "raises", "killed", "starts"])
def test_a_fork_sees_prints_and_ends_as_a_new_python(how: str, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    added = os.pathsep.join([str(tmp_path / "added"), os.environ.get("PYTHONPATH", "")])
    variables = {**os.environ, "ADDED": "1", "PYTHONPATH": added}
    new, forked = new_and_forked(
        [script, how, "word"], env=variables, cwd=tmp_path, start_new_session=how == "status"
    )
    assert forked == new
    assert str(os.getpid()) in new[1]
    codes = {"status": 7, "message": 1, "raises": 1, "killed": -signal.SIGKILL}
    assert new[0] == codes.get(how, 0)
    assert ("at exit" in new[1]) == (how != "killed")


def test_a_module_is_run_as_a_new_python_does(tmp_path: Path) -> None:
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__main__.py").write_text(SCRIPT)
    new, forked = new_and_forked(["-u", "-W", "error", "-m", "package", "returns"], cwd=tmp_path)
    assert forked == new
    assert new[0] == 0


def test_a_fork_gets_signals_and_is_waited_for(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("import time; print('ready', flush=True); time.sleep(60)")
    process = ForkedPython([script], stdout=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    assert process.poll() is None
    process.send_signal(signal.SIGTERM)
    assert process.wait(10) == -signal.SIGTERM
    process.stdout.close()
