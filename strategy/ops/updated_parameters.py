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
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from thunder.core import prims
from thunder.core.proxies import TensorProxy
from thunder.core.symbol import BoundSymbol
from thunder.core.trace import TraceCtx, TraceProvenance, from_trace
from thunder.extend import OperatorExecutor, register_executor
from torch import Tensor

from thunder_memsave.ops.added_gradients import lies_alike, only_accumulates, returning_others
from thunder_memsave.ops.running_backward import running_backward
from thunder_memsave.planner.graph import UPDATE

_executor = OperatorExecutor("thunder_memsave_updated_parameters", version="0")
register_executor(_executor)


@dataclass(frozen=True, slots=True)
class Update:
    """What the update of one parameter takes."""

    peak_bytes: int
    """Peak of the bytes that it allocates, beside the optimizer's states."""
    moved_bytes: int
    """Bytes that its kernels read and write."""
    stride: tuple[int, ...] | None
    """The parameter's. A gradient with other strides is copied first, as by autograd; None: any is."""
    states_bytes: int = 0
    """Bytes of the optimizer's states that the host keeps, and the device has for the update."""


def _update_parameter(
    grad: Tensor,
    name: str,
    peak_bytes: int,
    moved_bytes: int,
    stride: tuple[int, ...] | None,
    states_bytes: int,
    states: None = None,
) -> None:
    backward = running_backward()
    parameter = backward.parameters.get(name)
    if parameter is None:  # not reached by what is differentiated
        return
    updates = backward.updates
    if updates is None or not (only_accumulates(backward, name) and updates.takes(parameter)):
        backward.given[name] = grad
    else:
        updates.update(parameter, grad, is_shared=stride is None)


_update = _executor.register_operator(
    UPDATE,
    meta=lambda *_: None,
    fn=_update_parameter,
    tags=[prims.OpTags.DONT_DCE],
)


def updates_parameter(bsym: BoundSymbol) -> bool:
    """Return whether a symbol updates a parameter."""
    return bsym.sym.id == _update.id  # type: ignore[no-any-return]


def updated_name(bsym: BoundSymbol) -> str:
    """Return the name of the parameter that such a symbol updates."""
    return str(bsym.args[1])


def update_of(bsym: BoundSymbol) -> Update:
    """Return what such a symbol's update takes; states that are fetched before have memory of their own."""
    _grad, _name, peak_bytes, moved_bytes, stride, states_bytes, *fetched = bsym.args
    own_bytes = peak_bytes if fetched else peak_bytes + states_bytes
    return Update(own_bytes, moved_bytes, None if stride is None else tuple(stride), states_bytes)


def with_fetched(bsym: BoundSymbol, states: TensorProxy) -> BoundSymbol:
    """Return such a symbol with the states that were fetched for it."""
    return _update.bind(*bsym.args, states, output=None)


def updated_names(trace: TraceCtx) -> Sequence[str]:
    """Return the names of the parameters that a backward updates."""
    return [updated_name(b) for b in trace.bound_symbols if updates_parameter(b)]


def is_copied(shape: Sequence[int], stride: Sequence[int], update: Update) -> bool:
    """Return whether a gradient of this layout is copied before the update, to have the parameter's strides."""
    if update.stride is None or not math.prod(shape):
        return update.stride is None
    return not lies_alike(shape, stride, update.stride)


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
    chosen = _chosen(arguments, backward.output, updates, made)
    # An optimizer may write to a gradient: others read its memory before, or it is copied.
    shared = _shared(backward.output, chosen, memory, made)
    watched = {name: name for name in chosen}
    watched |= {r: name for name, g in chosen.items() if g not in shared for r in _roots(g, memory)}
    last = _last_readers(symbols, watched, memory)
    proxies = {g.name: g for g in backward.output if isinstance(g, TensorProxy)}
    after: dict[int, list[BoundSymbol]] = {}
    for name, gradient in chosen.items():
        update = updates[name]
        stride = None if gradient in shared else update.stride
        bound = _update.bind(
            *(proxies[gradient], name, update.peak_bytes, update.moved_bytes, stride),
            update.states_bytes,
            output=None,
        )
        after.setdefault(max(made[gradient], last.get(name, -1)), []).append(bound)
    new = from_trace(backward)
    new.bound_symbols = []
    for index, bsym in enumerate(symbols):
        is_return = bsym.sym is prims.python_return
        new.bound_symbols.append(returning_others(bsym, chosen, arguments) if is_return else bsym)
        new.bound_symbols.extend(after.get(index, ()))
    new.set_provenance(TraceProvenance("Pass update_parameters"))
    return new


def _roots(name: str, memory: Mapping[str, set[str]]) -> set[str]:
    return memory.get(name, {name})


def _chosen(
    arguments: Sequence[Any],
    gradients: Sequence[Any],
    updates: Mapping[str, Update],
    made: Collection[str],
) -> dict[str, str]:
    """Return the names of parameters and their gradients, which backward makes for each alone."""
    names = [
        (argument.name, gradient.name)
        for argument, gradient in zip(arguments, gradients, strict=True)
        if isinstance(gradient, TensorProxy)
    ]
    num_users = Counter(gradient for _, gradient in names)
    return {n: g for n, g in names if n in updates and g in made and num_users[g] == 1}


def _shared(
    gradients: Sequence[Any],
    chosen: Mapping[str, str],
    memory: Mapping[str, set[str]],
    made: Collection[str],
) -> set[str]:
    """Return the gradients whose memory others may have: further gradients, as those of a bucket, or the caller."""
    names = {g.name for g in gradients if isinstance(g, TensorProxy)}
    num_users = Counter(root for name in names for root in _roots(name, memory))
    return {
        gradient
        for gradient in chosen.values()
        if any(r not in made or num_users[r] > 1 for r in _roots(gradient, memory))
    }


def _last_readers(
    symbols: Sequence[BoundSymbol], watched: Mapping[str, str], memory: Mapping[str, set[str]]
) -> dict[str, int]:
    """Return the index of the last symbol that reads what is watched, itself or through a view, for each parameter."""
    last: dict[str, int] = {}
    for index, bsym in enumerate(symbols):
        if bsym.sym is prims.python_return:
            continue
        for argument in bsym.flat_proxy_args:
            for root in _roots(argument.name, memory) & watched.keys():
                last[watched[root]] = index
    return last
