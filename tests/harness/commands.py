"""Runs the fine-tuning command in this process."""

from __future__ import annotations

import contextlib
import io
import signal

from thunder_memsave.finetune.cli import main

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)


def run_command(*arguments: str, code: int = 0) -> str:
    """Run a command that ends with a code, and return what it printed; its handlers of signals do not outlive it."""
    handlers = {number: signal.getsignal(number) for number in _SIGNALS}
    output = io.StringIO()
    try:
        with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
            ended = main(list(arguments))
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    assert ended == code, output.getvalue()
    return output.getvalue()
