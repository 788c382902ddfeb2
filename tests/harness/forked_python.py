"""Starts Python commands as forks of a process that has imported what they need.

A Python of its own spends 8 s on imports and 2 s on forgetting them. A fork has the same arguments, environment,
directory, import path, standard streams, handling of signals, exit code, and parent: the process that started it. It
differs in what it imported before, in `/proc`, which shows the process that it was forked from, and in its end, which
runs exit handlers but does not take modules apart; and all forks hash strings alike. Tests of a start use `subprocess`.

What a fork starts with `sys.executable` is a fork too, as long as it has any left of those that it made when it began.
"""

from __future__ import annotations

import atexit
import ctypes
import inspect
import multiprocessing
import os
import pickle
import runpy
import signal
import socket
import subprocess
import sys
import threading
import traceback
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from io import FileIO, TextIOWrapper
from multiprocessing import forkserver, resource_tracker
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

import harness.distributed  # noqa: F401  # says what the server imports

_PR_SET_CHILD_SUBREAPER = 36
_LONGEST_JOB = 2**20
"""Most bytes of a pickled job; an environment is the longest part of one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """A command, as `subprocess` would start it."""

    arguments: Sequence[str]
    environment: Mapping[str, str]
    directory: str
    is_session: bool
    """True if it leads a session of its own."""
    num_children: int
    """Python processes of its own that are forks too."""


class ForkedPython(subprocess.Popen[str]):
    """A `Popen` of a Python command that is a fork.

    Args:
        arguments: Arguments of Python: `-u` and `-W`, then a script or `-m` and a module, then those of the command.
        num_children: The number of Python processes that it starts itself and that are forks too.
        **options: Options of `subprocess.Popen`; text is not bytes.
    """

    def __init__(
        self, arguments: Sequence[object], *, num_children: int = 0, **options: Any
    ) -> None:
        self._num_children = num_children
        super().__init__([sys.executable, *map(str, arguments)], text=True, **options)

    def _execute_child(self, *given: Any) -> None:
        _start(self, _blank_of_the_server(), given, num_children=self._num_children)


def _start(process: Any, blank: socket.socket, given: Sequence[Any], *, num_children: int) -> None:
    """Do what `Popen._execute_child` does, with a blank process instead of a new one."""
    options = _options(process, given)
    arguments = list(map(os.fspath, options["args"]))
    job = Job(
        arguments=arguments[1:],
        environment=dict(os.environ if options["env"] is None else options["env"]),
        directory=os.fspath(options["cwd"] or os.getcwd()),
        is_session=options["start_new_session"],
        num_children=num_children,
    )
    names = ("p2cread", "c2pwrite", "errwrite")
    streams = [fd if options[name] < 0 else options[name] for fd, name in enumerate(names)]
    with blank:
        socket.send_fds(blank, [pickle.dumps(job)], streams)
        process.pid = int(blank.recv(32))
    process._child_created = True
    ends = (f"{name}{end}" for name in ("p2c", "c2p", "err") for end in ("read", "write"))
    process._close_pipe_fds(*(options[end] for end in ends))


def _options(process: Any, given: Sequence[Any]) -> dict[str, Any]:
    return inspect.signature(_EXECUTE_CHILD).bind(process, *given).arguments


_EXECUTE_CHILD: Any = subprocess.Popen._execute_child  # type: ignore[attr-defined]


def _blank_of_the_server() -> socket.socket:
    """Return the socket of a child of this process that waits for its job."""
    ours, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with its, _adopting():
        process = multiprocessing.get_context("forkserver").Process(
            target=_leave_blank, args=(its,)
        )
        process.start()
        process.join()
    assert process.exitcode == 0
    return ours


@contextmanager
def _adopting() -> Iterator[None]:
    """Become the parent of processes whose own parent ends inside."""
    libc = ctypes.CDLL(None)
    libc.prctl(_PR_SET_CHILD_SUBREAPER, 1)
    try:
        yield
    finally:
        libc.prctl(_PR_SET_CHILD_SUBREAPER, 0)


def _leave_blank(its: socket.socket) -> None:
    """Leave a child that waits for its job; this process is the fork server's, and ends."""
    if os.fork():
        os._exit(0)
    forkserver._forkserver._forkserver_alive_fd = None  # type: ignore[attr-defined]
    resource_tracker._resource_tracker._fd = None  # type: ignore[attr-defined]
    fd = os.dup2(its.detach(), 3)
    os.closerange(4, os.sysconf("SC_OPEN_MAX"))
    _wait_for_job(socket.socket(fileno=fd))


