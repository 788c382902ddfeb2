"""Runs the fine-tuning command in this process."""

from __future__ import annotations

import contextlib
import io
import signal

from thunder_memsave.finetune.cli import main

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)


def run_command(*arguments: str) -> str:
    """Run a command that succeeds, and return what it printed; its handlers of signals do not outlive it."""
    handlers = {number: signal.getsignal(number) for number in _SIGNALS}
    output = io.StringIO()
    try:
        with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
            assert main(list(arguments)) == 0, output.getvalue()
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    return output.getvalue()
