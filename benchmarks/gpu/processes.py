"""Runs checks in processes of their own: a hang, a crash or a lost CUDA context ends one check, not the others."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import asdict
from itertools import groupby
from typing import Any

from gpu.checks import NEEDS_CUDA, Check, Outcome, Target, outcome_of

REPORT_TO = "GPU_CHECKS_REPORT_TO"
"""The variable that has the number of the pipe to which a process writes what it begins and what it ended."""
START_S = 90.0
"""Seconds in which a process must begin its first check: imports."""
_LOST_CONTEXT = 3
_NO_TIME = "the time of this part was over before it ended"


def run_here(checks: Sequence[Check], target: Target, *, report_to: str) -> None:
    """Run checks in this process, and write two lines of JSON for each to a pipe."""
    with os.fdopen(int(os.environ[report_to]), "w") as pipe:
        for check in checks:
            print(json.dumps({"began": check.name}), file=pipe, flush=True)
            outcome = outcome_of(check, target)
            print(json.dumps(asdict(outcome)), file=pipe, flush=True)
            if target.is_cuda and not _has_context():
                sys.exit(_LOST_CONTEXT)


def run_all(
    part: str, checks: Sequence[Check], target: Target, *, seconds: float, workers: int = 1
) -> list[Outcome]:
    """Run all checks, so many groups side by side, for so many seconds. Every check has an outcome.

    What must have the device to itself comes last. On a CPU all are one group: an error in a kernel is no more than
    an exception there.
    """
    end = _End(seconds)
    groups = [
        list(g)
        for _, g in groupby(checks, key=lambda c: (c.group or c.name) if target.is_cuda else "")
    ]
    ended = {check.name: threading.Event() for check in checks}
    outcomes: list[Outcome] = []

    def run(group: list[Check]) -> None:
        for check in group:
            if check.after in ended and check.after not in (c.name for c in group):
                ended[check.after].wait()
        for outcome in _group(part, group, target, end=end):
            print(f"{outcome.state:8} {outcome.name}: {outcome.reason}", flush=True)
            outcomes.append(outcome)
            ended[outcome.name].set()

    alone = [g for g in groups if workers == 1 or g[0].alone]
    with ThreadPoolExecutor(workers) as pool, end.now_if_interrupted():
        for future in [pool.submit(run, g) for g in groups if g not in alone]:
            future.result()
    for group in alone:
        run(group)
    names = [c.name for c in checks]
    return sorted(outcomes, key=lambda o: names.index(o.name))


class _End:
    """The moment at which checks end; an interrupt brings it forward."""

    def __init__(self, seconds: float) -> None:
        self._at = time.monotonic() + seconds
        self.running: set[_Process] = set()

    @property
    def left_s(self) -> float:
        return max(0.0, self._at - time.monotonic())

    @property
    def is_over(self) -> bool:
        return self.left_s == 0.0

    @contextmanager
    def now_if_interrupted(self) -> Iterator[None]:
        try:
            yield
        except BaseException:
            self._at = 0.0
            for process in tuple(self.running):
                process.kill()
            raise


def _group(part: str, checks: list[Check], target: Target, *, end: _End) -> Iterable[Outcome]:
    """Yield the outcomes of a group; a new process goes on after a check that ended the last one."""
    waiting = list(checks)
    for check in checks:
        if check.needs_cuda and not target.is_cuda:
            yield Outcome(name=check.name, state="not run", reason=NEEDS_CUDA)
            waiting.remove(check)
    while waiting:
        if end.is_over:
            for check in waiting:
                yield Outcome(name=check.name, state="not run", reason=_NO_TIME)
            return
        for outcome in _Process(part, waiting, target).outcomes(end=end):
            waiting = [c for c in waiting if c.name != outcome.name]
            yield outcome


class _Process:
    """A process that runs checks one after the other."""

    def __init__(self, part: str, checks: Sequence[Check], target: Target) -> None:
        self._checks = {c.name: c for c in checks}
        read, write = os.pipe()
        self._lines = _Lines(read)
        names = list(self._checks)
        command = [sys.executable, "-W", "ignore", "-m", "gpu", part, "--device", target.device]
        self._process = subprocess.Popen(
            [*command, "--here", *names],
            env={**os.environ, **checks[0].environment, REPORT_TO: str(write)},
            pass_fds=[write],
            start_new_session=True,  # what it starts ends with it
        )
        os.close(write)

    def outcomes(self, *, end: _End) -> Iterable[Outcome]:
        """Yield an outcome for each check that began; at least one."""
        running, limit = next(iter(self._checks)), START_S
        began = False
        end.running.add(self)
        try:
            while (line := self._lines.next(min(limit, end.left_s))) is not None:
                if "began" in line:
                    running, began = line["began"], True
                    limit = self._checks[running].limit_s
                else:
                    yield Outcome(**line)
                    running, began = _after(running, list(self._checks)), False
                    limit = START_S
                    if end.is_over:
                        return
        finally:
            was_running = self._process.poll() is None and not self._lines.is_closed
            end.running.discard(self)
            self._end()
        if running and (began or running == next(iter(self._checks))):
            if was_running and end.is_over:
                yield Outcome(name=running, state="not run", reason=_NO_TIME)
                return
            text = _hung(limit) if was_running else f"its process {_how(self._process.returncode)}"
            yield Outcome(name=running, state="failed", reason=text)

    def kill(self) -> None:
        """End the process and what it started, at once."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)

    def _end(self) -> None:
        """End the process and what it started."""
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=5 if self._lines.is_closed else 0)
        self.kill()
        self._process.wait()
        self._lines.close()


class _Lines:
    """Lines of JSON from a pipe."""

    def __init__(self, fd: int) -> None:
        self._fd, self._rest = fd, b""
        self.is_closed = False

    def next(self, seconds: float) -> dict[str, Any] | None:
        """Return the next line; None if none came within so many seconds, or the pipe was closed."""
        end = time.monotonic() + seconds
        while b"\n" not in self._rest:
            ready, _, _ = select.select([self._fd], [], [], max(0.0, end - time.monotonic()))
            read = os.read(self._fd, 2**16) if ready else b""
            self.is_closed = bool(ready) and not read
            if not read:
                return None
            self._rest += read
        line, _, self._rest = self._rest.partition(b"\n")
        return dict(json.loads(line))

    def close(self) -> None:
        os.close(self._fd)


def _after(name: str, names: Sequence[str]) -> str:
    position = names.index(name) + 1
    return names[position] if position < len(names) else ""


def _hung(limit_s: float) -> str:
    return f"it had not ended after {limit_s:.0f} s"


def _how(code: int) -> str:
    if code < 0:
        return f"was ended by {signal.Signals(-code).name}"
    return f"ended with exit code {code}"


def _has_context() -> bool:
    """Return whether the device still answers: an error inside a kernel ends the whole CUDA context."""
    import torch

    try:
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
    except RuntimeError:
        return False
    return True
