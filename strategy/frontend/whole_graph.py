"""Lowers a captured FX graph to ATen operators: PyTorch's autograd differentiates it as one function.

What `strategy.frontend: aot` asks for. Values and gradients have eager's bits, random numbers are those that eager
draws, and no rule of Thunder takes part.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from thunder.common import CompileData
from thunder.core import prims
from thunder.core.proxies import TensorProxy
from thunder.core.trace import TraceCtx, tracectx
from torch import Tensor, fx

from thunder_memsave.aten.joint_graph import JointGraph, Operand, UntraceableError, joint_graph
from thunder_memsave.aten.origin import KeepsOrigin
from thunder_memsave.distributed.data_parallel import DataParallel
from thunder_memsave.errors import CompileError
from thunder_memsave.fp8.compute.linears import Fp8Linears
from thunder_memsave.frontend.aliasing import refuse_changed_weights, refuse_unseen_changes
from thunder_memsave.frontend.capture import Capture
from thunder_memsave.frontend.fp8_linears import LinearNodes
from thunder_memsave.frontend.fx_nodes import refuse_numbers
from thunder_memsave.frontend.graph_inputs import GraphInputs, LazyInput
from thunder_memsave.frontend.graph_outputs import OutputOrder, distinct_values, graph_outputs
from thunder_memsave.frontend.higher_order import inline_checkpoints
from thunder_memsave.frontend.joint.recorded import RecordedJoint, joint_symbol
from thunder_memsave.frontend.joint.refusal import refusal
from thunder_memsave.frontend.joint.unseen_calls import UnseenCalls
from thunder_memsave.frontend.lowering import (
    Lowered,
    begin,
    computation,
    refuse_gradients_under_no_grad,
    trained_on_this_rank,
    views_of_batch,
    whole_inputs,
)
from thunder_memsave.frontend.modes import differentiated, in_language
from thunder_memsave.frontend.opaque import OpaqueExecutor
from thunder_memsave.frontend.rewrites.attention_masks import simplify_attention
from thunder_memsave.frontend.rewrites.batch_norms import split_batch_norms
from thunder_memsave.frontend.rewrites.nodes import changed_storages
from thunder_memsave.frontend.rewrites.rms_norms import join_rms_norms
from thunder_memsave.frontend.rewrites.scaled_linears import scale_smaller_operands
from thunder_memsave.ops.table import operation_of


def lower_whole(
    capture: Capture,
    *,
    compile_data: CompileData,
    data_parallel: DataParallel | None,
    opaque: OpaqueExecutor,
    target: torch.device | None = None,
    fp8: Fp8Linears | None = None,
) -> Lowered:
    """Trace `capture.graph` and its vector-Jacobian product; the arguments are those of `lowering.lower`.

    Raises:
        CompileError: PyTorch cannot trace it without numbers; the message names the user's line.
    """
    inline_checkpoints(capture.graph)
    split_batch_norms(capture.graph)
    refuse_unseen_changes(capture.graph)
    refuse_changed_weights(capture.graph, trained_on_this_rank(capture))
    refuse_gradients_under_no_grad(capture)
    changed = changed_storages(capture.graph)
    simplify_attention(capture.graph, changed=changed, target=target)
    join_rms_norms(capture.graph, changed=changed)
    linears = None if fp8 is None else LinearNodes(fp8, capture, target)
    in_fp8 = linears.computes if linears is not None else lambda node: False
    scale_smaller_operands(capture.graph, changed=changed, stays=in_fp8)
    inputs = GraphInputs(capture, compile_data, data_parallel, target, linears)
    return _WholeGraph(capture, compile_data, inputs, opaque, target, linears).lower()


@dataclass(slots=True)
class _WholeGraph:
    capture: Capture
    compile_data: CompileData
    inputs: GraphInputs
    opaque: OpaqueExecutor
    target: torch.device | None
    fp8: LinearNodes | None
    trace: TraceCtx = field(default_factory=lambda: TraceCtx(computation))

    def lower(self) -> Lowered:
        capture = self.capture
        views = views_of_batch(capture)
        as_they_are = {*whole_inputs(capture), *views}
        outputs, computed = graph_outputs(capture.graph, as_they_are=as_they_are)
        with tracectx(self.trace), in_language():
            lazy, constants = self.inputs.proxies(), self.inputs.constants()
            state = () if self.fp8 is None else self.fp8.proxies()
            of_constants = [p for _, p in constants]
            begin(self.trace, (*(i.proxy for i in lazy), *of_constants, *state))
            held = tuple(t for t, _ in constants)
            unseen = UnseenCalls(self.opaque, self.target)
            function = _Function(capture.graph, computed, held, self.fp8, unseen)
            joint = self._joint(function)
            returned = self._record(joint, function, lazy, of_constants, state)
            prims.python_return(tuple(map(distinct_values(), returned)))
        return Lowered(
            trace=self.trace,
            constants=function.constants,
            input_names=tuple(i.name for i in capture.inputs),
            depends_on=tuple(self._reached(joint, function, i) for i in range(len(computed))),
            training=capture.training,
            outputs=OutputOrder.of(capture.graph, outputs, computed, views),
            state=tuple if self.fp8 is None else self.fp8.tensors,
            reduces_last=True,
        )

    def _joint(self, function: _Function) -> JointGraph:
        for node in function.graph.graph.nodes:
            if node.op in ("call_function", "call_method"):
                refuse_numbers(node)
        grad_enabled = self.capture.grad_enabled
        examples = [function.placeholders[i].meta["example_value"] for i in function.read]
        operands = [_operand(t, grad_enabled) for t in (*examples, *function.constants)]
        try:
            return joint_graph(function, operands, is_used=lambda index: True, may_write=True)
        except UntraceableError as error:
            message = refusal(function.graph, function.failed, error)
            raise CompileError(message) from error

    def _record(
        self,
        joint: JointGraph,
        function: _Function,
        lazy: Sequence[LazyInput],
        constants: Sequence[TensorProxy],
        state: Sequence[TensorProxy],
    ) -> list[TensorProxy]:
        """Record the operators, and the copies to what the graph changes; return the outputs."""
        recorded = RecordedJoint(joint, self.opaque, self.target, operands_vary=False)
        with differentiated(self.compile_data, enabled=True):
            operands = [*(self._value(lazy[i], function, i) for i in function.read), *constants]
            others = (*state, *self._kept_weights(lazy))
            results = list(joint_symbol(recorded, function)(*operands, *others))
        num_outputs = len(results) - len(joint.writes)
        with differentiated(self.compile_data, enabled=False):
            for (index, _), value in zip(joint.writes, results[num_outputs:], strict=True):
                operands[index].copy_(value)
        return results[:num_outputs]

    def _value(self, lazy: LazyInput, function: _Function, index: int) -> TensorProxy:
        """Return an input; of a weight that only linears in fp8 read, the numbers that are kept."""
        users = function.placeholders[index].users
        as_kept = self.fp8 is not None and all(map(self.fp8.computes, users))
        return self.inputs.force(lazy, as_kept=as_kept)

    def _kept_weights(self, lazy: Sequence[LazyInput]) -> list[TensorProxy]:
        """Return the numbers of the weights that linears read in fp8."""
        by_tensor = {id(i.graph_input.tensor): i for i in lazy}
        weights = () if self.fp8 is None else self.fp8.kept_weights()
        return [self.inputs.force(by_tensor[id(w)], as_kept=True) for w in weights]

    def _reached(self, joint: JointGraph, function: _Function, output: int) -> frozenset[int]:
        """Return the inputs of the graph that an output gives a gradient to."""
        found = (i for i in joint.reached[output] if joint.gradients[i] is not None)
        return frozenset(function.read[i] for i in found)


class _Function:
    """The graph as a function `(*inputs that it reads, *constants) -> computed values`."""

    __module__ = "torch"  # it has no name of its own that a user knows

    def __init__(
        self,
        graph: fx.GraphModule,
        computed: Sequence[fx.Node],
        constants: tuple[Tensor, ...],
        fp8: LinearNodes | None,
        unseen: UnseenCalls,
    ) -> None:
        self.graph, self.constants, self.fp8 = graph, constants, fp8
        self.placeholders = graph.graph.find_nodes(op="placeholder")
        self.read = [i for i, node in enumerate(self.placeholders) if node.users]
        self.failed: fx.Node | None = None
        """The node at which a run ended in an error."""
        self._computed = computed
        self._unseen = unseen

    def __call__(self, *tensors: Tensor) -> tuple[Any, ...]:
        num_inputs = len(self.read)
        inputs = dict(zip(self.read, tensors[:num_inputs], strict=True))
        constants = zip(map(id, self.constants), tensors[num_inputs:], strict=True)
        run = _Run(self.graph, dict(constants), self.fp8, self._unseen)
        try:
            run.run(*(inputs.get(i) for i in range(len(self.placeholders))))
        finally:
            self.failed = run.failed
        return tuple(run.env[node] for node in self._computed)


class _Run(KeepsOrigin):
    """Runs the graph with other tensors in place of those that it holds."""

    def __init__(
        self,
        graph: fx.GraphModule,
        instead: dict[int, Tensor],
        fp8: LinearNodes | None,
        unseen: UnseenCalls,
    ) -> None:
        super().__init__(graph, garbage_collect_values=False)
        self._instead, self._fp8, self._unseen = instead, fp8, unseen

    def compute(self, n: fx.Node) -> Any:
        """Compute a node's value."""
        if self._fp8 is not None and self._fp8.computes(n):
            return self._fp8.call(n, *self.fetch_args_kwargs_from_env(n))
        return self._unseen.value(n, super().compute, self.fetch_args_kwargs_from_env)

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        """Call a function, or what the table of operations has in its place."""
        row = operation_of(target)
        return super().call_function(row.run if row and row.run else target, args, kwargs)

    def get_attr(self, target: Any, args: Any, kwargs: Any) -> Any:
        """Return what the graph holds under a name."""
        value = super().get_attr(target, args, kwargs)
        return self._instead.get(id(value), value)


def _operand(example: Tensor, grad_enabled: bool) -> Operand:
    return Operand(
        shape=tuple(example.shape),
        stride=tuple(example.stride()),
        dtype=example.dtype,
        device=example.device,
        requires_grad=example.requires_grad and grad_enabled,
    )
