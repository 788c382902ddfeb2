"""Makes the process groups of a run, with the user's timeout and a store that survives restarts."""

from __future__ import annotations

import atexit
import os
import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from thunder_memsave.config import ConfigError, StrategyConfig
from thunder_memsave.distributed.data_parallel import DataParallel
from thunder_memsave.distributed.restart_store import own_store
from thunder_memsave.distributed.transport import AUTO_BUCKET_BYTES

_SETTLE_SECONDS = 0.1


def needs_process_group(world_size: int) -> bool:
    """Return whether this process needs a group: one started by hand does not, one under torchrun does.

    A group of one keeps scripts that call `torch.distributed` themselves the same at any size.
    """
    return world_size > 1 or dist.is_torchelastic_launched()


def init_default_group(
    *,
    backend: str,
    rank: int,
    world_size: int,
    main_address: str,
    main_port: int,
    timeout: timedelta,
    device: torch.device | None = None,
) -> None:
    """Join the default process group, unless this process is in one already.

    Args:
        backend: `gloo`, `nccl`, or one per device type such as `cpu:gloo,cuda:nccl`.
        rank: This process's rank.
        world_size: The number of processes.
        main_address: The address at which rank 0, or torchrun's agent, serves the store.
        main_port: The store's port.
        timeout: The time after which a collective fails.
        device: The device that nccl is bound to, so that no collective has to guess it.
    """
    if dist.is_initialized():
        return
    # Libraries that join groups of their own read these.
    os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = main_address, str(main_port)
    dist.init_process_group(
        backend,
        store=_store(rank, world_size, main_address, main_port, timeout),
        rank=rank,
        world_size=world_size,
        timeout=timeout,
        device_id=device if device is not None and device.type != "cpu" else None,
    )
    # nccl warns, and may hang, when a process ends with its group alive; gloo needs what `destroy_groups` does.
    atexit.register(destroy_groups)


def make_data_parallel(config: StrategyConfig, *, ranks_per_node: int) -> DataParallel | None:
    """Make the strategy's groups over all ranks; None for one process, also in a group of its own. A collective.

    A group of one would only cost: casts, divisions, copies and reductions of each gradient.

    Thunder copies the default group without its timeout, so that on gloo a stopped peer is noticed
    only after 30 minutes; and groups of its own separate the strategy's collectives from the user's.

    Raises:
        ConfigError: The size of hybrid sharding's groups does not divide the number of ranks.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return None
    everyone = dist.new_group(timeout=config.timeout, group_desc="thunder_memsave data parallel")
    settings = _settings(config)
    num_ranks = dist.get_world_size()
    size = size_of_shard_group(config, num_ranks=num_ranks, ranks_per_node=ranks_per_node)
    if size == num_ranks:
        return DataParallel(group=everyone, **settings)
    return DataParallel(world=everyone, **_grid_of_groups(size, config.timeout), **settings)


def _settings(config: StrategyConfig) -> dict[str, Any]:
    """Return the settings of `DataParallel` that do not depend on the groups."""
    mode = config.sharding.mode
    return {
        "mode": "zero3" if mode == "hybrid" else mode,
        "prefetch": config.prefetch,
        "accumulate": "reduce_every" if config.accumulate == "auto" else config.accumulate,
        "reduce_dtype": torch.float32 if config.reduce_dtype == "float32" else None,
        "bucket_bytes": AUTO_BUCKET_BYTES if config.bucket == "auto" else config.bucket,
    }


def size_of_shard_group(config: StrategyConfig, *, num_ranks: int, ranks_per_node: int) -> int:
    """Return the number of ranks that share rows, if rows are shared at all.

    Raises:
        ConfigError: The size of hybrid sharding's groups does not divide the number of ranks.
    """
    if config.sharding.mode != "hybrid":
        return num_ranks
    size = ranks_per_node if config.sharding.size is None else config.sharding.size
    if num_ranks % size:
        divisors = ", ".join(str(n) for n in range(1, num_ranks + 1) if num_ranks % n == 0)
        raise ConfigError(
            f"hybrid sharding in groups of {size} ranks was asked for, and {num_ranks} ranks cannot "
            f"be divided into such groups; set sharding.size to one of {divisors}, or start a "
            f"multiple of {size} processes."
        )
    return size


def _grid_of_groups(size: int, timeout: timedelta) -> dict[str, Any]:
    """Make this rank's row and column of the grid of all ranks, `size` to a row."""
    num_ranks, rank = dist.get_world_size(), dist.get_rank()
    rows = [list(range(start, start + size)) for start in range(0, num_ranks, size)]
    columns = [list(range(offset, num_ranks, size)) for offset in range(size)]
    own: dict[str, Any] = {}
    # Every rank makes every group, in one order: each rank numbers them locally.
    for kind, members in [("group", rows), ("replicas", columns)]:
        for ranks in members:
            made = dist.new_group(ranks, timeout=timeout, group_desc=f"thunder_memsave {kind}")
            if rank in ranks:
                own[kind] = made
    return own


def destroy_groups() -> None:
    """Leave every process group of this process.

    A thread of gloo that is still releasing the last collective's tensors needs the interpreter's lock. Once the
    interpreter shuts down it cannot get it, and the process ends with SIGABRT; so this waits for a moment.
    """
    if dist.is_initialized():
        dist.destroy_process_group()
        time.sleep(_SETTLE_SECONDS)


def _store(
    rank: int, world_size: int, main_address: str, main_port: int, timeout: timedelta
) -> dist.PrefixStore:
    agent_serves = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    store = dist.TCPStore(
        main_address,
        main_port,
        world_size,
        is_master=rank == 0 and not agent_serves,
        timeout=timeout,
        multi_tenant=True,
    )
    return own_store(store, rank=rank, world_size=world_size, timeout=timeout)
