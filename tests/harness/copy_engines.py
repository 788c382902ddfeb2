"""Engines for copies that make what is read too early, or too late, a wrong number: slow, shuffled, poisoning."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Literal
from unittest.mock import patch

import torch
from torch import Tensor

from thunder_memsave.budget import plan_request
from thunder_memsave.budget.offload import terms
from thunder_memsave.ops.host_copies.buffers import HostBuffers
from thunder_memsave.ops.host_copies.engine import Host, other_host
from thunder_memsave.planner.search.mixes import OffloadTerms, solve_mix

POISON = 0xFF
"""A byte of which every float is not a number, every bool true, and every index far out of range."""


@dataclass
class ShuffledEngine:
    """Copies in threads, in an order of its own, as late as the wait; poisons what is not to be read."""

    seed: int = 0
    bytes_per_s: float | None = None
    """Bandwidth; None: as fast as memory."""
    num_begun: dict[str, int] = field(default_factory=lambda: {"out": 0, "in": 0})
    _waiting: list[tuple[threading.Event, Callable[[], None]]] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        self._draw = random.Random(self.seed)

    def begin(
        self, source: Tensor, target: Tensor, direction: Literal["out", "in"]
    ) -> Callable[[], None]:
        target.fill_(POISON)
        self.num_begun[direction] += 1
        ended = threading.Event()

        def copy() -> None:
            if self.bytes_per_s is not None:
                time.sleep(source.numel() / self.bytes_per_s)
            with torch.inference_mode():  # the thread that waits may be in it
                target.copy_(source)

        with self._lock:
            self._waiting.append((ended, copy))
        if self._draw.random() < 0.5:
            threading.Thread(target=self._run_any).start()

        def wait() -> None:
            self._run_any()
            while not ended.wait(0.001):
                self._run_any()
            if (
                direction == "out"
            ):  # the device's bytes are freed now: whatever reads them later reads this
                source.fill_(POISON)

        return wait

    def _run_any(self) -> None:
        """Run one of the copies that wait, and not the first."""
        with self._lock:
            if not self._waiting:
                return
            ended, copy = self._waiting.pop(self._draw.randrange(len(self._waiting)))
        copy()
        del copy  # who waits may count what is still held
        ended.set()


class PoisonedBuffers(HostBuffers):
    """Buffers that lose their contents when they come back."""

    def _take_back(self) -> None:
        for buffer in [*self._returned]:
            buffer.memory[:] = bytes([POISON]) * len(buffer.memory)
        super()._take_back()


@contextmanager
def hostile_copies(seed: int = 0) -> Iterator[tuple[ShuffledEngine, PoisonedBuffers]]:
    """Let copies of the CPU go through a shuffled engine and poisoned buffers."""
    engine, buffers = ShuffledEngine(seed), PoisonedBuffers()
    with other_host(torch.device("cpu"), Host(engine, buffers)):
        yield engine, buffers


@contextmanager
def small_values() -> Iterator[None]:
    """Let small values be offloaded, and plans be good enough for tests."""
    least = partial(OffloadTerms, least_bytes=1024)
    good_enough = partial(solve_mix, time_limit_s=0.2)
    with (
        patch.object(terms, "OffloadTerms", least),
        patch.object(plan_request, "solve_mix", good_enough),
    ):
        yield