def _wait_for_job(its: socket.socket) -> NoReturn:
    with its:
        message, fds, _, _ = socket.recv_fds(its, _LONGEST_JOB, 3)
        if not message:
            os._exit(0)  # its starter has ended
        job: Job = pickle.loads(message)
        for number, fd in enumerate(fds):
            os.dup2(fd, number)
            os.close(fd)
        if job.is_session:
            os.setsid()
        its.send(str(os.getpid()).encode())
    _become(job)


def _become(job: Job) -> NoReturn:
    """Run the command in this process, which then ends."""
    os.environ.clear()
    os.environ.update(job.environment)
    os.chdir(job.directory)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    np.random.seed()  # Python's own generator does so itself
    arguments = _set_options(job.arguments)
    _use_blanks(_blank_children(job.num_children))
    code = _run(arguments)
    threading._shutdown()  # type: ignore[attr-defined]  # waits for threads
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(code)


def _set_options(arguments: Sequence[str]) -> Sequence[str]:
    """Do what Python does when it starts, and return the arguments that follow its options."""
    is_unbuffered = bool(os.environ.get("PYTHONUNBUFFERED"))
    while arguments[0] in ("-u", "-W"):
        if arguments[0] == "-W":
            warnings.simplefilter(arguments[1])  # type: ignore[arg-type]
            arguments = arguments[1:]
        else:
            is_unbuffered = True
        arguments = arguments[1:]
    sys.stdin = open(0, closefd=False)  # noqa: SIM115
    sys.stdout = _stream(1, "strict", is_unbuffered=is_unbuffered)
    sys.stderr = _stream(2, "backslashreplace", is_unbuffered=is_unbuffered)
    return arguments


def _stream(fd: int, errors: str, *, is_unbuffered: bool) -> TextIOWrapper:
    if is_unbuffered:
        raw: Any = FileIO(fd, "w", closefd=False)
        return TextIOWrapper(raw, errors=errors, write_through=True)
    return open(fd, "w", buffering=1 if fd == 2 else -1, errors=errors, closefd=False)


def _run(arguments: Sequence[str]) -> int:
    """Run a module or a script as `__main__`, and return its exit code."""
    own = [path for path in sys.path if path.startswith((sys.prefix, sys.base_prefix))]
    paths = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
    is_module = arguments[0] == "-m"
    sys.argv[:] = arguments[1:] if is_module else arguments
    sys.path[:] = [os.getcwd() if is_module else str(Path(arguments[0]).parent), *paths, *own]
    try:
        if is_module:
            runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(sys.argv[0], run_name="__main__")
    except SystemExit as error:
        return _exit_code(error)
    except BaseException as error:
        below = error.__traceback__
        while below and below.tb_frame.f_code.co_filename in (__file__, "<frozen runpy>"):
            below = below.tb_next
        traceback.print_exception(error.with_traceback(below))
        return 1
    return 0


def _exit_code(error: SystemExit) -> int:
    if error.code is None or isinstance(error.code, int):
        return error.code or 0
    print(error.code, file=sys.stderr)
    return 1


def _blank_children(number: int) -> list[socket.socket]:
    """Return the sockets of children that wait for their jobs."""
    blanks: list[socket.socket] = []
    for _ in range(number):
        ours, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        if os.fork() == 0:
            for other in (ours, *blanks):
                other.close()  # so that each child sees when this process ends
            _wait_for_job(its)
        its.close()
        blanks.append(ours)
    return blanks


def _use_blanks(blanks: list[socket.socket]) -> None:
    """Let Python commands that this process starts be its blank children, as long as there are any."""

    def execute_child(process: Any, *given: Any) -> None:
        arguments = _options(process, given)["args"]
        if blanks and _is_module(arguments):
            _start(process, blanks.pop(0), given, num_children=0)
        else:
            _EXECUTE_CHILD(process, *given)

    subprocess.Popen._execute_child = execute_child  # type: ignore[attr-defined]


def _is_module(arguments: object) -> bool:
    """Tell whether they are this Python, perhaps `-u`, and `-m` or a script."""
    if not isinstance(arguments, list | tuple) or arguments[0] != sys.executable:
        return False
    rest = arguments[2:] if arguments[1] == "-u" else arguments[1:]
    return rest[0] == "-m" or not rest[0].startswith("-")
