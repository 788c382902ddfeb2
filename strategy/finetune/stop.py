"""Why a run ended before its last step: told in one message, not in a traceback."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable
from types import FrameType
from typing import ClassVar

_interrupted = False


class RunStoppedError(Exception):
    """A run ended before its last step; the message says at which one, and what to do."""

    exit_code: ClassVar[int]


class RunInterruptedError(RunStoppedError):
    """The user pressed Ctrl-C."""

    exit_code = 130  # 128 + SIGINT, as shells report it


class NotFiniteError(RunStoppedError):
    """A loss or a norm of gradients is infinite or not a number, on every rank."""

    exit_code = 1


class ProcessDiedError(RunStoppedError):
    """Another process of this machine ended, so that the run cannot go on."""

    exit_code = 1


def watch_interrupts() -> None:
    """Remember Ctrl-C from now on, besides the `KeyboardInterrupt` that it raises.

    That exception alone is not enough: libraries turn it into errors of their own, and Python drops
    it when it comes up in a finalizer or a callback of the garbage collector.
    """
    global _interrupted
    _interrupted = False
    # Not where the signal is ignored, as in a shell's background job.
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _interrupt)
        if not isinstance(sys.unraisablehook, _WithoutInterrupts):
            sys.unraisablehook = _WithoutInterrupts(sys.unraisablehook)


class _WithoutInterrupts:
    """Leaves out the report of a Ctrl-C that Python dropped; others go on to `report`."""

    def __init__(self, report: Callable[[sys.UnraisableHookArgs], object]) -> None:
        self._report = report

    def __call__(self, unraisable: sys.UnraisableHookArgs) -> None:
        if not isinstance(unraisable.exc_value, KeyboardInterrupt):
            self._report(unraisable)


def was_interrupted() -> bool:
    """Tell whether Ctrl-C was pressed since `watch_interrupts`."""
    return _interrupted


def _interrupt(signal_number: int, frame: FrameType | None) -> None:
    global _interrupted
    _interrupted = True
    raise KeyboardInterrupt
