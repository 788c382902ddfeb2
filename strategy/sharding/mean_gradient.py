"""Averages a whole gradient over the ranks, for the parameter that it is of."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from thunder_memsave.distributed.data_parallel import DataParallel
from thunder_memsave.distributed.transport import Handle, start_all_reduce, start_reduce_scatter
from thunder_memsave.sharding.sharded_parameter import as_rows, is_sharded


def mean_dtype(parameter: Tensor, data_parallel: DataParallel) -> torch.dtype:
    """Return the dtype in which gradients of a parameter are averaged."""
    wanted = data_parallel.reduce_dtype
    return parameter.dtype if wanted is None else torch.promote_types(parameter.dtype, wanted)


def mean_over_ranks(grad: Tensor, parameter: Tensor, data_parallel: DataParallel) -> Tensor:
    """Return the mean over all ranks: this rank's rows of it, with padding, if the parameter is sharded. A collective.

    Args:
        grad: The whole gradient, with or without padding rows; overwritten if the parameter is not sharded.
        parameter: The parameter that it is of.
        data_parallel: The ranks.
    """
    if not is_sharded(parameter):
        return _ended(start_all_reduce([grad], data_parallel.everyone, mean=True))
    num_rows = as_rows(parameter).shape[0] * data_parallel.world_size
    if num_rows > grad.shape[0]:
        grad = F.pad(grad, (0, 0) * (grad.dim() - 1) + (0, num_rows - grad.shape[0]))
    rows = _ended(start_reduce_scatter([grad], data_parallel.group, mean=True))
    if data_parallel.replicas is None:
        return rows
    return _ended(start_all_reduce([rows], data_parallel.replicas, mean=True))


def _ended(started: Sequence[tuple[Handle, Tensor]]) -> Tensor:
    ((handle, result),) = started
    handle.wait()
    return result
