"""Gives each attempt of a run its own store, if a launcher keeps one store over its restarts."""

from __future__ import annotations

import time
import uuid
from datetime import timedelta

import torch.distributed as dist

from thunder_memsave.distributed.lost_ranks import named_ranks
from thunder_memsave.errors import ThunderMemsaveError

_POLL_SECONDS = 0.02


class StartError(ThunderMemsaveError, RuntimeError):
    """Some ranks did not start with this attempt."""


def own_store(
    store: dist.Store, *, rank: int, world_size: int, timeout: timedelta
) -> dist.PrefixStore:
    """Return a part of `store` that no earlier attempt has written to. A collective.

    torchrun keeps one store over its restarts, in which a restarted rank would read the gloo address of a dead one and
    wait for it (https://github.com/pytorch/pytorch/issues/135712). Its count of restarts does not identify an attempt:
    each node has its own, a returning one begins at 0, and a changed membership does not count. So rank 0 draws a name:

        rank r: ask/r = question    rank 0: answer/question = name    rank r: seen/name/r    rank 0: go/name

    Each process asks a new question, so only a live rank 0 answers it, and nobody reads answers to dead processes.
    Until all ranks have seen one name, a restarted rank 0 may still answer with another.

    Raises:
        StartError: A rank did not start within the timeout.
    """
    handshake = dist.PrefixStore("thunder_memsave/start", store)
    deadline = time.monotonic() + timeout.total_seconds()
    name = (
        _name_attempt(handshake, world_size, deadline)
        if rank == 0
        else _ask_for_name(handshake, rank, deadline)
    )
    return dist.PrefixStore(f"thunder_memsave/attempt-{name}", store)


def _name_attempt(store: dist.Store, world_size: int, deadline: float) -> str:
    name = uuid.uuid4().hex
    answered: dict[int, str] = {}
    absent = set(range(1, world_size))
    while absent:
        for rank in sorted(absent):
            _answer(store, rank, name, answered)
            if store.check([f"seen/{name}/{rank}"]):
                absent.discard(rank)
        if time.monotonic() > deadline:
            raise StartError(
                f"rank 0 waited for {named_ranks(absent)} to start with it until the timeout; look at the output "
                "of those processes, and check that they reach this machine. After a restart of torchrun, all of its "
                "nodes start their processes again; one whose agent was killed has to be started by hand, or by its "
                "scheduler."
            )
        time.sleep(_POLL_SECONDS)
    store.set(f"go/{name}", "")
    return name


def _answer(store: dist.Store, rank: int, name: str, answered: dict[int, str]) -> None:
    if not store.check([f"ask/{rank}"]):
        return
    question = store.get(f"ask/{rank}").decode()
    if answered.get(rank) != question:
        answered[rank] = question
        store.set(f"answer/{question}", name)


def _ask_for_name(store: dist.Store, rank: int, deadline: float) -> str:
    question, seen = uuid.uuid4().hex, ""
    store.set(f"ask/{rank}", question)
    while not (seen and store.check([f"go/{seen}"])):
        if store.check([f"answer/{question}"]):
            name = store.get(f"answer/{question}").decode()
            if name != seen:
                store.set(f"seen/{name}/{rank}", "")
                seen = name
        if time.monotonic() > deadline:
            raise StartError(
                f"rank {rank} waited until the timeout for rank 0 to start {'all ranks' if seen else 'with it'}; look "
                "at the output of the other processes: one of them did not start, or runs on from before a restart."
            )
        time.sleep(_POLL_SECONDS)
    return seen
