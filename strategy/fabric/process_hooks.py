"""The processes of a run: their ranks, how they start, and their collectives."""

from __future__ import annotations

from typing import Any, TypeVar

import torch
import torch.distributed as dist
from lightning.fabric.accelerators import Accelerator
from lightning.fabric.plugins import ClusterEnvironment, Precision
from lightning.fabric.strategies import ParallelStrategy
from lightning.fabric.strategies.launchers.subprocess_script import _SubprocessScriptLauncher
from lightning.fabric.utilities.distributed import (
    ReduceOp,
    _get_default_process_group_backend_for_device,
)
from lightning.fabric.utilities.rank_zero import rank_zero_only
from lightning.fabric.utilities.seed import reset_seed
from lightning_utilities.core.rank_zero import rank_zero_only as utils_rank_zero_only
from torch import Tensor
from typing_extensions import override

from thunder_memsave.budget.allocator_settings import set_up_allocator
from thunder_memsave.config import ConfigError, StrategyConfig
from thunder_memsave.distributed.data_parallel import DataParallel
from thunder_memsave.distributed.lost_ranks import collective
from thunder_memsave.distributed.process_group import (
    init_default_group,
    make_data_parallel,
    needs_process_group,
)
from thunder_memsave.sharding.sharded_parameter import refuse_rows

T = TypeVar("T")


