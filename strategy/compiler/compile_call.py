"""Compiles one captured call: capture, lower, then the list of steps (`pipeline.py`)."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from typing import Any

import torch
from thunder.common import CompileData, CompileStats
from thunder.core.compile_data import compile_data_and_stats
from thunder.core.trace import TraceCtx
from thunder.executors import torchex
from torch import Tensor, nn

from thunder_memsave.budget.arguments import Arguments
from thunder_memsave.budget.extract import profiles
from thunder_memsave.budget.memory_planner import MemoryPlanner
from thunder_memsave.collector import collect_young, collector
from thunder_memsave.compiler.compile_trace import compile_trace
from thunder_memsave.compiler.cuda_graphs.choose import CudaGraphs
from thunder_memsave.compiler.pipeline import steps_without
from thunder_memsave.compiler.state import Facts, Schedule
from thunder_memsave.compiler.step_records import StepRecord
from thunder_memsave.compiler.trace_files import TraceFiles
from thunder_memsave.config import CompileConfig
from thunder_memsave.distributed.data_parallel import DataParallel
from thunder_memsave.errors import CaptureError
from thunder_memsave.fp8.compute.linears import Fp8Linears
from thunder_memsave.frontend.calls import Call
from thunder_memsave.frontend.capture import Capture, capture
from thunder_memsave.frontend.few_layers.capture import capture_few_layers
from thunder_memsave.frontend.fx_nodes import GraphCode, graph_code
from thunder_memsave.frontend.lowering import Lowered, lower
from thunder_memsave.frontend.opaque import OpaqueExecutor
from thunder_memsave.measure.op_profile import OpProfiles
from thunder_memsave.ops.accumulation import UnreducedGradients
from thunder_memsave.ops.cuda_device import planned_for
from thunder_memsave.ops.host_copies.weights import place_of
from thunder_memsave.optim.in_backward import UpdatesInBackward
from thunder_memsave.passes.overlap.schedule import schedule, two_largest_blocks
from thunder_memsave.planner.graph import StorageKind
from thunder_memsave.progress import stage

_numbers = count()


@dataclass(frozen=True, slots=True)
class Compiled:
    """One captured call, compiled."""

    method: str
    capture: Capture
    forward_traces: Sequence[TraceCtx]
    backward_traces: Sequence[TraceCtx]
    """Empty when nothing needs a gradient."""
    keeping_trace: TraceCtx | None
    """The backward that keeps gradients instead of reducing them; None where no backward may."""
    records: Sequence[StepRecord]
    """A record of each step, in order."""
    number: int
    """Number of this compilation in this process."""
    seconds: float
    run: Callable[..., Any]
    """The method, with its tensor work compiled."""
    run_graph: Callable[..., Any]
    """The tensor work alone."""
    code: GraphCode | None
    """The graph as it was captured; None: it cannot be compared with another."""

    def after_its_call(self, module: nn.Module, call: Call, *, is_of_mode: bool) -> Capture | None:
        """Return the guards under which the same graph is valid, if `call`, which ran, changed what its guards read.

        Classifiers of transformers set `config.problem_type` in their first call. Traced again, they give the same
        graph, which is not compiled again.

        Args:
            module: The module whose method was called.
            call: The call that this was compiled for, with the same settings of torch.
            is_of_mode: As for `capture`.

        Returns:
            The new capture; None if nothing changed, or the call gives another graph now.
        """
        old = self.capture
        if self.code is None or old.matches(call):
            return None
        try:
            new = capture(module, call, reason=old.why_not(call), is_of_mode=is_of_mode)
        except CaptureError:  # the next call raises it
            return None
        return new if graph_code(new.graph) == self.code and _read_the_same(old, new) else None


@dataclass(frozen=True, kw_only=True)
class CallCompiler:
    """Captures and compiles calls of a module's methods."""

    config: CompileConfig
    data_parallel: DataParallel | None
    """The ranks that share the parameters; None on one device."""
    unreduced: UnreducedGradients | None = None
    """Whole gradients that are kept between micro-batches."""
    planner: MemoryPlanner | None = None
    """Decides what backward keeps; None keeps all that it reads."""
    target: torch.device | None = None
    """The device to compile for if it is absent (`budget/target/device.py`); then the result cannot run."""
    fp8: Fp8Linears | None = None
    """The linears of the module that compute in fp8."""
    graphs: CudaGraphs | None = None
    """The module's CUDA graphs; None: it has none."""
    updates: UpdatesInBackward | None = None
    """Updates parameters in backward; None: nothing does."""

    def compile(self, module: nn.Module, call: Call, *, name: str, reason: str) -> Compiled:
        """Compile one call.

        Args:
            module: The module whose method is called.
            call: The method's arguments.
            name: Name of the method.
            reason: Reason for this capture.

        Raises:
            CaptureError: the method cannot be captured as one graph.
            CompileError: it cannot be compiled to what eager PyTorch computes.
            BudgetError: no plan fits the memory budget.
        """
        collects = gc.isenabled()
        with collector(runs=False):  # it would go through all traces again and again
            compiled = self._compiled(module, call, name, reason)
            if collects:
                collect_young()  # garbage may hold tensors
        return compiled

    def _compiled(self, module: nn.Module, call: Call, name: str, reason: str) -> Compiled:
        start = time.perf_counter()
        traced = self._traced(module, call, reason)
        facts = self._facts(module, traced, name=f"{type(module).__name__}.{name}")
        files = self._files(facts.name)
        lower_s = time.perf_counter() - start
        with compile_data_and_stats(traced.compile_data, CompileStats()):
            graph = compile_trace(facts, files=files, lower_s=lower_s)
        state = graph.state
        assert state.run is not None, "the last step makes it"
        return Compiled(
            method=name,
            capture=traced.capture,
            forward_traces=graph.forward_traces,
            backward_traces=() if state.backward is None else (state.backward,),
            keeping_trace=state.keeping,
            records=graph.records,
            number=next(_numbers),
            seconds=time.perf_counter() - start,
            run=traced.capture.callable(state.run),
            run_graph=state.run,
            code=traced.code,
        )

    def _traced(self, module: nn.Module, call: Call, reason: str) -> _Traced:
        stage("capture")
        captured = self._captured(module, call, reason)
        code = graph_code(captured.graph)  # lowering rewrites it
        stage("lower")
        opaque = OpaqueExecutor()
        compile_data = CompileData(
            fn=module,
            executors_list=(opaque, torchex.ex),
            disable_preprocessing=True,
            using_jit=True,
        )
        planned = planned_for(self.target, self._capability)
        with compile_data_and_stats(compile_data, CompileStats()), planned:
            lowered = lower(
                captured,
                compile_data=compile_data,
                data_parallel=self.data_parallel,
                opaque=opaque,
                target=self.target,
                fp8=self.fp8,
                return_logits=self.config.return_logits,
            )
        return _Traced(captured, lowered, compile_data, code)

    def _captured(self, module: nn.Module, call: Call, reason: str) -> Capture:
        """Capture the call: with few of many equal layers, where they are what tells of all."""
        is_guarded, is_of_mode = self.target is None, self.fp8 is not None
        few = capture_few_layers(
            module, call, reason=reason, is_guarded=is_guarded, is_of_mode=is_of_mode
        )
        return few or capture(
            module, call, reason=reason, is_guarded=is_guarded, is_of_mode=is_of_mode
        )

    @property
    def _capability(self) -> tuple[int, int] | None:
        """The compute capability of an absent device; None: the device is here, or the plan does not say."""
        if self.target is None or self.planner is None:
            return None
        return self.planner.device.compute_capability

    def _facts(self, module: nn.Module, traced: _Traced, *, name: str) -> Facts:
        data_parallel = self.data_parallel
        arguments = replace(
            _arguments(module, traced),
            leaves_sums=self.graphs is not None and self.graphs.is_required,
        )
        if (updates := self.updates) is not None:
            others = {n for n, t in arguments.tensors.items() if not updates.owns(t)}
            arguments = replace(arguments, not_updated=frozenset(others))
        return Facts(
            steps=steps_without(self.config.leave_out),
            lowered=traced.lowered,
            executors=traced.compile_data.executors_list,
            regathers=bool(arguments.on_host)
            or (data_parallel is not None and data_parallel.mode in ("zero3", "auto")),
            planner=self.planner,
            arguments=arguments,
            schedule=_schedule(module, data_parallel),
            unreduced=self.unreduced or UnreducedGradients(data_parallel),
            is_run=self.target is None,
            name=name,
            fusion=self._fusion(arguments.tensors),
            graphs=self.graphs,
            updates=self.updates,
        )

    def _fusion(self, tensors: Mapping[str, Tensor]) -> OpProfiles | None:
        """Return the profiles of all symbols that are fused, and planned for; None where nothing is fused."""
        fuses = self.config.fusion
        if fuses == "auto":
            is_on_cuda = any(t.is_cuda for t in tensors.values())
            fuses = is_on_cuda if self.target is None else self.target.type == "cuda"
        if not fuses:
            return None
        return profiles() if self.planner is None else self.planner.profiles

    def _files(self, title: str) -> TraceFiles | None:
        if self.config.trace_dir is None:
            return None
        return TraceFiles(self.config.trace_dir, call=title, data_parallel=self.data_parallel)


