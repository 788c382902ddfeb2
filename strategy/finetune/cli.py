"""The command `thunder-memsave`: arguments in, exit code out, no traceback for a user's mistake."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from thunder_memsave import __version__
from thunder_memsave.collector import leave_garbage
from thunder_memsave.errors import ThunderMemsaveError
from thunder_memsave.finetune.chat.chat_command import run_chat
from thunder_memsave.finetune.chat.options import parse_chat_options
from thunder_memsave.finetune.export.export_command import parse_export_options, run_export
from thunder_memsave.finetune.plan.plan_command import (
    PLAN_OPTIONS,
    parse_options,
    run_plan,
    run_search,
)
from thunder_memsave.finetune.process.messages import label_messages
from thunder_memsave.finetune.process.signals import (
    end_as,
    received,
    stop_watching,
    watch_signals,
)
from thunder_memsave.finetune.process.stop import (
    LESS_MEMORY,
    LESS_MEMORY_OF_A_NEW_RUN,
    OUT_OF_MEMORY,
    RunInterruptedError,
    RunStoppedError,
)
from thunder_memsave.finetune.run_file.keys.foreign_commands import suggested_command
from thunder_memsave.finetune.run_file.launch import is_first_local, is_under_torchrun
from thunder_memsave.finetune.run_file.reading.arguments import refuse_misspelt
from thunder_memsave.finetune.run_file.reading.overrides import parse_overrides
from thunder_memsave.finetune.run_file.reading.parse import RunFile, read_run_file
from thunder_memsave.finetune.run_file.reading.report import Source, report
from thunder_memsave.finetune.run_file.shipped import (
    copy_shipped,
    find_config,
    find_shipped,
    first_line,
    shipped_configs,
    shown_name,
)
from thunder_memsave.settings.problems import ConfigError, ConfigErrors

_USAGE = """\
usage: thunder-memsave train CONFIG [--verbose] [--key=value ...]
       thunder-memsave validate CONFIG [--key=value ...]
       thunder-memsave plan CONFIG [--world-size N] [--device h200] [--budget 60GiB]
                            [--json FILE] [--html FILE] [--work] [--longest] [--key=value ...]
       thunder-memsave plan CONFIG --search [AXES] [--price 2.5] [--write best.yaml] [--key=value ...]
       thunder-memsave chat RUN [--prompt TEXT] [--temperature 0.7] [--plain]
       thunder-memsave export RUN --out DIR [--merge] [--dtype float32|bfloat16]
       thunder-memsave configs list
       thunder-memsave configs show NAME
       thunder-memsave configs copy NAME [DESTINATION] [--key=value ...]
       thunder-memsave --version

  train      fine-tunes or pre-trains a language model as the YAML file CONFIG says
  validate   checks everything that train would use, and says what would run; writes nothing
  plan       says what train would hold on each device, and whether that fits; needs no GPU
  chat       answers in the terminal, with what a run has trained so far
  export     writes a run's adapter, or its whole model, from a checkpoint of any number of processes
  configs    the run files that come with the package

CONFIG is a path, or the name of a shipped run file. --key=value (also `key=value` and
`--key value`) overrides one of its keys, such as --train.max_steps=10.
`thunder-memsave train --help` lists all keys.

Several processes: --devices=N on one machine, or on each of several

       torchrun ... --no-python thunder-memsave train CONFIG [--key=value ...]

Exit codes: 0 the run is finished; 1 a loss or gradient was not finite, or something failed; 2 the
arguments, the run file or what it names cannot be used; 3 it does not fit the memory budget; 4 the device
ran out of memory nevertheless;
75 SIGTERM or SIGUSR1 came, the step is finished and all is saved: start again with --resume=auto;
130 Ctrl-C; 143 or 138 SIGTERM or SIGUSR1 ended it at once. A second signal always does.
"""

_TRAIN_HELP = """\
usage: thunder-memsave {command} CONFIG [--key=value ...]

{what}
CONFIG is a path, or the name of a shipped run file (`thunder-memsave configs list`).
These are its keys; each can be overridden on the command line, such as --train.max_steps=10.

