"""Adds gradients in backward: to a parameter's `.grad`, and those that the caller gives of outputs to computed ones.

A gradient is added to its parameter's `.grad` as soon as it is there, where several micro-batches accumulate.

Autograd gets all gradients of a compiled backward at its end, and adds them then: new gradients and old ones would be
live together. A trace that adds them itself frees each one at once:

    t8 = linear_backward(...)
    add_gradient(t8, "t_weight")                    # parameter.grad += t8
    return (None, ...)

The sum and its order are autograd's where a parameter gets one gradient per backward. Where it gets several, from two
calls of the module or from a term of the loss outside of it, autograd sums these before it adds them to `.grad`; here
each is added on its own, so the last bits may differ.

Where the engine must get a gradient, such as for `torch.autograd.grad`, a hook or a first one, which becomes `.grad`,
it does get it (`RunningBackward.given`). Hooks on a parameter's `AccumulateGrad` node cannot be seen: they get None.

The caller seldom gives a gradient of an output beside a loss (`add_if_given`): nothing is added then.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from thunder.core import prims
from thunder.core.proxies import Proxy, TensorProxy
from thunder.core.symbol import BoundSymbol
from thunder.core.trace import TraceCtx, TraceProvenance, from_trace
from thunder.extend import OperatorExecutor, register_executor
from torch import Tensor

from thunder_memsave.ops.running_backward import RunningBackward, running_backward
from thunder_memsave.sharding.sharded_parameter import as_rows

_executor = OperatorExecutor("thunder_memsave_added_gradients", version="0")
register_executor(_executor)


def is_watched(parameter: Tensor) -> bool:
    """Return whether a hook waits for this parameter's gradients, which only autograd calls."""
    hooks = (parameter._backward_hooks, getattr(parameter, "_post_accumulate_grad_hooks", None))
    return any(hooks)


def lies_alike(shape: Sequence[int], stride: Sequence[int], like: Sequence[int]) -> bool:
    """Return whether a gradient has its parameter's strides, so that autograd stores it as it is."""
    pairs = zip(shape, stride, like, strict=True)
    return all(own == wanted for length, own, wanted in pairs if length != 1)


def only_accumulates(backward: RunningBackward, name: str) -> bool:
    """Return whether autograd would do nothing with the gradient of a parameter but add it to `.grad`."""
    return name in backward.accumulating and not is_watched(backward.parameters[name])


def _add_gradient(grad: Tensor, name: str) -> None:
    backward = running_backward()
    parameter = backward.parameters.get(name)
    if parameter is None:  # not reached by what is differentiated
        return
    total = parameter.grad
    if total is None or not only_accumulates(backward, name):
        backward.given[name] = grad
    else:
        as_rows(total).add_(grad)


_add = _executor.register_operator(
    "add_gradient",
    meta=lambda grad, name: None,
    fn=_add_gradient,
    tags=[prims.OpTags.DONT_DCE],
)


def adds_gradient(bsym: BoundSymbol) -> bool:
    """Return whether a symbol adds a gradient to its parameter's."""
    return bsym.sym.id == _add.id  # type: ignore[no-any-return]


def added_names(trace: TraceCtx) -> Sequence[str]:
    """Return the names of the parameters to whose gradients a backward adds."""
    return [b.args[1] for b in trace.bound_symbols if adds_gradient(b)]


def with_added(backward: TraceCtx, arguments: Sequence[Any], names: Collection[str]) -> TraceCtx:
    """Add the gradients of some parameters where they are made, instead of returning them.

    Args:
        backward: A backward trace, before values are deleted after their last use.
        arguments: Those of its forward, to which its results are gradients.
        names: The names of these parameters.
    """
    returned: dict[str, list[str]] = {}
    for argument, gradient in zip(arguments, backward.output, strict=True):
        if isinstance(gradient, TensorProxy) and argument.name in names:
            returned.setdefault(gradient.name, []).append(argument.name)
    made = {o.name for b in backward.bound_symbols for o in b.flat_proxy_outs}
    returned = {gradient: of for gradient, of in returned.items() if gradient in made}
    new = from_trace(backward)
    new.bound_symbols = list(_adding(backward.bound_symbols, returned, arguments))
    new.set_provenance(TraceProvenance("Pass add_gradients"))
    return new


