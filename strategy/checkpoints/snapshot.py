"""A copy of a run's state in host memory, which can be written while training goes on."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from thunder_memsave.checkpoints.contents import Contents
from thunder_memsave.checkpoints.host_buffers import HostBuffers, Loan, padded_bytes
from thunder_memsave.checkpoints.sharded import state_for_dcp, write_sharded
from thunder_memsave.distributed.data_parallel import DataParallel


@dataclass(frozen=True, kw_only=True, slots=True)
class Snapshot:
    """This rank's part of a sharded checkpoint, as of one moment."""

    tensors: Mapping[str, Any]
    """State of modules and optimizers, as DCP takes it."""
    others: dict[str, Any]
    data_parallel: DataParallel | None
    loan: Loan
    """The memory of these tensors."""

    @classmethod
    def take(
        cls,
        state: MutableMapping[str, Any],
        *,
        data_parallel: DataParallel | None,
        buffers: HostBuffers | None = None,
    ) -> Snapshot:
        """Copy the state. It may change as soon as this returns.

        Args:
            state: As for `save_checkpoint`.
            data_parallel: The group that holds the shards, or None in a process alone.
            buffers: Host memory, kept from one snapshot to the next; None: memory of its own.
        """
        contents = Contents.of(state, asked="save")
        contents.require_module(asked="save")
        tensors, others = state_for_dcp(contents, data_parallel), contents.state_of_others()
        to_copy = _tensors(tensors, others)
        device = next((t.device for t in to_copy if t.device.type == "cuda"), None)
        loan = (buffers or HostBuffers()).lend(
            padded_bytes(to_copy), device_type="cpu" if device is None else device.type
        )
        with torch.no_grad():
            copied = _mapped((tensors, others), partial(_copied, loan), keep=copy.deepcopy)
        if device is not None:
            torch.cuda.current_stream(device).synchronize()
        return cls(tensors=copied[0], others=copied[1], data_parallel=data_parallel, loan=loan)

    def write(self, path: Path, group: dist.ProcessGroup | None) -> None:
        """Write a sharded checkpoint, without using a device. A collective of the given group only.

        Afterwards the memory of the copies may be overwritten.

        Args:
            path: A directory to make.
            group: All ranks, over gloo; nothing else may use it meanwhile. None in a process alone.
        """
        alone_or_all = self.data_parallel and replace(self.data_parallel, world=group)
        try:
            write_sharded(
                path,
                dict(self.tensors),
                lambda: self.others,
                data_parallel=alone_or_all,
                uses_device=False,
            )
        finally:
            self.loan.give_back()


def num_bytes_to_copy(
    state: MutableMapping[str, Any], *, data_parallel: DataParallel | None
) -> int:
    """Return the bytes of host memory that a snapshot of the state takes on this rank."""
    contents = Contents.of(state, asked="save")
    return padded_bytes(
        _tensors(state_for_dcp(contents, data_parallel), contents.state_of_others())
    )


def _tensors(*parts: Any) -> list[Tensor]:
    """List the tensors, of DTensors the local shards, in the order in which they are copied."""
    found: list[Tensor] = []
    _mapped(parts, lambda tensor: found.append(_local(tensor)), keep=lambda value: value)
    return found


def _copied(loan: Loan, tensor: Tensor) -> Tensor:
    """Copy a tensor, or only the local shard of a DTensor."""
    copied = loan.copy(_local(tensor.detach()))
    if isinstance(tensor, DTensor):
        return DTensor(copied, tensor._spec, requires_grad=False)
    return copied


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _mapped(value: Any, of_tensor: Callable[[Tensor], Any], *, keep: Callable[[Any], Any]) -> Any:
    """Rebuild the same mappings, lists and tuples with their tensors and other values replaced."""
    if isinstance(value, Tensor):
        return of_tensor(value)
    if isinstance(value, Mapping):
        return {k: _mapped(v, of_tensor, keep=keep) for k, v in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_mapped(v, of_tensor, keep=keep) for v in value)
    return keep(value)
