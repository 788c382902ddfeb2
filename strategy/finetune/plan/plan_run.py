"""Plans the memory of a run for an absent device and absent ranks, without downloads or computation."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.optim import Optimizer
from torch.utils._pytree import tree_map_only

from thunder_memsave.budget.allocator_settings import allocator_environment
from thunder_memsave.budget.limits import limits_reserved
from thunder_memsave.budget.offload.offered_updates import OfferedUpdates
from thunder_memsave.budget.offload.part_of_states import States
from thunder_memsave.budget.offload.terms import check_states_fit, check_weights_fit
from thunder_memsave.budget.pins import check_pins
from thunder_memsave.budget.planned_call import PlannedCall
from thunder_memsave.budget.target.autocast import autocast_of_cuda
from thunder_memsave.budget.target.device import fake_ranks, stand_in, without_memory
from thunder_memsave.compiler.compile_call import CallCompiler
from thunder_memsave.compiler.cuda_graphs.choose import CudaGraphs
from thunder_memsave.compiler.cuda_graphs.torch_runtime import CudaRuntime
from thunder_memsave.config import MemoryConfig, StrategyConfig
from thunder_memsave.distributed.data_parallel import DataParallel
from thunder_memsave.distributed.process_group import make_data_parallel
from thunder_memsave.errors import BudgetError
from thunder_memsave.finetune.model.build import autocast_of, describe_model, with_attention
from thunder_memsave.finetune.objectives.choose import objective_of
from thunder_memsave.finetune.objectives.loss_in_model import TRAINING, call_inputs, put_loss_in
from thunder_memsave.finetune.objectives.objective import Objective
from thunder_memsave.finetune.plan.few_layers import FewLayers, FewLayersPlanner
from thunder_memsave.finetune.plan.fp8_planned import (
    planned_fp8,
    refuse_without_fp8,
)
from thunder_memsave.finetune.plan.host_loading import HostLoading, host_loading
from thunder_memsave.finetune.plan.planned_ranks import ranks_per_node
from thunder_memsave.finetune.plan.run_planner import RunPlanner
from thunder_memsave.finetune.process.deterministic import unfilled_choice
from thunder_memsave.finetune.run_file.batch_sizes import BatchSizes, sizes_of
from thunder_memsave.finetune.run_file.config import RunConfig
from thunder_memsave.finetune.training.caller_memory import caller_memory
from thunder_memsave.finetune.training.optimizer import make_optimizer
from thunder_memsave.fp8.recipe import refuse_own_scales
from thunder_memsave.frontend.calls import Call
from thunder_memsave.materialize.host_weights import mark_all, named_for_host
from thunder_memsave.measure.outside_memory import CONTEXT_BYTES, outside_bytes
from thunder_memsave.measure.step_memory import StepMemoryError, step_memory
from thunder_memsave.ops.accumulation import (
    automatically_accumulating,
    may_keep,
    whole_gradient_bytes,
)
from thunder_memsave.optim.in_backward import UpdatesInBackward
from thunder_memsave.optim.on_host import Kind, begin_step, num_of_kinds, states_on_host
from thunder_memsave.planner.caching_allocator.environment import NotSimulatedError
from thunder_memsave.planner.graph import Device, StepMemory
from thunder_memsave.planner.reserved import ReservedMemory
from thunder_memsave.progress import stage
from thunder_memsave.settings.problems import ConfigError
from thunder_memsave.sharding.gradients import clip_norm
from thunder_memsave.stored_weights.in_bytes import frozen_in_bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class RunPlan:
    """Planned memory of a run on each rank."""

    device: Device
    num_ranks: int
    num_rows: int
    """Rows per micro-batch, each of `num_tokens`."""
    num_tokens: int
    num_micro_batches: int
    """Micro-batches per optimizer step on each rank."""
    budget_bytes: int | None
    call: PlannedCall
    """The planned call; with the smallest plan that was found if the budget is too small (`refusal`)."""
    refusal: BudgetError | None
    smallest_bytes: int
    """Smallest budget for which a plan was found."""
    reserved: ReservedMemory | NotSimulatedError | None
    """Bytes that the device's allocator reserves; None on the CPU, where nothing is reserved."""
    limits_reserved: bool
    """Whether the budget limits these, not bytes of tensors."""
    outside_bytes: Mapping[str, int]
    """Estimated bytes that the device holds beside what the allocator reserves; empty on the CPU."""
    loading: HostLoading | None
    """What the host holds meanwhile; None: the device is a CPU, so the model itself."""
    few_layers: FewLayers | None = None
    """What part of the model the call and the smallest budget are of; None: of the whole."""
    curve: tuple[tuple[int, float], ...]
    """Budgets in bytes, each with a lower bound in microseconds of the recompute time under it."""

    @property
    def fits(self) -> bool:
        """Whether a plan within the budget was found."""
        return self.refusal is None

    @property
    def lacking_bytes(self) -> int:
        """Bytes by which the budget, and what is held beside it, exceed the device's memory; 0: they do not."""
        if self.budget_bytes is None or self.device.memory_bytes is None:
            return 0
        held_bytes = self.budget_bytes + sum(self.outside_bytes.values())
        return max(held_bytes - self.device.memory_bytes, 0)

    @property
    def doubled_bytes(self) -> int:
        """Estimated peak for twice the rows, with the same tensors kept: all but weights and their state doubles."""
        of_weights = ("parameter", "buffer", "gathered", "gradient", "accumulated", "optimizer")
        by_kind = self.call.profile.peak_bytes_by_kind
        return sum(n if kind in of_weights else 2 * n for kind, n in by_kind.items())


