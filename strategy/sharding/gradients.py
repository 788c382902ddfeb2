"""Clips sharded gradients by their norm over all ranks, and checks that they are finite."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from thunder_memsave.distributed.data_parallel import DataParallel
from thunder_memsave.distributed.lost_ranks import collective
from thunder_memsave.sharding.rows import all_gather
from thunder_memsave.sharding.sharded_parameter import as_rows, is_sharded, local_gradients


def clip_norm(
    parameters: Iterable[nn.Parameter],
    *,
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = True,
    data_parallel: DataParallel | None,
) -> Tensor:
    """Scale all gradients so that their norm over all ranks is at most `max_norm`.

    Every rank calls it with the same parameters; replicated ones count once, and padding rows not
    at all, because their gradients are zero. A collective if parameters are sharded.

    Returns:
        The norm before clipping, the same on all ranks.

    Raises:
        ValueError: `max_norm` or `norm_type` is not positive.
        RuntimeError: The norm is not finite and `error_if_nonfinite` is set; on every rank.
    """
    _require_positive("max_norm", max_norm)
    _require_positive("norm_type", norm_type)
    parameters = list(parameters)
    norm = global_norm(parameters, norm_type=norm_type, data_parallel=data_parallel)
    if error_if_nonfinite and not bool(torch.isfinite(norm)):
        raise RuntimeError(
            f"the gradients' norm of order {norm_type:g} is {norm.item()}, so they cannot be "
            "clipped; find the step's loss, lower the learning rate, or pass "
            "error_if_nonfinite=False to go on with gradients that are not finite."
        )
    nn.utils.clip_grads_with_norm_(parameters, max_norm, norm)
    return norm


def clip_value(parameters: Iterable[nn.Parameter], *, clip_value: float) -> None:
    """Clamp every gradient element to `[-clip_value, clip_value]`. No communication.

    Raises:
        ValueError: `clip_value` is not positive.
    """
    _require_positive("clip_value", clip_value)
    nn.utils.clip_grad_value_(list(parameters), clip_value)


def are_finite(parameters: Iterable[nn.Parameter], *, data_parallel: DataParallel | None) -> bool:
    """Return whether every gradient is finite on every rank; the same answer on all. A collective of one number."""
    parameters = list(parameters)
    # The largest element: NaN goes through it, and unlike a sum it does not overflow.
    largest = nn.utils.get_total_norm(local_gradients(parameters), math.inf)
    finite = torch.isfinite(largest).to(parameters[0].device, torch.float32)
    if data_parallel is not None:
        with collective("agreement on finite gradients", data_parallel.everyone):
            dist.all_reduce(finite, dist.ReduceOp.MIN, group=data_parallel.everyone)
    return bool(finite)


def global_norm(
    parameters: Sequence[nn.Parameter],
    *,
    norm_type: float = 2.0,
    data_parallel: DataParallel | None,
) -> Tensor:
    """Return the norm of all gradients over all ranks. A collective if parameters are sharded."""
    whole = local_gradients(p for p in parameters if not is_sharded(p))
    if data_parallel is None or not any(is_sharded(p) for p in parameters):
        if all(g.dtype.itemsize > 2 for g in whole):
            return nn.utils.get_total_norm(whole, norm_type)
        return _norm(whole, norm_type, whole[0].new_zeros((), dtype=torch.float32))
    like = torch.zeros((), dtype=norm_dtype(parameters), device=parameters[0].device)
    shards = local_gradients(p for p in parameters if is_sharded(p))
    return _over_ranks(shards, whole, norm_type, like, data_parallel)


def _over_ranks(
    shards: Sequence[Tensor],
    whole: Sequence[Tensor],
    norm_type: float,
    like: Tensor,
    data_parallel: DataParallel,
) -> Tensor:
    sharded_norms = like.new_empty(data_parallel.world_size)
    all_gather(sharded_norms, _norm(shards, norm_type, like).reshape(1), data_parallel)
    replicated_norm = _norm(whole, norm_type, like).reshape(1)
    # A norm of norms is the norm of everything, for any order, and does not overflow first.
    return _norm([sharded_norms, replicated_norm], norm_type, like)


def norm_of_one(gradient: Tensor, place: Tensor) -> None:
    """Write the norm of a gradient, or of its rows on this rank, to `place`, a number in float32 or float64."""
    rows = as_rows(gradient)
    numbers = torch.view_as_real(rows) if rows.is_complex() else rows
    torch.linalg.vector_norm(numbers, dtype=place.dtype, out=place)


def norm_of_kept(
    parameters: Sequence[nn.Parameter], norms: Sequence[Tensor], data_parallel: DataParallel | None
) -> Tensor:
    """Return the norm of all gradients over all ranks, from norms that were kept. A collective if they are sharded.

    Args:
        parameters: The same on all ranks.
        norms: By parameter, of this rank's rows of sharded ones.
        data_parallel: The ranks that share parameters; None: there is one.
    """
    pairs = list(zip(parameters, norms, strict=True))
    rows = [norm for p, norm in pairs if is_sharded(p)]
    if data_parallel is None or not rows:
        total: Tensor = torch.linalg.vector_norm(torch.stack(list(norms)))
        return total
    whole = [norm for p, norm in pairs if not is_sharded(p)]
    # Stacked: two kernels, not one for each number.
    replicated = [torch.stack(whole)] if whole else []
    return _over_ranks([torch.stack(rows)], replicated, 2.0, norms[0], data_parallel)


def norm_dtype(parameters: Sequence[nn.Parameter]) -> torch.dtype:
    """Return float32 or float64: bfloat16's 8 bits are too few for a sum over a whole model."""
    is_double = any(p.dtype in (torch.float64, torch.complex128) for p in parameters)
    return torch.float64 if is_double else torch.float32


def _norm(grads: Sequence[Tensor], norm_type: float, like: Tensor) -> Tensor:
    if not grads:
        return torch.zeros_like(like)
    norms = [torch.linalg.vector_norm(g, norm_type, dtype=like.dtype) for g in grads]
    total: Tensor = torch.linalg.vector_norm(torch.stack(norms), norm_type)
    return total


def _require_positive(name: str, value: float) -> None:
    if not value > 0:
        raise ValueError(f"{name} is {value}; it must be greater than 0 to clip by.")
