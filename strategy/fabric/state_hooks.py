"""Fabric's hooks that save, load and gather the state of a run."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from functools import cached_property
from pathlib import Path
from typing import Any

from lightning.fabric.plugins import CheckpointIO
from lightning.fabric.wrappers import _FabricModule, _unwrap_objects
from torch import nn
from torch.optim import Optimizer
from typing_extensions import override

from thunder_memsave.checkpoints import (
    load_checkpoint,
    load_raw,
    load_state_dict,
    save_checkpoint,
    unsharded_state_dict,
)
from thunder_memsave.checkpoints.host_buffers import HostBuffers
from thunder_memsave.checkpoints.snapshot import Snapshot, num_bytes_to_copy
from thunder_memsave.compiler.compiled_module import CompiledModule
from thunder_memsave.config import ConfigError
from thunder_memsave.distributed.agreement import is_rank_zero
from thunder_memsave.fabric.process_hooks import ProcessHooks
from thunder_memsave.sharding.local_state import keep_state_whole
from thunder_memsave.sharding.sharded_parameter import StateRows
from thunder_memsave.sharding.summon import summon_full

_log = logging.getLogger(__name__)


class StateHooks(ProcessHooks):
    """The part of Fabric's contract that concerns state; all hooks take whole models.

    A model may be passed as Fabric wrapped it, as the strategy did, or as the user made it.
    """

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

    @override
    def save_checkpoint(
        self,
        path: str | Path,
        state: dict[str, Any],
        storage_options: Any | None = None,
        filter: dict[str, Callable[[str, Any], bool]] | None = None,
    ) -> None:
        """Save the model, optimizers and the rest of `state` in the format `state_dict_type`, without gradients."""
        if storage_options is not None:
            raise ConfigError(
                f"storage_options={storage_options!r} is for CheckpointIO plugins, which "
                f"{type(self).__name__} does not use; leave it out."
            )
        if is_rank_zero(self.data_parallel):
            _warn_of_gradients_left_out(state)
        save_checkpoint(
            path,
            _originals(state),
            state_dict_type=self.config.state_dict_type,
            data_parallel=self.data_parallel,
            filter=filter,
        )

    def snapshot_bytes(self, state: dict[str, Any]) -> int:
        """Return the bytes of host memory that `snapshot` takes on this rank, besides what the last one left.

        No communication.
        """
        originals = _originals(_unwrap_objects(state))
        num_bytes = num_bytes_to_copy(originals, data_parallel=self.data_parallel)
        kept_bytes = self._host_buffers.kept_bytes
        return 0 if kept_bytes >= num_bytes else num_bytes

    def snapshot(self, state: dict[str, Any]) -> Snapshot:
        """Copy what `fabric.save` would save to host memory, so that another thread can write it.

        The memory is kept for the next snapshot once this one is written. No communication.

        Args:
            state: As for `fabric.save`.
        """
        if is_rank_zero(self.data_parallel):
            _warn_of_gradients_left_out(state)
        originals = _originals(_unwrap_objects(state))
        return Snapshot.take(
            originals, data_parallel=self.data_parallel, buffers=self._host_buffers
        )

    @cached_property
    def _host_buffers(self) -> HostBuffers:
        """Memory of snapshots."""
        return HostBuffers()

    @override
    def load_checkpoint(
        self,
        path: str | Path,
        state: nn.Module | Optimizer | dict[str, Any] | None = None,
        strict: bool = True,
        weights_only: bool | None = None,
    ) -> dict[str, Any]:
        """Restore `state` in place; a module alone is loaded from raw weights.

        Returns the checkpoint's other entries. Raw weights are read without running code, whatever
        `weights_only` says.
        """
        if isinstance(state, nn.Module | Optimizer):
            module = _original(state) if isinstance(state, nn.Module) else state
            load_raw(path, module, data_parallel=self.data_parallel, strict=strict)
            return {}
        state = {} if state is None else state
        originals = _originals(state)
        self._before_states()
        remainder = load_checkpoint(
            path,
            originals,
            data_parallel=self.data_parallel,
            strict=strict,
            weights_only=weights_only,
        )
        others = (k for k in state if not isinstance(state[k], nn.Module | Optimizer))
        state.update({key: originals[key] for key in others})
        return remainder

    def _before_states(self) -> None:
        """Prepare for states of optimizers, which are about to be loaded."""

    @override
    def setup_optimizer(self, optimizer: Optimizer) -> Optimizer:
        """Let the optimizer's state dicts say that they hold rows, and take whole ones."""
        if self._shards:
            keep_state_whole(optimizer)
        return optimizer

    @override
    def get_module_state_dict(self, module: nn.Module) -> dict[str, Any]:
        """Gather whole CPU tensors under the model's own names, on every rank. A collective."""
        return unsharded_state_dict(_original(module), self.data_parallel)

    @override
    def load_module_state_dict(
        self, module: nn.Module, state_dict: Mapping[str, Any], strict: bool = True
    ) -> None:
        """Copy whole tensors into the model, each rank its own rows.

        Raises:
            ValueError: a tensor is of a sharded model's `state_dict()`: one rank's rows.
            StateMismatchError: names, shapes or dtypes differ.
        """
        _refuse_rows(state_dict)
        load_state_dict(_original(module), state_dict, strict=strict)

    def summon_full(
        self, module: nn.Module, *, writeback: bool = False
    ) -> AbstractContextManager[None]:
        """Return a context in which every parameter of the model is whole. A collective.

        With `writeback`, changes made inside are kept; each rank keeps its own rows.
        """
        return summon_full(_original(module), self.data_parallel, writeback=writeback)


def _warn_of_gradients_left_out(state: Mapping[str, Any]) -> None:
    # No error: when a machine is about to be taken away, a checkpoint is worth more than these gradients.
    for name, module in state.items():
        num_waiting = module.unreduced.num_waiting if isinstance(module, CompiledModule) else 0
        if num_waiting:
            _log.warning(
                "%r is saved while the gradients of %d parameters wait for the last micro-batch of a step; "
                "a checkpoint holds no gradients, so a run that resumes from it goes on without those. "
                "Save after optimizer.step().",
                name,
                num_waiting,
            )


def _refuse_rows(state_dict: Mapping[str, Any]) -> None:
    for name, value in state_dict.items():
        if isinstance(value, StateRows) and value.shape != value.unsharded_shape:
            raise ValueError(
                f"load_module_state_dict() got one rank's {value.shape[0]} rows of {name!r}, which has the shape "
                f"{tuple(value.unsharded_shape)}; load rows into the model that they are from with "
                "model.load_state_dict(state_dict), or gather whole weights before with "
                "fabric.strategy.get_module_state_dict(model)."
            )


def _original(module: nn.Module) -> nn.Module:
    """Return the user's model inside Fabric's wrapper and ours."""
    if isinstance(module, _FabricModule):
        return module.module
    return module.module if isinstance(module, CompiledModule) else module


def _originals(state: Mapping[str, Any]) -> dict[str, Any]:
    return {k: _original(v) if isinstance(v, nn.Module) else v for k, v in state.items()}
