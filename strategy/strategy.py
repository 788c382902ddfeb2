"""The Fabric strategy: every hook of Fabric's contract, each delegating to one other file."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ExitStack, nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from lightning.fabric.accelerators import Accelerator
from lightning.fabric.plugins import CheckpointIO, ClusterEnvironment, Precision
from lightning.fabric.strategies import ParallelStrategy
from lightning.fabric.strategies.launchers.subprocess_script import _SubprocessScriptLauncher
from lightning.fabric.strategies.registry import _StrategyRegistry
from lightning.fabric.strategies.strategy import _BackwardSyncControl, _Sharded
from lightning.fabric.utilities.distributed import (
    ReduceOp,
    _get_default_process_group_backend_for_device,
    _sync_ddp_if_available,
)
from lightning.fabric.utilities.rank_zero import rank_zero_only
from lightning.fabric.utilities.seed import reset_seed
from lightning.fabric.wrappers import _FabricModule
from lightning_utilities.core.rank_zero import rank_zero_only as utils_rank_zero_only
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import override

from thunder_memsave import checkpoint
from thunder_memsave.autoload import DESCRIPTION, STRATEGY_NAME
from thunder_memsave.compile import CompiledModule
from thunder_memsave.config import (
    ConfigError,
    ShardingConfig,
    StrategyConfig,
    load_strategy_config,
    parse_strategy,
    refuse_keys,
)
from thunder_memsave.digest import check_ranks_agree
from thunder_memsave.forward_methods import take_redirection
from thunder_memsave.gradients import clip_norm, clip_value
from thunder_memsave.local_state import hide_padding
from thunder_memsave.materialize import materialize
from thunder_memsave.precision import refuse_unsupported, share_found_inf
from thunder_memsave.process_group import (
    init_default_group,
    make_data_parallel,
    needs_process_group,
)
from thunder_memsave.refusals import refuse_unsuitable
from thunder_memsave.sharding import DataParallel, shard_module, summon_full

T = TypeVar("T")


class ForwardModule(CompiledModule):
    """What Fabric calls: the compiled `forward`, or the method that Fabric redirects through it."""

    @override
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.call_method(take_redirection(self.module), *args, **kwargs)


class ThunderMemsaveStrategy(ParallelStrategy, _Sharded):
    """Trains with sharded parameters and graphs compiled by Thunder.

    Args:
        accelerator: Set by Fabric, as are the next four.
        parallel_devices: The devices of this node's processes.
        cluster_environment: Who launched the processes.
        checkpoint_io: Refused: checkpoints are sharded over the ranks.
        precision: One of Fabric's precision plugins.
        sharding: `"zero2"`, `"none"` or a `ShardingConfig`.
        frontend: How graphs are captured, `"dynamo"` or `"interpreter"`.
        executors: Names of Thunder executors; None takes the defaults.
        timeout: How long a collective may wait for the other ranks, such as `"30min"`.
        state_dict_type: What `fabric.save` writes, `"sharded"` or `"full"`.
        memory: Has no keys in this version.
        fp8: Has no keys in this version.
        process_group_backend: None takes `nccl` on CUDA devices and `gloo` on the CPU.

    Raises:
        ConfigError: an argument is unknown or wrong.
    """

    def __init__(
        self,
        accelerator: Accelerator | None = None,
        parallel_devices: list[torch.device] | None = None,
        cluster_environment: ClusterEnvironment | None = None,
        checkpoint_io: CheckpointIO | None = None,
        precision: Precision | None = None,
        *,
        sharding: str | Mapping[str, Any] | ShardingConfig = "zero2",
        frontend: str = "dynamo",
        executors: list[str] | tuple[str, ...] | None = None,
        timeout: str | timedelta = "30min",
        state_dict_type: str = "sharded",
        memory: Mapping[str, Any] | None = None,
        fp8: Mapping[str, Any] | None = None,
        process_group_backend: str | None = None,
    ) -> None:
        if checkpoint_io is not None:
            self.checkpoint_io = checkpoint_io  # raises
        super().__init__(
            accelerator=accelerator,
            parallel_devices=parallel_devices,
            cluster_environment=cluster_environment,
            precision=precision,
        )
        refuse_keys(memory, where="memory")
        refuse_keys(fp8, where="fp8")
        self.config: StrategyConfig = parse_strategy(
            {
                "sharding": sharding,
                "frontend": frontend,
                "executors": executors,
                "timeout": timeout,
                "state_dict_type": state_dict_type,
            },
            where=type(self).__name__,
        )
        self.data_parallel: DataParallel | None = None
        self._num_nodes = 1
        self._process_group_backend = process_group_backend
        self._backward_sync_control = _ReduceInEveryBackward()

    @classmethod
    def from_config(cls, path: str | Path, **fabric_arguments: Any) -> ThunderMemsaveStrategy:
        """Build the strategy from the `strategy`, `memory` and `fp8` parts of a YAML file.

        Raises:
            ConfigError: the file cannot be read, or one of the three parts is wrong.
        """
        config = load_strategy_config(path)
        strategy = cls(**fabric_arguments)
        strategy.config = config
        return strategy

    @classmethod
    @override
    def register_strategies(cls, strategy_registry: _StrategyRegistry) -> None:
        strategy_registry.register(STRATEGY_NAME, cls, description=DESCRIPTION)

    # What Fabric asks about the processes.

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
    @override
    def checkpoint_io(self) -> CheckpointIO:
        raise NotImplementedError(f"{type(self).__name__} does not use the CheckpointIO plugin.")

    @checkpoint_io.setter
    @override
    def checkpoint_io(self, io: CheckpointIO) -> None:
        raise NotImplementedError(
            f"{type(self).__name__} does not use the CheckpointIO plugin: every rank writes and "
            f"reads its own part of a checkpoint; leave {type(io).__name__} out."
        )

    @property
    @override
    def precision(self) -> Precision:
        return self._precision if self._precision is not None else Precision()

    @precision.setter
    @override
    def precision(self, precision: Precision | None) -> None:
        if precision is not None:
            refuse_unsupported(precision)
        self._precision = precision

    # Launch.

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
        super().setup_environment()
        self._setup_distributed()

    def _check_world_size(self) -> None:
        # Fabric checks this in a launcher, and there is none under torchrun.
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
        self.data_parallel = make_data_parallel(
            self.config.sharding.mode, timeout=self.config.timeout
        )
        assert self.data_parallel is not None
        if self.data_parallel.shards:
            share_found_inf(self.precision, self.data_parallel.group)

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

    # Models and optimizers.

    @property
    def _shards(self) -> bool:
        return self.data_parallel is not None and self.data_parallel.shards

    @override
    def module_init_context(self, empty_init: bool | None = None) -> AbstractContextManager[Any]:
        stack = ExitStack()
        if empty_init:
            stack.enter_context(torch.device("meta"))  # setup_module makes the values
        elif not self._shards:
            stack.enter_context(self.root_device)  # else the whole model need not fit there
        stack.enter_context(self.precision.module_init_context())
        stack.enter_context(self.module_sharded_context())
        return stack

    @override
    def module_sharded_context(self) -> AbstractContextManager[None]:
        return nullcontext()

    @override
    def module_to_device(self, module: nn.Module) -> None:
        if not self._shards and not _has_meta(module):
            module.to(self.root_device)

    @override
    def setup_module(self, module: nn.Module) -> ForwardModule:
        """Shard the model in place and wrap it into its compiled forward. A collective.

        The parameters stay the objects that they were, so optimizers made before train them.

        Raises:
            ValueError: the model is compiled, distributed or set up already.
            RankMismatchError: the ranks' models differ.
        """
        refuse_unsuitable(module)
        check_ranks_agree(module, config=self.config, data_parallel=self.data_parallel)
        if _has_meta(module):
            materialize(module, device=self.root_device, data_parallel=self.data_parallel)
        else:
            shard_module(module, self.data_parallel)
        if self._shards:
            module.to(self.root_device)
            hide_padding(module)
        return ForwardModule(module, config=self.config.compile, data_parallel=self.data_parallel)

    @override
    def setup_optimizer(self, optimizer: Optimizer) -> Optimizer:
        """Check that the optimizer's state fits the shards.

        Raises:
            ValueError: it has taken a step on the whole weights.
        """
        for parameter, state in optimizer.state.items():
            _refuse_whole_state(parameter, state)
        return optimizer

    @override
    def clip_gradients_norm(
        self,
        module: nn.Module,
        optimizer: Optimizer,
        max_norm: float | int,
        norm_type: float | int = 2.0,
        error_if_nonfinite: bool = True,
    ) -> Tensor:
        """Scale the gradients to a global norm; returns the norm before. A collective."""
        self.precision.unscale_gradients(optimizer)
        return clip_norm(
            list(self.precision.main_params(optimizer)),
            max_norm=max_norm,
            norm_type=norm_type,
            error_if_nonfinite=error_if_nonfinite,
            data_parallel=self.data_parallel,
        )

    @override
    def clip_gradients_value(
        self, module: nn.Module, optimizer: Optimizer, clip_val: float | int
    ) -> None:
        self.precision.unscale_gradients(optimizer)
        clip_value(self.precision.main_params(optimizer), clip_value=clip_val)

    # Communication for the user's script.

    @override
    def all_reduce(
        self,
        tensor: Tensor | Any,
        group: Any | None = None,
        reduce_op: ReduceOp | str | None = "mean",
    ) -> Tensor | Any:
        if isinstance(tensor, Tensor):
            return _sync_ddp_if_available(tensor, group, reduce_op=reduce_op)
        return tensor

    @override
    def all_gather(
        self, tensor: Tensor, group: Any | None = None, sync_grads: bool = False
    ) -> Tensor:
        if sync_grads or not dist.is_initialized():
            return super().all_gather(tensor, group=group, sync_grads=sync_grads)
        # Fabric's own way to do this warns about a deprecation in torch 2.13.
        tensor = tensor.detach().contiguous()
        gathered = [torch.empty_like(tensor) for _ in range(dist.get_world_size(group))]
        dist.all_gather(gathered, tensor, group=group)
        return torch.stack(gathered)

    @override
    def barrier(self, name: str | None = None) -> None:
        if not dist.is_initialized():
            return
        if dist.get_backend() == "nccl":
            dist.barrier(device_ids=[self.root_device.index])
        else:
            dist.barrier()

    @override
    def broadcast(self, obj: T, src: int = 0) -> T:
        if not dist.is_initialized():
            return obj
        objects = [obj]
        dist.broadcast_object_list(objects, src)
        return objects[0]

    # State.

    @override
    def save_checkpoint(
        self,
        path: str | Path,
        state: dict[str, Any],
        storage_options: Any | None = None,
        filter: dict[str, Callable[[str, Any], bool]] | None = None,
    ) -> None:
        """Save the model, optimizers and the rest of `state` as `state_dict_type` says."""
        if storage_options is not None:
            raise ConfigError(
                f"storage_options={storage_options!r} is for CheckpointIO plugins, which "
                f"{type(self).__name__} does not use; leave it out."
            )
        checkpoint.save_checkpoint(
            path,
            _originals(state),
            state_dict_type=self.config.state_dict_type,
            data_parallel=self.data_parallel,
            filter=filter,
        )

    @override
    def load_checkpoint(
        self,
        path: str | Path,
        state: nn.Module | Optimizer | dict[str, Any] | None = None,
        strict: bool = True,
        weights_only: bool | None = None,
    ) -> dict[str, Any]:
        """Restore `state` in place; a module alone is loaded from raw weights.

        Returns what the checkpoint has beyond it. Raw weights are read without running code,
        whatever `weights_only` says.
        """
        if isinstance(state, nn.Module | Optimizer):
            module = _original(state) if isinstance(state, nn.Module) else state
            checkpoint.load_raw(path, module, data_parallel=self.data_parallel, strict=strict)
            return {}
        state = {} if state is None else state
        originals = _originals(state)
        remainder = checkpoint.load_checkpoint(
            path,
            originals,
            data_parallel=self.data_parallel,
            strict=strict,
            weights_only=weights_only,
        )
        others = (k for k in state if not isinstance(state[k], nn.Module | Optimizer))
        state.update({key: originals[key] for key in others})
        return remainder

    @override
    def get_module_state_dict(self, module: nn.Module) -> dict[str, Any]:
        """Whole CPU tensors under the model's own names, on every rank. A collective."""
        return checkpoint.unsharded_state_dict(_original(module), self.data_parallel)

    @override
    def load_module_state_dict(
        self, module: nn.Module, state_dict: Mapping[str, Any], strict: bool = True
    ) -> None:
        """Copy whole tensors into the model, each rank its own rows."""
        checkpoint.load_state_dict(_original(module), state_dict, strict=strict)

    def summon_full(
        self, module: nn.Module, *, writeback: bool = False
    ) -> AbstractContextManager[None]:
        """Make every parameter of the model whole inside the context. A collective.

        With `writeback`, changes made inside are kept, each rank keeping its own rows.
        """
        return summon_full(_original(module), self.data_parallel, writeback=writeback)


