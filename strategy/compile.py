"""Compiles a module's methods: capture, lower, differentiate, execute. The ordered list is `_compile`.

Thunder's own driver (`thunder.jit`) interprets the Python code of the model, checks every parameter in a prologue on
each call and keeps parameters of its own. None of that is needed when the graph comes from Dynamo with its guards, so
Thunder's passes are called directly (docs/decisions/0003).
"""

from __future__ import annotations

import logging
import time
import traceback
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from thunder_memsave import compat

compat.apply()

from thunder.common import CompileData, CompileStats  # noqa: E402
from thunder.core import dtypes  # noqa: E402
from thunder.core.compile_data import compile_data_and_stats  # noqa: E402
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
    get_default_executors,
    resolve_executors,
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
from thunder_memsave.attention import attention_executor  # noqa: E402
from thunder_memsave.capture import Call, Capture, capture  # noqa: E402
from thunder_memsave.collectives import collectives_executor  # noqa: E402
from thunder_memsave.config import CompileConfig  # noqa: E402
from thunder_memsave.errors import CompileError  # noqa: E402
from thunder_memsave.fp8.linears import Fp8Linears  # noqa: E402
from thunder_memsave.interpret import Interpretation, interpret  # noqa: E402
from thunder_memsave.kernels import kernels_executor  # noqa: E402
from thunder_memsave.lowering import Lowered, lower  # noqa: E402
from thunder_memsave.opaque import OpaqueExecutor  # noqa: E402
from thunder_memsave.passes import JOINT_PASSES, JointPass, JointTracePasses, regather  # noqa: E402
from thunder_memsave.passes.lost_writes import refuse_lost_writes  # noqa: E402
from thunder_memsave.passes.regather import regather_forward  # noqa: E402
from thunder_memsave.passes.schedule import schedule, two_largest_blocks  # noqa: E402
from thunder_memsave.passes.symbols import is_joint  # noqa: E402
from thunder_memsave.planned_call import Arguments, differentiated  # noqa: E402
from thunder_memsave.planner.graph import StorageKind  # noqa: E402
from thunder_memsave.planning import MemoryPlanner  # noqa: E402
from thunder_memsave.sharding import DataParallel  # noqa: E402
from thunder_memsave.stages import stage  # noqa: E402

_MANY_CAPTURES = 8
_NO_GRADIENT = (
    "Thunder computes no gradient for {name!r} although eager PyTorch does: an operation that uses it is not "
    "differentiable in Thunder. Freeze the parameter, or write the operation with others."
)

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Compiled:
    """One captured call, compiled."""

    method: str
    capture: Capture | Interpretation
    forward_traces: Sequence[TraceCtx]
    backward_traces: Sequence[TraceCtx]
    """Empty when nothing needs a gradient."""
    keeping_trace: TraceCtx | None
    """The backward that keeps gradients instead of reducing them; None where no backward may."""
    seconds: float
    run: Callable[..., Any]
    """The method, with its tensor work compiled."""


