"""A rank that stops is noticed by the others within the timeout, in a message that names who waited for what."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Literal

import pytest
import torch
import torch.distributed as dist
from torch import nn

from harness.distributed import run_on_ranks
from thunder_memsave.compiler.compiled_module import CompiledModule
from thunder_memsave.distributed.data_parallel import DataParallel
from thunder_memsave.sharding.rows import shard_module

TIMEOUT_S = 3.0


def check(rank: int) -> None:
    sharded, replicated = compiled("zero3"), compiled("none")
    for module in (sharded, replicated):
        module(torch.ones(3, 4)).sum().backward()
    loss = replicated(torch.ones(3, 4)).sum()
    pids: list[int | None] = [None, None]
    dist.all_gather_object(pids, os.getpid())
    if rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
        return
    assert pids[1] is not None
    try:
        check_that_it_is_noticed(lambda: sharded(torch.ones(3, 4)), r"all-gather of \[6\]")
        check_that_it_is_noticed(loss.backward, r"all-reduce of \[6\]")
    finally:
        os.kill(pids[1], signal.SIGCONT)


def compiled(mode: Literal["none", "zero3"]) -> CompiledModule:
    """A layer with a group of its own: where one collective failed, the next would fail at once."""
    group = dist.new_group(timeout=timedelta(seconds=TIMEOUT_S))
    data_parallel = DataParallel(mode=mode, group=group)
    model = nn.Linear(4, 6)
    shard_module(model, data_parallel)
    return CompiledModule(model, data_parallel=data_parallel)


def check_that_it_is_noticed(act: Callable[[], object], collective: str) -> None:
    start = time.monotonic()
    with pytest.raises(RuntimeError, match=MESSAGE.format(collective)):
        act()
    assert time.monotonic() - start < TIMEOUT_S + 2


MESSAGE = r"rank 0 waited for the {} with rank 1, which failed: .*imed out.* strategy.timeout"


def test_a_stopped_peer_is_noticed_within_the_timeout(tmp_path: Path) -> None:
    run_on_ranks(check, 2, tmp_path / "rendezvous")
