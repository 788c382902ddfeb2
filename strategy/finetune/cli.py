"""The command `thunder-memsave`: arguments in, exit code out, no traceback for a user's mistake."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence

from thunder_memsave.finetune.parse import load_run_config, run_parser
from thunder_memsave.finetune.stop import RunInterruptedError, RunStoppedError, watch_interrupts
from thunder_memsave.settings import ConfigError, suggestion

_USAGE = """\
usage: thunder-memsave train CONFIG [--key=value ...]
       torchrun --nproc-per-node N --no-python thunder-memsave train CONFIG [--key=value ...]

Fine-tunes or pre-trains a language model as the YAML file CONFIG says; --key=value overrides one
of its keys, such as --train.max_steps=10. `thunder-memsave train --help` lists all keys.

Exit codes: 0 the run is finished; 1 a loss or gradient was not finite, or something failed; 2 the
arguments, the run file or what it names cannot be used; 130 Ctrl-C.
"""

_COMMANDS = ("train",)
_USER_ERROR = 2


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code.

    Returns:
        0, or 2 for what the user can correct before training, 1 for a loss or gradients that are
        not finite, 130 for Ctrl-C.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        return _dispatch(arguments)
    except ConfigError as error:
        # Every rank finds the same mistake; one message per node is enough.
        _print_on("LOCAL_RANK", f"error: {error}")
        return _USER_ERROR
    except RunInterruptedError as stop:
        return _stopped(stop, str(stop))
    except RunStoppedError as stop:
        return _stopped(stop, f"error: {stop}")
    except KeyboardInterrupt:
        return _stopped(RunInterruptedError(), "interrupted before training began; start it again.")


def _stopped(stop: RunStoppedError, message: str) -> int:
    # A second Ctrl-C, while the interpreter cleans up, ends the process without a traceback.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    _print_on("RANK", message)
    return stop.exit_code


def _print_on(variable: str, message: str) -> None:
    """Print where this variable of torchrun is 0, or not set."""
    if os.environ.get(variable, "0") == "0":
        print(message, file=sys.stderr, flush=True)


def _dispatch(arguments: list[str]) -> int:
    if not arguments or arguments[0] in ("-h", "--help"):
        print(_USAGE)
        return 0 if arguments else _USER_ERROR
    command, *rest = arguments
    if command not in _COMMANDS:
        raise ConfigError(f"there is no command {command!r}{suggestion(command, _COMMANDS)}")
    if "-h" in rest or "--help" in rest:
        run_parser().print_help()
        return 0
    return _train(rest)


def _train(arguments: list[str]) -> int:
    if not arguments or arguments[0].startswith("--"):
        raise ConfigError("train needs a run file: thunder-memsave train CONFIG [--key=value ...].")
    path, *overrides = arguments
    config = load_run_config(path, overrides)
    watch_interrupts()
    # After the configuration is known to be good: these imports take seconds.
    from thunder_memsave.finetune.train import train

    train(config)
    return 0
