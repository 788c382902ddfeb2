"""Compiles a module's methods: each call is captured, lowered, and made to forward and backward (`compile_trace.py`).

Thunder's own driver (`thunder.jit`) interprets the Python code of the model, checks every parameter in a prologue on
each call and keeps parameters of its own. None of that is needed when the graph comes from Dynamo with its guards, so
Thunder's passes are called directly (docs/decisions/0003).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from thunder_memsave import compat

compat.apply()

from thunder.common import CompileData, CompileStats  # noqa: E402
from thunder.core.compile_data import compile_data_and_stats  # noqa: E402
from thunder.core.proxies import DistParallelType  # noqa: E402
from thunder.core.trace import TraceCtx  # noqa: E402
from thunder.extend import (  # noqa: E402
    Executor,
    FusionExecutor,
    get_default_executors,
    resolve_executors,
)

from thunder_memsave.accumulation import (  # noqa: E402
    UnreducedGradients,
)
from thunder_memsave.attention import attention_executor  # noqa: E402
from thunder_memsave.capture import Call, Capture, capture  # noqa: E402
from thunder_memsave.collectives import collectives_executor  # noqa: E402
from thunder_memsave.compile_trace import Schedule, compile_trace  # noqa: E402
from thunder_memsave.config import CompileConfig  # noqa: E402
from thunder_memsave.fp8.linears import Fp8Linears  # noqa: E402
from thunder_memsave.interpret import Interpretation, interpret  # noqa: E402
from thunder_memsave.kernels import kernels_executor  # noqa: E402
from thunder_memsave.lowering import Lowered, lower  # noqa: E402
from thunder_memsave.opaque import OpaqueExecutor  # noqa: E402
from thunder_memsave.passes import JOINT_PASSES, JointPass, regather  # noqa: E402
from thunder_memsave.passes.regather import regather_forward  # noqa: E402
from thunder_memsave.passes.schedule import schedule, two_largest_blocks  # noqa: E402
from thunder_memsave.planned_call import Arguments  # noqa: E402
from thunder_memsave.planner.graph import StorageKind  # noqa: E402
from thunder_memsave.planning import MemoryPlanner  # noqa: E402
from thunder_memsave.sharding import DataParallel  # noqa: E402
from thunder_memsave.stages import stage  # noqa: E402

_MANY_CAPTURES = 8

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
    passes, plan = _passes(data_parallel, planner), None
    if planner is not None:
        arguments = _arguments(module, traced)
        passes = (partial(planner.prepared, arguments=arguments), *passes)
        plan = partial(planner.recomputed, arguments=arguments)
    with compile_data_and_stats(traced.compile_data, CompileStats()):
        graph = compile_trace(
            traced.lowered,
            traced.compile_data,
            joint_passes=passes,
            schedule=_schedule(module, data_parallel),
            unreduced=unreduced or UnreducedGradients(data_parallel),
            plan=plan,
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
        return Arguments(kinds=dict.fromkeys(_distributed(lowered.trace), "parameter"))
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


def _distributed(trace: TraceCtx) -> Iterator[str]:
    """Yield names of the parameters that ranks share, trained or not: what `unshard` gathers."""
    for argument in trace.args:
        kind = getattr(argument, "distparallel_type", DistParallelType.NONE)
        if kind is not DistParallelType.NONE:
            yield argument.name


def _passes(
    data_parallel: DataParallel | None, planner: MemoryPlanner | None
) -> tuple[JointPass, ...]:
    """All, but gathered weights stay from forward to backward where the mode, or the plan, is to say so.

    With a planner they always seem to. Its plan is what gathers them again, once, for the first in backward that reads
    them, clones among those: so it knows from when on they are there.
    """
    mode = "none" if data_parallel is None else data_parallel.mode
    if mode in ("zero3", "auto") and planner is not None:
        return tuple(regather_forward if run is regather else run for run in JOINT_PASSES)
    if mode in ("zero3", "auto"):
        return JOINT_PASSES
    return tuple(run for run in JOINT_PASSES if run is not regather)


def _schedule(module: nn.Module, data_parallel: DataParallel | None) -> Schedule:
    if data_parallel is None:
        return partial(schedule, window_bytes=0)
    prefetch, bucket_bytes = data_parallel.prefetch, data_parallel.bucket_bytes
    window_bytes = two_largest_blocks(module) if prefetch == "auto" else prefetch
    return partial(schedule, window_bytes=window_bytes, bucket_bytes=bucket_bytes)
