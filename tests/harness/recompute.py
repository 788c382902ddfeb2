"""Runs a model, or one joint trace, with activations to keep that the test chooses."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence, Set
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import torch
from thunder.common import CompileData, CompileStats
from thunder.core.compile_data import compile_data_and_stats
from thunder.core.proxies import TensorProxy
from thunder.core.trace import TraceCtx
from thunder.executors.passes import _transform_for_operator_executor_execution, del_last_used
from thunder.extend import get_always_executors
from thunder.transforms.autodiff import split_into_forward_and_backward
from torch import Tensor, nn

from harness.joint_passes import JOINT_PASSES, joint_passes
from thunder_memsave.compiler.compiled_module import CompiledModule
from thunder_memsave.passes.recompute import recompute
from thunder_memsave.passes.repeatable import why_not_repeatable
from thunder_memsave.passes.step import Pass
from thunder_memsave.passes.symbols import forward_symbols
from thunder_memsave.planner.actions import keeping

Choice = Callable[[TraceCtx], Set[str]]


@contextmanager
def recomputing(
    choose: Choice, *, passes: Sequence[str | Pass] = JOINT_PASSES
) -> Iterator[list[TraceCtx]]:
    """Let modules compiled inside keep the values that `choose` returns; yield their rewritten joint traces."""
    seen: list[TraceCtx] = []

    def run(trace: TraceCtx) -> TraceCtx:
        seen.append(recompute(trace, actions=keeping(choose(trace))))
        return seen[-1]

    with joint_passes(*passes, run):
        yield seen


class _SeenError(Exception):
    """Ends a compilation after its joint trace, which was all that was wanted."""


def joint_trace(module: nn.Module, *args: Any, **kwargs: Any) -> TraceCtx:
    """Return the joint trace of a call, after the passes that always run."""
    seen: list[TraceCtx] = []

    def stop(trace: TraceCtx) -> TraceCtx:
        seen.append(trace)
        raise _SeenError

    with joint_passes(*JOINT_PASSES, stop), suppress(_SeenError):
        CompiledModule(module)(*args, **kwargs)
    return seen[0]


def forward_values(trace: TraceCtx) -> list[str]:
    """Return the names of the tensors that forward makes, in its order."""
    forward = forward_symbols(trace.bound_symbols)
    return [
        o.name
        for b in trace.bound_symbols
        if id(b) in forward
        for o in b.flat_proxy_outs
        if isinstance(o, TensorProxy)
    ]


def nothing(trace: TraceCtx) -> Set[str]:
    """Keep only values that cannot be recomputed."""
    symbols = trace.bound_symbols
    refused = why_not_repeatable(symbols)
    names = {o.name for b in symbols if id(b) in refused for o in b.flat_proxy_outs}
    return names & set(forward_values(trace))


def everything(trace: TraceCtx) -> Set[str]:
    """Keep all values that forward makes."""
    return set(forward_values(trace))


def at_random(fraction: float, *, seed: int = 0) -> Choice:
    """Keep a fraction of forward's values, chosen by the seed."""

    def choose(trace: TraceCtx) -> Set[str]:
        rng = random.Random(seed)
        return nothing(trace) | {n for n in forward_values(trace) if rng.random() < fraction}

    return choose


@dataclass(frozen=True, slots=True)
class Step:
    """The results of one forward and backward."""

    outputs: Sequence[Any]
    gradients: Sequence[Tensor | None]
    generator: Tensor
    """State of the generator afterwards."""
    inputs: Sequence[Tensor]
    """The inputs afterwards: forward may write to them."""
    saved: Sequence[str]
    """Names of the values that forward saved."""


def run_joint(trace: TraceCtx, inputs: Sequence[Tensor], *, seed: int = 0) -> Step:
    """Split a joint trace and run both parts, with cotangents of ones, on copies of the inputs."""
    forward, backward = _split(trace)
    inputs = [i.detach().clone() for i in inputs]
    torch.manual_seed(seed)
    result, (tensors, numbers) = del_last_used(forward).python_callable()(*inputs)
    saved = [t.name for t in forward.bound_symbols[-1].args[1][0]]
    outputs = [o.clone() if isinstance(o, Tensor) else o for o in result["output"]]
    cotangents = [_ones(g, o) for g, o in zip(backward.args[1], result["output"], strict=True)]
    run = del_last_used(backward, clear_mutable_collections=True).python_callable()
    gradients = run([list(tensors), list(numbers)], cotangents)
    return Step(outputs, gradients, torch.get_rng_state(), inputs, saved)


def _split(trace: TraceCtx) -> tuple[TraceCtx, TraceCtx]:
    data = CompileData(fn=run_joint, executors_list=(), disable_preprocessing=True)
    with compile_data_and_stats(data, CompileStats()):
        claimed = _transform_for_operator_executor_execution(trace, get_always_executors())
        forward, backward = split_into_forward_and_backward(claimed)
    assert backward is not None, "nothing needs a gradient"
    return forward, backward


def _ones(proxy: Any, output: Any) -> Tensor | None:
    return None if proxy is None else torch.ones_like(output)
