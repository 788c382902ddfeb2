"""The command `thunder-memsave`: arguments in, exit code out, no traceback for a user's mistake."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from thunder_memsave.finetune.parse import load_run_config, run_parser
from thunder_memsave.settings import ConfigError, suggestion

_USAGE = """\
usage: thunder-memsave train CONFIG [--key=value ...]
       torchrun --nproc-per-node N --no-python thunder-memsave train CONFIG [--key=value ...]

Fine-tunes or pre-trains a language model as the YAML file CONFIG says; --key=value overrides one
of its keys, such as --train.max_steps=10. `thunder-memsave train --help` lists all keys.
"""

_COMMANDS = ("train",)
_USER_ERROR = 2


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code: 0, or 2 for what the user can correct."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        return _dispatch(arguments)
    except ConfigError as error:
        # Every rank finds the same mistake; one message per node is enough.
        if os.environ.get("LOCAL_RANK", "0") == "0":
            print(f"error: {error}", file=sys.stderr)
        return _USER_ERROR


def _dispatch(arguments: list[str]) -> int:
    if not arguments or arguments[0] in ("-h", "--help"):
        print(_USAGE)
        return 0 if arguments else _USER_ERROR
    command, *rest = arguments
    if command not in _COMMANDS:
        raise ConfigError(f"there is no command {command!r}{suggestion(command, _COMMANDS)}.")
    if "-h" in rest or "--help" in rest:
        run_parser().print_help()
        return 0
    return _train(rest)


def _train(arguments: list[str]) -> int:
    if not arguments or arguments[0].startswith("--"):
        raise ConfigError("train needs a run file: thunder-memsave train CONFIG [--key=value ...].")
    path, *overrides = arguments
    config = load_run_config(path, overrides)
    # After the configuration is known to be good: these imports take seconds.
    from thunder_memsave.finetune.train import train

    train(config)
    return 0
