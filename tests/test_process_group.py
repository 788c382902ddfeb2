"""Groups with the user's timeout, made only where there is somebody to talk to."""

from __future__ import annotations

import os
import socket
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from harness.distributed import run_on_ranks
from thunder_memsave.process_group import (
    _store,
    destroy_groups,
    init_default_group,
    make_data_parallel,
    needs_process_group,
)

LOOPBACK = "127.0.0.1"
TIMEOUT = timedelta(seconds=60)


def free_port() -> int:
    with socket.socket() as s:
        s.bind((LOOPBACK, 0))
        port: int = s.getsockname()[1]
        return port


def check_groups(rank: int, port: int) -> None:
    for _ in range(2):
        init_default_group(
            backend="gloo",
            rank=rank,
            world_size=2,
            main_address=LOOPBACK,
            main_port=port,
            timeout=TIMEOUT,
            device=torch.device("cpu"),
        )
    assert os.environ["MASTER_PORT"] == str(port)
    data_parallel = make_data_parallel("zero2", timeout=timedelta(seconds=1))
    assert data_parallel is not None
    assert (data_parallel.rank, data_parallel.world_size) == (rank, 2)
    assert data_parallel.group is not dist.group.WORLD
    total = torch.ones(1)
    dist.all_reduce(total, group=data_parallel.group)
    assert total == 2
    _check_that_a_missing_peer_is_noticed(rank, data_parallel.group)
    destroy_groups()
    destroy_groups()


def _check_that_a_missing_peer_is_noticed(rank: int, group: dist.ProcessGroup) -> None:
    if rank == 0:
        with pytest.raises(RuntimeError, match=r"(?i)timed? ?out"):
            dist.all_reduce(torch.ones(1), group=group)
    # The default group's own, longer timeout holds rank 1 here meanwhile.
    dist.barrier()


def test_our_group_has_the_users_timeout_and_the_default_group_its_own(tmp_path: Path) -> None:
    run_on_ranks(check_groups, 2, tmp_path / "unused", free_port(), init=False)


def test_a_process_started_by_hand_needs_no_group(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    assert not needs_process_group(1)
    assert needs_process_group(2)
    assert make_data_parallel("zero2", timeout=TIMEOUT) is None


def test_one_process_under_torchrun_has_a_group_of_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    assert needs_process_group(1)


def test_a_restarted_attempt_does_not_see_the_keys_of_the_dead_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    port = free_port()
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "0")
    first = _store(0, 1, LOOPBACK, port, TIMEOUT)
    first.set("address", "dead")
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    second = _store(0, 1, LOOPBACK, port, TIMEOUT)
    assert not second.check(["address"])
    assert first.check(["address"])
