"""Starts the other processes of a run with `devices` above one, if torchrun does not."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch

from thunder_memsave.finetune.process.stop import OUT_OF_MEMORY
from thunder_memsave.finetune.run_file.config import RunConfig
from thunder_memsave.finetune.run_file.launch import is_under_torchrun, num_local_processes
from thunder_memsave.finetune.run_file.reading.parse import dump_run_config

_STARTED_BY = "THUNDER_MEMSAVE_STARTED_BY"
_POLL_SECONDS = 0.2
_GRACE_SECONDS = 1.0
"""Time to end by themselves, and to print why."""


class LocalProcesses:
    """The processes that this one started on this machine; none under torchrun.

    The environment tells Fabric that its processes are started already. Fabric's own launcher
    kills all processes, its own included, as soon as one ends with an error: without a
    message, with another exit code, and without time for the others to report.
    """

    def __init__(self, children: Sequence[subprocess.Popen[bytes]] = ()) -> None:
        self._children = children
        self._is_over = threading.Event()

    def died(self, *, wait_seconds: float = 0.0) -> str | None:
        """Describe a process that has ended with an error, or does within `wait_seconds`; None if none has."""
        deadline = time.monotonic() + (wait_seconds if self._children else 0.0)
        while True:
            for rank, child in enumerate(self._children, start=1):
                if child.poll():
                    return f"process {rank} of {len(self._children) + 1} {_how(child.returncode)}"
            if time.monotonic() >= deadline:
                return None
            time.sleep(_POLL_SECONDS)

    @property
    def exit_code(self) -> int:
        """This process's exit code after another one died: that one's own if it tells the reason."""
        codes = {child.poll() for child in self._children}
        return OUT_OF_MEMORY if OUT_OF_MEMORY in codes else 1

    def watch(self, explain: Callable[[str], str], *, grace_seconds: float = 15.0) -> None:
        """End this process too if another one died and this one waits for it in vain.

        Args:
            explain: Makes the message from the result of `died`.
            grace_seconds: Time to notice by itself and to end normally.
        """
        if self._children:
            arguments = (explain, grace_seconds)
            threading.Thread(target=self._watch, args=arguments, daemon=True).start()

    def _watch(self, explain: Callable[[str], str], grace_seconds: float) -> None:
        while self.died() is None:
            if self._is_over.wait(_POLL_SECONDS):
                return
        if not self._is_over.wait(grace_seconds):
            print(f"error: {explain(self.died() or '')}", file=sys.stderr, flush=True)
            code = self.exit_code
            self.end()
            os._exit(code)  # the main thread may hang in a collective, which nothing interrupts

    def join(self) -> None:
        """Wait for the others, which have finished their work."""
        for child in self._children:
            child.wait()
        self._is_over.set()

    def end(self) -> None:
        """End the others, by force if need be: SIGTERM would let a run finish its step, which needs this process."""
        self._is_over.set()
        deadline = time.monotonic() + _GRACE_SECONDS
        for child in self._children:
            try:
                child.wait(max(deadline - time.monotonic(), 0))
            except subprocess.TimeoutExpired:
                child.kill()
                child.wait()


@contextmanager
def local_processes(config: RunConfig) -> Iterator[LocalProcesses]:
    """Start the other processes with the same configuration, and end them with this one."""
    if _STARTED_BY in os.environ:
        _end_with(int(os.environ[_STARTED_BY]))
    count = num_local_processes(config)
    if count == 1 or is_under_torchrun() or _STARTED_BY in os.environ:
        yield LocalProcesses()
        return
    variables = {**_cluster(count), **_threads(count)}
    with tempfile.TemporaryDirectory() as directory, _variables(variables):
        run_file = Path(directory) / "run.yaml"
        run_file.write_text(dump_run_config(config), encoding="utf-8")
        processes = LocalProcesses([_start(run_file, rank) for rank in range(1, count)])
        try:
            yield processes
        except BaseException:
            processes.end()
            raise
        processes.join()


def _cluster(count: int) -> dict[str, str]:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        port = server.getsockname()[1]
    return {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "NODE_RANK": "0",
        "LOCAL_RANK": "0",
        "RANK": "0",
        "WORLD_SIZE": str(count),
    }


def _threads(count: int) -> dict[str, str]:
    """Divide the cores, unless the user has; otherwise each process would use all of them."""
    if "OMP_NUM_THREADS" in os.environ:
        return {}
    share = max(len(os.sched_getaffinity(0)) // count, 1)
    torch.set_num_threads(share)  # the variable affects only processes started later
    return {"OMP_NUM_THREADS": str(share)}


def _start(run_file: Path, rank: int) -> subprocess.Popen[bytes]:
    changes = {
        "LOCAL_RANK": str(rank),
        "RANK": str(rank),
        _STARTED_BY: str(os.getpid()),
        # So that user-defined classes named in the run file are found as in this process.
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
    }
    command = [sys.executable, "-m", "thunder_memsave", "train", str(run_file)]
    return subprocess.Popen(command, env={**os.environ, **changes}, stdin=subprocess.DEVNULL)


@contextmanager
def _variables(values: Mapping[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def _end_with(parent: int) -> None:
    """End this process when its starter is gone, even in a collective that waits for the starter."""

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(1)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def _how(exit_code: int) -> str:
    if exit_code < 0:
        return f"was ended by {signal.Signals(-exit_code).name}"
    return f"ended with exit code {exit_code}"
