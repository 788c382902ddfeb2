"""Groups with the user's timeout, made only where there is somebody to talk to."""

from __future__ import annotations

import os
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from harness.distributed import run_on_ranks
from harness.fabric import free_port
from thunder_memsave.config import ConfigError, StrategyConfig
from thunder_memsave.distributed.process_group import (
    destroy_groups,
    init_default_group,
    make_data_parallel,
    needs_process_group,
)
from thunder_memsave.settings.schema import parse_section

LOOPBACK = "127.0.0.1"
TIMEOUT = timedelta(seconds=60)


def config(**settings: Any) -> StrategyConfig:
    return parse_section(StrategyConfig, {"timeout": "60s", **settings}, where="strategy")


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
    data_parallel = make_data_parallel(config(timeout="1s"), ranks_per_node=2)
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
    assert make_data_parallel(config(), ranks_per_node=1) is None


def test_one_process_under_torchrun_has_a_group_of_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    assert needs_process_group(1)


def check_hybrid_groups(rank: int) -> None:
    settings = config(sharding={"mode": "hybrid", "size": 2}, prefetch="1KiB", timeout="50s")
    dp = make_data_parallel(settings, ranks_per_node=4)
    assert dp is not None
    assert dp.replicas is not None
    assert dist.get_process_group_ranks(dp.group) == [[0, 1], [0, 1], [2, 3], [2, 3]][rank]
    assert dist.get_process_group_ranks(dp.replicas) == [[0, 2], [1, 3], [0, 2], [1, 3]][rank]
    assert dist.get_process_group_ranks(dp.everyone) == [0, 1, 2, 3]
    assert (dp.mode, dp.prefetch, dp.shards, dp.num_ranks) == ("zero3", 1024, True, 4)
    for group in (dp.group, dp.replicas, dp.everyone):
        assert group is not dist.group.WORLD
        backend = group._get_backend(torch.device("cpu"))
        assert backend.options._timeout == timedelta(seconds=50)
    _check_sizes(config(sharding="hybrid"))


def _check_sizes(hybrid: StrategyConfig) -> None:
    """Without a size, the ranks of a node shard."""
    on_two_nodes = make_data_parallel(hybrid, ranks_per_node=2)
    on_one_node = make_data_parallel(hybrid, ranks_per_node=4)
    assert on_two_nodes is not None
    assert on_one_node is not None
    assert (on_two_nodes.world_size, on_two_nodes.num_ranks) == (2, 4)
    assert (on_one_node.world_size, on_one_node.replicas) == (4, None)
    auto = make_data_parallel(config(sharding="auto"), ranks_per_node=2)
    assert auto is not None
    assert (auto.mode, auto.world_size, auto.replicas) == ("auto", 4, None)
    message = "groups of 3 ranks was asked for, and 4 ranks cannot be divided .* one of 1, 2, 4, or"
    with pytest.raises(ConfigError, match=message):
        make_data_parallel(config(sharding={"mode": "hybrid", "size": 3}), ranks_per_node=4)


def test_hybrid_groups_are_rows_and_columns_of_the_ranks(tmp_path: Path) -> None:
    run_on_ranks(check_hybrid_groups, 4, tmp_path / "rendezvous")
