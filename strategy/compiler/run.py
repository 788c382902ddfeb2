"""The last steps: callables of the traces that run, of inference or of a forward whose backward autograd calls."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from thunder.core.trace import TraceCtx
from thunder.core.transform_common import (
    unwrap_return_value,
)
from torch import Tensor

from thunder_memsave.budget.pieces.measured_step import Follow
from thunder_memsave.budget.planned_call import differentiated
from thunder_memsave.compiler import autograd
from thunder_memsave.compiler.cuda_graphs.graphed_call import GraphedCall
from thunder_memsave.compiler.state import State
from thunder_memsave.frontend.lowering import Lowered
from thunder_memsave.ops.accumulation import UnreducedGradients, accumulated_names
from thunder_memsave.ops.added_gradients import added_if_given, added_names
from thunder_memsave.ops.host_copies.engine import copying
from thunder_memsave.ops.host_copies.symbols import has_copies
from thunder_memsave.ops.host_copies.weights import fetches
from thunder_memsave.ops.running_backward import RunningBackward, running
from thunder_memsave.ops.updated_parameters import updated_names
from thunder_memsave.optim.in_backward import Expected, UpdatesInBackward
from thunder_memsave.passes.symbols import is_tensor


def unwrap_results(state: State) -> State:
    """Return the results alone, where there is no backward to hand anything to."""
    if state.backward is not None or not state.facts.is_run:
        return state
    return replace(state, forward=unwrap_return_value(state.forward))


def make_callable(state: State) -> State:
    """Make what the captured call runs."""
    facts, forward, backward = state.facts, state.forward, state.backward
    assert forward is not None
    if backward is None:
        run = inference(facts.lowered, forward) if facts.is_run else _not_here
        return replace(state, run=run)
    graphed = _graphed(state, forward, backward)
    if not facts.is_run:
        return replace(state, run=_not_here)
    run = training(
        facts.lowered,
        forward,
        backward,
        state.keeping,
        facts.unreduced,
        updates=facts.updates,
        graphed=graphed,
        follow=None if facts.planner is None else facts.planner.follow,
    )
    return replace(state, run=run)


def _graphed(state: State, forward: TraceCtx, backward: TraceCtx) -> GraphedCall | None:
    """Decide whether the call runs as CUDA graphs; what is no batch stays where it is."""
    facts = state.facts
    if facts.graphs is None:
        return None
    kinds = facts.arguments.kinds
    return facts.graphs.choose(
        forward,
        backward,
        keeps_gradients=state.keeping is not None,
        fixed=[a.name for a in forward.args if kinds.get(a.name) != "batch"],
        name=facts.name,
    )


def _not_here(*inputs: Any) -> Any:
    raise AssertionError("what is compiled for a device that is not here is not run")


def inference(lowered: Lowered, trace: TraceCtx) -> Callable[..., Any]:
    """Make a callable of an inference trace."""
    computation = _callable(trace)

    def run(*inputs: Tensor) -> Sequence[Any]:
        with _plain_execution(), torch.no_grad():
            computed = computation(*inputs, *lowered.constants, *lowered.state())
        return lowered.outputs(inputs, computed)

    return run


def training(
    lowered: Lowered,
    forward: TraceCtx,
    backward: TraceCtx,
    keeping: TraceCtx | None,
    unreduced: UnreducedGradients,
    *,
    updates: UpdatesInBackward | None = None,
    graphed: GraphedCall | None = None,
    follow: Follow | None = None,
) -> Callable[..., Any]:
    """Make a callable of a forward and of the backward that autograd calls."""
    compute = _callable(forward)
    differentiate = _differentiate(backward, keeping, unreduced)

    def compute_outputs(*inputs: Any) -> Any:
        with _plain_execution():
            result, saved = compute(*inputs)
        return result["output"], saved

    def run_forward(*inputs: Any) -> Any:
        if graphed is None:
            return compute_outputs(*inputs)
        return graphed.forward(compute_outputs, inputs)

    run_backward_of = _running_backward(differentiate, unreduced, updates, graphed)
    updated = set(updated_names(backward))
    added = {*added_names(backward), *updated}
    named = {*accumulated_names(backward), *added}
    slots = [(i, a.name) for i, a in enumerate(forward.args) if a.name in named]
    planned_gradients = differentiated(forward.output[0]["output"])
    adds_to = frozenset(i for i, name in slots if name in added)
    absent = added_if_given(backward.bound_symbols)
    may_be_absent = frozenset(
        i for i, p in enumerate(backward.args[1]) if is_tensor(p) and p.name in absent
    )

    def run(*inputs: Tensor) -> Sequence[Any]:
        # Not `inputs`: the batch is not kept until backward.
        parameters = [(i, name, inputs[i]) for i, name in slots]
        expected = None
        if updates is not None:
            trained = [t for t in inputs if isinstance(t, Tensor) and t.requires_grad and t.is_leaf]
            expected = updates.expect(trained)
        function = autograd.Differentiable(
            forward=run_forward,
            backward=run_backward_of(parameters, expected),
            output_depends_on=lowered.depends_on,
            planned_gradients=planned_gradients,
            adds_to=adds_to,
            may_be_absent=may_be_absent,
            follow=follow,
        )
        computed = autograd.run(function, (*inputs, *lowered.constants, *lowered.state()))
        return lowered.outputs(inputs, computed)

    return run


_Parameters = Sequence[tuple[int, str, Tensor]]
"""Places among the inputs, names in the trace, and the parameters themselves."""


def _running_backward(
    differentiate: Callable[..., Any],
    unreduced: UnreducedGradients,
    updates: UpdatesInBackward | None,
    graphed: GraphedCall | None,
) -> Callable[[_Parameters, Expected | None], Callable[..., Any]]:
    """Return what makes, of a call's parameters, the backward that autograd calls; it holds what is expected of it."""

    def of_call(parameters: _Parameters, expected: Expected | None) -> Callable[..., Any]:
        def run_backward(saved: Any, cotangents: Any, reached: autograd.Reached) -> Any:
            of_run = RunningBackward(
                gradients=unreduced,
                parameters={name: p for i, name, p in parameters if i in reached.inputs},
                accumulating=frozenset(n for i, n, _ in parameters if i in reached.accumulating),
                updates=updates,
                expected=expected,
            )
            with _plain_execution(), running(of_run):
                if graphed is not None:
                    return graphed.backward(differentiate, saved, cotangents, reached.inputs)
                try:
                    gradients = list(differentiate(saved, cotangents))
                finally:
                    if updates is not None:
                        updates.end_copies()
            for i, name, _ in parameters:
                gradients[i] = of_run.given.get(name, gradients[i])
            return gradients

        return run_backward

    return of_call


def _differentiate(
    backward: TraceCtx, keeping: TraceCtx | None, unreduced: UnreducedGradients
) -> Callable[..., Any]:
    """The compiled backward, or the one that keeps gradients while `unreduced` says so."""
    reduce = _callable(backward)
    if keeping is None:
        return reduce
    keep = _callable(keeping)

    def differentiate(saved: Any, cotangents: Any) -> Any:
        if unreduced.is_keeping:
            return keep(saved, cotangents)
        gradients = reduce(saved, cotangents)
        unreduced.reduce_rest()
        return gradients

    return differentiate


def _callable(trace: TraceCtx) -> Callable[..., Any]:
    """Make a callable of a trace; what it copies to or from the host ends with it, also where it raises."""
    run: Callable[..., Any] = trace.python_callable()
    if not (has_copies(trace) or fetches(trace)):
        return run

    def run_with_copies(*arguments: Any) -> Any:
        with copying():
            return run(*arguments)

    return run_with_copies


@contextmanager
def _plain_execution() -> Iterator[None]:
    """Shards are plain tensors to a trace; its casts are explicit, Thunder turns autocast off."""
    with torch._C.DisableTorchFunction():
        yield
