"""Makes the memory of gloo's collectives countable: it is released before a wait returns."""

from __future__ import annotations

import sys
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor

from thunder_memsave.distributed import transport

_LONGEST_S = 20.0


@contextmanager
def letting_go() -> Iterator[None]:
    """Make the `wait` of collectives that are started inside return only after they have released their tensors.

    A thread of gloo's runs them, and drops its tensors some microseconds after it said that it was done. If it is the
    last to hold a tensor, it frees it, unseen by the profiler, which counts only this thread; gloo's own allocations
    are counted, as they run with this thread's state.
    """
    with (
        patch.object(transport, "all_gather_single", _awaited(transport.all_gather_single)),
        patch.object(dist, "all_to_all_single", _awaited(dist.all_to_all_single)),
        patch.object(dist, "all_reduce", _awaited(dist.all_reduce)),
    ):
        yield


def _awaited(start: Callable[..., Any]) -> Callable[..., Any]:
    def started(*args: Any, **kwargs: Any) -> Any:
        tensors = [a for a in args if isinstance(a, Tensor)]
        before = list(map(_num_users, tensors))
        given: list[weakref.ref[Tensor]] = []

        def alias(argument: Any) -> Any:
            if not isinstance(argument, Tensor):
                return argument
            other = argument.detach()
            given.append(weakref.ref(other))
            return other

        work = start(*map(alias, args), **kwargs)
        return work and _Awaited(work, tensors, before, given)

    return started


class _Awaited:
    """A `Work` of gloo's whose `wait` returns after it has released its tensors."""

    def __init__(
        self,
        work: Any,
        tensors: Sequence[Tensor],
        before: Sequence[tuple[int, int]],
        given: Sequence[weakref.ref[Tensor]],
    ) -> None:
        self._work, self._tensors, self._before, self._given = work, tensors, before, given

    def wait(self) -> None:
        self._work.wait()
        self._work = None
        deadline = time.monotonic() + _LONGEST_S
        while not self._is_let_go():
            assert time.monotonic() < deadline, "gloo keeps what it sent or received"
            time.sleep(1e-5)
        self._tensors = ()

    def _is_let_go(self) -> bool:
        if any(given() is not None for given in self._given):
            return False
        return list(map(_num_users, self._tensors)) == self._before


def _num_users(tensor: Tensor) -> tuple[int, int]:
    """Count the users of a tensor's memory: tensors, and references to its Python object, which are dropped later."""
    storage = tensor.untyped_storage()
    return int(torch._C._storage_Use_Count(storage._cdata)), sys.getrefcount(storage)
