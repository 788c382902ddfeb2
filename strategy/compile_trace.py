"""Makes of a lowered trace the forward and backward that run. The ordered list is `compile_trace`."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from thunder_memsave import compat

compat.apply()

from thunder.common import CompileData  # noqa: E402
from thunder.core import dtypes  # noqa: E402
from thunder.core.prims import PrimIDs  # noqa: E402
from thunder.core.proxies import TensorProxy  # noqa: E402
from thunder.core.symbol import BoundSymbol, Symbol  # noqa: E402
from thunder.core.trace import TraceCtx  # noqa: E402
from thunder.core.transform_common import (  # noqa: E402
    _inplace_copy_sanity_check,
    dce,
    unwrap_return_value,
    wrap_return_value_together_with_arguments,
)
from thunder.core.update_aliases import insert_alias_updates  # noqa: E402
from thunder.executors.passes import (  # noqa: E402
    _transform_for_operator_executor_execution,
    del_last_used,
)
from thunder.extend import (  # noqa: E402
    Executor,
    FusionExecutor,
    get_always_executors,
)
from thunder.transforms.autodiff import (  # noqa: E402
    grad_transform_on_trace,
    split_into_forward_and_backward,
)

from thunder_memsave import autograd  # noqa: E402
from thunder_memsave.accumulation import (  # noqa: E402
    UnreducedGradients,
    accumulated_names,
    running,
    without_reductions,
)
from thunder_memsave.errors import CompileError  # noqa: E402
from thunder_memsave.lowering import Lowered  # noqa: E402
from thunder_memsave.passes import JointPass, JointTracePasses  # noqa: E402
from thunder_memsave.passes.lost_writes import refuse_lost_writes  # noqa: E402
from thunder_memsave.passes.room import Room  # noqa: E402
from thunder_memsave.passes.symbols import is_joint  # noqa: E402
from thunder_memsave.planned_call import differentiated  # noqa: E402
from thunder_memsave.stages import stage  # noqa: E402

_NO_GRADIENT = (
    "Thunder computes no gradient for {name!r} although eager PyTorch does: an operation that uses it is not "
    "differentiable in Thunder. Freeze the parameter, or write the operation with others."
)


class Schedule(Protocol):
    """Orders a forward or a backward."""

    def __call__(self, trace: TraceCtx, *, room: Room | None = None) -> TraceCtx:
        """`room`: what else limits what is on its way."""


@dataclass(frozen=True, slots=True)
class CompiledTrace:
    """A trace made to run."""

    run: Callable[..., Any]
    """From the inputs of the lowered trace to what the captured call returns."""
    forward_traces: Sequence[TraceCtx]
    """After each step; the last one runs."""
    backward_traces: Sequence[TraceCtx] = ()
    """Empty when nothing needs a gradient."""
    keeping_trace: TraceCtx | None = None
    """The backward that keeps gradients instead of reducing them; None where no backward may."""


def compile_trace(
    lowered: Lowered,
    compile_data: CompileData,
    *,
    joint_passes: Sequence[JointPass],
    schedule: Schedule,
    unreduced: UnreducedGradients,
    plan: Callable[..., TraceCtx] | None,
    is_run: bool,
) -> CompiledTrace:
    """Do the one ordered list of what happens to a trace.

    Args:
        lowered: What was captured, in Thunder's operations.
        compile_data: Whose executors claim operations, in their order.
        joint_passes: Rewrite the trace of forward and backward once executors have claimed its operations.
        schedule: Orders a forward or a backward.
        unreduced: Where whole gradients are kept between micro-batches.
        plan: The last joint pass, which is told by `finish` what will run; None: backward reads what it reads.
        is_run: Whether the result is to be run here; if not, `run` refuses.

    Raises:
        CompileError: it cannot be compiled to what eager PyTorch computes.
        BudgetError: no plan fits the memory budget.
    """
    traces = [lowered.trace]
    splitting = _Splitting(lowered, schedule)
    if plan is not None:
        joint_passes = (*joint_passes, partial(plan, finish=splitting.planned))

    def then(trace: TraceCtx) -> TraceCtx:
        traces.append(trace)
        return trace

    trace = then(wrap_return_value_together_with_arguments(lowered.trace))
    trace = then(insert_alias_updates(trace, []))
    trace = then(dce(trace))
    if lowered.training:
        stage("differentiate")
        with _errors_name_user_code():
            trace = then(grad_transform_on_trace(trace))
    stage("choose executors")
    # Executors claim operations, then the joint passes run, then whatever fuses.
    executors = (JointTracePasses(joint_passes), *compile_data.executors_list)
    trace = then(_executed(trace, executors, is_run=is_run))
    refuse_lost_writes(trace)
    if not is_run:
        return CompiledTrace(_not_here, traces)
    split = splitting.of(trace)
    then(split.scheduled_forward)
    trace = then(split.forward)
    _inplace_copy_sanity_check(trace)
    if split.backward is None or split.scheduled_backward is None:
        _refuse_gradients(lowered)
        trace = then(unwrap_return_value(trace))
        return CompiledTrace(_inference(lowered, trace), traces)
    keeping = None
    if accumulated_names(split.scheduled_backward):
        keeping = _deleting(without_reductions(split.scheduled_backward))
    run = _training(lowered, trace, split.backward, keeping, unreduced)
    return CompiledTrace(run, traces, [split.backward], keeping)


def _executed(trace: TraceCtx, executors: Sequence[Executor], *, is_run: bool) -> TraceCtx:
    """As Thunder's `transform_for_execution`, without what that does for Thunder's own data parallelism.

    What is left to Python's own operations at the end matters to what is run, and to nothing that is planned.
    """
    trace = dce(_claimed(dce(trace), executors))
    for executor in executors:
        if isinstance(executor, FusionExecutor):
            trace = executor.fusion_pass(trace)
    return (
        _transform_for_operator_executor_execution(trace, get_always_executors())
        if is_run
        else trace
    )


def _claimed(trace: TraceCtx, executors: Sequence[Executor]) -> TraceCtx:
    """Let executors claim operations, and then those of which their own rules are made.

    Thunder offers to no executor what a rule for execution records in place of an operation: a cast before a kernel, or
    the whole forward of a user's `autograd.Function`. Rules for gradients have run before, so their parts are claimed.
    """
    trace = _transform_for_operator_executor_execution(trace, executors)
    while any(_is_unclaimed(b, executors) for b in trace.bound_symbols):
        trace = _transform_for_operator_executor_execution(trace, executors)
    return trace


def _is_unclaimed(bsym: BoundSymbol, executors: Sequence[Executor]) -> bool:
    """Whether nothing can run it yet, and nobody left it for a fusion."""
    symbol = bsym.sym
    if symbol.executor or symbol.python_impl or symbol.id is PrimIDs.GET_GRAD:
        return False
    return not any(isinstance(e, FusionExecutor) and e.can_fuse(bsym) for e in executors)


@dataclass(frozen=True, slots=True)
class _Split:
    """Forward and backward of a trace in the order in which they run, and with what deletes values."""

    scheduled_forward: TraceCtx
    forward: TraceCtx
    scheduled_backward: TraceCtx | None = None
    """None, as is the next, where nothing needs a gradient."""
    backward: TraceCtx | None = None


@dataclass(frozen=True, slots=True)
class _Planned:
    """What the planner simulated."""

    trace: TraceCtx
    room: Room | None
    split: _Split


class _Splitting:
    """Makes of a trace what runs. What the planner simulated is not made again, where nothing has changed since."""

    def __init__(self, lowered: Lowered, schedule: Schedule) -> None:
        self._lowered, self._schedule = lowered, schedule
        self._last: _Planned | None = None

    def planned(self, trace: TraceCtx, room: Room | None) -> tuple[TraceCtx, TraceCtx | None]:
        """For the planner, which takes the last: forward and backward, or an inference trace and None."""
        split = self._split(trace, room)
        if split.backward is not None and self._lowered.depends_on is not None:
            names, depends_on = self._lowered.input_names, self._lowered.depends_on
            _check_gradients(names, split.forward, split.backward, depends_on)
        self._last = _Planned(trace, room, split)
        return split.forward, split.backward

    def of(self, trace: TraceCtx) -> _Split:
        """What runs. Executors that fuse, and those of Python's own operations, may have changed the planned trace."""
        if self._last is None:
            return self._split(trace, None)
        if _is_same(trace, self._last.trace):
            return self._last.split
        return self._split(trace, self._last.room)

    def _split(self, trace: TraceCtx, room: Room | None) -> _Split:
        backward = None
        if is_joint(trace.bound_symbols):
            trace, backward = split_into_forward_and_backward(trace)
        forward = self._schedule(trace, room=room)
        if backward is None:
            return _Split(forward, del_last_used(forward))
        backward = self._schedule(backward, room=room)
        return _Split(forward, del_last_used(forward), backward, _deleting(backward))


