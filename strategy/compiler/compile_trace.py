"""Makes of a lowered trace the forward and backward that run. The ordered list is `compile_trace`."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

from thunder.common import CompileData
from thunder.core.prims import PrimIDs
from thunder.core.symbol import BoundSymbol
from thunder.core.trace import TraceCtx
from thunder.core.transform_common import (
    _inplace_copy_sanity_check,
    dce,
    unwrap_return_value,
    wrap_return_value_together_with_arguments,
)
from thunder.core.update_aliases import insert_alias_updates
from thunder.executors.passes import (
    _transform_for_operator_executor_execution,
)
from thunder.extend import (
    Executor,
    FusionExecutor,
    get_always_executors,
)
from thunder.transforms.autodiff import (
    grad_transform_on_trace,
)

from thunder_memsave.compiler.gradient_checks import refuse_gradients
from thunder_memsave.compiler.run import inference, training
from thunder_memsave.compiler.split import Schedule, Splitting, with_deletions
from thunder_memsave.errors import CompileError
from thunder_memsave.frontend.lowering import Lowered
from thunder_memsave.ops.accumulation import (
    UnreducedGradients,
    accumulated_names,
    without_reductions,
)
from thunder_memsave.passes.joint_passes import JointPass, JointTracePasses
from thunder_memsave.passes.lost_writes import refuse_lost_writes
from thunder_memsave.progress import stage


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
    splitting = Splitting(lowered, schedule)
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
        refuse_gradients(lowered)
        trace = then(unwrap_return_value(trace))
        return CompiledTrace(inference(lowered, trace), traces)
    keeping = None
    if accumulated_names(split.scheduled_backward):
        keeping = with_deletions(without_reductions(split.scheduled_backward))
    run = training(lowered, trace, split.backward, keeping, unreduced)
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


def _not_here(*inputs: Any) -> Any:
    raise AssertionError("what is compiled for a device that is not here is not run")


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
