"""Explains failed collectives: the rank that noticed, the collective, and the ranks that did not respond.

It costs nothing until then: a rank that gives up writes so to the store, and reads who else did. On nccl torch's
watchdog gives up and ends the process, within seconds of the timeout; its last log message names the rank and the
collective. Nothing in this file runs then, except for collectives that block.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Protocol

import torch.distributed as dist

from thunder_memsave.compat.foreign_messages import first_line, says_peer_failed, says_timeout
from thunder_memsave.errors import ThunderMemsaveError

_GRACE_SECONDS = 0.8
_GRACE_SECONDS_OF_SERVER = 1.2
"""Seconds that rank 0 stays: it may serve the store, which the others still read."""
_LONGEST_SECONDS = 1.5
"""Seconds to wait for the store: that of a stopped process does not answer, and clients have no timeout."""

_MOST_LISTED = 8

_num_failures = 0


class CollectiveError(ThunderMemsaveError, RuntimeError):
    """A collective failed because of another rank.

    Args:
        message: The message for the user.
        is_timeout: Whether the other rank was late, rather than that a connection broke.
    """

    def __init__(self, message: str, *, is_timeout: bool = False) -> None:
        super().__init__(message)
        self.is_timeout = is_timeout


class Waitable(Protocol):
    """The handle that a collective returned."""

    def wait(self) -> object:
        """Return when the collective has ended."""


@contextmanager
def collective(name: str, group: dist.ProcessGroup | None = None) -> Iterator[None]:
    """Explain errors of the collective inside.

    Args:
        name: The collective's name in the message, such as `all-gather of rows`.
        group: The participating ranks; None for all processes.

    Raises:
        CollectiveError: Another rank was late, or its process ended.
    """
    try:
        yield
    except RuntimeError as error:
        if isinstance(error, CollectiveError) or not says_peer_failed(error):
            raise
        raise CollectiveError(
            _explain(name, group, error), is_timeout=says_timeout(error)
        ) from error


class NoticingHandle:
    """Waits for a collective, and explains its errors."""

    def __init__(self, work: Waitable, name: str, group: dist.ProcessGroup) -> None:
        self._work: Waitable | None = work
        self._name, self._group = name, group

    def wait(self) -> None:
        """Return when the results may be read; may be called for each of them, and repeatedly.

        Raises:
            CollectiveError: Another rank was late, or its process ended.
        """
        if self._work is None:
            return
        with collective(self._name, self._group):
            self._work.wait()
        # It references everything that was received together, and would keep it alive as long as any of it.
        self._work = None


def named_ranks(ranks: Collection[int]) -> str:
    """Return `ranks 0, 3` for a message, in order; of many only the first."""
    listed = ", ".join(map(str, sorted(ranks)[:_MOST_LISTED]))
    more = f" and {len(ranks) - _MOST_LISTED} more" if len(ranks) > _MOST_LISTED else ""
    return f"rank{'s' if len(ranks) > 1 else ''} {listed}{more}"


def _explain(name: str, group: dist.ProcessGroup | None, error: RuntimeError) -> str:
    rank = dist.get_rank()
    ranks = dist.get_process_group_ranks(group or dist.group.WORLD)
    others = named_ranks([r for r in ranks if r != rank])
    reason = first_line(error)
    silent = _silent_ranks(f"{name} with {others}")
    return (
        f"rank {rank} waited for the {name} with {others}, which failed: {reason} {_who(silent)} Its own output says "
        "why. strategy.timeout is how long the others wait."
    )


def _who(silent: list[int] | None) -> str:
    if silent is None:
        return "The store that rank 0 or its launcher serves does not answer: that process has stopped or died."
    if not silent:
        return "All ranks gave up: one raised an error or took another way through the code than the others."
    who = named_ranks(silent).capitalize()
    return f"{who} did not give up with the others: stopped, busy with something else, or dead."


def _silent_ranks(waited_in: str) -> list[int] | None:
    """Return the ranks that did not give up at about the same time; None if that cannot be known."""
    global _num_failures
    _num_failures += 1
    found: list[list[int]] = []
    # In a thread, as a call to the store of a stopped process does not return.
    asking = threading.Thread(
        target=_ask_store,
        args=(f"thunder_memsave/gave_up/{_num_failures}", waited_in, found),
        daemon=True,
    )
    asking.start()
    asking.join(_LONGEST_SECONDS)
    return found[0] if found else None


def _ask_store(prefix: str, waited_in: str, found: list[list[int]]) -> None:
    try:
        store = dist.PrefixStore(prefix, dist.distributed_c10d._get_default_store())
        store.set(str(dist.get_rank()), waited_in)
        time.sleep(_GRACE_SECONDS_OF_SERVER if dist.get_rank() == 0 else _GRACE_SECONDS)
        found.append([r for r in range(dist.get_world_size()) if not store.check([str(r)])])
    except (RuntimeError, ValueError):
        return  # the store is gone with the process that served it, and nothing is found