class CompiledModule(nn.Module):
    """Runs the methods of a module as compiled graphs; the parameters stay where they are.

    The first call of a method captures it; so does every call that no earlier capture is valid for (another shape,
    `train`/`eval`, a changed attribute, ...). Padding or packing batches to one shape keeps it at one capture.
    """

    def __init__(
        self,
        module: nn.Module,
        *,
        config: CompileConfig | None = None,
        data_parallel: DataParallel | None = None,
        planner: MemoryPlanner | None = None,
        fp8: Fp8Linears | None = None,
    ) -> None:
        """Compile nothing yet.

        Args:
            module: Whose methods are compiled when they are called.
            config: How.
            data_parallel: The ranks that share the parameters; None on one device.
            planner: Decides what backward keeps; None: all that it reads.
            fp8: The linears of `module` that compute in fp8.
        """
        super().__init__()
        self.module = module
        self._config = config if config is not None else CompileConfig()
        self._data_parallel = data_parallel
        self.planner = planner
        self.fp8 = fp8
        self._compiled: dict[str, list[Compiled]] = {}
        self.unreduced = UnreducedGradients(data_parallel)

    @property
    def captures(self) -> Sequence[Compiled]:
        """Everything compiled so far, in order, with the reason of each."""
        return tuple(c for compiled in self._compiled.values() for c in compiled)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module."""
        return self.call_method("forward", *args, **kwargs)

    def call_method(self, name: str, /, *args: Any, **kwargs: Any) -> Any:
        """Call the bound method `name` of the module through a capture of its own.

        Raises:
            CaptureError: it cannot be captured as one graph.
            CompileError: it cannot be compiled to what eager PyTorch computes.
        """
        target = self.module if name == "forward" else getattr(self.module, name)
        call = Call.of(target, args, kwargs)
        compiled = self._find(name, call) or self._compile(name, call)
        return compiled.run(*args, **kwargs)

    def _find(self, name: str, call: Call) -> Compiled | None:
        return next((c for c in self._compiled.get(name, ()) if c.capture.matches(call)), None)

    def _compile(self, name: str, call: Call) -> Compiled:
        known = self._compiled.setdefault(name, [])
        reason = known[0].capture.why_not(call) if known else "first call"
        start = time.perf_counter()
        compiled = compile_call(
            self.module,
            call,
            name=name,
            reason=reason,
            config=self._config,
            data_parallel=self._data_parallel,
            unreduced=self.unreduced,
            planner=self.planner,
            fp8=self.fp8,
        )
        known.insert(0, compiled)
        _log.info(
            "capture %d of %s.%s: %s (%.1f s)",
            len(known),
            type(self.module).__name__,
            name,
            reason,
            time.perf_counter() - start,
        )
        if len(known) == _MANY_CAPTURES:
            _log.warning(
                "%s.%s was captured %d times; each takes seconds. The last reason: %s. Pad or pack batches to one "
                "shape, and keep values that change every step in tensors.",
                type(self.module).__name__,
                name,
                len(known),
                reason,
            )
        return compiled


def compile_call(
    module: nn.Module,
    call: Call,
    *,
    name: str,
    reason: str,
    config: CompileConfig,
    data_parallel: DataParallel | None,
    unreduced: UnreducedGradients | None = None,
    planner: MemoryPlanner | None = None,
    target: torch.device | None = None,
    fp8: Fp8Linears | None = None,
) -> Compiled:
    """Capture and compile one call of a method of `module`.

    Args:
        module: Whose method is called.
        call: With the arguments of this call.
        name: Of the method.
        reason: Why it is captured.
        config: How.
        data_parallel: The ranks that share the parameters; None on one device.
        unreduced: Where whole gradients are kept between micro-batches.
        planner: Decides what backward keeps; None: all that it reads.
        target: The device that is compiled for, where it is not here (`target_device.py`); the result is not to be
            run.
        fp8: The linears of `module` that compute in fp8.

    Raises:
        CaptureError: the method cannot be captured as one graph.
        CompileError: it cannot be compiled to what eager PyTorch computes.
        BudgetError: no plan fits the memory budget.
    """
    start = time.perf_counter()
    executors = _executors(config)
    if config.frontend == "interpreter":
        assert target is None, "what captures for another device is Dynamo"
        assert fp8 is None, "the strategy refuses it"
        traced = _interpreter(module, call, reason, executors, data_parallel)
    else:
        traced = _dynamo(module, call, reason, executors, data_parallel, target, fp8)
    with compile_data_and_stats(traced.compile_data, CompileStats()):
        graph = _compile(
            traced.lowered,
            traced.compile_data,
            joint_passes=_passes(data_parallel, planner),
            schedule=_schedule(module, data_parallel),
            unreduced=unreduced or UnreducedGradients(data_parallel),
            plan=None
            if planner is None
            else partial(planner.recomputed, arguments=_arguments(module, traced)),
            is_run=target is None,
        )
    return Compiled(
        method=name,
        capture=traced.capture,
        forward_traces=graph.forward_traces,
        backward_traces=graph.backward_traces,
        keeping_trace=graph.keeping_trace,
        seconds=time.perf_counter() - start,
        run=traced.capture.callable(graph.run),
    )


@dataclass(frozen=True, slots=True)
class _Traced:
    """What a frontend gives: the trace, and when and how it may be run."""

    capture: Capture | Interpretation
    lowered: Lowered
    compile_data: CompileData


def _dynamo(
    module: nn.Module,
    call: Call,
    reason: str,
    executors: Sequence[Executor],
    data_parallel: DataParallel | None,
    target: torch.device | None,
    fp8: Fp8Linears | None,
) -> _Traced:
    stage("capture")
    captured = capture(
        module, call, reason=reason, is_guarded=target is None, is_of_mode=fp8 is not None
    )
    stage("lower")
    opaque = OpaqueExecutor()
    compile_data = CompileData(
        fn=module, executors_list=(opaque, *executors), disable_preprocessing=True, using_jit=True
    )
    with compile_data_and_stats(compile_data, CompileStats()):
        lowered = lower(
            captured,
            compile_data=compile_data,
            data_parallel=data_parallel,
            opaque=opaque,
            target=target,
            fp8=fp8,
        )
    return _Traced(captured, lowered, compile_data)


def _interpreter(
    module: nn.Module,
    call: Call,
    reason: str,
    executors: Sequence[Executor],
    data_parallel: DataParallel | None,
) -> _Traced:
    interpretation = interpret(
        module, call, reason=reason, executors=executors, data_parallel=data_parallel
    )
    return _Traced(interpretation, interpretation.lowered, interpretation.compile_data)


def _executors(config: CompileConfig) -> tuple[Executor, ...]:
    """The ordered list of those that claim operations, and then of those that fuse."""
    if config.executors is None:
        # None that fuses: on CUDA, Thunder's default would keep what it may fuse unclaimed until after the plan.
        chosen = [e for e in get_default_executors() if not isinstance(e, FusionExecutor)]
    else:
        chosen = resolve_executors(config.executors)
    fuses = any(isinstance(e, FusionExecutor) for e in chosen)
    return (
        attention_executor,
        *(() if fuses else (kernels_executor,)),
        collectives_executor,
        *chosen,
    )


def _arguments(module: nn.Module, traced: _Traced) -> Arguments:
    """What the planner may know of the trace's arguments; an interpreted trace has no more than its proxies."""
    lowered, captured = traced.lowered, traced.capture
    if not isinstance(captured, Capture):
        return Arguments()
    kinds: dict[str, StorageKind] = {"parameter": "parameter", "buffer": "buffer", "user": "batch"}
    names = [a.name for a in lowered.trace.args]
    constants = names[len(captured.inputs) :]
    fixed = (*lowered.constants, *lowered.state())
    read = {id(i.tensor) for i in captured.inputs}
    unread = [t for t in (*module.parameters(), *module.buffers()) if id(t) not in read]
    return Arguments(
        kinds={
            **{n: kinds[i.kind] for n, i in zip(names, captured.inputs, strict=False)},
            **dict.fromkeys(constants, "buffer"),
        },
        tensors={
            **{n: i.tensor for n, i in zip(names, captured.inputs, strict=False)},
            **dict(zip(constants, fixed, strict=True)),
        },
        unread_bytes=sum(t.numel() * t.element_size() for t in unread),
    )


