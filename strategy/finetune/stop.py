"""Why a run ended before its last step: told in one message, not in a traceback."""

from __future__ import annotations

from typing import ClassVar


class RunStoppedError(Exception):
    """A run ended before its last step; the message says at which one, and what to do."""

    exit_code: ClassVar[int]


class RunInterruptedError(RunStoppedError):
    """The user pressed Ctrl-C."""

    exit_code = 130  # 128 + SIGINT, as shells report it


class NotFiniteError(RunStoppedError):
    """A loss or a norm of gradients is infinite or not a number, on every rank."""

    exit_code = 1