@dataclass(frozen=True, slots=True)
class _Traced:
    """The trace of a call, and when and how it may be run."""

    capture: Capture
    lowered: Lowered
    compile_data: CompileData
    code: GraphCode | None


def _schedule(module: nn.Module, data_parallel: DataParallel | None) -> Schedule:
    """Make the schedule of a module's traces, by the window of its ranks."""
    if data_parallel is None:  # there may be weights on the host
        return partial(schedule, window_bytes=two_largest_blocks(module))
    prefetch, bucket_bytes = data_parallel.prefetch, data_parallel.bucket_bytes
    window_bytes = two_largest_blocks(module) if prefetch == "auto" else prefetch
    return partial(schedule, window_bytes=window_bytes, bucket_bytes=bucket_bytes)


def _read_the_same(old: Capture, new: Capture) -> bool:
    """Whether two captures of one call read the same parameters and buffers."""
    if [i.kind for i in old.inputs] != [i.kind for i in new.inputs]:
        return False
    pairs = zip(old.inputs, new.inputs, strict=True)
    return all(a.kind == "user" or a.tensor is b.tensor for a, b in pairs)


def _arguments(module: nn.Module, traced: _Traced) -> Arguments:
    """Return the facts about the trace's arguments for the planner."""
    lowered, captured = traced.lowered, traced.capture
    kinds: dict[str, StorageKind] = {"parameter": "parameter", "buffer": "buffer", "user": "batch"}
    names = [a.name for a in lowered.trace.args]
    constants = names[len(captured.inputs) :]
    fixed = (*lowered.constants, *lowered.state())
    on_host = [
        name
        for name, i in zip(names, captured.inputs, strict=False)
        if i.kind == "parameter" and place_of(i.tensor) is not None
    ]
    read = {id(i.tensor) for i in captured.inputs}
    unread = [t for t in (*module.parameters(), *module.buffers()) if id(t) not in read]
    return Arguments(
        kinds={
            **{n: kinds[i.kind] for n, i in zip(names, captured.inputs, strict=False)},
            **dict.fromkeys(constants, "buffer"),
            **dict.fromkeys(on_host, "host"),
        },
        tensors={
            **{n: i.tensor for n, i in zip(names, captured.inputs, strict=False)},
            **dict(zip(constants, fixed, strict=True)),
        },
        unread_bytes=sum(t.numel() * t.element_size() for t in unread if place_of(t) is None),
    )
