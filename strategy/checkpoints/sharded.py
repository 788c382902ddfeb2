"""Sharded checkpoints: a directory that all ranks write, each its own rows, for any world size.

The layout is Lightning's: torch.distributed.checkpoint (DCP) files plus `meta.pt`, which
`fabric consolidate` turns into one file. Padding is never saved.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.optim import Optimizer

from thunder_memsave.checkpoints.commit import commit, remove, save_synced, temporary_name
from thunder_memsave.checkpoints.contents import Contents
from thunder_memsave.checkpoints.disk_errors import TellingWriter
from thunder_memsave.checkpoints.manifest import DamagedCheckpointError
from thunder_memsave.checkpoints.module_state import (
    Problem,
    compare,
    first_stored_names,
    named_state,
    raise_problems,
)
from thunder_memsave.checkpoints.optimizer_state import (
    NamedState,
    compare_groups,
    compare_state,
    named_parameters_of,
    named_state_of,
    set_optimizer_state,
)
from thunder_memsave.checkpoints.safe_metadata import read_metadata
from thunder_memsave.checkpoints.safe_reader import SafePlanner, SafeReader
from thunder_memsave.checkpoints.sources import TensorSpec, load_mapped
from thunder_memsave.distributed.agreement import (
    CheckpointError,
    broadcast,
    is_rank_zero,
    once,
    together,
)
from thunder_memsave.distributed.data_parallel import DataParallel
from thunder_memsave.optim.loading import state_device
from thunder_memsave.sharding.rows import is_state_of_rows, local_rows, whole_shape
from thunder_memsave.sharding.sharded_parameter import as_rows, is_sharded

META_FILE = "meta.pt"
# Errors that are clear without an explanation: of the disk, of memory, of our own reader.
_CLEAR = (OSError, MemoryError, torch.OutOfMemoryError, DamagedCheckpointError)
Keys = tuple[str | int, ...]


def is_sharded_checkpoint(path: Path) -> bool:
    """Tell whether `path` is a directory with shards, ours or Lightning's."""
    return path.is_dir() and (path / META_FILE).is_file()


def save_sharded(path: Path, contents: Contents, *, data_parallel: DataParallel | None) -> None:
    """Write beside `path` and rename at the end. A collective."""
    state = state_for_dcp(contents, data_parallel)
    write_sharded(path, state, contents.state_of_others, data_parallel=data_parallel)


def state_for_dcp(contents: Contents, data_parallel: DataParallel | None) -> dict[str, Any]:
    """Return the state of modules and optimizers for DCP: views of their tensors, nothing is copied."""
    state: dict[str, Any] = {}
    for key, module in contents.modules.items():
        named = named_state(module)
        state[key] = {name: _for_dcp(t, t, data_parallel) for name, t in named.items()}
    for key, optimizer in contents.optimizers.items():
        parameters = named_parameters_of(optimizer, contents.modules.values())
        state[key] = _optimizer_for_dcp(optimizer, parameters, data_parallel)
    return state


def write_sharded(
    path: Path,
    state: dict[str, Any],
    others: Callable[[], dict[str, Any]],
    *,
    data_parallel: DataParallel | None,
    uses_device: bool = True,
) -> None:
    """Write what `state_for_dcp` and `Contents.state_of_others` returned, or copies of it. A collective of `everyone`.

    Args:
        path: A directory to create.
        state: Modules and optimizers.
        others: Returns the rest of the state.
        data_parallel: The group that holds the shards, or None in a process alone.
        uses_device: Copy tensors from a device ahead of writing. False if none is on a device: DCP would still wait
            for the device, and initialise the first one in a thread that has not chosen its own.
    """
    temporary = broadcast(temporary_name(path), data_parallel)
    once(lambda: temporary.mkdir(parents=True), data_parallel)
    try:
        together(lambda: _require_shared(temporary), data_parallel)
        with _dcp_options(data_parallel, failed=_not_written) as options:
            # Only the first replica writes, so that all rows are of the same moment.
            planner = DefaultSavePlanner(dedup_save_to_lowest_rank=True)
            writer = TellingWriter(temporary)
            if not uses_device:
                writer.per_thread_copy_ahead = 0
            dcp.save(state, storage_writer=writer, planner=planner, **options)
        meta = together(others, data_parallel)
        once(lambda: save_synced(meta, temporary / META_FILE), data_parallel)
        once(lambda: commit(temporary, path), data_parallel)
    finally:
        if is_rank_zero(data_parallel):
            remove(temporary)


