"""The ranks of one attempt find each other in a store that holds keys of dead ranks."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch.distributed as dist

from thunder_memsave.distributed.restart_store import StartError, own_store

SOON = timedelta(seconds=20)
AT_ONCE = timedelta(seconds=0.2)


def start(
    pool: ThreadPoolExecutor, store: dist.Store, rank: int, *, world_size: int = 3
) -> Future[dist.PrefixStore]:
    return pool.submit(own_store, store, rank=rank, world_size=world_size, timeout=SOON)


def run_attempt(store: dist.Store, world_size: int = 3) -> list[dist.PrefixStore]:
    with ThreadPoolExecutor(world_size) as pool:
        started = [start(pool, store, rank) for rank in reversed(range(world_size))]
        return [future.result() for future in started]


def wait_until(condition: Callable[[], bool]) -> None:
    pause = threading.Event()
    while not condition():
        pause.wait(0.01)


def test_the_ranks_of_one_attempt_share_a_store_and_the_next_attempt_has_another() -> None:
    store = dist.HashStore()
    first = run_attempt(store)
    first[0].set("address", "dead")
    assert all(own.check(["address"]) for own in first)
    second = run_attempt(store)
    assert not any(own.check(["address"]) for own in second)
    second[2].set("address", "alive")
    assert [own.get("address") for own in second] == [b"alive"] * 3
    assert first[1].get("address") == b"dead"


def test_a_rank_that_died_while_it_started_is_replaced() -> None:
    store = dist.HashStore()
    with pytest.raises(
        StartError, match=r"rank 1 waited until the timeout for rank 0 to start with it"
    ):
        own_store(store, rank=1, world_size=3, timeout=AT_ONCE)
    run_attempt(store)


def test_a_rank_0_that_died_while_it_started_is_replaced() -> None:
    """The others have seen its name, and still follow the next one's."""
    store = dist.HashStore()
    handshake = dist.PrefixStore("thunder_memsave/start", store)
    with ThreadPoolExecutor(3) as pool:
        one = start(pool, store, 1)
        wait_until(lambda: handshake.check(["ask/1"]))
        with pytest.raises(StartError, match=r"rank 0 waited for rank 2 to start with it"):
            own_store(store, rank=0, world_size=3, timeout=AT_ONCE)
        zero, two = start(pool, store, 0), start(pool, store, 2)
        one.result().set("address", "alive")
        assert zero.result().get("address") == two.result().get("address") == b"alive"


def test_rank_0_names_all_that_did_not_come() -> None:
    message = r"rank 0 waited for ranks 1, 2 to start with it until the timeout; look at the output"
    with pytest.raises(StartError, match=message):
        own_store(dist.HashStore(), rank=0, world_size=3, timeout=AT_ONCE)


def test_a_rank_whose_neighbour_does_not_come_says_so() -> None:
    store = dist.HashStore()
    handshake = dist.PrefixStore("thunder_memsave/start", store)
    with ThreadPoolExecutor(1) as pool:
        zero = start(pool, store, 0)
        with pytest.raises(
            StartError, match=r"rank 1 waited .* for rank 0 to start all ranks; look"
        ):
            own_store(store, rank=1, world_size=3, timeout=timedelta(seconds=0.5))
        # Rank 0 goes on waiting; both come at last.
        handshake.set("ask/2", "two")
        wait_until(lambda: handshake.check(["answer/two"]))
        name = handshake.get("answer/two").decode()
        for rank in (1, 2):
            handshake.set(f"seen/{name}/{rank}", "")
        zero.result()
