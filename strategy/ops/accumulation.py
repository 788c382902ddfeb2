"""Keeps unreduced whole gradients over micro-batches, until one backward reduces their sum.

The trace of a backward that may do so has a `with_unreduced` before each reduction:

    t8 = with_unreduced(t7, "t_weight")             # t7 plus the kept sum
    ft9 = reduce_scatter_rows(t8, group)
    t10 = torch_wait_prim_impl(ft9)
    return (t10, ...)

`without_reductions` derives the trace for `fabric.no_backward_sync`, which communicates no gradient:

    keep_unreduced(t7, "t_weight")
    return (None, ...)
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from thunder.core import prims
from thunder.core.proxies import Proxy, TensorProxy
from thunder.core.pytree import tree_map
from thunder.core.symbol import BoundSymbol
from thunder.core.trace import TraceCtx, TraceProvenance, from_trace
from thunder.extend import OperatorExecutor, register_executor
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from thunder_memsave.distributed.data_parallel import DataParallel
from thunder_memsave.ops.running_backward import running_backward
from thunder_memsave.sharding.mean_gradient import mean_dtype, mean_over_ranks
from thunder_memsave.sharding.rows import whole_shape
from thunder_memsave.sharding.sharded_parameter import as_rows

_SMALL_PART = 0.1
"""Largest share of the memory budget for whole gradients under `accumulate: auto`: a large model's adapters need
less, full training more."""

_executor = OperatorExecutor("thunder_memsave_accumulation", version="0")
register_executor(_executor)


@dataclass(slots=True, weakref_slot=True)
class _Kept:
    """The sum of one parameter's unreduced gradients on this rank."""

    parameter: Tensor
    total: Tensor
    grad: Tensor
    """The `parameter.grad` at that time; another one means that the gradients were dropped."""
    version: int
    hook: RemovableHandle | None = None

    @property
    def is_dropped(self) -> bool:
        """Whether `zero_grad` was called since, with `set_to_none` or without."""
        if self.parameter.grad is not self.grad:
            return True
        return self.grad._version != self.version and not bool(as_rows(self.grad).any())

    def follow(self) -> None:
        """Count autograd's additions to `grad`, to tell them from `zero_grad` even if they add zeros.

        Such as a weight decay in the loss, or `0 * weight.sum()`; the rows of some ranks may get zeros only.
        """
        # Weak: the hook is the parameter's, and must not keep the parameter and its gradient alive.
        this = weakref.ref(self)

        def added(_: Tensor) -> None:
            if (kept := this()) is not None and kept.grad._version == kept.version + 1:
                kept.version += 1

        if self.parameter.requires_grad:  # it may have been frozen between forward and backward
            self.hook = self.parameter.register_post_accumulate_grad_hook(added)

    def unfollow(self) -> None:
        """Stop counting: the sum is no longer kept."""
        if self.hook is not None:
            self.hook.remove()


class UnreducedGradients:
    """The kept, unreduced gradients of one module."""

    def __init__(self, data_parallel: DataParallel | None) -> None:
        """Keep nothing yet; `data_parallel`: the ranks that reduce gradients; None: there is nothing to reduce."""
        self._data_parallel = data_parallel
        self.is_keeping = False
        """Whether backwards currently keep their gradients instead of reducing them."""
        self._kept: dict[int, _Kept] = {}

    @contextmanager
    def keeping(self, *, enabled: bool) -> Iterator[None]:
        """Make backwards inside keep their gradients."""
        before, self.is_keeping = self.is_keeping, enabled
        try:
            yield
        finally:
            self.is_keeping = before

    @property
    def may_keep(self) -> bool:
        """Whether a backward under `fabric.no_backward_sync` keeps its gradients."""
        return may_keep(self._data_parallel)

    def parameters(self) -> list[Tensor]:
        """Return the parameters with unreduced gradients."""
        found = [self._find(kept.parameter) for kept in list(self._kept.values())]
        return [kept.parameter for kept in found if kept is not None]

    @property
    def num_waiting(self) -> int:
        """Number of parameters with unreduced gradients."""
        return sum(not kept.is_dropped for kept in self._kept.values())

    def add(self, parameter: Tensor, grad: Tensor) -> None:
        """Add a gradient to the kept sum, in float32 at least: bfloat16 would round every sum to 8 bits."""
        kept = self._find(parameter)
        if kept is not None:
            kept.total.add_(grad)
            return
        total = grad.to(torch.promote_types(grad.dtype, torch.float32))
        if parameter.grad is None:
            # The reduced sum goes here; and `zero_grad`, which takes it away, drops what is kept.
            parameter.grad = torch.zeros_like(parameter.detach())
        kept = _Kept(parameter, total, parameter.grad, parameter.grad._version)
        kept.follow()
        self._kept[id(parameter)] = kept

    def take(self, parameter: Tensor) -> Tensor | None:
        """Remove and return a parameter's kept sum; None if there is none."""
        kept = self._find(parameter)
        if kept is None:
            return None
        self._forget(kept)
        return kept.total

    def reduce_rest(self) -> None:
        """Reduce the kept sums to which the last backward added no gradient. A collective.

        These are of weights that some micro-batches use and the last one does not; the ranks must agree on which.
        """
        for parameter in self.parameters():
            total = self.take(parameter)
            assert total is not None
            assert parameter.grad is not None
            assert self._data_parallel is not None
            parameter.grad.add_(_reduced(total, parameter, self._data_parallel))

    def _find(self, parameter: Tensor) -> _Kept | None:
        kept = self._kept.get(id(parameter))
        if kept is not None and kept.is_dropped:
            self._forget(kept)
            return None
        return kept

    def _forget(self, kept: _Kept) -> None:
        kept.unfollow()
        del self._kept[id(kept.parameter)]