def _passes(
    data_parallel: DataParallel | None, planner: MemoryPlanner | None
) -> tuple[JointPass, ...]:
    """All, but gathered weights stay from forward to backward where the mode, or the plan, is to say so."""
    mode = "none" if data_parallel is None else data_parallel.mode
    if mode == "auto" and planner is not None and planner.decides_gathers:
        return tuple(regather_forward if run is regather else run for run in JOINT_PASSES)
    if mode in ("zero3", "auto"):
        return JOINT_PASSES
    return tuple(run for run in JOINT_PASSES if run is not regather)


@dataclass(frozen=True, slots=True)
class _Graph:
    run: Callable[..., Any]
    forward_traces: Sequence[TraceCtx]
    backward_traces: Sequence[TraceCtx] = ()
    keeping_trace: TraceCtx | None = None


def _schedule(
    module: nn.Module, data_parallel: DataParallel | None
) -> Callable[[TraceCtx], TraceCtx]:
    if data_parallel is None:
        return partial(schedule, window_bytes=0)
    prefetch, bucket_bytes = data_parallel.prefetch, data_parallel.bucket_bytes
    window_bytes = two_largest_blocks(module) if prefetch == "auto" else prefetch
    return partial(schedule, window_bytes=window_bytes, bucket_bytes=bucket_bytes)


