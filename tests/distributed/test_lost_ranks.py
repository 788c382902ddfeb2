"""A peer that stops is noticed in every group, within the timeout, and named by those who waited for it."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from harness.fabric import make_fabric, on_fabric_rank, run_on_fabric_ranks
from thunder_memsave import ThunderMemsaveStrategy
from thunder_memsave.distributed.agreement import together
from thunder_memsave.distributed.data_parallel import DataParallel
from thunder_memsave.distributed.lost_ranks import CollectiveError, collective, named_ranks
from thunder_memsave.distributed.transport import start_all_gather

TIMEOUT_S = 4
STOPPED = 3
NUM_RANKS = 4

NAMED = (
    rf"rank {STOPPED} did not give up with the others: stopped, busy with something else, or dead\."
)
ADVICE = r"Its own output says why\. strategy\.timeout is how long the others wait\."


def meet(directory: Path, what: str, num_ranks: int = NUM_RANKS) -> None:
    """Wait for the other processes in the file system: the timeout is shorter than their start."""
    (directory / f"{what}-{os.getpid()}").touch()
    while len(list(directory.glob(f"{what}-*"))) < num_ranks:
        time.sleep(0.01)


@on_fabric_rank
def check_groups(directory: Path) -> None:
    meet(directory, "imported")
    settings: dict[str, Any] = {
        "sharding": {"mode": "hybrid", "size": 2},
        "timeout": f"{TIMEOUT_S}s",
    }
    fabric = make_fabric(devices=NUM_RANKS, **settings)
    strategy = fabric.strategy
    assert isinstance(strategy, ThunderMemsaveStrategy)
    assert strategy.data_parallel is not None
    (directory / f"rank-{fabric.global_rank}").write_text(str(os.getpid()))
    meet(directory, "ready")
    if fabric.global_rank == STOPPED:
        os.kill(os.getpid(), signal.SIGSTOP)
        return  # continued, when the others are done
    with while_stopped(directory, STOPPED):
        check_waits(fabric.global_rank, strategy.data_parallel)
        meet(directory, "noticed", NUM_RANKS - 1)


@contextmanager
def while_stopped(directory: Path, rank: int) -> Iterator[None]:
    pid = int((directory / f"rank-{rank}").read_text())
    try:
        while Path(f"/proc/{pid}/stat").read_text().split()[2] != "T":
            time.sleep(0.01)
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


def check_waits(rank: int, dp: DataParallel) -> None:
    """Each rank waits in another group, all of them for the same one."""
    assert dp.replicas is not None
    replicas, rows = dp.replicas, torch.ones(2, 3)
    waits: list[tuple[Callable[[], object], str]] = [
        (lambda: together(lambda: None, dp), "exchange of outcomes with ranks 1, 2, 3"),
        (lambda: sum_over(replicas), "sum with rank 3"),
        (
            lambda: start_all_gather([rows], dp.group)[0][0].wait(),
            r"all-gather of \[4, 3\] with rank 3",
        ),
    ]
    expect_notice(rank, *waits[rank])


def sum_over(group: dist.ProcessGroup) -> None:
    with collective("sum", group):
        dist.all_reduce(torch.ones(1), group=group)


def expect_notice(rank: int, wait: Callable[[], object], waited_for: str) -> None:
    start = time.monotonic()
    message = rf"rank {rank} waited for the {waited_for}, which failed: .*(?i:timed out).* {NAMED} {ADVICE}"
    with pytest.raises(CollectiveError, match=f"(?i){message}"):
        wait()
    assert TIMEOUT_S - 1 < time.monotonic() - start < TIMEOUT_S + 2


def test_a_stopped_rank_is_named_in_every_group_by_all_who_wait(tmp_path: Path) -> None:
    run_on_fabric_ranks(check_groups, NUM_RANKS, tmp_path)


@on_fabric_rank
def check_store_of_a_stopped_rank(directory: Path) -> None:
    """Rank 0 serves the store, so that nobody can be asked."""
    meet(directory, "imported", 2)
    fabric = make_fabric(devices=2, timeout=f"{TIMEOUT_S}s")
    (directory / f"rank-{fabric.global_rank}").write_text(str(os.getpid()))
    meet(directory, "ready", 2)
    if fabric.global_rank == 0:
        os.kill(os.getpid(), signal.SIGSTOP)
        return
    message = (
        r"rank 1 waited for the fabric.barrier 'end' with rank 0, which failed: .*(?i:timed out).* "
        r"The store that rank 0 or its launcher serves does not answer: that process has stopped"
    )
    with while_stopped(directory, 0):
        start = time.monotonic()
        with pytest.raises(CollectiveError, match=message):
            fabric.strategy.barrier("end")
        assert time.monotonic() - start < TIMEOUT_S + 2


def test_a_stopped_rank_that_serves_the_store_is_noticed_too(tmp_path: Path) -> None:
    run_on_fabric_ranks(check_store_of_a_stopped_rank, 2, tmp_path)


def test_errors_that_are_not_about_other_ranks_stay_as_they_are() -> None:
    error = RuntimeError("a tensor of the wrong shape")
    with pytest.raises(RuntimeError, match=re.escape(str(error))) as raised, collective("sum"):
        raise error
    assert raised.value is error


def test_ranks_are_named_in_order_and_of_many_the_first() -> None:
    assert named_ranks({3}) == "rank 3"
    assert named_ranks({10, 9, 2}) == "ranks 2, 9, 10"
    assert named_ranks(range(100)) == "ranks 0, 1, 2, 3, 4, 5, 6, 7 and 92 more"