def may_keep(data_parallel: DataParallel | None) -> bool:
    """Return whether whole gradients are kept between micro-batches."""
    return data_parallel is not None and data_parallel.accumulate == "accumulate_unsharded"


def automatically_accumulating(
    data_parallel: DataParallel | None, parameters: Iterable[Tensor], *, budget_bytes: int | None
) -> DataParallel | None:
    """Keep whole gradients between micro-batches if they are a small part of the budget: `accumulate: auto`.

    Args:
        data_parallel: The ranks.
        parameters: Those of the model.
        budget_bytes: The memory budget, the same on all ranks; None: every gradient is reduced.
    """
    if data_parallel is None or budget_bytes is None:
        return data_parallel
    if whole_gradient_bytes(parameters) > _SMALL_PART * budget_bytes:
        return data_parallel
    return replace(data_parallel, accumulate="accumulate_unsharded")


def whole_gradient_bytes(parameters: Iterable[Tensor]) -> int:
    """Return the bytes of the trained parameters' unreduced gradients on each rank."""
    return sum(
        whole_shape(p).numel() * torch.promote_types(p.dtype, torch.float32).itemsize
        for p in parameters
        if p.requires_grad
    )


def _reduced(total: Tensor, parameter: Tensor, data_parallel: DataParallel) -> Tensor:
    grad = total.to(mean_dtype(parameter, data_parallel))
    return mean_over_ranks(grad, parameter, data_parallel)


def _with_unreduced(grad: Tensor, name: str) -> Tensor:
    backward = running_backward()
    parameter = backward.parameters.get(name)
    kept = None if parameter is None else backward.gradients.take(parameter)
    return grad if kept is None else kept.add_(grad).to(grad.dtype)


def _keep_unreduced(grad: Tensor, name: str) -> None:
    backward = running_backward()
    if (parameter := backward.parameters.get(name)) is not None:
        backward.gradients.add(parameter, grad)


with_unreduced = _executor.register_operator(
    "with_unreduced", meta=lambda grad, name: TensorProxy(like=grad), fn=_with_unreduced
)
"""`(grad, parameter's name) -> grad + kept sum`, right before its reduction."""

_keep = _executor.register_operator(
    "keep_unreduced",
    meta=lambda grad, name: None,
    fn=_keep_unreduced,
    tags=[prims.OpTags.DONT_DCE],
)


def accumulated_names(trace: TraceCtx) -> Sequence[str]:
    """Return the names of the parameters whose gradients may be kept, in the order of their reductions."""
    return [b.args[1] for b in trace.bound_symbols if b.sym.id == with_unreduced.id]


def without_reductions(trace: TraceCtx) -> TraceCtx:
    """Keep gradients instead of reducing them.

    Args:
        trace: A backward trace, before values are deleted after their last use.

    Returns:
        A trace without the symbols between each `with_unreduced` and the output, which is None there.
    """
    reduced: set[str] = set()
    new = from_trace(trace)
    new.bound_symbols = list(_kept_symbols(trace.bound_symbols, reduced))
    new.set_provenance(TraceProvenance("Pass without_reductions"))
    return new


def _kept_symbols(symbols: Sequence[BoundSymbol], reduced: set[str]) -> Iterator[BoundSymbol]:
    for bsym in symbols:
        if bsym.sym.id == with_unreduced.id:
            yield _keep.bind(*bsym.args, output=None)
        elif bsym.sym is prims.python_return:
            yield bsym.from_bsym(args=tree_map(lambda v: _unless(v, reduced), bsym.args))
            continue
        elif not any(a.name in reduced for a in bsym.flat_proxy_args):
            yield bsym
            continue
        reduced.update(o.name for o in bsym.flat_proxy_outs)


def _unless(value: Any, reduced: set[str]) -> Any:
    return None if isinstance(value, Proxy) and value.name in reduced else value