def plan_run(
    config: RunConfig,
    *,
    device: Device,
    num_ranks: int,
    has_curve: bool = True,
    counts_tiles: bool = False,
    has_few_layers: bool = False,
) -> RunPlan:
    """Plan one micro-batch's forward and backward, and the step that it is part of.

    Args:
        config: A checked run file.
        device: The device of each rank.
        num_ranks: Number of ranks.
        has_curve: Whether to compute the cost of other budgets.
        counts_tiles: Whether the smallest budget is that of tiles of tokens, also where a plan fits without.
        has_few_layers: Whether to plan few of a model's equal layers instead of all, if it has many.

    Raises:
        ConfigError: the model cannot be built without its files, or the budget is invalid for this device.
        CaptureError: the model cannot be captured.
        CompileError: it cannot be compiled.
        BudgetError: no plan was found at all.
    """
    config = with_attention(config, fetches=False)
    device = device.among(ranks_per_node(num_ranks))
    strategy = _strategy(config, device, num_ranks)
    sizes = sizes_of(config, world_size=num_ranks)
    budget_bytes = budget_of(strategy, device)
    objective = objective_of(config)
    model = _described(config, strategy)
    loading = None if device.name == "cpu" else host_loading(model, config, num_ranks)
    marked = named_for_host(model, strategy)
    mark_all(model, marked, torch.device("cpu"))
    few = FewLayers.left_of(model) if has_few_layers and not marked else None
    if few is not None:
        device = few.host_of(device)
    put_loss_in(model, objective)
    with _ranks(strategy, num_ranks) as data_parallel:
        stand_in(model, data_parallel)
        if kept := frozen_in_bytes(model, strategy.frozen_weights, data_parallel=data_parallel):
            kept.stand_in()
        weights_bytes = sum(p.nbytes for p in marked)
        check_weights_fit(config.memory, weights_bytes, free_bytes=device.host_memory_bytes)
        few = None if few is None else few.weighing(model)
        if strategy.accumulate == "auto":
            data_parallel = automatically_accumulating(
                data_parallel, model.parameters(), budget_bytes=_about(budget_bytes, few)
            )
        about_step = (config, objective, model, device, sizes)
        memory = _step_memory(*about_step)
        states = States(
            memory=partial(_step_memory, *about_step),
            move=lambda kinds: None,
            kinds=partial(_kinds, config, model),
        )
        if sizes.gradient_accumulation_steps > 1 and may_keep(data_parallel):
            kept_bytes = whole_gradient_bytes(model.parameters())
            memory = replace(memory, gradient_bytes=memory.gradient_bytes + kept_bytes)
        updates = None
        if (
            strategy.memory.optimizer_in_backward == "auto"
            and sizes.gradient_accumulation_steps == 1
        ):
            updates = OfferedUpdates(partial(_with_updates, *about_step), lambda: None)
        about = (strategy, device, budget_bytes, data_parallel, memory, states, updates)
        planner = RunPlanner(*about) if few is None else FewLayersPlanner(few, *about)
        outside = _outside_bytes(device, num_ranks, data_parallel)
        inputs = _inputs(objective, num_rows=sizes.micro_batch_size)
        _compile(model, inputs, config, strategy, data_parallel, planner)
    return RunPlan(
        device=device,
        num_ranks=num_ranks,
        num_rows=sizes.micro_batch_size,
        num_tokens=config.data.max_seq_length,
        num_micro_batches=sizes.gradient_accumulation_steps,
        budget_bytes=budget_bytes,
        few_layers=planner.few_layers if isinstance(planner, FewLayersPlanner) else None,
        call=planner.call,
        refusal=planner.refusal,
        smallest_bytes=(smallest := planner.smallest_bytes(counts_tiles=counts_tiles)),
        curve=planner.curve(smallest) if has_curve else (),
        reserved=_reserved(planner.call, device, config.memory),
        limits_reserved=limits_reserved(config.memory, device),
        outside_bytes=outside,
        loading=loading,
    )