{keys}
"""

_WHAT = {
    "train": (
        "Fine-tunes or pre-trains a language model as the YAML file CONFIG says.\n\n"
        "  --verbose         prints the whole plan of the memory, which is in plan.txt of output_dir\n"
    ),
    "validate": (
        "Checks everything that `train` would use, reports all problems together, and says what\n"
        "would run, with one sample of the data as the model sees it. Needs no GPU, and writes nothing\n"
        "but the cached tokens of data that streams."
    ),
    "plan": (
        "Says what `train` would hold on each device and whether that fits, for devices and\n"
        "processes that need not be here. Downloads nothing; reads no data.\n\n"
        "  --world-size N    processes; else what `devices` says\n"
        "  --device NAME     h100, h200 (the default), b200, a100, l40s or cpu; or any other name, with\n"
        "  --device-memory 24GiB --device-bandwidth 1.0TB --device-flops 165T\n"
        "                    of its data sheet, per second, dense and in bfloat16; these change a known one too\n"
        "  --host-memory 256GiB   memory of the host for each process, for memory.offload\n"
        "  --budget BYTES    the same as --memory.budget, such as 60GiB, 60G or 80%\n"
        "  --json FILE       the plan as JSON\n"
        "  --html FILE       a report: memory over the step, other budgets, what is recomputed\n"
        "  --work            FLOPs, bytes moved and time by kind of operation, recomputation included\n"
        "  --formats         weights and optimizer states in other formats, on up to 8 times the ranks\n"
        "  --what-if         half and twice the processes, rows at once and length, and other devices: minutes\n"
        "  --longest         search for the longest row that fits, from data.max_seq_length on: minutes\n"
        "  --search [AXES]   what to run: a table of changes that fit, the fastest first; AXES are some of\n"
        "                    micro_batch_size,sharding,frozen_weights,states,offload, by default all of these, and\n"
        "                    max_seq_length,fp8. With it --world-size 1,8 and --device h100,h200 try each, --price\n"
        "                    2.5 (of a device for an hour) adds costs, and --write FILE writes the first of the\n"
        "                    table as a run file\n"
    ),
}

_HELP = {
    "chat": """\
usage: thunder-memsave chat RUN [--prompt TEXT] [--system TEXT] [--temperature 0.7] [--max-new-tokens 512] [--plain]

Answers what you type, word by word, with transformers: what the run exported at its end, or, of a run
that goes on or was stopped, its newest checkpoint. On a GPU if there is one. Ctrl-C stops an answer,
Ctrl-D ends, /new begins another conversation.

  RUN               an output_dir, one of its checkpoints, or a directory with an adapter or a model;
                    or the address of a run or a checkpoint, such as s3://bucket/runs/first
  --prompt TEXT     one message, instead of those that are typed
  --system TEXT     the first message of each conversation
  --temperature T   0 takes the most probable token each time; else what the model's own generation_config says
  --max-new-tokens  of an answer
  --plain           continue the text, without the chat template; so does a run that was trained on texts
                    or prompts
  --model.name_or_path=PATH
                    where the base model is now
""",
    "export": """\
usage: thunder-memsave export RUN --out DIR [--merge] [--dtype float32|bfloat16] [--max-file-size 5GB]

Writes what a run trained, from its newest checkpoint: the adapter in PEFT's format, or, of a run without
one, the whole model as transformers loads it. Needs no GPU, and the memory of one layer at a time; the
logits are compared with those of the run's own model before DIR has its name.

  RUN               an output_dir, or one of its checkpoints (runs/first/checkpoints/step-00000100)
  --out DIR         where to; must not hold anything yet
  --merge           the whole model, with the adapter merged into it
  --dtype FORMAT    of a whole model's weights; else model.dtype with --merge, model.trainable_dtype without
  --max-file-size   of each of its files
  --model.name_or_path=PATH, --model.revision=NAME
                    where the base model is now
""",
    "configs": """\
usage: thunder-memsave configs list                      names, and what each is for
       thunder-memsave configs show NAME                 the text of one
       thunder-memsave configs copy NAME [DESTINATION] [--key=value ...]
                                                         a copy, with keys changed; overwrites nothing

