"""Gives every rank the values of rank 0, where models were initialised differently."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from thunder_memsave.distributed.agreement import is_rank_zero
from thunder_memsave.distributed.data_parallel import DataParallel
from thunder_memsave.distributed.lost_ranks import collective
from thunder_memsave.sharding.same_on_all_ranks import compared_tensors

_log = logging.getLogger(__name__)


def take_rank_zero_values(
    module: nn.Module,
    names: Sequence[str],
    *,
    device: torch.device,
    data_parallel: DataParallel | None,
) -> None:
    """Copy rank 0's values into the same tensors of every rank, in place. One collective for each tensor.

    At most one of them is on `device` at a time beside the model. Rank 0 logs how many there are.

    Args:
        module: Whole on every rank, with the same shapes and dtypes.
        names: What `check_ranks_agree` returned: names of `compared_tensors`, the same on all ranks.
        device: Where the ranks communicate.
        data_parallel: The ranks; None: there is one.
    """
    if data_parallel is None or not names:
        return
    tensors = compared_tensors(module)
    for name in names:
        _copy_from_rank_zero(tensors[name].detach(), device, data_parallel)
    if is_rank_zero(data_parallel):
        _log.warning(
            "the ranks had other initial values for %d of the model's %d tensors, %s the first; all have rank 0's now.",
            len(names),
            len(tensors),
            names[0],
        )


def batch_norms(module: nn.Module) -> list[nn.Module]:
    """Return the layers whose running statistics follow this rank's rows alone."""
    return [
        each
        for each in module.modules()
        if isinstance(each, _BatchNorm)
        and not isinstance(each, nn.SyncBatchNorm)
        and each.track_running_stats
    ]


def take_rank_zero_statistics(
    norms: Sequence[nn.Module], data_parallel: DataParallel | None
) -> None:
    """Copy rank 0's running statistics into the same buffers of every rank, in place, as DDP does before each forward.

    One collective for each buffer, which takes no memory besides.

    Args:
        norms: What `batch_norms` returned, in the same order on all ranks.
        data_parallel: The ranks; None: there is one.
    """
    if data_parallel is None or not norms:
        return
    with collective("broadcast of BatchNorm's statistics", data_parallel.everyone), torch.no_grad():
        for norm in norms:
            for buffer in norm.buffers(recurse=False):
                dist.broadcast(buffer, group=data_parallel.everyone, group_src=0)


def _copy_from_rank_zero(t: Tensor, device: torch.device, data_parallel: DataParallel) -> None:
    real = torch.view_as_real(t) if t.is_complex() else t
    sent = real.to(device).contiguous()
    with collective("broadcast of rank 0's initial values", data_parallel.everyone):
        # As bytes, because backends do not know every dtype.
        as_bytes = sent.reshape(-1).view(torch.uint8)
        dist.broadcast(as_bytes, group=data_parallel.everyone, group_src=0)
    if not is_rank_zero(data_parallel):
        real.copy_(sent)