def _about(budget_bytes: int | None, few: FewLayers | None) -> int | None:
    return budget_bytes if budget_bytes is None or few is None else few.budget_bytes(budget_bytes)


def budget_of(strategy: StrategyConfig, device: Device) -> int | None:
    """Return the bytes that a step may take; None: there is no limit."""
    available_bytes = _available_bytes(device)
    return strategy.memory.budget_bytes(device.memory_bytes, available_bytes=available_bytes)


def _strategy(config: RunConfig, device: Device, num_ranks: int) -> StrategyConfig:
    refuse_without_fp8(config.fp8, device)
    refuse_own_scales(config.fp8, num_ranks=num_ranks)
    return config.of_strategy


def _reserved(
    call: PlannedCall, device: Device, memory: MemoryConfig
) -> ReservedMemory | NotSimulatedError | None:
    if device.name == "cpu":
        return None
    stage("reserved memory")
    return call.reserved_or_reason(allocator_environment(memory))


def _available_bytes(device: Device) -> int | None:
    """Return what CUDA leaves of a device that nothing else uses."""
    return None if device.memory_bytes is None else device.memory_bytes - CONTEXT_BYTES


def _described(config: RunConfig, strategy: StrategyConfig) -> nn.Module:
    stage("describe the model")
    model = describe_model(config).train()
    check_pins(strategy.memory, (name for name, _ in model.named_modules()))
    return model


def _outside_bytes(
    device: Device, num_ranks: int, data_parallel: DataParallel | None
) -> dict[str, int]:
    return outside_bytes(
        device,
        num_ranks=num_ranks,
        ranks_per_node=ranks_per_node(num_ranks),
        shard_size=None if data_parallel is None else data_parallel.world_size,
    )


def _compile(
    model: nn.Module,
    inputs: dict[str, Any],
    config: RunConfig,
    strategy: StrategyConfig,
    data_parallel: DataParallel | None,
    planner: RunPlanner,
) -> None:
    compiler = CallCompiler(
        config=strategy,
        data_parallel=data_parallel,
        planner=planner,
        target=_target(planner.device),
        fp8=planned_fp8(model, strategy, planner.device),
        graphs=_graphs(strategy, planner),
    )
    with _precision(config, planner.device), _determinism(config):
        call = Call.of(getattr(model, TRAINING), (), inputs)
        compiler.compile(model, call, name=TRAINING, reason="plan")


def _graphs(strategy: StrategyConfig, planner: RunPlanner) -> CudaGraphs:
    """Count the memory of CUDA graphs, which nothing captures here."""
    runtime = None if planner.device.compute_capability is None else CudaRuntime()
    return CudaGraphs(strategy.cuda_graphs, runtime, planner)