def load_sharded(
    path: Path,
    contents: Contents,
    *,
    data_parallel: DataParallel | None,
    strict: bool,
    weights_only: bool,
) -> dict[str, Any]:
    """Read this rank's rows, whatever the world size was; return the entries that were not asked for."""
    stored = together(lambda: _Stored.read(path), data_parallel)
    meta = together(lambda: load_mapped(path / META_FILE, weights_only=weights_only), data_parallel)
    contents.require_keys([*stored.top_level(), *meta], path, strict=strict)
    template: dict[str, Any] = {}
    problems: list[Problem] = []
    for key, module in contents.modules.items():
        if key in stored.top_level():
            wanted, specs = named_state(module), stored.specs(key)
            problems += compare(wanted, specs, strict=strict)
            for name, t in first_stored_names(wanted, specs).items():
                template[stored.flat(key, name)] = _for_dcp(t, t, data_parallel)
    optimizers = [
        _StoredOptimizer.of(optimizer, key, stored, contents)
        for key, optimizer in contents.optimizers.items()
        if key in stored.top_level()
    ]
    groups = {flat: None for o in optimizers for flat in o.group_entries}
    reader = partial(_dcp_load, path=path, metadata=stored.metadata, weights_only=weights_only)
    reader(groups, data_parallel)
    for o in optimizers:
        problems += o.problems(groups)
    raise_problems(problems, what=str(list(contents.everything)))
    for o in optimizers:
        template.update(o.template(data_parallel))
    with torch.no_grad():
        reader(template, data_parallel)
    for o in optimizers:
        together(partial(o.restore, template, groups), data_parallel)
    together(lambda: contents.restore_others(meta), data_parallel)
    return dict(meta)