def _is_same(trace: TraceCtx, other: TraceCtx) -> bool:
    """Whether the same operators run on the same values, whatever these are called.

    Thunder's executors change an operator, or name what it makes anew, and nothing else of it.
    """
    if len(trace.bound_symbols) != len(other.bound_symbols):
        return False
    pairs = zip(_numbered(trace), _numbered(other), strict=True)
    return all(a == b for a, b in pairs)


def _numbered(trace: TraceCtx) -> Iterator[tuple[Symbol, list[int]]]:
    """Yield the operators, with their arguments and results numbered in the order in which they appear."""
    numbers: dict[str, int] = {}
    for bsym in trace.bound_symbols:
        proxies = (*bsym.flat_proxy_args, *bsym.flat_proxy_outs)
        yield bsym.sym, [numbers.setdefault(p.name, len(numbers)) for p in proxies]


def _deleting(backward: TraceCtx) -> TraceCtx:
    return del_last_used(backward, clear_mutable_collections=True)


def _not_here(*inputs: Any) -> Any:
    raise AssertionError("what is compiled for a device that is not here is not run")


def _inference(lowered: Lowered, trace: TraceCtx) -> Callable[..., Any]:
    computation = trace.python_callable()

    def run(*inputs: Tensor) -> Sequence[Any]:
        with _plain_execution(), torch.no_grad():
            computed = computation(*inputs, *lowered.constants, *lowered.state())
        return lowered.outputs(inputs, computed)

    return run


