"""Run a function on ranks that build their own Fabric, as torchrun's workers do."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Sequence
from functools import wraps
from pathlib import Path
from typing import Any

from lightning.fabric import Fabric
from torch import Tensor

from harness.distributed import HANG_S, run_on_ranks
from harness.forked_python import ForkedPython
from thunder_memsave import ThunderMemsaveStrategy
from thunder_memsave.distributed.process_group import destroy_groups

_PORTS = (12_000, 32_000)
"""Below those that systems give to connections: 32,768 on Linux (`ip_local_port_range`), 49,152 elsewhere."""


def make_fabric(*, devices: int = 1, **arguments: Any) -> Fabric:
    """Return a launched Fabric on the CPU; arguments that Fabric does not know go to the strategy."""
    fabric_arguments = {
        name: arguments.pop(name) for name in ("precision", "plugins") if name in arguments
    }
    strategy = ThunderMemsaveStrategy(**arguments)
    fabric = Fabric(strategy=strategy, accelerator="cpu", devices=devices, **fabric_arguments)
    fabric.launch()
    return fabric


def on_fabric_rank(fn: Callable[..., None]) -> Callable[..., None]:
    """Give the function the environment of a torchrun worker; for `run_on_fabric_ranks`."""

    @wraps(fn)
    def run(rank: int, world_size: int, port: int, *args: object) -> None:
        os.environ.update(
            RANK=str(rank),
            LOCAL_RANK=str(rank),
            GROUP_RANK="0",
            WORLD_SIZE=str(world_size),
            MASTER_ADDR="127.0.0.1",
            MASTER_PORT=str(port),
            TORCHELASTIC_RUN_ID="test",
        )
        try:
            fn(*args)
        finally:
            destroy_groups()

    return run


def run_on_fabric_ranks(
    fn: Callable[..., None],
    world_size: int,
    *args: object,
    hang_s: float = HANG_S,
    hash_seeds: Sequence[int] = (),
) -> None:
    """Call `fn(*args)` in `world_size` processes; each builds its Fabric with `make_fabric`.

    Args:
        fn: A module's function, decorated with `on_fabric_rank`.
        world_size: The number of processes.
        *args: Arguments of `fn`.
        hang_s: Seconds after which the processes are killed.
        hash_seeds: As for `run_on_ranks`.

    Raises:
        torch.multiprocessing.ProcessRaisedException: a rank failed; carries its traceback.
        TimeoutError: the ranks hung; they were killed.
    """
    arguments = (world_size, free_port(), *args)
    run_on_ranks(
        fn, world_size, Path(), *arguments, init=False, hang_s=hang_s, hash_seeds=hash_seeds
    )


def all_reduced(fabric: Fabric, value: Tensor, **arguments: Any) -> Tensor:
    """Call `fabric.all_reduce` on one tensor; Fabric's own type also allows collections."""
    result = fabric.all_reduce(value, **arguments)
    assert isinstance(result, Tensor)
    return result


def all_gathered(fabric: Fabric, value: Tensor) -> Tensor:
    """Call `fabric.all_gather` on one tensor; Fabric's own type also allows collections."""
    result = fabric.all_gather(value)
    assert isinstance(result, Tensor)
    return result


def free_port() -> int:
    """Return a port that was free a moment ago, and that the system gives to nobody who asks for any port.

    A Fabric that is made anew opens a store on it again; in between another test must not get it.
    """
    choices = random.SystemRandom()  # not the generator that tests seed
    while True:
        port = choices.randrange(*_PORTS)
        with socket.socket() as listener, contextlib.suppress(OSError):
            listener.bind(("127.0.0.1", port))
            return port


def run_python(
    arguments: Sequence[object], *, num_forks: int = 0, timeout: float = 300, **env: str
) -> str:
    """Run this Python with arguments, and return what it printed; as `start_python`.

    Raises:
        AssertionError: it failed, or ran past the timeout; carries its output.
    """
    process = start_python(arguments, num_forks=num_forks, **env)
    return finish(process, timeout=timeout)


def start_python(
    arguments: Sequence[object], *, num_forks: int = 0, **env: str
) -> subprocess.Popen[str]:
    """Start this Python in a session of its own, so that `finish` can end all it started.

    Args:
        arguments: Arguments of Python.
        num_forks: The number of Python processes that are forks instead: this one, and those that it starts.
        **env: More variables of the environment.
    """
    # PYTHONPATH is passed on: the checkout under test may not be the installed one.
    paths = [str(Path(__file__).parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])]
    variables = {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(paths), **env}
    options: dict[str, Any] = {
        "stdout": subprocess.PIPE,
        "stderr": subprocess.STDOUT,
        "start_new_session": True,
        "env": {**os.environ, **variables},
    }
    if num_forks:
        return ForkedPython(arguments, num_children=num_forks - 1, **options)
    return subprocess.Popen([sys.executable, *map(str, arguments)], text=True, **options)


def finish(process: subprocess.Popen[str], *, timeout: float = 300) -> str:
    """Wait for the process and return its output; end its session past the timeout, or when the test ends."""
    try:
        output, _ = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        output, _ = process.communicate()
        raise AssertionError(f"still running after {timeout} s:\n{output}") from None
    except BaseException:  # pytest's own timeout, or Ctrl-C
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        raise
    assert process.returncode == 0, output
    return output


def clipped_step(fabric: Fabric, model: Any, optimizer: Any, inputs: Tensor) -> None:
    """Take a whole step on the sum of squares, with clipping; no gradient stays."""
    fabric.backward(model(inputs).square().sum())
    fabric.clip_gradients(model, optimizer, max_norm=1.0)
    optimizer.step()
    optimizer.zero_grad()
