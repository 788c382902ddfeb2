"""Updates a parameter in backward, as soon as its gradient is there and nothing reads the parameter any more.

Otherwise the gradients of all parameters are live when the optimizer steps. Here each lives for a few operations:

    t8 = linear_backward(...)
    t9 = linear(g, t_weight)                        # the last reader
    update_parameter(t8, "t_weight", ...)           # optimizer's update, then nothing holds the gradient

Where the engine must get a gradient, such as for `torch.autograd.grad` or a hook, it does get it, and the update is
that of `optimizer.step()`, as it is where a step has several gradients of a parameter, from two calls of the module.

Lv et al. 2023, LOMO (arXiv 2306.09782), and PyTorch's tutorial "How to save memory by fusing the optimizer step into
the backward pass" do this with hooks on gradients.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from thunder.core import prims
from thunder.core.proxies import TensorProxy
from thunder.core.symbol import BoundSymbol
from thunder.core.trace import TraceCtx, TraceProvenance, from_trace
from thunder.extend import OperatorExecutor, register_executor
from torch import Tensor

from thunder_memsave.ops.added_gradients import is_watched
from thunder_memsave.ops.running_backward import running_backward

_executor = OperatorExecutor("thunder_memsave_updated_parameters", version="0")
register_executor(_executor)


@dataclass(frozen=True, slots=True)
class Update:
    """What the update of one parameter takes."""

    peak_bytes: int
    """Peak of the bytes that it allocates, beside the optimizer's states."""
    moved_bytes: int
    """Bytes that its kernels read and write."""
    stride: tuple[int, ...]
    """The parameter's. A gradient with other strides is copied first, as by autograd."""


def _update_parameter(
    grad: Tensor, name: str, peak_bytes: int, moved_bytes: int, stride: tuple[int, ...]
) -> None:
    backward = running_backward()
    parameter = backward.parameters.get(name)
    if parameter is None:  # not reached by what is differentiated
        return
    updates = backward.updates
    is_alone = name in backward.accumulating and not is_watched(parameter)
    if updates is None or not is_alone or not updates.takes(parameter):
        backward.given[name] = grad
    else:
        updates.update(parameter, grad)


_update = _executor.register_operator(
    "update_parameter",
    meta=lambda grad, name, peak_bytes, moved_bytes, stride: None,
    fn=_update_parameter,
    tags=[prims.OpTags.DONT_DCE],
)


def updates_parameter(bsym: BoundSymbol) -> bool:
    """Return whether a symbol updates a parameter."""
    return bsym.sym.id == _update.id  # type: ignore[no-any-return]


def update_of(bsym: BoundSymbol) -> Update:
    """Return what such a symbol's update takes."""
    _grad, _name, peak_bytes, moved_bytes, stride = bsym.args
    return Update(peak_bytes, moved_bytes, tuple(stride))


def updated_names(trace: TraceCtx) -> Sequence[str]:
    """Return the names of the parameters that a backward updates."""
    return [b.args[1] for b in trace.bound_symbols if updates_parameter(b)]


def is_copied(shape: Sequence[int], stride: Sequence[int], update: Update) -> bool:
    """Return whether a gradient of this layout is copied before the update, to have the parameter's strides."""
    if not math.prod(shape):
        return False
    pairs = zip(shape, stride, update.stride, strict=True)
    return any(length != 1 and own != wanted for length, own, wanted in pairs)


def with_updates(
    backward: TraceCtx,
    arguments: Sequence[Any],
    updates: Mapping[str, Update],
    memory: Mapping[str, set[str]],
) -> TraceCtx:
    """Update parameters after their last reader, instead of returning their gradients.

    Args:
        backward: A backward trace in its final order, before values are deleted after their last use.
        arguments: Those of its forward, to which its results are gradients.
        updates: What each takes, by the parameters' names.
        memory: The tensors whose memory each value may share (`passes.repeatable.roots`), of forward and backward.
    """
    symbols = backward.bound_symbols
    made = {o.name: i for i, b in enumerate(symbols) for o in b.flat_proxy_outs}
    readers: dict[str, list[str]] = {}
    for argument, gradient in zip(arguments, backward.output, strict=True):
        if isinstance(gradient, TensorProxy):
            readers.setdefault(gradient.name, []).append(argument.name)
    # A gradient that two parameters share is copied by autograd.
    chosen = {
        names[0]: gradient
        for gradient, names in readers.items()
        if len(names) == 1 and names[0] in updates and gradient in made
    }
    last = _last_readers(symbols, chosen, memory)
    proxies = {g.name: g for g in backward.output if isinstance(g, TensorProxy)}
    after: dict[int, list[BoundSymbol]] = {}
    for name, gradient in chosen.items():
        update = updates[name]
        bound = _update.bind(
            *(proxies[gradient], name, update.peak_bytes, update.moved_bytes, update.stride),
            output=None,
        )
        after.setdefault(max(made[gradient], last.get(name, -1)), []).append(bound)
    new = from_trace(backward)
    new.bound_symbols = []
    for index, bsym in enumerate(symbols):
        is_return = bsym.sym is prims.python_return
        new.bound_symbols.append(_without(bsym, arguments, chosen) if is_return else bsym)
        new.bound_symbols.extend(after.get(index, ()))
    new.set_provenance(TraceProvenance("Pass update_parameters"))
    return new


def _last_readers(
    symbols: Sequence[BoundSymbol], names: Mapping[str, str], memory: Mapping[str, set[str]]
) -> dict[str, int]:
    """Return the index of the last symbol that reads each parameter's memory, itself or through a view."""
    last: dict[str, int] = {}
    for index, bsym in enumerate(symbols):
        if bsym.sym is prims.python_return:
            continue
        for argument in bsym.flat_proxy_args:
            for root in memory.get(argument.name, {argument.name}):
                if root in names:
                    last[root] = index
    return last


def _without(bsym: BoundSymbol, arguments: Sequence[Any], names: Mapping[str, str]) -> BoundSymbol:
    """Return the return of a backward without the gradients of these arguments."""
    (gradients,) = bsym.args
    others = tuple(
        None if getattr(argument, "name", None) in names else gradient
        for argument, gradient in zip(arguments, gradients, strict=True)
    )
    return bsym.from_bsym(args=(others,))
