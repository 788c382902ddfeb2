"""torchrun's c10d rendezvous takes an agent back that was restarted, when its agents share no store.

By default they share one, and an agent that stays rank 0 does not tell the next round where that store is, so that a
new agent waits for the address in vain (torch 2.11 and 2.13). docs/several_nodes.md and tests/harness/nodes.py switch
the sharing off. When the first test fails, the installed torch has healed: take the variable out of both.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from datetime import timedelta

import pytest
import torch.distributed as dist
from torch.distributed.elastic.rendezvous import RendezvousInfo
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import (
    DynamicRendezvousHandler,
    RendezvousTimeout,
)

ADDRESS = "127.0.0.1"
SWITCH = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"
STORE_TIMEOUT = timedelta(seconds=3)
WAITS_AT_MOST = timedelta(seconds=60)


def agent(port: int) -> DynamicRendezvousHandler:
    store = dist.TCPStore(ADDRESS, port, is_master=False, timeout=STORE_TIMEOUT)
    return DynamicRendezvousHandler.from_backend(
        "run",
        store,
        C10dRendezvousBackend(store, "run"),
        min_nodes=2,
        max_nodes=2,
        local_addr=ADDRESS,
        timeout=RendezvousTimeout(join=WAITS_AT_MOST),
        keep_alive_interval=1,
        keep_alive_max_attempt=4,  # a busy machine delays the heartbeats of the living, too
    )


@contextmanager
def second_round(pool: ThreadPoolExecutor) -> Iterator[Future[RendezvousInfo]]:
    """Rendezvous result of the agent that replaces a dead one; the other one stays rank 0."""
    server = dist.TCPStore(ADDRESS, 0, is_master=True, wait_for_workers=False)
    first, second, returned = (agent(server.port) for _ in range(3))
    joining = [pool.submit(a.next_rendezvous) for a in (first, second)]
    ranks = [future.result().rank for future in joining]
    alive, dead = (first, second) if ranks == [0, 1] else (second, first)
    dead._stop_heartbeats()
    try:
        result = pool.submit(returned.next_rendezvous)
        end = time.monotonic() + WAITS_AT_MOST.total_seconds()
        while not alive.num_nodes_waiting():
            assert time.monotonic() < end, "the agent that returned does not wait to be let in"
            time.sleep(0.05)
        assert alive.next_rendezvous().rank == 0
        yield result
    finally:
        for each in (alive, returned):
            each._stop_heartbeats()


def test_an_agent_that_returns_waits_in_vain_for_the_shared_stores_address(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv(SWITCH, raising=False)
    refused = pytest.raises(dist.DistStoreError, match=r"timeout .*MASTER_ADDR")
    with ThreadPoolExecutor(2) as pool, second_round(pool) as returned, refused:
        returned.result()


def test_without_sharing_it_is_taken_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SWITCH, "1")
    with ThreadPoolExecutor(2) as pool, second_round(pool) as returned:
        assert returned.result().rank == 1
