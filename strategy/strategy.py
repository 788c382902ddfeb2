"""The Fabric strategy: every hook of Fabric's contract, each delegating to one other file."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.accelerators import Accelerator
from lightning.fabric.plugins import CheckpointIO, ClusterEnvironment, Precision
from lightning.fabric.strategies.registry import _StrategyRegistry
from lightning.fabric.strategies.strategy import _Sharded
from lightning.fabric.utilities.types import Optimizable
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import override

from thunder_memsave.autoload import DESCRIPTION, STRATEGY_NAME
from thunder_memsave.budget.agreed import least_available_bytes
from thunder_memsave.budget.explain_call import explain_call, summarize_call
from thunder_memsave.budget.planned_call import PlannedCall
from thunder_memsave.compiler.explain_steps import explain_steps
from thunder_memsave.config import (
    Fp8Config,
    MemoryConfig,
    ShardingConfig,
    StrategyConfig,
    load_strategy_config,
)
from thunder_memsave.fabric.accumulation import Accumulation, refuse_unreduced
from thunder_memsave.fabric.counted_step import CountedStep
from thunder_memsave.fabric.forward_module import ForwardModule
from thunder_memsave.fabric.measured_backward import MeasuredBackward
from thunder_memsave.fabric.module_setup import ModuleSetup, has_meta
from thunder_memsave.fabric.nonfinite import (
    NonfiniteGradients,
    refuse_closure,
    refuse_stop_with_scaler,
)
from thunder_memsave.fabric.precision import fp8_of, share_found_inf, taken_over
from thunder_memsave.fabric.refusals import fit_optimizer
from thunder_memsave.fabric.state_hooks import StateHooks
from thunder_memsave.fabric.updates import unclipped_norm, update_in_backward
from thunder_memsave.fp8.compute.steps import Fp8Steps
from thunder_memsave.fp8.recipe import refuse_own_scales
from thunder_memsave.ops.families.tiled_loss import TILE_BYTES
from thunder_memsave.optim.in_backward import UpdatesInBackward
from thunder_memsave.optim.on_host import begin_step
from thunder_memsave.planner.graph import Allocations, Plan, StepMemory
from thunder_memsave.settings.schema import field_names, parse_section
from thunder_memsave.sharding.gradients import clip_norm, clip_value


class ThunderMemsaveStrategy(StateHooks, MeasuredBackward, _Sharded):
    """Trains with sharded parameters and graphs compiled by Thunder.

    Args:
        accelerator: Set by Fabric, as are the next four.
        parallel_devices: The devices of this node's processes.
        cluster_environment: The launcher of the processes.
        checkpoint_io: Refused, as checkpoints are sharded over the ranks.
        precision: One of Fabric's precision plugins.
        sharding: `"none"`, `"zero2"`, `"zero3"`, `"hybrid"`, `"auto"`, a mapping such as
            `{"mode": "hybrid", "size": 8}`, or a `ShardingConfig`.
        prefetch: Bytes of gathered weights in flight besides those being read: `"auto"`, `"256MiB"`, or a number.
        accumulate: Backward in `fabric.no_backward_sync`: `"reduce_every"`, `"accumulate_unsharded"` or `"auto"`.
        bucket: Largest parameter, in bytes, that shares collectives with others: `"auto"`, `"64KiB"`, or a number.
        reduce_dtype: Dtype in which ranks sum gradients of fewer bits: `"float32"`, or None for their own dtype.
        cuda_graphs: Whether forward and backward are a CUDA graph each: `"auto"`, True or False.
        fusion: Whether neighbouring elementwise operations are one kernel: `"auto"`, True or False.
        trace_dir: Directory for the traces after each step of a compilation; None writes none.
        fullgraph: Whether to refuse a forward that is not one graph; else it runs in compiled and eager pieces.
        return_logits: Whether logits that a model returns beside its loss are computed before they are read.
        leave_out: Steps of a compilation to leave out, for an experiment.
        nonfinite_gradients: What happens to a step with non-finite gradients: `"ignore"`, `"skip"` or `"stop"`.
        timeout: Longest wait of a collective for the other ranks, such as `"30min"`.
        state_dict_type: What `fabric.save` writes: `"sharded"` or `"full"`.
        memory: The memory budget and the planner's settings: a mapping such as `{"budget": "60GiB"}`, or a
            `MemoryConfig`; None means the defaults.
        fp8: Which linears compute in fp8, and how: `{"recipe": "delayed"}`, `{}`, an `Fp8Config`; None: none do.
        frozen_weights: Format of frozen weights, `"nf4"`, `"int8"` or `"mxfp4"`; None: as they are, or as `fp8` says.
        process_group_backend: None means `nccl` on CUDA devices and `gloo` on the CPU.

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
        prefetch: int | str = "auto",
        accumulate: str = "auto",
        bucket: int | str = "auto",
        reduce_dtype: str | None = "float32",
        trace_dir: str | None = None,
        cuda_graphs: str | bool = False,
        fusion: str | bool = "auto",
        fullgraph: bool = False,
        return_logits: bool = False,
        leave_out: list[str] | tuple[str, ...] = (),
        nonfinite_gradients: str = "ignore",
        timeout: str | timedelta = "30min",
        state_dict_type: str = "sharded",
        memory: Mapping[str, Any] | MemoryConfig | None = None,
        fp8: Mapping[str, Any] | Fp8Config | None = None,
        frozen_weights: str | None = None,
        process_group_backend: str | None = None,
    ) -> None:
        given = {**locals(), "memory": {} if memory is None else memory}
        if checkpoint_io is not None:
            self.checkpoint_io = checkpoint_io  # raises
        values = {name: given[name] for name in field_names(StrategyConfig)}
        config = parse_section(StrategyConfig, values, where=type(self).__name__)
        super().__init__(
            accelerator,
            parallel_devices,
            cluster_environment,
            precision,
            config=config,
            process_group_backend=process_group_backend,
        )
        self._updates = UpdatesInBackward()
        self._backward_sync_control = self._accumulation = Accumulation(self._updates)
        self._nonfinite = NonfiniteGradients(config.nonfinite_gradients)
        self._modules: weakref.WeakSet[ForwardModule] = weakref.WeakSet()
        self._optimizers: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self._counted = CountedStep(
            self._modules, self._optimizers, self._accumulation, self._updates
        )
        self._fp8_steps: Fp8Steps | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> ThunderMemsaveStrategy:
        """Return the strategy itself: copies of a model that Fabric set up share its process groups."""
        return self

    @classmethod
    def from_config(
        cls, path: str | Path, *, process_group_backend: str | None = None
    ) -> ThunderMemsaveStrategy:
        """Build the strategy from the `strategy`, `memory` and `fp8` parts of a YAML file.

        Raises:
            ConfigError: the file cannot be read, or one of the three parts is wrong.
        """
        strategy = cls(process_group_backend=process_group_backend)
        strategy.config = load_strategy_config(path)
        strategy._nonfinite = NonfiniteGradients(strategy.config.nonfinite_gradients)
        return strategy

    @classmethod
    @override
    def register_strategies(cls, strategy_registry: _StrategyRegistry) -> None:
        strategy_registry.register(STRATEGY_NAME, cls, description=DESCRIPTION)

    @property
    @override
    def precision(self) -> Precision:
        return self._precision if self._precision is not None else Precision()

    @precision.setter
    @override
    def precision(self, precision: Precision | None) -> None:
        self._precision = None if precision is None else taken_over(precision)

    @override
    def _setup_distributed(self) -> None:
        refuse_stop_with_scaler(self._nonfinite.policy, self.precision)
        self.config = replace(self.config, fp8=fp8_of(self.precision, self.config.fp8))
        refuse_own_scales(self.config.fp8, num_ranks=self.world_size)
        super()._setup_distributed()
        self.available_bytes = least_available_bytes(self.root_device, self.data_parallel)
        if self.data_parallel is not None and self.data_parallel.shards:
            share_found_inf(self.precision, self.data_parallel.everyone)

    @override
    def module_init_context(self, empty_init: bool | None = None) -> AbstractContextManager[Any]:
        stack = ExitStack()
        if empty_init:
            stack.enter_context(torch.device("meta"))  # setup_module makes the values
        elif not self._shards:
            stack.enter_context(self.root_device)  # a sharded model may not fit there whole
        stack.enter_context(self.precision.module_init_context())
        stack.enter_context(self.module_sharded_context())
        return stack

    @override
    def module_sharded_context(self) -> AbstractContextManager[None]:
        return nullcontext()

    @override
    def module_to_device(self, module: nn.Module) -> None:
        # Some are cast to fewer bytes first, or stay on the host.
        is_set_up_first = self.config.casts_frozen_weights or self.config.memory.offload_weights
        if not self._shards and not has_meta(module) and not is_set_up_first:
            module.to(self.root_device)

    @override
    def setup_module(self, module: nn.Module) -> ForwardModule:
        """Shard the model in place and wrap it into its compiled forward. A collective.

        The parameters remain the same objects, so optimizers made before train them.

        Raises:
            ValueError: the model is compiled, distributed or set up already.
            RankMismatchError: the ranks' models differ in more than values, or their settings.
            OtherRankError: another rank's model could not be set up.
        """
        forward = self._module_setup.set_up(module)
        if forward.fp8 is not None:
            if self._fp8_steps is None:
                self._fp8_steps = Fp8Steps(self.data_parallel)
            self._fp8_steps.add(module, forward.fp8)
        self._modules.add(forward)
        return forward

    @property
    def _module_setup(self) -> ModuleSetup:
        return ModuleSetup(
            config=self.config,
            data_parallel=self.data_parallel,
            device=self.root_device,
            counted=self._counted,
            updates=self._updates if self.config.memory.optimizer_in_backward else None,
            available_bytes=self.available_bytes,
            ranks_per_node=self.num_processes,
        )

    @override
    def _before_states(self) -> None:
        if self._optimizers:
            self._module_setup.make_room(m.module for m in self._modules)

    def count_caller(
        self, *, between_bytes: int = 0, other_bytes: int = 0, loss_allocations: Allocations = ()
    ) -> None:
        """Tell the planner what the script itself allocates, for all plans made from now on.

        Args:
            between_bytes: Peak bytes that the script allocates between forward and backward besides the model's
                outputs, such as by a loss outside of the model.
            other_bytes: Bytes that the script holds all the time, such as queued batches.
            loss_allocations: Those of `between_bytes`, if known; only the simulation of what is reserved uses them.
        """
        self._counted.caller = StepMemory(
            between_bytes=between_bytes,
            other_bytes=other_bytes,
            loss_allocations=loss_allocations,
        )

    @property
    def plan(self) -> Plan | None:
        """The plan of the most recently compiled call with a backward; None before the first."""
        call = self._planned_call()
        return None if call is None else call.plan

    @property
    def budget_bytes(self) -> int | None:
        """Bytes that a step may take on each device; None without a limit."""
        return self._module_setup.budget_bytes

    @property
    def updates_in_backward(self) -> bool:
        """Whether backward updates weights: `memory.optimizer_in_backward` says so, or a plan does with `auto`."""
        return self._updates.is_on

    def explain(self, *, num_rows: int = 40, passes: bool = False) -> str:
        """Return the plan as text: what is kept for backward and what is recomputed, with source lines.

        Args:
            num_rows: Rows of the table of decisions; the rest is counted.
            passes: Return the steps of the last compilation instead, with times and numbers of operations.

        Raises:
            RuntimeError: nothing was compiled yet.
        """
        if passes:
            return explain_steps([c for m in self._modules for c in m.captures])
        return explain_call(
            self._planned_call(),
            memory=self.config.memory,
            device_type=self.root_device.type,
            tile_bytes=TILE_BYTES,
            num_rows=num_rows,
            notes=[m.pieces_note for m in self._modules if m.pieces_note],
        )

    def summary(self) -> list[str]:
        """Return the plan in three short lines: whether it fits, what it recomputes, what takes the most.

        Raises:
            RuntimeError: nothing was compiled yet.
        """
        return summarize_call(self._planned_call())

    def _planned_call(self) -> PlannedCall | None:
        calls = [c for m in self._modules if m.planner for c in m.planner.calls if c.plan]
        return max(calls, key=lambda call: call.number, default=None)

    @override
    def setup_optimizer(self, optimizer: Optimizer) -> Optimizer:
        """Check that the optimizer can work on shards, and that its state fits them.

        Raises:
            ConfigError: it computes with whole weights.
            ValueError: it has taken a step on the whole weights.
        """
        fit_optimizer(optimizer, self.config.memory)
        self._optimizers.add(optimizer)
        if asked := self.config.memory.optimizer_in_backward:
            context = self.precision, self._modules
            update_in_backward(optimizer, self._updates, *context, is_asked=asked is True)
        return super().setup_optimizer(optimizer)

    @override
    def optimizer_step(self, optimizer: Optimizable, **kwargs: Any) -> Any:
        """Take the step, unless gradients are unreduced, or are non-finite and such steps are skipped.

        Raises:
            RuntimeError: no backward reduced the gradients of the last micro-batches; or backward updated parameters by
                a part of their gradients, or with other settings.
            NonfiniteGradientsError: gradients are non-finite and the policy is to stop; on every rank.
            ConfigError: a closure computes the gradients, and they were to be checked.
        """
        may_step = not isinstance(optimizer, Optimizer) or self._may_step(optimizer, kwargs)
        result = super().optimizer_step(optimizer, **kwargs) if may_step else None
        if isinstance(optimizer, Optimizer):
            self.leave_out_step(optimizer)  # no effect if the step was taken
            self._updates.end_step(optimizer)
        return result

    def leave_out_step(self, optimizer: Optimizer) -> None:
        """End a step that was not taken, so that fp8 scales are updated from its amax. A collective.

        For loops that do not call `optimizer.step()` when the loss or gradients are bad.

        Args:
            optimizer: The optimizer that would have taken the step, on every rank.
        """
        if self._fp8_steps is not None:
            self._fp8_steps.ended(optimizer)  # the optimizer has not called its hooks

    def _may_step(self, optimizer: Optimizer, kwargs: Mapping[str, Any]) -> bool:
        if "closure" in kwargs:  # runs the last micro-batch itself
            refuse_closure(self._nonfinite.policy)
            return True
        refuse_unreduced(optimizer, self._modules)
        self._updates.check_step(optimizer)
        return self._nonfinite.allows_step(
            optimizer, precision=self.precision, data_parallel=self.data_parallel
        )

    @override
    def clip_gradients_norm(
        self,
        module: nn.Module,
        optimizer: Optimizer,
        max_norm: float | int,
        norm_type: float | int = 2.0,
        error_if_nonfinite: bool = True,
    ) -> Tensor:
        """Scale the gradients to a global norm, and return the norm before. A collective.

        Where backward updates parameters, only an infinite `max_norm` gives the norm; others raise a RuntimeError.
        """
        refuse_unreduced(optimizer, self._modules)
        if self._updates.is_on:
            terms = (max_norm, norm_type, error_if_nonfinite)
            return unclipped_norm(self._updates, optimizer, *terms, self.data_parallel)
        self.precision.unscale_gradients(optimizer)
        parameters = list(self.precision.main_params(optimizer))
        begin_step(optimizer)
        norm = clip_norm(
            parameters,
            max_norm=max_norm,
            norm_type=norm_type,
            # Fabric's default would end a run whose policy is to skip such steps.
            error_if_nonfinite=error_if_nonfinite and self._nonfinite.policy != "skip",
            data_parallel=self.data_parallel,
        )
        self._nonfinite.note_norm(parameters, norm, data_parallel=self.data_parallel)
        return norm

    @override
    def clip_gradients_value(
        self, module: nn.Module, optimizer: Optimizer, clip_val: float | int
    ) -> None:
        refuse_unreduced(optimizer, self._modules)
        self._updates.refuse_clipping()
        self.precision.unscale_gradients(optimizer)
        begin_step(optimizer)
        clip_value(self.precision.main_params(optimizer), clip_value=clip_val)