def _compile(
    lowered: Lowered,
    compile_data: CompileData,
    *,
    joint_passes: Sequence[JointPass],
    schedule: Callable[[TraceCtx], TraceCtx],
    unreduced: UnreducedGradients,
    plan: Callable[..., TraceCtx] | None,
    is_run: bool,
) -> _Graph:
    """The one ordered list of what happens to a trace."""
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
        return _Graph(_not_here, traces)
    split = splitting.of(trace)
    then(split.scheduled_forward)
    trace = then(split.forward)
    _inplace_copy_sanity_check(trace)
    if split.backward is None or split.scheduled_backward is None:
        _refuse_gradients(lowered)
        trace = then(unwrap_return_value(trace))
        return _Graph(_inference(lowered, trace), traces)
    keeping = None
    if accumulated_names(split.scheduled_backward):
        keeping = _deleting(without_reductions(split.scheduled_backward))
    run = _training(lowered, trace, split.backward, keeping, unreduced)
    return _Graph(run, traces, [split.backward], keeping)


def _executed(trace: TraceCtx, executors: Sequence[Executor], *, is_run: bool) -> TraceCtx:
    """As Thunder's `transform_for_execution`, without what that does for Thunder's own data parallelism.

    What is left to Python's own operations at the end matters to what is run, and to nothing that is planned.
    """
    trace = dce(_transform_for_operator_executor_execution(dce(trace), executors))
    for executor in executors:
        if isinstance(executor, FusionExecutor):
            trace = executor.fusion_pass(trace)
    return (
        _transform_for_operator_executor_execution(trace, get_always_executors())
        if is_run
        else trace
    )


@dataclass(frozen=True, slots=True)
class _Split:
    """Forward and backward of a trace in the order in which they run, and with what deletes values."""

    scheduled_forward: TraceCtx
    forward: TraceCtx
    scheduled_backward: TraceCtx | None = None
    """None, as is the next, where nothing needs a gradient."""
    backward: TraceCtx | None = None


class _Splitting:
    """Makes of a trace what runs. What the planner simulated is not made again, where nothing has changed since."""

    def __init__(self, lowered: Lowered, schedule: Callable[[TraceCtx], TraceCtx]) -> None:
        self._lowered, self._schedule = lowered, schedule
        self._last: tuple[TraceCtx, _Split] | None = None

    def planned(self, trace: TraceCtx) -> tuple[TraceCtx, TraceCtx | None]:
        """For the planner: forward and backward, or an inference trace and None."""
        split = self._split(trace)
        if split.backward is not None and self._lowered.depends_on is not None:
            names, depends_on = self._lowered.input_names, self._lowered.depends_on
            _check_gradients(names, split.forward, split.backward, depends_on)
        self._last = (trace, split)
        return split.forward, split.backward

    def of(self, trace: TraceCtx) -> _Split:
        """What runs. Executors that fuse, and those of Python's own operations, may have changed the planned trace."""
        if self._last is not None and _is_same(trace, self._last[0]):
            return self._last[1]
        return self._split(trace)

    def _split(self, trace: TraceCtx) -> _Split:
        backward = None
        if is_joint(trace.bound_symbols):
            trace, backward = split_into_forward_and_backward(trace)
        forward = self._schedule(trace)
        if backward is None:
            return _Split(forward, del_last_used(forward))
        backward = self._schedule(backward)
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