class ProcessHooks(ParallelStrategy):
    """The part of Fabric's contract that concerns processes, not models.

    Args:
        accelerator: Set by Fabric, as are the next three.
        parallel_devices: The devices of this node's processes.
        cluster_environment: The launcher of the processes.
        precision: One of Fabric's precision plugins.
        config: Only the timeout, the sharding and `memory.expandable_segments` are used.
        process_group_backend: None means `nccl` on CUDA devices and `gloo` on the CPU.
    """

    def __init__(
        self,
        accelerator: Accelerator | None,
        parallel_devices: list[torch.device] | None,
        cluster_environment: ClusterEnvironment | None,
        precision: Precision | None,
        *,
        config: StrategyConfig,
        process_group_backend: str | None,
    ) -> None:
        super().__init__(
            accelerator=accelerator,
            parallel_devices=parallel_devices,
            cluster_environment=cluster_environment,
            precision=precision,
        )
        self.config = config
        self.data_parallel: DataParallel | None = None
        self.available_bytes: int | None = None
        """Bytes that this process can have on each rank's device; None on the CPU, and before set-up."""
        self._num_nodes = 1
        self._process_group_backend = process_group_backend

    @property
    @override
    def root_device(self) -> torch.device:
        assert self.parallel_devices is not None
        return self.parallel_devices[self.local_rank]

    @property
    def num_nodes(self) -> int:
        """The number of machines."""
        return self._num_nodes

    @num_nodes.setter
    def num_nodes(self, num_nodes: int) -> None:
        self._num_nodes = num_nodes

    @property
    def num_processes(self) -> int:
        """The number of processes on this machine."""
        return len(self.parallel_devices) if self.parallel_devices is not None else 0

    @property
    def process_group_backend(self) -> str | None:
        """The backend of the process group; None until it is known."""
        return self._process_group_backend

    @property
    @override
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        return {"num_replicas": self.num_nodes * self.num_processes, "rank": self.global_rank}

    @property
    def _shards(self) -> bool:
        return self.data_parallel is not None and self.data_parallel.shards

    @override
    def _configure_launcher(self) -> None:
        assert self.cluster_environment is not None
        alone = self.num_nodes * self.num_processes == 1
        if not alone and not self.cluster_environment.creates_processes_externally:
            self._launcher = _SubprocessScriptLauncher(
                self.cluster_environment, self.num_processes, self.num_nodes
            )

    @override
    def setup_environment(self) -> None:
        self._check_world_size()
        set_up_allocator(self.config.memory, self.root_device)
        super().setup_environment()
        self._setup_distributed()

    def _check_world_size(self) -> None:
        # Fabric checks this in its launcher, and under torchrun there is none.
        if self.world_size != self.num_nodes * self.num_processes:
            raise ConfigError(
                f"Fabric(devices={self.num_processes}, num_nodes={self.num_nodes}) asks for "
                f"{self.num_nodes * self.num_processes} processes, but "
                f"{type(self.cluster_environment).__name__} started {self.world_size}; pass "
                "devices=<processes per node> and num_nodes=<nodes> as they were launched."
            )

    def _setup_distributed(self) -> None:
        reset_seed()
        self._set_world_ranks()
        if not needs_process_group(self.world_size):
            return
        assert self.cluster_environment is not None
        if self._process_group_backend is None:
            backend = _get_default_process_group_backend_for_device(self.root_device)
            self._process_group_backend = backend
        init_default_group(
            backend=self._process_group_backend,
            rank=self.global_rank,
            world_size=self.world_size,
            main_address=self.cluster_environment.main_address,
            main_port=self.cluster_environment.main_port,
            timeout=self.config.timeout,
            device=self.root_device,
        )
        self.data_parallel = make_data_parallel(self.config, ranks_per_node=self.num_processes)

    def _set_world_ranks(self) -> None:
        if self.cluster_environment is not None:
            self.cluster_environment.set_global_rank(
                self.node_rank * self.num_processes + self.local_rank
            )
            self.cluster_environment.set_world_size(self.num_nodes * self.num_processes)
        for only_on_rank_zero in (rank_zero_only, utils_rank_zero_only):
            vars(only_on_rank_zero)["rank"] = self.global_rank

    @override
    def teardown(self) -> None:
        self.precision.teardown()
        assert self.cluster_environment is not None
        self.cluster_environment.teardown()
        assert self.accelerator is not None
        self.accelerator.teardown()

    @override
    def all_reduce(
        self,
        tensor: Tensor | Any,
        group: Any | None = None,
        reduce_op: ReduceOp | str | None = "mean",
    ) -> Tensor | Any:
        if isinstance(tensor, Tensor):
            refuse_rows(tensor, operation="fabric.all_reduce")
            if dist.is_initialized():
                with collective("fabric.all_reduce", group):
                    _reduce(tensor, group, reduce_op)
        return tensor

    @override
    def all_gather(
        self, tensor: Tensor, group: Any | None = None, sync_grads: bool = False
    ) -> Tensor:
        if sync_grads or not dist.is_initialized():
            return super().all_gather(tensor, group=group, sync_grads=sync_grads)
        # Fabric's own implementation warns about a deprecation in torch 2.13.
        tensor = tensor.detach().contiguous()
        gathered = [torch.empty_like(tensor) for _ in range(dist.get_world_size(group))]
        with collective("fabric.all_gather", group):
            dist.all_gather(gathered, tensor, group=group)
        return torch.stack(gathered)

    @override
    def barrier(self, name: str | None = None) -> None:
        if not dist.is_initialized():
            return
        device_ids = [self.root_device.index] if dist.get_backend() == "nccl" else None
        with collective("fabric.barrier" if name is None else f"fabric.barrier {name!r}"):
            dist.barrier(device_ids=device_ids)

    @override
    def broadcast(self, obj: T, src: int = 0) -> T:
        if not dist.is_initialized():
            return obj
        objects = [obj]
        with collective("fabric.broadcast"):
            dist.broadcast_object_list(objects, src)
        return objects[0]


def _reduce(tensor: Tensor, group: Any | None, reduce_op: ReduceOp | str | None) -> None:
    """Reduce in place, as Lightning does, but without its barrier, which on nccl makes the host wait for the device."""
    is_mean = isinstance(reduce_op, str) and reduce_op.lower() in ("mean", "avg")
    operation = ReduceOp.SUM if is_mean or reduce_op is None else reduce_op
    if isinstance(operation, str):
        if not hasattr(ReduceOp, operation.upper()):
            raise ValueError(
                f"reduce_op is {operation!r}, which torch.distributed does not know; use mean, sum, max or min."
            )
        operation = getattr(ReduceOp, operation.upper())
    dist.all_reduce(tensor, op=operation, group=group)
    if is_mean:
        tensor.copy_(tensor / dist.get_world_size(group))