def _require_shared(directory: Path) -> None:
    if not directory.is_dir():
        raise ValueError(
            f"{directory.parent} is not the same directory on all nodes, and a sharded checkpoint "
            "is written by all of them; save to a file system that they share, or use "
            "state_dict_type='full', which rank 0 writes."
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class _Stored:
    """A checkpoint's table of contents: each entry's place in the nested state."""

    metadata: Metadata
    paths: Mapping[str, Keys]

    @classmethod
    def read(cls, path: Path) -> _Stored:
        try:
            metadata = read_metadata(path)
        # It is not documented what unpickling raises for bytes that are no pickle.
        except Exception as e:
            raise ValueError(
                f"{path} has no readable .metadata file, so its save was interrupted or the "
                f"directory is damaged; load an older checkpoint. The reason given: {e}"
            ) from e
        return cls(metadata=metadata, paths=metadata.planner_data)

    def top_level(self) -> set[str]:
        return {str(path[0]) for path in self.paths.values()}

    def flat(self, *path: str | int) -> str:
        return ".".join(map(str, path))

    def under(self, *prefix: str, kinds: tuple[type, ...]) -> dict[str, Keys]:
        """Return the entries below a prefix, by flat name, with the rest of their path, whose keys have these types.

        Raises:
            DamagedCheckpointError: they have others.
        """
        n = len(prefix)
        found = {flat: p[n:] for flat, p in self.paths.items() if p[:n] == prefix}
        for flat, rest in found.items():
            if tuple(map(type, rest)) != kinds:
                names = ", ".join(kind.__name__ for kind in kinds)
                raise DamagedCheckpointError(
                    f"{flat!r} lies at {rest} below {'.'.join(prefix)}, where a checkpoint has ({names}); no save "
                    "writes that. Load another checkpoint."
                )
        return found

    def specs(self, key: str) -> dict[str, TensorSpec]:
        entries = self.under(key, kinds=(str,))
        return {
            str(rest[0]): self.spec(flat) for flat, rest in entries.items() if self.is_tensor(flat)
        }

    def is_tensor(self, flat: str) -> bool:
        return isinstance(self.metadata.state_dict_metadata[flat], TensorStorageMetadata)

    def spec(self, flat: str) -> TensorSpec:
        entry = self.metadata.state_dict_metadata[flat]
        assert isinstance(entry, TensorStorageMetadata)
        return TensorSpec(shape=entry.size, dtype=entry.properties.dtype)


@dataclass(frozen=True, kw_only=True, slots=True)
class _StoredOptimizer:
    """An optimizer and its entries in the file; its state need not exist before loading."""

    optimizer: Optimizer
    parameters: Mapping[str, Tensor]
    stored: _Stored
    state_entries: Mapping[str, Keys]
    """flat name -> (parameter name, key)"""
    group_entries: Mapping[str, Keys]
    """flat name -> (group number, setting)"""

    @classmethod
    def of(
        cls, optimizer: Optimizer, key: str, stored: _Stored, contents: Contents
    ) -> _StoredOptimizer:
        return cls(
            optimizer=optimizer,
            parameters=named_parameters_of(optimizer, contents.modules.values()),
            stored=stored,
            state_entries=stored.under(key, "state", kinds=(str, str)),
            group_entries=stored.under(key, "param_groups", kinds=(int, str)),
        )

    def problems(self, loaded: Mapping[str, Any]) -> list[Problem]:
        specs = {
            (str(name), str(key)): self.stored.spec(flat) if self.stored.is_tensor(flat) else None
            for flat, (name, key) in self.state_entries.items()
        }
        groups = compare_groups(self.optimizer, self.parameters, self._groups(loaded))
        return [*groups, *compare_state(self.optimizer, self.parameters, specs)]

    def template(self, data_parallel: DataParallel | None) -> dict[str, Any]:
        """Return zeros of the stored shapes and dtypes, without taking an optimizer step to make them."""
        return {
            flat: self._zeros(flat, *map(str, rest), data_parallel=data_parallel)
            for flat, rest in self.state_entries.items()
        }

    def restore(self, loaded: Mapping[str, Any], groups: Mapping[str, Any]) -> None:
        state: dict[str, dict[str, Any]] = {}
        for flat, (name, key) in self.state_entries.items():
            value = loaded[flat]
            if isinstance(value, DTensor):
                value = _padded(value.to_local(), self.parameters[str(name)])
            state.setdefault(str(name), {})[str(key)] = value
        named = NamedState(state=state, param_groups=self._groups(groups))
        set_optimizer_state(self.optimizer, self.parameters, named)

    def _groups(self, loaded: Mapping[str, Any]) -> list[dict[str, Any]]:
        groups: dict[int, dict[str, Any]] = {}
        for flat, (i, setting) in self.group_entries.items():
            groups.setdefault(int(i), {})[str(setting)] = loaded[flat]
        return [groups[i] for i in sorted(groups)]

    def _zeros(self, flat: str, name: str, key: str, *, data_parallel: DataParallel | None) -> Any:
        if not self.stored.is_tensor(flat):
            return None
        spec, p = self.stored.spec(flat), self.parameters[name]
        if is_sharded(p) and is_state_of_rows(self.optimizer, key, spec.shape, whole_shape(p)):
            device = state_device(self.optimizer, p)
            zeros = torch.zeros((len(p), *spec.shape[1:]), dtype=spec.dtype, device=device)
            return _rows_for_dcp(zeros, p, data_parallel)
        return torch.zeros(spec.shape, dtype=spec.dtype)


def _optimizer_for_dcp(
    optimizer: Optimizer, parameters: Mapping[str, Tensor], data_parallel: DataParallel | None
) -> dict[str, Any]:
    named = named_state_of(optimizer, parameters)
    for name, values in named.state.items():
        for key, value in values.items():
            if isinstance(value, Tensor):
                p = parameters[name]
                is_of_rows = is_state_of_rows(optimizer, key, value.shape, p.shape)
                values[key] = (
                    _rows_for_dcp(value, p, data_parallel) if is_of_rows else as_rows(value)
                )
    return named.as_dict()


def _for_dcp(t: Tensor, p: Tensor, data_parallel: DataParallel | None) -> Tensor:
    """Return `t`, which belongs to parameter `p`, for DCP: without padding, as a DTensor if it is sharded."""
    return _rows_for_dcp(t, p, data_parallel) if t.shape == p.shape else as_rows(t)


def _rows_for_dcp(t: Tensor, p: Tensor, data_parallel: DataParallel | None) -> Tensor:
    """Do so for a tensor that has a row for each row of `p`."""
    if data_parallel is None or not is_sharded(p):
        return as_rows(t)
    shape = torch.Size((whole_shape(p)[0], *t.shape[1:]))
    mesh = DeviceMesh.from_group(data_parallel.group, t.device.type)
    stride = torch.empty(shape, device="meta").stride()
    # Thunder's shards are DTensor's Shard(0) plus padding.
    sharded: Tensor = DTensor.from_local(
        local_rows(t, p), mesh, [Shard(0)], run_check=False, shape=shape, stride=stride
    )
    return sharded


def _padded(rows: Tensor, p: Tensor) -> Tensor:
    padded = rows.new_zeros((len(p), *rows.shape[1:]))
    padded[: rows.shape[0]] = rows
    return padded


def _dcp_load(
    state: dict[str, Any],
    data_parallel: DataParallel | None,
    *,
    path: Path,
    metadata: Metadata,
    weights_only: bool,
) -> None:
    if state:
        reader, planner = SafeReader(path, metadata), SafePlanner(weights_only=weights_only)
        with _dcp_options(data_parallel, failed=_not_read) as options:
            dcp.load(state, storage_reader=reader, planner=planner, **options)


@contextmanager
def _dcp_options(
    data_parallel: DataParallel | None, *, failed: Callable[[str], Exception]
) -> Iterator[dict[str, Any]]:
    if data_parallel is None:
        # DCP warns about a single process even if told so. Not `catch_warnings`: saves run in threads too.
        warnings.filterwarnings("ignore", "torch.distributed is disabled, unavailable or unini")
    group = None if data_parallel is None else data_parallel.everyone
    try:
        yield {"process_group": group, "no_dist": data_parallel is None}
    except dcp.CheckpointException as e:  # a BaseException, raised on all ranks
        raise _own_failure(e, data_parallel, failed) from e


def _own_failure(
    error: dcp.CheckpointException,
    data_parallel: DataParallel | None,
    failed: Callable[[str], Exception],
) -> BaseException:
    rank, (reason, _) = next(iter(error.failures.items()))
    own = 0 if data_parallel is None else dist.get_rank(data_parallel.everyone)
    mine = error.failures.get(own, (None, None))[0]
    if mine is None:
        text = f"{type(reason).__name__}: {reason}"
        return CheckpointError(f"rank {rank} failed, so this rank stops too: {text}")
    if isinstance(mine, _CLEAR) or not isinstance(mine, Exception):
        return mine
    return failed(f"{type(mine).__name__}: {mine}")


def _not_written(reason: str) -> Exception:
    return ValueError(
        f"torch.distributed.checkpoint cannot write this state as shards ({reason}); rename what is in its way, or "
        "use state_dict_type='full'."
    )


def _not_read(reason: str) -> Exception:
    return DamagedCheckpointError(
        f"torch.distributed.checkpoint cannot read these shards into this state ({reason}), so they are not what a "
        "save wrote; load another checkpoint."
    )