The run files that come with the package; `thunder-memsave train NAME` runs one as it is.
""",
}

# torchrun ends all ranks as soon as one has ended with an error.
_SECONDS_TO_REPORT = 15.0

_USER_ERROR = 2

_VERBOSE = "--verbose"
_OPTIONS_OF = {"train": (_VERBOSE,), "plan": PLAN_OPTIONS}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code.

    Returns:
        0, or 2 for what the user can correct before training, 3 for a run that does not fit its memory
        budget, 1 for non-finite losses or gradients and for what cannot be compiled or saved,
        75 for SIGTERM and SIGUSR1 if all is saved, and else 128 plus the signal's number.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    label_messages()
    if argv is None and arguments[:1] == ["plan"]:
        leave_garbage()
    try:
        return _main(arguments)
    finally:
        if argv is not None:  # the process goes on
            stop_watching()


def _main(arguments: list[str]) -> int:
    try:
        code = _dispatch(arguments)
        sys.stdout.flush()
    except BrokenPipeError:
        return _reader_left()
    except ConfigError as error:
        return _refused(report(error, Source()))
    except RunStoppedError as stop:
        return _stopped(stop)
    except KeyboardInterrupt:
        return _stopped(_ended_at_once(is_run=arguments[:1] == ["train"]))
    except Exception as error:
        told = _told(error)
        if told is None:
            raise
        code = _failed(*told)
        _let_failed_rank_end(error)
    return code


def _dispatch(arguments: list[str]) -> int:
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(_USAGE, end="")
        return 0 if arguments else _USER_ERROR
    command, *rest = arguments
    if command == "--version":
        print(f"thunder-memsave {__version__}")
        return 0
    if command not in _COMMANDS:
        raise ConfigError(f"there is no command {command!r}{suggested_command(command, _COMMANDS)}")
    if "-h" in rest or "--help" in rest:
        print(_help(command), end="")
        return 0
    return _COMMANDS[command](rest)


def _help(command: str) -> str:
    if command in _HELP:
        return _HELP[command]
    from thunder_memsave.finetune.run_file.keys.key_help import help_text

    return _TRAIN_HELP.format(command=command, what=_WHAT[command], keys=help_text())


def _train(arguments: list[str]) -> int:
    rest = [word for word in arguments if word != _VERBOSE]
    prints_plan = len(rest) < len(arguments)
    return _with_run_file("train", rest, lambda run_file: _run(run_file, prints_plan=prints_plan))


def _plan(arguments: list[str]) -> int:
    options, rest = parse_options(arguments)

    def action(run_file: RunFile) -> int:
        if run_file.problems:
            raise ConfigErrors(run_file.problems)
        searches = options.search is not None
        return run_search(run_file, options) if searches else run_plan(run_file.config, options)

    return _with_run_file("plan", rest, action)


def _configs(arguments: list[str]) -> int:
    if not arguments:
        print(_HELP["configs"], end="")
        return _USER_ERROR
    match arguments:
        case ["list"]:
            _list_configs()
        case ["show", name]:
            print(find_shipped(name).read_text(encoding="utf-8"), end="")
        case ["copy", name, *rest]:
            destination = [] if not rest or rest[0].startswith("-") else rest[:1]
            overrides = parse_overrides(rest[len(destination) :])
            print(copy_shipped(name, *destination, overrides=overrides))
        case _:
            raise ConfigError(
                f"'configs {' '.join(arguments)}' is not a command.\n{_HELP['configs'].rstrip()}"
            )
    return 0


_COMMANDS: dict[str, Callable[[list[str]], int]] = {
    "train": _train,
    "validate": lambda arguments: _with_run_file("validate", arguments, _describe),
    "plan": _plan,
    "chat": lambda arguments: run_chat(parse_chat_options(arguments)),
    "export": lambda arguments: run_export(parse_export_options(arguments)),
    "configs": _configs,
}


def _list_configs() -> None:
    shipped = shipped_configs()
    width = max(map(len, shipped))
    for name, path in shipped.items():
        print(f"{name:<{width}}  {first_line(path)}")


def _with_run_file(
    command: str, arguments: list[str], action: Callable[[RunFile], int | None]
) -> int:
    """Read the run file that the arguments name, and run `action` on it."""
    usage = f"thunder-memsave {command} CONFIG [--key=value ...]"
    if arguments[:1] in (["--config"], ["-c"]):
        raise ConfigError(f"the run file has no option before it; write {usage}.")
    if not arguments or arguments[0].startswith("-"):
        raise ConfigError(f"{command} needs a run file first: {usage}.")
    name, *overrides = arguments
    refuse_misspelt(overrides, _OPTIONS_OF.get(command, ()), command=command)
    path = find_config(name)
    source = Source(path=path, name=shown_name(path))
    try:
        run_file = read_run_file(path, overrides)
        source = replace(source, lines=run_file.lines, overrides=run_file.overrides)
        return action(run_file) or 0
    except ConfigError as error:
        return _refused(report(error, source))


def _run(run_file: RunFile, *, prints_plan: bool) -> None:
    watch_signals()
    # These imports take seconds; mistakes in the arguments are found first.
    from thunder_memsave.finetune.run.job import prepare
    from thunder_memsave.finetune.run.train import train
    from thunder_memsave.finetune.run_file.reading.problems import Problems

    if run_file.problems:
        # `prepare` finds the other problems, and raises, so that nothing starts.
        prepare(run_file.config, Problems(run_file.problems))
    train(run_file.config, prints_plan=prints_plan)


def _describe(run_file: RunFile) -> None:
    from thunder_memsave.finetune.run.describe_job import describe_job
    from thunder_memsave.finetune.run.job import prepare
    from thunder_memsave.finetune.run.resume import base_files
    from thunder_memsave.finetune.run_file.reading.problems import Problems

    job = prepare(run_file.config, Problems(run_file.problems))
    base_files(job)  # which compares them with the checkpoint's
    if is_first_local():
        print(f"{shown_name(run_file.path)} is usable.\n\n{describe_job(job)}")


def _refused(message: str) -> int:
    # Every rank finds the same mistake; one message per machine is enough.
    _print_on("LOCAL_RANK", message)
    return _USER_ERROR


def _failed(message: str, code: int) -> int:
    """Print an error; ranks other than the first print one line, because it may have happened only there."""
    if is_first_local():
        print(f"error: {message}", file=sys.stderr, flush=True)
    else:
        rank, first_line = os.environ.get("RANK", "?"), message.partition("\n")[0]
        print(f"error on rank {rank}: {first_line}", file=sys.stderr, flush=True)
    return code


def _let_failed_rank_end(error: Exception) -> None:
    """Wait, on a rank that only heard of the error, until the rank that failed has reported and cleaned up."""
    from thunder_memsave.distributed.agreement import OtherRankError

    if isinstance(error, OtherRankError) and is_under_torchrun():
        time.sleep(_SECONDS_TO_REPORT)


def _stopped(stop: RunStoppedError) -> int:
    end_as(stop.code)
    if not stop.is_of_all_ranks:
        return _failed(str(stop), stop.code)
    if isinstance(stop, RunInterruptedError):
        # If all ranks got the signal, torchrun waits for them.
        _print_on("RANK", str(stop), waits=not stop.is_own)
    else:
        _print_on("RANK", f"error: {stop}")
    return stop.code


def _ended_at_once(*, is_run: bool) -> RunInterruptedError:
    number = received() or signal.SIGINT
    what = "interrupted" if number == signal.SIGINT else f"ended by {number.name}"
    when = " before training began; start it again." if is_run else "."
    return RunInterruptedError(f"{what}{when}", code=128 + number)


def _reader_left() -> int:
    """End quietly when the reader of a pipe, such as `head`, has closed it."""
    # The interpreter flushes again when it ends, and must not find the closed pipe.
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 128 + signal.SIGPIPE


def _print_on(variable: str, message: str, *, waits: bool = True) -> None:
    """Print if this variable of torchrun is 0 or unset; other processes wait, so that the first can print."""
    if os.environ.get(variable, "0") == "0":
        print(message, file=sys.stderr, flush=True)
    elif waits and is_under_torchrun():
        time.sleep(_SECONDS_TO_REPORT)


def _told(error: Exception) -> tuple[str, int] | None:
    """Return the message for the user and the exit code; None if a traceback says more."""
    from thunder_memsave.compat.foreign_messages import says_out_of_memory

    if isinstance(error, ThunderMemsaveError):
        return None if error.code is None else (str(error), error.code)
    if (said := says_out_of_memory(error)) is not None:
        message = (
            f"{said}. To need less, {LESS_MEMORY}, a smaller train.micro_batch_size "
            f"(train.global_batch_size stays), {LESS_MEMORY_OF_A_NEW_RUN}."
        )
        return message, OUT_OF_MEMORY
    return None
