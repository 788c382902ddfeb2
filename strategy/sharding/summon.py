"""Gathers sharded parameters temporarily, in place, and restores the shards."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from thunder_memsave.distributed.data_parallel import DataParallel
from thunder_memsave.sharding.quantized_parameter import mark_whole
from thunder_memsave.sharding.rows import gather_full, mark, own_rows, take_rows
from thunder_memsave.sharding.sharded_parameter import (
    ShardedParameter,
    as_rows,
    is_sharded,
    unquantized_dtype,
)

_CHANGES_ARE_KEPT = "_changes_are_kept"


@contextmanager
def summon_full(
    module: nn.Module, data_parallel: DataParallel | None, *, writeback: bool = False
) -> Iterator[None]:
    """Make every parameter of `module` whole inside the context. A collective.

    Gradients of the shards are set aside and restored at the end. With `writeback`, this rank
    keeps its rows of the changed parameters; otherwise changes are dropped. Parameters that an
    enclosing `summon_full` has gathered stay whole until that one ends.

    Raises:
        ValueError: A gradient was computed inside, which does not fit the shards;
            or `writeback` was set inside a context that drops changes.
    """
    if data_parallel is None:
        yield
        return
    if writeback:
        _refuse_lost_writeback(module)
    summoned: list[_Summoned] = []
    try:
        for p in module.parameters():
            if is_sharded(p):
                summoned.append(_Summoned.set_aside(p, writeback=writeback))
                summoned[-1].gather(data_parallel)
        yield
    finally:
        with_grad = [s.name for s in summoned if s.parameter.grad is not None]
        for s in summoned:
            s.restore(data_parallel, writeback=writeback)
    if with_grad:
        raise ValueError(
            f"backward() ran inside summon_full and gave {with_grad[0]!r} (and {len(with_grad) - 1}"
            " more) a gradient of the whole weight, which does not fit this rank's rows; "
            "run forward and backward outside summon_full."
        )


def _refuse_lost_writeback(module: nn.Module) -> None:
    for name, p in module.named_parameters():
        if vars(p).get(_CHANGES_ARE_KEPT) is False:
            raise ValueError(
                f"{name!r} is whole already, inside a summon_full that will drop the changes that "
                "this one is to write back; pass writeback=True to the outer one."
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class _Summoned:
    parameter: nn.Parameter
    shard: Tensor
    grad: Tensor | None
    name: str
    unsharded_shape: torch.Size

    @classmethod
    def set_aside(cls, p: nn.Parameter, *, writeback: bool) -> _Summoned:
        assert isinstance(p, ShardedParameter)
        kept = cls(
            parameter=p,
            shard=as_rows(p),
            grad=p.grad,
            name=p._parameter_name,
            unsharded_shape=p.unsharded_shape,
        )
        p.grad = None
        setattr(p, _CHANGES_ARE_KEPT, writeback)
        return kept

    def gather(self, data_parallel: DataParallel) -> None:
        p = self.parameter
        whole = gather_full(p, data_parallel)
        p.__class__ = nn.Parameter
        p.data = whole
        if unquantized_dtype(p) is not None:
            mark_whole(p, name=self.name)

    def restore(self, data_parallel: DataParallel, *, writeback: bool) -> None:
        p, rows = self.parameter, own_rows(self.unsharded_shape, data_parallel)
        delattr(p, _CHANGES_ARE_KEPT)
        if writeback and not is_sharded(p):
            self.shard.copy_(take_rows(p.detach(), rows))
        p.grad = None
        p.data = self.shard
        mark(p, self.name, self.unsharded_shape, data_parallel)
        p.grad = self.grad
