"""A copy of a run's state in host memory, which can be written while training goes on."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from thunder_memsave.checkpoints.contents import Contents
from thunder_memsave.checkpoints.sharded import state_for_dcp, write_sharded
from thunder_memsave.distributed.data_parallel import DataParallel


@dataclass(frozen=True, kw_only=True, slots=True)
class Snapshot:
    """This rank's part of a sharded checkpoint, as of one moment."""

    tensors: Mapping[str, Any]
    """State of modules and optimizers, as DCP takes it."""
    others: dict[str, Any]
    data_parallel: DataParallel | None

    @classmethod
    def take(
        cls, state: MutableMapping[str, Any], *, data_parallel: DataParallel | None
    ) -> Snapshot:
        """Copy the state. It may change as soon as this returns.

        Args:
            state: As for `save_checkpoint`.
            data_parallel: The group that holds the shards, or None in a process alone.
        """
        contents = Contents.of(state, asked="save")
        return cls(
            tensors=_on_host(state_for_dcp(contents, data_parallel)),
            others=_on_host(contents.state_of_others()),
            data_parallel=data_parallel,
        )

    def write(self, path: Path, group: dist.ProcessGroup | None) -> None:
        """Write a sharded checkpoint, without using a device. A collective of the given group only.

        Args:
            path: A directory to make.
            group: All ranks, over gloo; nothing else may use it meanwhile. None in a process alone.
        """
        alone_or_all = self.data_parallel and replace(self.data_parallel, world=group)
        write_sharded(
            path,
            dict(self.tensors),
            lambda: self.others,
            data_parallel=alone_or_all,
            uses_device=False,
        )


def num_bytes_to_copy(
    state: MutableMapping[str, Any], *, data_parallel: DataParallel | None
) -> int:
    """Return the bytes of host memory that a snapshot of the state takes on this rank."""
    contents = Contents.of(state, asked="save")
    sizes: list[int] = []
    parts = (state_for_dcp(contents, data_parallel), contents.state_of_others())
    for part in parts:
        _mapped(part, lambda tensor: sizes.append(_local(tensor).nbytes), keep=lambda value: value)
    return sum(sizes)


def _on_host(value: Any) -> Any:
    with torch.no_grad():
        return _mapped(value, _copied, keep=copy.deepcopy)


def _copied(tensor: Tensor) -> Tensor:
    """Copy a tensor, or only the local shard of a DTensor, into memory of its own."""
    return tensor.detach().to("cpu", copy=True)


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
