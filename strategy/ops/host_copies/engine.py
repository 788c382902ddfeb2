"""Begins copies on the engine of a device, and waits for them: what the operations of a trace call.

An engine is a function: `begin(source, target, direction)` begins a copy of bytes, after all that the device was given
before, and returns a function that lets what the device is given next wait for it. Until then both tensors are held
here, so that nothing reuses their memory; if a forward or backward raises, its copies are waited for, and let go.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal, Protocol

from torch import Tensor, device

from thunder_memsave.ops.host_copies.buffers import HostBuffers
from thunder_memsave.ops.host_copies.cpu_engine import CpuEngine
from thunder_memsave.ops.host_copies.cuda_engine import CudaEngine, lock_pages

Direction = Literal["out", "in"]


class CopyEngine(Protocol):
    """Copies bytes between a device and the host."""

    def begin(self, source: Tensor, target: Tensor, direction: Direction) -> Callable[[], None]:
        """Begin a copy, and return what waits for it.

        Args:
            source: Bytes, `(n,)` of uint8.
            target: Bytes of the same number.
            direction: `out` is to the host.
        """


@dataclass(slots=True)
class Host:
    """The engine of a device, and its buffers."""

    engine: CopyEngine
    buffers: HostBuffers
    """Of values that a forward leaves for its backward."""
    states: HostBuffers = field(default_factory=HostBuffers)
    """Of optimizers' states."""
    weights: HostBuffers = field(default_factory=HostBuffers)
    """Of frozen weights."""


_hosts: dict[str, Host] = {}
_local = threading.local()


def host_of(place: device) -> Host:
    """Return the engine and the buffers of a device, made when they are first asked for."""
    if (found := _hosts.get(key := str(place))) is None:
        if place.type == "cpu":
            found = Host(CpuEngine(), HostBuffers())
        else:
            locked = [HostBuffers(lock_pages) for _ in range(3)]
            found = Host(CudaEngine(place), *locked)
        found = _hosts.setdefault(key, found)
    return found


@contextmanager
def other_host(place: device, host: Host) -> Iterator[None]:
    """Let copies of a device go through another engine and other buffers, for tests."""
    before, _hosts[str(place)] = host_of(place), host
    try:
        yield
    finally:
        _hosts[str(place)] = before


@dataclass(slots=True)
class _Pending:
    wait: Callable[[], None]
    held: tuple[Tensor, Tensor]


class _Copies:
    """Copies that a forward or a backward has begun, by the address of what they make."""

    def __init__(self) -> None:
        self._pending: dict[int, _Pending] = {}

    def begin(
        self, engine: CopyEngine, source: Tensor, target: Tensor, direction: Direction
    ) -> None:
        wait = engine.begin(source, target, direction)
        self._pending[target.data_ptr()] = _Pending(wait, (source, target))

    def wait(self, target: Tensor) -> None:
        pending = self._pending.pop(target.data_ptr())
        pending.wait()

    def close(self) -> None:
        while self._pending:
            _, pending = self._pending.popitem()
            pending.wait()


@contextmanager
def copying() -> Iterator[None]:
    """Hold the copies that the operations inside begin, and end those that nothing waited for when it is left."""
    before, _local.copies = getattr(_local, "copies", None), (copies := _Copies())
    try:
        yield
    finally:
        _local.copies = before
        copies.close()


def begin(source: Tensor, target: Tensor, direction: Direction) -> None:
    """Begin a copy on the engine of the device's tensor; inside of `copying()`."""
    place = source.device if direction == "out" else target.device
    _local.copies.begin(host_of(place).engine, source, target, direction)


def wait(target: Tensor) -> None:
    """Wait for the copy into `target`, and let its source go."""
    _local.copies.wait(target)
