"""Fills a module on the meta device with real tensors, on each rank its own rows only."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

from thunder_memsave.checkpoints.module_state import Problem, StateMismatchError, copy_rows
from thunder_memsave.checkpoints.quantized_files.stored_source import (
    StoredSource,
    format_in_files,
)
from thunder_memsave.checkpoints.sources import (
    TensorSource,
    TensorSpec,
)
from thunder_memsave.distributed.agreement import OtherRankError, broadcast, together
from thunder_memsave.distributed.data_parallel import DataParallel
from thunder_memsave.materialize.initialize import initialize
from thunder_memsave.materialize.magnitudes import start_magnitudes
from thunder_memsave.materialize.pending_weights import (
    PENDING,
    PendingWeights,
    Rename,
    load_on_setup,
    wanted_tensors,
    without_adapters,
)
from thunder_memsave.ops.host_copies.weights import place_of
from thunder_memsave.sharding.rows import (
    RowRange,
    can_shard,
    fill_meta,
    own_rows,
    shard_rest,
    take_rows,
    whole_shape,
)
from thunder_memsave.sharding.sharded_parameter import stored_weight
from thunder_memsave.stored_weights.format import QuantizedFilesError, StoredFormat
from thunder_memsave.stored_weights.formats import NF4
from thunder_memsave.stored_weights.in_bytes import FrozenInBytes
from thunder_memsave.stored_weights.walk import FrozenWeights


def materialize(
    module: nn.Module,
    *,
    device: torch.device,
    data_parallel: DataParallel | None,
    weights: str | Path | None = None,
    rename: Rename = without_adapters,
    frozen: FrozenWeights | None = None,
) -> None:
    """Fill every meta tensor of `module` in place, and shard the rest as well. A collective.

    From files, a rank reads its own rows of one tensor at a time, so that the host holds its shard and one tensor.
    Tensors that the files do not have, and non-persistent buffers, are initialised by the modules' own
    `reset_parameters` or `_init_weights`, with the same values on all ranks; the module being initialised is whole on
    the host meanwhile.

    Weights to be kept in another format are cast as soon as they are read, so that at most one of them is live in its
    own dtype; initialised ones are live in their own dtype until all are. DoRA's magnitudes start from weights last.

    Args:
        module: A module wholly or partly on meta.
        device: The device of the real tensors.
        data_parallel: The ranks to shard over.
        weights: As in `load_on_setup`, for the whole module.
        rename: As in `load_on_setup`.
        frozen: The weights to be kept in another format only.

    Raises:
        QuantizedFilesError: The files have weights in NF4, and `frozen` does not keep them so.
        StateMismatchError: Names or shapes in the files do not fit; nothing was changed.
        ValueError: A parameter or buffer has no initial value; the message names it.
        OtherRankError: Another rank raised one of these, or could not read its rows.
    """
    if weights is not None:
        load_on_setup(module, weights, rename=rename)
    seed = broadcast(torch.initial_seed(), data_parallel)
    on_all_ranks = partial(together, data_parallel=data_parallel, error_elsewhere=OtherRankError)
    reads = on_all_ranks(lambda: _planned_reads(module, frozen))
    if frozen is not None:
        on_all_ranks(lambda: _take_stored(reads, frozen, device, data_parallel))
        kept = [read for read in reads if frozen.has(read.target) and read.target.is_meta]
        fills = ((r.target, partial(_fill_from_file, r, device, data_parallel)) for r in kept)
        frozen.cast_each(fills, device)
    on_all_ranks(lambda: _fill_rest(module, reads, device, data_parallel, seed=seed))
    if frozen is not None:
        frozen.cast_rest(device)
    start_magnitudes(module, data_parallel)


def _planned_reads(module: nn.Module, frozen: FrozenWeights | None) -> list[_Read]:
    reads = list(_plan_reads(module))
    in_nf4 = [read for read in reads if read.format_in_files is NF4]
    if in_nf4 and not _keeps(frozen, NF4):
        raise QuantizedFilesError(
            f"the weight files have {len(in_nf4)} weights in NF4, such as {in_nf4[0].stored_name}, but the model is "
            "not to keep them so; set frozen_weights to 'nf4', or give the files that they were made from.",
            key="model.frozen_weights",
        )
    return reads


def _keeps(frozen: FrozenWeights | None, kept_in: StoredFormat) -> bool:
    return isinstance(frozen, FrozenInBytes) and frozen.kept_in.setting == kept_in.setting


def _take_stored(
    reads: Iterable[_Read],
    frozen: FrozenWeights,
    device: torch.device,
    data_parallel: DataParallel | None,
) -> None:
    """Give weights the bytes that files have of them; those that are trained are read dequantised, with the rest."""
    for read in reads:
        found = read.format_in_files
        if found is None or not _keeps(frozen, found):
            continue
        if not frozen.has(read.target) or not read.target.is_meta:
            continue
        assert isinstance(frozen, FrozenInBytes)
        _fill_with_nothing(read, device, data_parallel)
        frozen.take(read.target, found, partial(read.stored, device))


def _fill_with_nothing(
    read: _Read, device: torch.device, data_parallel: DataParallel | None
) -> None:
    """Move a weight, or this rank's rows of it, off meta without memory for its values."""
    shape = whole_shape(read.target)
    sharded_over = data_parallel if can_shard(shape, data_parallel) else None
    if sharded_over is not None:
        shape = torch.Size([own_rows(shape, sharded_over).num_rows, *shape[1:]])
    one = torch.empty(1, dtype=read.target.dtype, device=device)
    values = one.expand(shape)  # the bytes replace it at once
    fill_meta(read.target, values, name=read.name, sharded_over=sharded_over)