def _adding(
    symbols: Sequence[BoundSymbol], returned: dict[str, list[str]], arguments: Sequence[Any]
) -> Iterator[BoundSymbol]:
    taken = {name for names in returned.values() for name in names}
    for bsym in symbols:
        if bsym.sym is prims.python_return:
            yield returning_others(bsym, taken, arguments)
            continue
        yield bsym
        for out in bsym.flat_proxy_outs:
            for name in returned.pop(out.name, ()):
                yield _add.bind(out, name, output=None)


def returning_others(
    bsym: BoundSymbol, taken: Collection[str], arguments: Sequence[Any]
) -> BoundSymbol:
    """Return the return of a backward without the gradients of the arguments that are taken."""
    (gradients,) = bsym.args
    others = tuple(
        None if isinstance(argument, Proxy) and argument.name in taken else gradient
        for argument, gradient in zip(arguments, gradients, strict=True)
    )
    return bsym.from_bsym(args=(others,))


@dataclass(frozen=True, slots=True)
class Absent:
    """Stands for the gradient that the caller does not give of an output."""

    shape: torch.Size
    dtype: torch.dtype
    device: torch.device

    def zeros(self) -> Tensor:
        """Return it as a tensor."""
        return torch.zeros(self.shape, dtype=self.dtype, device=self.device)


def _laid_out(value: Tensor, stride: Sequence[int]) -> Tensor:
    if value.stride() == tuple(stride):
        return value
    new = torch.empty_strided(value.shape, stride, dtype=value.dtype, device=value.device)
    return new.copy_(value)


def _add_if_given(computed: Tensor, given: Tensor | Absent, stride: Sequence[int]) -> Tensor:
    if isinstance(given, Tensor):
        return computed + _laid_out(given, stride)
    if computed.stride() == tuple(stride):
        return computed
    return computed + _laid_out(given.zeros(), stride)


_laid_out_symbol = _executor.register_operator(
    "laid_out", meta=lambda value, stride: TensorProxy(like=value), fn=_laid_out
)
_add_if_given_symbol = _executor.register_operator(
    "add_if_given",
    meta=lambda computed, given, stride: TensorProxy(like=computed),
    fn=_add_if_given,
)


def laid_out(value: TensorProxy, stride: Sequence[int]) -> TensorProxy:
    """Record a value with these strides: itself, or a copy."""
    result: TensorProxy = _laid_out_symbol(value, tuple(stride))
    return result


def stride_laid_out(bsym: BoundSymbol) -> tuple[int, ...] | None:
    """Return the strides that a symbol gives a value; None: it does something else."""
    return bsym.args[1] if bsym.sym.id == _laid_out_symbol.id else None


def adding_if_given(
    bsym: BoundSymbol, computed: TensorProxy, given: TensorProxy, stride: Sequence[int]
) -> BoundSymbol:
    """Return the symbol for a sum of two: the first itself where the caller gives no second, which has these strides.

    Where the first has other strides, so might the sum: zeros are added then.
    """
    return bsym.from_bsym(
        sym=_add_if_given_symbol, args=(computed, given, tuple(stride)), kwargs={}, subsymbols=()
    )


def adds_if_given(bsym: BoundSymbol) -> bool:
    """Return whether a symbol adds what the caller gives, if anything."""
    return bsym.sym.id == _add_if_given_symbol.id  # type: ignore[no-any-return]


def added_if_given(symbols: Sequence[BoundSymbol]) -> frozenset[str]:
    """Return the names of what is added where the caller gives it, and read by nothing else."""
    added = Counter(b.args[1].name for b in symbols if adds_if_given(b))
    if not added:
        return frozenset()
    makes_nothing = (prims.python_del, prims.python_return)
    read = Counter(a.name for b in symbols if b.sym not in makes_nothing for a in b.flat_proxy_args)
    return frozenset(name for name, number in added.items() if read[name] == number)