@contextmanager
def _ranks(strategy: StrategyConfig, num_ranks: int) -> Iterator[DataParallel | None]:
    if num_ranks == 1:
        yield None
        return
    with fake_ranks(num_ranks):
        yield make_data_parallel(strategy, ranks_per_node=ranks_per_node(num_ranks))


def _target(device: Device) -> torch.device:
    return torch.device("cpu") if device.name == "cpu" else torch.device("cuda", 0)


def _precision(config: RunConfig, device: Device) -> AbstractContextManager[object]:
    """Return Fabric's precision context of the device, for tensors that claim to be on the CPU."""
    dtype = autocast_of(config)
    if dtype is None:
        return nullcontext()
    return torch.autocast("cpu", dtype=dtype) if device.name == "cpu" else autocast_of_cuda(dtype)


def _determinism(config: RunConfig) -> AbstractContextManager[None]:
    """Choose kernels as a run does that asks for deterministic ones; memory is not filled, there is none."""
    return unfilled_choice() if config.train.deterministic else nullcontext()


def _inputs(objective: Objective[Any], *, num_rows: int) -> dict[str, Any]:
    """Return the loop's arguments for the model with its loss, without memory."""
    with FakeTensorMode():
        inputs = call_inputs(objective, objective.blank(num_rows))
    planned = tree_map_only(Tensor, lambda each: without_memory(each.shape, each.dtype), inputs)
    return cast(dict[str, Any], planned)


def _step_memory(
    config: RunConfig,
    objective: Objective[Any],
    model: nn.Module,
    device: Device,
    sizes: BatchSizes,
    on_host: Sequence[Kind] = (),
    *,
    in_backward: bool = False,
) -> StepMemory:
    """Return what a step holds besides.

    Args:
        config: The run.
        objective: Its loss.
        model: Without numbers.
        device: Of each rank.
        sizes: Of its batches.
        on_host: Kinds of parameters whose states are on the host, beside those that the run keeps there.
        in_backward: Whether backward updates weights also where the run does not say so.
    """
    in_backward = in_backward or config.memory.optimizer_in_backward is True
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    device_type = _target(device).type
    optimizer = make_optimizer(config, trained, device_type=device_type)
    own = caller_memory(objective, sizes, device_type=device_type)
    memory = step_memory(
        [optimizer],
        clip=_clip,
        before_clip=begin_step,
        accumulates=sizes.gradient_accumulation_steps > 1,
        other_bytes=own.other_bytes,
        between_bytes=own.between_bytes,
        loss_allocations=own.loss_allocations,
        device_type="" if device.name == "cpu" else "cuda",
        change=_put_on_host(config, on_host),
        one_by_one=UpdatesInBackward() if in_backward else None,
    )
    memory = replace(memory, states_on_host=tuple(on_host))
    check_states_fit(config.memory, memory.host_bytes, free_bytes=device.host_memory_bytes)
    return memory


def _put_on_host(config: RunConfig, kinds: Sequence[Kind]) -> Callable[[Optimizer], None] | None:
    """Return what puts states on the host; None: nothing is there."""
    if config.memory.offloads_optimizer:
        return states_on_host
    return partial(states_on_host, kinds=kinds) if kinds else None


def _kinds(config: RunConfig, model: nn.Module) -> Mapping[Kind, int]:
    """Return how many trained parameters of each kind have their states on the device."""
    if config.memory.offloads_optimizer:
        return {}
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return num_of_kinds([make_optimizer(config, trained, device_type="cuda")])


def _with_updates(
    config: RunConfig,
    objective: Objective[Any],
    model: nn.Module,
    device: Device,
    sizes: BatchSizes,
    on_host: Sequence[Kind],
) -> StepMemory | None:
    """Return what a step holds besides with updates in backward; None: its optimizer cannot make them."""
    with suppress(ConfigError, StepMemoryError):
        return _step_memory(config, objective, model, device, sizes, on_host, in_backward=True)
    return None


def _clip(parameters: Sequence[nn.Parameter]) -> Tensor:
    """Clip as a run does, which needs the norm without `max_grad_norm` too."""
    return clip_norm(parameters, max_norm=1.0, error_if_nonfinite=False, data_parallel=None)