class _ReduceInEveryBackward(_BackwardSyncControl):
    """Reduces gradients in every micro-batch, so that accumulation is exact and never whole.

    Thunder's own `no_sync` drops the gradients of sharded parameters, and keeping unreduced ones
    would take the memory of all whole gradients.
    """

    @override
    def no_backward_sync(self, module: nn.Module, enabled: bool) -> AbstractContextManager[None]:
        if not isinstance(module, ForwardModule):
            raise TypeError(
                "no_backward_sync() needs a model that fabric.setup() returned, but got a "
                f"{type(module).__name__}."
            )
        return nullcontext()


def _original(module: nn.Module) -> nn.Module:
    """The user's model inside what Fabric and we put around it."""
    if isinstance(module, _FabricModule):
        return module.module
    return module.module if isinstance(module, CompiledModule) else module


def _originals(state: Mapping[str, Any]) -> dict[str, Any]:
    return {k: _original(v) if isinstance(v, nn.Module) else v for k, v in state.items()}


def _has_meta(module: nn.Module) -> bool:
    return any(t.is_meta for t in (*module.parameters(), *module.buffers()))


def _refuse_whole_state(parameter: Tensor, state: Mapping[str, Any]) -> None:
    whole = getattr(parameter, "unsharded_shape", parameter.shape)
    if whole == parameter.shape:
        return
    for name, value in state.items():
        if isinstance(value, Tensor) and value.shape == whole:
            raise ValueError(
                f"the optimizer's state {name!r} has the whole weight's shape {tuple(whole)}, but "
                f"the weight is sharded now; set the optimizer up before its first step, and load "
                "its state with fabric.load()."
            )