def _fill_rest(
    module: nn.Module,
    reads: Iterable[_Read],
    device: torch.device,
    data_parallel: DataParallel | None,
    *,
    seed: int,
) -> None:
    for read in reads:
        if stored_weight(read.target) is None:
            _fill_from_file(read, device, data_parallel)
    for name, target, whole in initialize(module, seed=seed):
        _fill(target, name, _rows_of(whole), device, data_parallel)
    shard_rest(module, data_parallel)


def _fill_from_file(read: _Read, device: torch.device, data_parallel: DataParallel | None) -> None:
    if read.target.is_meta:
        _fill(read.target, read.name, read.rows_of_source, device, data_parallel)
    else:
        with torch.no_grad():
            copy_rows(read.source, read.stored_name, read.target)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Read:
    """A tensor of the module, and the source of its rows."""

    name: str
    target: Tensor
    stored_name: str
    source: TensorSource

    @property
    def format_in_files(self) -> StoredFormat | None:
        """The format in which the files have the tensor; None: they have its values."""
        return format_in_files(self.source, self.stored_name)

    def stored(self, device: torch.device, rows: slice | None) -> Tensor:
        """Read the bytes of a quantised weight, or some rows of them."""
        assert isinstance(self.source, StoredSource)
        return self.source.stored(self.stored_name, rows).to(device)

    def rows_of_source(self, rows: slice | None) -> Tensor:
        return self.source.read(self.stored_name, rows)


def _rows_of(whole: Tensor) -> Callable[[slice | None], Tensor]:
    return lambda rows: whole if rows is None else whole[rows]


def _fill(
    target: Tensor,
    name: str,
    read: Callable[[slice | None], Tensor],
    device: torch.device,
    data_parallel: DataParallel | None,
) -> None:
    shape = whole_shape(target)
    where = device if place_of(target) is None else torch.device("cpu")
    sharded_over: DataParallel | None = None
    if isinstance(target, nn.Parameter) and data_parallel and can_shard(shape, data_parallel):
        sharded_over = data_parallel
        rows = own_rows(shape, data_parallel)
        real = read(slice(rows.start, rows.stop)).to(where, target.dtype)
        own = RowRange(start=0, stop=rows.num_real_rows, num_rows=rows.num_rows)
        values = take_rows(real, own)
    else:
        # A copy: what is read may be a view of a mapped file, or of values tied by accident.
        values = read(None).to(where, target.dtype, copy=True)
    fill_meta(target, values, name=name, sharded_over=sharded_over)


def _plan_reads(module: nn.Module) -> Iterator[_Read]:
    """Yield the reads from files, each distinct tensor once; raise for all problems at once."""
    planned: dict[int, _Read] = {}
    problems: list[Problem] = []
    for prefix, owner in list(module.named_modules()):
        pending = vars(owner).pop(PENDING, None)
        if isinstance(pending, PendingWeights):
            for read in _reads_of(owner, prefix, pending, problems):
                planned.setdefault(id(read.target), read)
    if problems:
        raise StateMismatchError.listing(
            problems,
            what="the weight files do not fit the model",
            advice="Build the model from the config that belongs to the files, or map its names to theirs with "
            "rename=.",
        )
    yield from planned.values()


def _reads_of(
    owner: nn.Module, prefix: str, pending: PendingWeights, problems: list[Problem]
) -> Iterator[_Read]:
    stored = {name: pending.source.spec(name) for name in pending.source.names()}
    wanted = wanted_tensors(owner, pending.rename)
    found: set[int] = set()
    used: set[str] = set()
    for name, (stored_name, target) in wanted.items():
        if stored_name not in stored:
            continue
        used.add(stored_name)
        found.add(id(target))
        problems += _shape_problems(name, target, stored[stored_name])
        full_name = f"{prefix}.{name}" if prefix else name
        source = pending.source
        yield _Read(name=full_name, target=target, stored_name=stored_name, source=source)
    transient = _non_persistent(owner)
    problems += [
        Problem(name=name, text="missing: the model has it, the files do not")
        for name, (_, target) in wanted.items()
        if id(target) not in found and name not in transient
    ]
    problems += [
        Problem(name=name, text="unexpected: the files have it, the model does not")
        for name in stored
        if name not in used and not _may_be_ignored(owner, name)
    ]


def _shape_problems(name: str, target: Tensor, spec: TensorSpec) -> list[Problem]:
    shape = whole_shape(target)
    if spec.shape == shape:
        return []
    text = f"shape {tuple(spec.shape)} in the files, {tuple(shape)} in the model"
    return [Problem(name=name, text=text)]


def _non_persistent(owner: nn.Module) -> set[str]:
    return {
        f"{prefix}.{name}" if prefix else name
        for prefix, submodule in owner.named_modules(remove_duplicate=False)
        for name in submodule._non_persistent_buffers_set
    }


def _may_be_ignored(owner: nn.Module, name: str) -> bool:
    """Return whether a transformers model lists this name as one that old files have and it no longer reads."""
    ignored: Mapping[str, object] | list[str] = (
        getattr(owner, "_keys_to_ignore_on_load_unexpected", None) or []
    )
    return any(re.search(pattern, name) for pattern in ignored)
