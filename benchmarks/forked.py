"""Runs a function of each name in a process of its own, several side by side, with limits of time and memory."""

from __future__ import annotations

import json
import os
import resource
import select
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

LIMIT_S = 600.0
MEMORY_BYTES = 10 * 2**30

Fields = dict[str, Any]


class EndedWithoutError(Exception):
    """A process ended without a result; the message says how."""


class Forked:
    """A process that computes what JSON can hold, and the pipe that it comes through."""

    def __init__(self, run: Callable[[], Fields], *, waits: bool = False) -> None:
        self.pipe, write = os.pipe()
        signalled, self._go = os.pipe()
        self.start = time.monotonic()
        self.pid = os.fork()
        if self.pid:
            os.close(write)
            os.close(signalled)
            if not waits:
                self.go_on(True)
            return
        os.close(self.pipe)
        os.close(self._go)
        if not waits:
            os.setsid()  # what it forks ends with it
        if os.read(signalled, 1) == b"y":
            _run_quietly(run, write)
        os._exit(0)

    def go_on(self, goes_on: bool) -> None:
        """Let the process begin, or end."""
        os.write(self._go, b"y" if goes_on else b"n")
        os.close(self._go)

    def result(self) -> Fields:
        """Wait for the result.

        Raises:
            EndedWithoutError: there is none.
        """
        with os.fdopen(self.pipe) as pipe:
            text = pipe.read()
        _, status = os.waitpid(self.pid, 0)
        if not text:
            raise EndedWithoutError(f"its process ended with {os.waitstatus_to_exitcode(status)}")
        fields: Fields = json.loads(text)
        return fields


def _run_quietly(run: Callable[[], Fields], write: int) -> None:
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    silent = os.open(os.devnull, os.O_WRONLY)
    os.dup2(silent, 1)
    os.dup2(silent, 2)
    with os.fdopen(write, "w") as pipe:
        pipe.write(json.dumps(run()))


def results(
    names: Sequence[str],
    run: Callable[[str], Fields],
    *,
    workers: int,
    without: Callable[[str, bool, str, float], Fields],
) -> Iterator[Fields]:
    """Yield the result of each name, as they end.

    Args:
        names: What to run.
        run: Is called in a process of its own.
        workers: Number of processes side by side.
        without: Makes a result where there is none, of the name, whether its time was over, the reason and the seconds.
    """
    waiting = list(names)
    running: dict[int, tuple[str, Forked]] = {}
    while waiting or running:
        while waiting and len(running) < workers:
            name = waiting.pop(0)
            forked = Forked(partial(run, name))
            running[forked.pipe] = name, forked
        ready, _, _ = select.select(list(running), [], [], 1.0)
        for pipe, (name, forked) in list(running.items()):
            seconds = time.monotonic() - forked.start
            if is_late := pipe not in ready and seconds > LIMIT_S:
                os.killpg(forked.pid, signal.SIGKILL)
            if pipe in ready or is_late:
                del running[pipe]
                try:
                    yield forked.result()
                except EndedWithoutError as error:
                    reason = f"it had not ended after {LIMIT_S:.0f} s" if is_late else str(error)
                    yield without(name, is_late, reason, round(seconds, 1))