def _training(
    lowered: Lowered,
    forward: TraceCtx,
    backward: TraceCtx,
    keeping: TraceCtx | None,
    unreduced: UnreducedGradients,
) -> Callable[..., Any]:
    depends_on = lowered.depends_on
    if depends_on is None:
        depends_on = _all_dependencies(forward, backward)
    _check_gradients(lowered.input_names, forward, backward, depends_on)
    compute = forward.python_callable()
    differentiate = _differentiate(backward, keeping, unreduced)

    def run_forward(*inputs: Any) -> Any:
        with _plain_execution():
            result, saved = compute(*inputs)
        return result["output"], saved

    accumulated = set(accumulated_names(backward))
    slots = [(i, a.name) for i, a in enumerate(forward.args) if a.name in accumulated]

    def run(*inputs: Tensor) -> Sequence[Any]:
        # Not `inputs`: the batch is not kept until backward.
        parameters = [(i, name, inputs[i]) for i, name in slots]

        def run_backward(saved: Any, cotangents: Any, reached: Collection[int]) -> Any:
            trained = {name: p for i, name, p in parameters if i in reached}
            with _plain_execution(), running(unreduced, trained):
                return differentiate(saved, cotangents)

        function = autograd.Differentiable(
            forward=run_forward,
            backward=run_backward,
            output_depends_on=depends_on,
            planned_gradients=differentiated(forward.output[0]["output"]),
        )
        computed = autograd.run(function, (*inputs, *lowered.constants, *lowered.state()))
        return lowered.outputs(inputs, computed)

    return run


def _differentiate(
    backward: TraceCtx, keeping: TraceCtx | None, unreduced: UnreducedGradients
) -> Callable[..., Any]:
    """The compiled backward, or the one that keeps gradients while `unreduced` says so."""
    reduce: Callable[..., Any] = backward.python_callable()
    if keeping is None:
        return reduce
    keep = keeping.python_callable()

    def differentiate(saved: Any, cotangents: Any) -> Any:
        if unreduced.is_keeping:
            return keep(saved, cotangents)
        gradients = reduce(saved, cotangents)
        unreduced.reduce_rest()
        return gradients

    return differentiate


def _all_dependencies(forward: TraceCtx, backward: TraceCtx) -> tuple[frozenset[int], ...]:
    """Every floating output depends on every input that gets a gradient."""
    with_gradient = frozenset(i for i, g in enumerate(backward.output) if g is not None)
    outputs = forward.output[0]["output"]
    return tuple(
        with_gradient
        if isinstance(o, TensorProxy) and dtypes.is_inexact_dtype(o.dtype)
        else frozenset()
        for o in outputs
    )


@contextmanager
def _errors_name_user_code() -> Iterator[None]:
    try:
        yield
    except Exception as error:
        frames = (frame.f_locals for frame, _ in traceback.walk_tb(error.__traceback__))
        found = (f["bsym"] for f in frames if isinstance(f.get("bsym"), BoundSymbol))
        if (bsym := next(found, None)) is None:
            raise
        raise CompileError(
            f"Thunder cannot differentiate {bsym.sym.name} (at {bsym.source_filename or 'an unknown line'}): {error}. "
            "Write it with other operations, or keep it out of the compiled model."
        ) from error


def _refuse_gradients(lowered: Lowered) -> None:
    """Raise where eager gives a gradient and Thunder's trace has no backward at all."""
    for index in sorted(frozenset().union(*(lowered.depends_on or ()))):
        raise CompileError(_NO_GRADIENT.format(name=lowered.input_names[index]))


def _check_gradients(
    names: Sequence[str],
    forward: TraceCtx,
    backward: TraceCtx,
    depends_on: Sequence[frozenset[int]],
) -> None:
    """Every gradient that eager gives is computed, in the shape and dtype of its input."""
    gradients = backward.output  # looked for in the whole trace, each time
    for index in sorted(frozenset().union(*depends_on)):
        proxy, gradient = forward.args[index], gradients[index]
        if gradient is None:
            raise CompileError(_NO_GRADIENT.format(name=names[index]))
        if (gradient.shape, gradient.dtype) != (proxy.shape, proxy.dtype):
            raise CompileError(
                f"Thunder computes the gradient of {names[index]!r} as {tuple(gradient.shape)} {gradient.dtype}, the "
                f"tensor is {tuple(proxy.shape)} {proxy.dtype}."
            )


@contextmanager
def _plain_execution() -> Iterator[None]:
    """Shards are plain tensors to a trace; its casts are explicit, Thunder turns autocast off."""
    with torch._C.DisableTorchFunctionSubclass():
        yield
