"""A rank that stops is noticed by the others within the timeout, in a message that names who waited for what."""

from __future__ import annotations

import os
import signal
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

from harness.distributed import run_on_ranks
from thunder_memsave.compile import CompiledModule
from thunder_memsave.sharding import DataParallel, shard_module

TIMEOUT_S = 3.0


def check(rank: int) -> None:
    group = dist.new_group(timeout=timedelta(seconds=TIMEOUT_S))
    data_parallel = DataParallel(mode="zero3", group=group)
    model = nn.Linear(4, 6)
    shard_module(model, data_parallel)
    module = CompiledModule(model, data_parallel=data_parallel)
    module(torch.ones(3, 4)).sum().backward()
    pids: list[int | None] = [None, None]
    dist.all_gather_object(pids, os.getpid())
    if rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
        return
    assert pids[1] is not None
    try:
        start = time.monotonic()
        with pytest.raises(RuntimeError, match=MESSAGE):
            module(torch.ones(3, 4))
        assert time.monotonic() - start < TIMEOUT_S + 2
    finally:
        os.kill(pids[1], signal.SIGCONT)


MESSAGE = r"rank 0 waited for the all-gather of \[6, 4\] with rank 1, which failed: .*imed out.* strategy.timeout"


def test_a_stopped_peer_is_noticed_within_the_timeout(tmp_path: Path) -> None:
    run_on_ranks(check, 2, tmp_path / "rendezvous")
