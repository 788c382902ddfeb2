"""Sets a model up: checks, values for meta tensors, shards, fp8, and last the compiled forward around it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import torch
from torch import nn

from thunder_memsave.budget.memory_planner import MemoryPlanner
from thunder_memsave.budget.offload.last_resort import LastResort
from thunder_memsave.budget.offload.terms import check_states_fit, check_weights_fit, offload_terms
from thunder_memsave.budget.pins import check_pins
from thunder_memsave.config import Fp8Config, StrategyConfig
from thunder_memsave.distributed.agreement import OtherRankError, broadcast, together
from thunder_memsave.distributed.data_parallel import DataParallel
from thunder_memsave.fabric.counted_step import CountedStep
from thunder_memsave.fabric.forward_module import ForwardModule
from thunder_memsave.fabric.refusals import refuse_unsuitable
from thunder_memsave.fp8.compute.backends import choose_backend
from thunder_memsave.fp8.compute.linears import Fp8Linears, frozen_in_fp8, set_up_fp8
from thunder_memsave.fp8.compute.operators import Backend
from thunder_memsave.materialize.fill import materialize
from thunder_memsave.materialize.host_weights import mark_all, move, named_for_host, put_on_host
from thunder_memsave.measure.devices import device_at, total_bytes
from thunder_memsave.measure.host_memory import free_host_bytes
from thunder_memsave.measure.op_times import MeasuredTimes
from thunder_memsave.ops.accumulation import automatically_accumulating
from thunder_memsave.ops.host_copies.engine import host_of
from thunder_memsave.optim.in_backward import UpdatesInBackward
from thunder_memsave.planner.graph import Device, StepMemory
from thunder_memsave.planner.search.mixes import OffloadTerms
from thunder_memsave.sharding.local_state import hide_padding
from thunder_memsave.sharding.rank_zero_values import take_rank_zero_values
from thunder_memsave.sharding.rows import shard_module
from thunder_memsave.sharding.same_on_all_ranks import check_choices_agree, check_ranks_agree
from thunder_memsave.stored_weights.formats import format_named
from thunder_memsave.stored_weights.in_bytes import FrozenInBytes
from thunder_memsave.stored_weights.walk import FrozenWeights

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class ModuleSetup:
    """Sets models up for one strategy; every method is a collective."""

    config: StrategyConfig
    data_parallel: DataParallel | None
    device: torch.device
    counted: CountedStep
    """What a step holds beside the model's graph, with the optimizers so far: asked when a plan is made."""
    updates: UpdatesInBackward | None = None
    """Updates parameters in backward; None: nothing does."""
    available_bytes: int | None = None
    """Bytes that this process can have on each rank's device; None for the CPU."""
    ranks_per_node: int = 1
    """Processes that share the memory of this host."""

    @property
    def budget_bytes(self) -> int | None:
        """Bytes that a step may take on this rank's device; None without a limit."""
        total = total_bytes(self.device)
        return self.config.memory.budget_bytes(total, available_bytes=self.available_bytes)

    def set_up(self, module: nn.Module) -> ForwardModule:
        """Shard the model in place and wrap it into its compiled forward.

        Raises:
            ValueError: the model is compiled, distributed or set up already.
            RankMismatchError: the ranks' models differ in more than values, or their settings.
            OtherRankError: another rank's model could not be set up.
        """
        self._on_all_ranks(lambda: refuse_unsuitable(module))
        check_pins(self.config.memory, [name for name, _ in module.named_modules()])
        self._agree(module)
        fp8 = self.config.fp8
        backend = None if fp8 is None else self._backend(fp8)
        self._place(module)
        return ForwardModule(
            module,
            may_be_split=self._may_be_split,
            config=self.config,
            data_parallel=self._accumulating(module),
            planner=self._planner(backend),
            fp8=None if fp8 is None or backend is None else self._linears(module, fp8, backend),
            updates=self.updates,
        )

    def make_room(self, modules: Iterable[nn.Module]) -> None:
        """Keep optimizer states that the device cannot hold on the host, before they are loaded. A collective."""
        resort, budget_bytes = self._last_resort(), self.budget_bytes
        if resort is not None and budget_bytes is not None:
            memory = self._memory()
            resort.make_room(
                modules,
                memory,
                updates=self.counted.offered,
                budget_bytes=budget_bytes,
                data_parallel=self.data_parallel,
            )

    @property
    def _may_be_split(self) -> bool:
        """Whether what cannot be one graph runs in pieces: not where a promise would not hold."""
        config = self.config
        updates = config.memory.optimizer_in_backward is True
        promises = config.fullgraph, config.cuda_graphs is True, updates
        return not (any(promises) or config.fp8 is not None)

    def _agree(self, module: nn.Module) -> None:
        """Refuse models that differ between ranks; where only values do, all ranks take rank 0's."""
        data_parallel = self.data_parallel
        names = check_ranks_agree(module, config=self.config, data_parallel=data_parallel)
        take_rank_zero_values(module, names, device=self.device, data_parallel=data_parallel)

    def _place(self, module: nn.Module) -> None:
        """Give every tensor its values, this rank's rows of them, on the device or on the host."""
        frozen, on_host = self._frozen(module), self._on_host(module)
        shards = self.data_parallel is not None and self.data_parallel.shards
        if has_meta(module):
            materialize(module, device=self.device, data_parallel=self.data_parallel, frozen=frozen)
        else:
            self._on_all_ranks(lambda: shard_module(module, self.data_parallel))
        if frozen is not None:
            frozen.cast_rest(self.device)
        if on_host:
            put_on_host(module)
        if shards or frozen is not None or on_host:
            move(module, self.device)
        if shards:
            hide_padding(module)
        torch.cuda.empty_cache()  # whole weights were here, one at a time

    def _backend(self, fp8: Fp8Config) -> Backend:
        """Choose the fp8 backend, the same on all ranks, before any weight is cast."""
        backend = self._on_all_ranks(lambda: choose_backend(fp8, self.device))
        check_choices_agree(
            "fp8.backend",
            backend,
            advice="install the same TransformerEngine on every rank, or set fp8.backend to 'torch'",
            data_parallel=self.data_parallel,
        )
        return backend

    def _frozen(self, module: nn.Module) -> FrozenWeights | None:
        """Choose the frozen weights to keep in another format; None: all are kept as they are."""
        config = self.config
        choose: Callable[[], FrozenWeights | None] = partial(
            frozen_in_fp8, module, config.fp8, data_parallel=self.data_parallel
        )
        if config.frozen_weights is not None:
            kept_in = format_named(config.frozen_weights)
            choose = partial(FrozenInBytes, module, kept_in, data_parallel=self.data_parallel)
        return self._on_all_ranks(choose)

    def _on_host(self, module: nn.Module) -> bool:
        """Choose the frozen weights that stay on the host; tell whether there are any."""
        chosen = self._on_all_ranks(lambda: self._that_fit_the_host(module))
        mark_all(module, chosen, self.device)
        return bool(chosen)

    def _that_fit_the_host(self, module: nn.Module) -> list[nn.Parameter]:
        chosen, data_parallel = named_for_host(module, self.config), self.data_parallel
        shards = data_parallel is not None and data_parallel.shards
        num_shards = data_parallel.world_size if data_parallel is not None and shards else 1
        nbytes = sum(p.nbytes for p in chosen) // num_shards
        check_weights_fit(self.config.memory, nbytes, free_bytes=self._free_host_bytes)
        return chosen

    def _linears(self, module: nn.Module, fp8: Fp8Config, backend: Backend) -> Fp8Linears:
        set_up = partial(set_up_fp8, module, fp8, backend=backend)
        return self._on_all_ranks(set_up)

    def _planner(self, backend: Backend | None) -> MemoryPlanner:
        offload, resort = self._offload(), self._last_resort()
        for terms in (offload, None if resort is None else resort.terms):
            if terms is not None:  # this rank's buffers are held to them
                host_of(self.device).buffers.limit_bytes = terms.host_bytes
        return MemoryPlanner(
            self.config.memory,
            device=self._rates,
            budget_bytes=self.budget_bytes,
            data_parallel=self.data_parallel,
            step_memory=self._step_memory(),
            times=MeasuredTimes(),
            by_transformer_engine=backend == "transformer_engine",
            offload=offload,
            last_resort=resort,
            updates=self.counted.offered,
        )

    def _offload(self) -> OffloadTerms | None:
        """Return the terms of offload; None: plans offload nothing."""
        return offload_terms(self.config.memory, self._rates, free_bytes=self._free_host_bytes)

    def _last_resort(self) -> LastResort | None:
        """Return what may go to the host where nothing fits otherwise; None: nothing."""
        return LastResort.of(
            self.config.memory,
            self._rates,
            self.counted.states,
            free_bytes=self._free_host_bytes,
            streams=self.config.may_stream_weights,
        )

    @property
    def _rates(self) -> Device:
        return device_at(self.device).among(self.ranks_per_node)

    def _memory(self) -> StepMemory:
        return self.counted.memory(self.budget_bytes is not None)

    def _step_memory(self) -> Callable[[], StepMemory]:
        """Return what finds the bytes that a step holds besides, and refuses states that do not fit the host."""
        free_bytes = self._free_host_bytes  # as it is now: later the states take some of it

        def found() -> StepMemory:
            memory = self._memory()
            check_states_fit(self.config.memory, memory.host_bytes, free_bytes=free_bytes)
            return memory

        return found

    @property
    def _free_host_bytes(self) -> int | None:
        """Free memory of the host for each of its ranks; None: not known."""
        free_bytes = free_host_bytes()
        return None if free_bytes is None else free_bytes // self.ranks_per_node

    def _accumulating(self, module: nn.Module) -> DataParallel | None:
        """Resolve `accumulate: auto`. A collective."""
        data_parallel = self.data_parallel
        if data_parallel is None or self.config.accumulate != "auto":
            return data_parallel
        budget_bytes = broadcast(self.budget_bytes, data_parallel)
        return automatically_accumulating(
            data_parallel, module.parameters(), budget_bytes=budget_bytes
        )

    def _on_all_ranks(self, act: Callable[[], T]) -> T:
        return together(act, self.data_parallel, error_elsewhere=OtherRankError)


def has_meta(module: nn.Module) -> bool:
    """Tell whether a parameter or buffer is on the meta device."""
    return any(t.is_meta for t in (*module.parameters(), *module.buffers()))
