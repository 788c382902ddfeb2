"""Runs one operation of a trace alone, on zeros or what its row writes, and leaves the generators as they were."""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import platform
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from pathlib import Path

import torch

from thunder_memsave import ops
from thunder_memsave.measure.layouts import make_arguments
from thunder_memsave.measure.op_profile import Operation
from thunder_memsave.ops.table import write_numbers


def device_type_of(operation: Operation) -> str:
    """Return the device type of its tensors; empty if they are on several, or it has none."""
    devices = {a.layout.device.partition(":")[0] for a in operation.arguments if a is not None}
    return devices.pop() if len(devices) == 1 else ""


@contextlib.contextmanager
def ready_to_run(operation: Operation) -> Iterator[Callable[[], None]]:
    """Yield a function that runs the operation once, after a first run that makes what libraries keep, not counted.

    Raises:
        RuntimeError, IndexError, ValueError: there is not enough memory, or the operation refuses zeros.
    """
    with _generators_kept(device_type_of(operation)), torch.no_grad():
        arguments = make_arguments(operation.arguments, zeros=True)
        write_numbers(operation.name, arguments)

        def run() -> None:
            operation.run(*arguments)

        run()
        yield run


@contextlib.contextmanager
def _generators_kept(device_type: str) -> Iterator[None]:
    """Restore the user's generators afterwards, from which random operations draw."""
    devices = [torch.cuda.current_device()] if device_type == "cuda" else []
    with torch.random.fork_rng(devices=devices):
        yield


def environment() -> str:
    """Describe all that decides which kernels run here: versions, threads and the device."""
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else _processor()
    versions = f"torch {torch.__version__}{_transformer_engine()}, own kernels {_own_kernels()}"
    return f"{versions}, {torch.get_num_threads()} threads, {device}"


@cache
def _own_kernels() -> str:
    """Return a digest of the code of this package's own operations."""
    return digest_of(sorted(Path(ops.__file__).parent.rglob("*.py")))


def digest_of(files: Iterable[Path]) -> str:
    """Return a digest of what files have in them, of 8 digits, for the key of a table on disk."""
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()[:8]


def _transformer_engine() -> str:
    """Return the version of TransformerEngine, whose kernels compute in fp8, if it is installed."""
    try:
        return f", TransformerEngine {importlib.metadata.version('transformer_engine')}"
    except importlib.metadata.PackageNotFoundError:
        return ""


def _processor() -> str:
    return f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()} {platform.processor()}"
