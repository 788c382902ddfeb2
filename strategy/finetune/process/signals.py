"""Handles Ctrl-C, SIGTERM and SIGUSR1 in a run: it finishes and saves its step, or ends at once."""

from __future__ import annotations

import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

from thunder_memsave.finetune.run_file.launch import is_first_local, is_under_torchrun

EXIT_SAVED = 75
"""Exit code after SIGTERM or SIGUSR1 if all is saved: start again. EX_TEMPFAIL of sysexits.h."""

_WATCHED = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
_POLL_SECONDS = 0.1
_AT_ONCE_SECONDS = 4.0
"""Longest time that a library, or C++ code waiting for another machine, may keep a run from ending at once."""


def _same_signal_seconds() -> float:
    """Return the seconds after a signal within which another one counts as the same.

    `timeout` and some schedulers signal both a process and its group, and torchrun forwards what its processes got too.
    """
    return 3.0 if is_under_torchrun() else 0.5


class _Watch:
    """Receives signals after one call of `watch_signals`.

    Python's handler runs only between two bytecodes of the main thread, so not while that thread waits in a
    collective. Therefore a thread gets each signal through a pipe as well, and ends the process when that is due.
    """

    def __init__(self) -> None:
        self.received: signal.Signals | None = None
        self.is_deferring = False
        self.exit_code: int | None = None
        self.is_saved = False
        self.is_deferred = False
        self._pipe = os.pipe()
        self._before: dict[signal.Signals, Any] = {}

    def start(self) -> None:
        for number in _WATCHED:
            # Not if the signal is ignored, as in a shell's background job.
            if signal.getsignal(number) in (signal.SIG_DFL, signal.default_int_handler):
                self._before[number] = signal.signal(number, self._handle)
        os.set_blocking(self._pipe[1], False)
        signal.set_wakeup_fd(self._pipe[1], warn_on_full_buffer=False)
        threading.Thread(target=self._attend, daemon=True).start()

    def stop(self) -> None:
        signal.set_wakeup_fd(-1)
        self.restore()
        os.close(self._pipe[1])  # the thread reads end-of-file

    def restore(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.received is None:
            self.received = signal.Signals(number)
            self.is_deferred = self.is_deferring
            if self.exit_code is not None:  # the run is ending already
                raise SystemExit(self.exit_code)
            if not self.is_deferring:
                raise KeyboardInterrupt

    def _attend(self) -> None:
        first = self._read()
        while first is not None and first not in self._before:
            first = self._read()
        if first is not None:
            self._attend_to(signal.Signals(first))
        os.close(self._pipe[0])

    def _read(self) -> int | None:
        """Read a signal that has any Python handler, such as the SIGCHLD of data loaders; None at end-of-file."""
        read = os.read(self._pipe[0], 1)
        return read[0] if read else None

    def _attend_to(self, first: signal.Signals) -> None:
        start, is_told = time.monotonic(), False
        while True:
            if not is_told and (self.is_deferred or self.is_deferring):
                is_told = True
                _say(
                    f"{first.name}: the step is finished and saved, then the run ends; a second one ends it at once."
                )
            waited = time.monotonic() - start
            if select.select([self._pipe[0]], [], [], _POLL_SECONDS)[0]:
                again = self._read()
                if again is None:
                    return
                if again in self._before and waited > _same_signal_seconds():
                    self._end(signal.Signals(again))
            # Without a step to finish, the exception should have ended the process.
            if not is_told and waited > _AT_ONCE_SECONDS:
                self._end(first)

    def _end(self, number: signal.Signals) -> None:
        if self.exit_code is None:
            _say(
                f"ended at once by {number.name}; --resume=auto goes on from the last checkpoint, if there is one."
            )
        at_once = EXIT_SAVED if self.is_saved and number != signal.SIGINT else 128 + number
        os._exit(at_once if self.exit_code is None else self.exit_code)


_watch: _Watch | None = None


def watch_signals() -> None:
    """Handle the signals from now on; at first each ends the run at once, by `KeyboardInterrupt`.

    That exception alone is not enough: libraries turn it into errors of their own, and Python drops
    it when it is raised in a finalizer or a callback of the garbage collector. See `received`.
    """
    global _watch
    stop_watching()
    _watch = _Watch()
    _watch.start()
    if not isinstance(sys.unraisablehook, _WithoutInterrupts):
        sys.unraisablehook = _WithoutInterrupts(sys.unraisablehook)


def stop_watching() -> None:
    """Restore the signal handlers from before `watch_signals`."""
    global _watch
    if _watch is not None:
        _watch.stop()
        _watch = None


def received() -> signal.Signals | None:
    """Return the first signal since `watch_signals`, if one came."""
    return None if _watch is None else _watch.received


def raised() -> bool:
    """Tell whether that signal raised `KeyboardInterrupt`, which other code may have turned into another error."""
    return _watch is not None and _watch.received is not None and not _watch.is_deferred


def finish_steps(is_deferring: bool) -> None:
    """Set whether signals wait for a step to be finished and saved; otherwise they end the run at once."""
    if _watch is not None:
        _watch.is_deferring = is_deferring


def all_is_saved() -> None:
    """Let the exit code of signals that end the run at once say that the last step is saved."""
    if _watch is not None:
        _watch.is_saved = True


def end_as(exit_code: int) -> None:
    """Let a further signal end the process with this code and no message, as the run is ending already."""
    if _watch is not None:
        _watch.exit_code = exit_code


def _say(text: str) -> None:
    # Not `print`: the main thread may be inside one.
    if is_first_local():
        os.write(2, f"{text}\n".encode())


def _forget_in_child() -> None:
    """Stop handling signals in a forked process, which would share its parent's pipe."""
    global _watch
    if _watch is not None:
        signal.set_wakeup_fd(-1)
        _watch.restore()
        _watch = None


os.register_at_fork(after_in_child=_forget_in_child)


class _WithoutInterrupts:
    """Hides the report of a Ctrl-C that Python dropped; others are passed to `report`."""

    def __init__(self, report: Callable[[sys.UnraisableHookArgs], object]) -> None:
        self._report = report

    def __call__(self, unraisable: sys.UnraisableHookArgs) -> None:
        if not isinstance(unraisable.exc_value, KeyboardInterrupt):
            self._report(unraisable)
