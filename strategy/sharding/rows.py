"""Shards the parameters of a module in place, each rank its own rows, and gathers them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from thunder_memsave.distributed import transport
from thunder_memsave.distributed.agreement import device_of
from thunder_memsave.distributed.data_parallel import DataParallel
from thunder_memsave.distributed.lost_ranks import NoticingHandle
from thunder_memsave.sharding.sharded_parameter import (
    ShardedParameter,
    as_rows,
    gathered,
    is_sharded,
    mark_sharded,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class RowRange:
    """One rank's part of dim 0: rows `[start, stop)` of the whole, padded to `num_rows`."""

    start: int
    stop: int
    num_rows: int

    @property
    def num_real_rows(self) -> int:
        """Rows that are not padding."""
        return self.stop - self.start


def own_rows(unsharded_shape: torch.Size, data_parallel: DataParallel) -> RowRange:
    """Return this rank's rows in Thunder's FSDP layout: ceil(n / world) each, padding at the very end."""
    total = unsharded_shape[0]
    num_rows = -(-total // data_parallel.world_size)
    start = min(data_parallel.rank * num_rows, total)
    return RowRange(start=start, stop=min(start + num_rows, total), num_rows=num_rows)


def can_shard(unsharded_shape: torch.Size, data_parallel: DataParallel | None) -> bool:
    """Return whether a parameter of this shape is sharded: 0-dim and empty ones are replicated."""
    if data_parallel is None or not data_parallel.shards:
        return False
    return len(unsharded_shape) > 0 and unsharded_shape.numel() > 0


def num_real_rows(p: Tensor) -> int:
    """Return the number of leading rows of `p` that are not padding."""
    if isinstance(p, ShardedParameter):
        return p._num_real_rows
    return p.shape[0] if p.dim() else 1


def local_rows(t: Tensor, p: Tensor) -> Tensor:
    """Return the rows of `t` without padding; `t` has the shape of `p`: the parameter, its grad, its moments."""
    return as_rows(t)[: num_real_rows(p)] if is_sharded(p) else as_rows(t)


def is_state_of_rows(optimizer: object, key: str, shape: torch.Size, of: torch.Size) -> bool:
    """Tell whether a state of this shape has a row for each row of a parameter of the shape `of`.

    Optimizers name those of another shape in `row_states`; most have none.
    """
    row_states: frozenset[str] = getattr(optimizer, "row_states", frozenset())
    return shape == of or (key in row_states and shape[:1] == of[:1])


def shard_module(module: nn.Module, data_parallel: DataParallel | None) -> None:
    """Replace the data of every parameter by this rank's rows, in place.

    Parameter objects, `requires_grad` and ties stay, so an optimizer made before still trains
    them. Every parameter gets `unsharded_shape`. Meta parameters stay on meta.

    Raises:
        ValueError: The module is sharded already, has gradients, ties weights by storage only, or
            has parameters of another type than `nn.Parameter`.
    """
    for name, p in module.named_parameters():
        if is_sharded(p):
            raise ValueError(
                f"the module is sharded already ({name!r} holds {num_real_rows(p)} rows); "
                "set it up once, and use the module that setup returned."
            )
    shard_rest(module, data_parallel)


def shard_rest(module: nn.Module, data_parallel: DataParallel | None) -> None:
    """Shard the parameters that are not sharded yet, as `shard_module` does."""
    rest = {name: p for name, p in module.named_parameters() if not is_sharded(p)}
    _refuse_unshardable(rest)
    _refuse_subclasses(rest, data_parallel)
    for name, p in rest.items():
        shape = p.shape
        p.unsharded_shape = shape  # type: ignore[attr-defined]
        if data_parallel is not None and can_shard(shape, data_parallel):
            set_data(p, take_rows(p.detach(), own_rows(shape, data_parallel)))
            mark(p, name, shape, data_parallel)


def set_data(p: nn.Parameter, values: Tensor) -> None:
    """Give a parameter `values` of its own dtype, and perhaps another shape.

    A graph that was made before, such as that of a weight that `torch.nn.utils.prune` keeps, may hold what adds up the
    parameter's gradients, which knows its shape from then. PyTorch makes a new one only if the dtype changes.
    """
    if p.requires_grad:
        other = torch.float32 if p.dtype is torch.float64 else torch.float64
        p.data = values.new_empty(0, dtype=other)
    p.data = values


def take_rows(whole: Tensor, rows: RowRange) -> Tensor:
    """Return a copy of `rows` of `whole`, padded with zeros."""
    shard = whole.new_zeros((rows.num_rows, *whole.shape[1:]))
    shard[: rows.num_real_rows] = whole[rows.start : rows.stop]
    return shard


def padded_rows(value: Tensor, p: ShardedParameter) -> Tensor:
    """Return this rank's rows of `p`, padded, from a value that holds these rows, or the whole weight's."""
    rows = torch.zeros((len(p), *value.shape[1:]), dtype=value.dtype, device=value.device)
    first = p._first_row if len(value) == p.unsharded_shape[0] else 0
    rows[: p._num_real_rows] = as_rows(value)[first : first + p._num_real_rows]
    return rows


def fill_meta(p: Tensor, values: Tensor, *, name: str, sharded_over: DataParallel | None) -> None:
    """Give a meta parameter or buffer its `values`: all of it, or this rank's rows with padding.

    The object stays, with its attributes and `requires_grad`; only its contents change.
    """
    real = nn.Parameter(values, p.requires_grad) if isinstance(p, nn.Parameter) else values
    vars(real).update(vars(p))
    if sharded_over is not None:
        assert isinstance(real, nn.Parameter)
        mark(real, name, whole_shape(p), sharded_over)
    # `p.data = values` is refused by torch where p is on meta.
    torch.utils.swap_tensors(p, real)


def whole_shape(t: Tensor) -> torch.Size:
    """Return the shape of `t`, or of the whole tensor if `t` is a shard."""
    return t.unsharded_shape if isinstance(t, ShardedParameter) else t.shape


def gather_full(p: Tensor, data_parallel: DataParallel | None) -> Tensor:
    """Return the whole parameter, without padding. A collective for sharded parameters.

    Replicated parameters are returned without a copy: do not write to the result.
    """
    if data_parallel is None or not isinstance(p, ShardedParameter):
        return as_rows(p)
    return gather_rows(as_rows(p), p.unsharded_shape, data_parallel)


def gather_rows(shard: Tensor, unsharded_shape: torch.Size, data_parallel: DataParallel) -> Tensor:
    """Gather all ranks' rows of a tensor sharded like a parameter, without padding. A collective."""
    shard = as_rows(shard).contiguous()
    if device_of(data_parallel.group) == "cuda":  # of a weight that the host keeps
        shard = shard.cuda()
    whole = shard.new_empty((shard.shape[0] * data_parallel.world_size, *shard.shape[1:]))
    all_gather(whole, shard, data_parallel)
    return whole[: unsharded_shape[0]]


def gather_whole(rows: Tensor, p: Tensor) -> Tensor:
    """Return the whole of rows that are shaped like those of the parameter `p`, without padding.

    A collective if `p` is a shard, or stands for one in a plan; otherwise `rows` are the whole.
    """
    marks = vars(p)
    gather = marks.get("_gather")
    return rows if gather is None else gathered(rows, gather, marks["unsharded_shape"])


def all_gather(out: Tensor, shard: Tensor, data_parallel: DataParallel) -> None:
    """Fill `out` with the contiguous `shard` of all ranks, in the order of ranks."""
    if shard.dtype.itemsize == 1:
        # gloo knows no float8, but moving bytes does not need to.
        out, shard = out.view(torch.uint8), shard.view(torch.uint8)
    work = transport.all_gather_single(out, shard, data_parallel.group, True)
    NoticingHandle(work, f"all-gather of {list(out.shape)}", data_parallel.group).wait()


def _refuse_unshardable(named: dict[str, nn.Parameter]) -> None:
    for name, p in named.items():
        if p.grad is not None:
            raise ValueError(
                f"{name!r} has a gradient, which sharding would drop; call "
                "optimizer.zero_grad() before setup, or set up before the first backward()."
            )
    for (name, p), (other_name, other) in _neighbours_in_memory(named):
        if _bytes_of(other).stop > _bytes_of(p).start:
            raise ValueError(
                f"{name!r} and {other_name!r} are two Parameters over one storage; sharding "
                "would untie them. Assign the same Parameter object to both modules."
            )


def _refuse_subclasses(named: dict[str, nn.Parameter], data_parallel: DataParallel | None) -> None:
    for name, p in named.items():
        if type(p) is not nn.Parameter and can_shard(p.shape, data_parallel):
            raise ValueError(
                f"{name!r} is a {type(p).__name__}, and only torch.nn.Parameter itself is known to "
                "hold a weight row by row; build the model with plain parameters, or use "
                "sharding='none'."
            )


def _neighbours_in_memory(
    named: dict[str, nn.Parameter],
) -> Iterator[tuple[tuple[str, nn.Parameter], tuple[str, nn.Parameter]]]:
    """Yield each parameter with the one of its storage that starts before it and reaches furthest."""
    of_storage: dict[int, list[tuple[str, nn.Parameter]]] = {}
    for name, p in named.items():
        if p.numel() and (address := p.untyped_storage().data_ptr()):
            of_storage.setdefault(address, []).append((name, p))
    for sharing in of_storage.values():
        sharing.sort(key=lambda item: _bytes_of(item[1]).start)
        furthest = sharing[0]
        for item in sharing[1:]:
            yield item, furthest
            furthest = max(furthest, item, key=lambda item: _bytes_of(item[1]).stop)


def _bytes_of(p: Tensor) -> range:
    """Return the range of bytes of `p` within its storage."""
    last = sum((n - 1) * stride for n, stride in zip(p.shape, p.stride(), strict=True))
    start = p.storage_offset() * p.element_size()
    return range(start, start + (last + 1) * p.element_size())


def mark(p: nn.Parameter, name: str, shape: torch.Size, data_parallel: DataParallel) -> None:
    """Mark a parameter as this rank's rows of a whole of this name and shape."""
    rows = own_rows(shape, data_parallel)
    mark_sharded(
        p,
        unsharded_shape=shape,
        first_row=rows.start,
        num_real_rows=rows.num_real_rows,
        parameter_name=name,
        gather=partial(_gather_numbers, data_parallel=data_parallel),
    )


def _gather_numbers(numbers: Tensor, data_parallel: DataParallel) -> Tensor:
    of_ranks = numbers.new_empty(data_parallel.world_size * len(numbers))
    if not isinstance(numbers, FakeTensor):
        all_gather(of_ranks, numbers, data_parallel)
    elif numbers.device.type == "cpu":
        torch.empty_like(of_ranks)  # gloo receives into a buffer of its own, which a plan counts
    return of_ranks.view(data_parallel.world_size, -1)
