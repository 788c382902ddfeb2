"""Lowers a captured FX graph to a trace of ATen operators: PyTorch's autograd differentiates it as one function.

Values and gradients have eager's bits, random numbers are those that eager draws, and no rule of Thunder takes part
(docs/decisions/0020-pytorch-differentiates-the-whole-graph.md).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from thunder.common import CompileData
from thunder.core import prims
from thunder.core.codeutils import SigInfo
from thunder.core.proxies import TensorProxy
from thunder.core.trace import TraceCtx, tracectx
from torch import Tensor, fx

from thunder_memsave.aten.equal_layers import equal_layers
from thunder_memsave.aten.joint_graph import (
    JointGraph,
    Operand,
    Shortened,
    UntraceableError,
    joint_graph,
)
from thunder_memsave.distributed.data_parallel import DataParallel
from thunder_memsave.errors import CompileError
from thunder_memsave.fp8.compute.linears import Fp8Linears
from thunder_memsave.frontend.aliasing import (
    refuse_changed_weights,
    refuse_gradients_in_buffers,
    refuse_unseen_changes,
)
from thunder_memsave.frontend.capture import Capture, GraphInput
from thunder_memsave.frontend.checkpoints import inline_checkpoints
from thunder_memsave.frontend.fp8_linears import LinearNodes
from thunder_memsave.frontend.fx_nodes import (
    example_values,
    refuse_numbers,
    value_needs_grad,
)
from thunder_memsave.frontend.graph_function import GraphFunction
from thunder_memsave.frontend.graph_inputs import GraphInputs
from thunder_memsave.frontend.graph_outputs import (
    OutputOrder,
    ViewOfInput,
    distinct_values,
    graph_outputs,
    views_of_inputs,
)
from thunder_memsave.frontend.modes import differentiated, in_language
from thunder_memsave.frontend.opaque import OpaqueExecutor
from thunder_memsave.frontend.recorded_joint import RecordedJoint, joint_symbol
from thunder_memsave.frontend.refusal import refusal
from thunder_memsave.frontend.rewrites.attention_masks import simplify_attention
from thunder_memsave.frontend.rewrites.batch_norms import split_batch_norms
from thunder_memsave.frontend.rewrites.late_logits import LateNodes
from thunder_memsave.frontend.rewrites.linear_losses import join_linear_losses
from thunder_memsave.frontend.rewrites.nodes import changed_storages
from thunder_memsave.frontend.rewrites.rms_norms import join_rms_norms
from thunder_memsave.frontend.rewrites.scaled_linears import scale_smaller_operands
from thunder_memsave.frontend.unseen_calls import UnseenCalls


@dataclass(frozen=True, slots=True)
class Lowered:
    """The trace of one graph: `(*inputs, *constants, *state) -> computed values`."""

    trace: TraceCtx
    constants: tuple[Tensor, ...]
    """Tensors that the graph holds itself (literals in the user's code)."""
    input_names: tuple[str, ...]
    """Names of the inputs in error messages."""
    depends_on: tuple[frozenset[int], ...]
    """Indices of the inputs that each computed value has a gradient for in eager."""
    training: bool
    """Whether any input needs a gradient."""
    outputs: Callable[[Sequence[Tensor], Sequence[Any]], Sequence[Any]]
    """`(inputs, computed values) -> the graph's outputs`."""
    state: Callable[[], tuple[Tensor, ...]] = tuple
    """Returns the current state of the fp8 linears: the trace's last arguments."""


def lower(
    capture: Capture,
    *,
    compile_data: CompileData,
    data_parallel: DataParallel | None,
    opaque: OpaqueExecutor,
    target: torch.device | None = None,
    fp8: Fp8Linears | None = None,
    return_logits: bool = True,
) -> Lowered:
    """Trace `capture.graph` and its vector-Jacobian product.

    Args:
        capture: The graph.
        compile_data: Thunder's settings, with the executors.
        data_parallel: The ranks that share the parameters; None on one device.
        opaque: The executor of the graph's own functions.
        target: The device of every tensor, for a plan; None: each tensor's own.
        fp8: The linears that compute in fp8.
        return_logits: Whether logits that the graph returns beside their loss are computed.

    Raises:
        CompileError: PyTorch cannot trace it without numbers; the message names the user's line.
    """
    inline_checkpoints(capture.graph)
    split_batch_norms(capture.graph)
    refuse_unseen_changes(capture.graph)
    refuse_changed_weights(capture.graph, _weights(capture))
    refuse_gradients_in_buffers(capture.graph, _buffers(capture))
    _refuse_gradients_under_no_grad(capture)
    changed = changed_storages(capture.graph)
    simplify_attention(capture.graph, changed=changed, target=target)
    join_rms_norms(capture.graph, changed=changed)
    linears = None if fp8 is None else LinearNodes(fp8, capture, target)
    in_fp8 = linears.computes if linears is not None else lambda node: False
    late = join_linear_losses(
        capture.graph,
        changed=changed,
        grad_enabled=capture.grad_enabled,
        fp8=linears,
        returns=return_logits,
    )
    scale_smaller_operands(capture.graph, changed=changed, stays=in_fp8)
    inputs = GraphInputs(capture, compile_data, data_parallel, target, linears)
    return _Lowering(capture, compile_data, inputs, opaque, target, linears, late).lower()


def _whole_inputs(capture: Capture) -> frozenset[fx.Node]:
    """Return the inputs that may be returned unchanged; for any other, the caller would get this rank's rows."""
    return frozenset(node for node, graph_input in _inputs(capture) if graph_input.is_whole)


def _inputs(capture: Capture) -> Iterator[tuple[fx.Node, GraphInput]]:
    """Yield the placeholders, each with its input."""
    placeholders = capture.graph.graph.find_nodes(op="placeholder")
    return zip(placeholders, capture.inputs, strict=True)


def _views_of_batch(capture: Capture) -> dict[fx.Node, ViewOfInput]:
    """Return the outputs that are views of what the caller passed."""
    of = {node for node, graph_input in _inputs(capture) if graph_input.kind == "user"}
    return views_of_inputs(capture.graph, of=of, changed=changed_storages(capture.graph))


def _weights(capture: Capture) -> dict[fx.Node, GraphInput]:
    """Return the parameters whose change would be lost: those that are trained, and those of which a rank has rows."""
    return {
        node: i
        for node, i in _inputs(capture)
        if i.kind == "parameter" and (i.tensor.requires_grad or not i.is_whole)
    }


def _buffers(capture: Capture) -> dict[fx.Node, GraphInput]:
    """Return the buffers that require no gradient."""
    return {
        node: i for node, i in _inputs(capture) if i.kind == "buffer" and not i.tensor.requires_grad
    }


def _refuse_gradients_under_no_grad(capture: Capture) -> None:
    """Refuse a graph of a call under no_grad that returns a tensor which requires a gradient."""
    outputs, _ = graph_outputs(capture.graph, as_they_are=())
    # A view of a weight says so too under no_grad, but has no graph.
    recorded = (v for v in example_values(outputs) if getattr(v, "grad_fn", None) is not None)
    if not capture.grad_enabled and any(map(value_needs_grad, recorded)):
        raise CompileError(
            "The method was called under no_grad and returns a tensor that requires a gradient, because it turns "
            "gradients on itself. Call it with gradients enabled."
        )


def _begin(trace: TraceCtx, arguments: Sequence[TensorProxy]) -> None:
    """Record in `trace`, the current one, that it is given `arguments`."""
    trace.args, trace.kwargs = tuple(arguments), {}
    trace._siginfo = SigInfo.from_name_and_args("computation", trace.args)
    for proxy in arguments:
        prims.unpack_trivial(proxy, name=proxy.name)


def _computation() -> None:
    """Names the trace."""


@dataclass(slots=True)
class _Lowering:
    capture: Capture
    compile_data: CompileData
    inputs: GraphInputs
    opaque: OpaqueExecutor
    target: torch.device | None
    fp8: LinearNodes | None
    late: Mapping[int, LateNodes]
    trace: TraceCtx = field(default_factory=lambda: TraceCtx(_computation))

    def lower(self) -> Lowered:
        capture = self.capture
        views = _views_of_batch(capture)
        as_they_are = {*_whole_inputs(capture), *views}
        outputs, computed = graph_outputs(capture.graph, as_they_are=as_they_are)
        with tracectx(self.trace), in_language():
            proxies, constants = self.inputs.proxies(), self.inputs.constants()
            state = () if self.fp8 is None else self.fp8.proxies()
            of_constants = [p for _, p in constants]
            _begin(self.trace, (*proxies, *of_constants, *state))
            held = tuple(t for t, _ in constants)
            unseen = UnseenCalls(self.opaque, self.target)
            function = GraphFunction(capture.graph, computed, held, self.fp8, unseen)
            joint = self._joint(function)
            returned = self._record(joint, function, proxies, of_constants, state)
            prims.python_return(tuple(map(distinct_values(), returned)))
        return Lowered(
            trace=self.trace,
            constants=function.constants,
            input_names=tuple(i.name for i in capture.inputs),
            depends_on=tuple(self._reached(joint, function, i) for i in range(len(computed))),
            training=capture.training,
            outputs=OutputOrder.of(capture.graph, outputs, computed, views, self.late),
            state=tuple if self.fp8 is None else self.fp8.tensors,
        )

    def _joint(self, function: GraphFunction) -> JointGraph:
        for node in function.graph.graph.nodes:
            if node.op in ("call_function", "call_method"):
                refuse_numbers(node)
        grad_enabled = self.capture.grad_enabled
        examples = [function.placeholders[i].meta["example_value"] for i in function.read]
        operands = [_operand(t, grad_enabled) for t in (*examples, *function.constants)]
        try:
            return joint_graph(function, operands, self._shortened(function, operands))
        except UntraceableError as error:
            message = refusal(function.graph, function.failed, error)
            raise CompileError(message) from error

    def _shortened(self, function: GraphFunction, operands: Sequence[Operand]) -> Shortened | None:
        """Return the function without the inner ones of many equal layers; in fp8 each has scales of its own."""
        if self.fp8 is not None:
            return None
        index_of = {function.placeholders[i]: at for at, i in enumerate(function.read)}
        layers = equal_layers(function.graph.graph, index_of, operands.__getitem__)
        return None if layers is None else Shortened(function.with_layers(layers), layers)

    def _record(
        self,
        joint: JointGraph,
        function: GraphFunction,
        proxies: Sequence[TensorProxy],
        constants: Sequence[TensorProxy],
        state: Sequence[TensorProxy],
    ) -> list[TensorProxy]:
        """Record the operators, and the copies to what the graph changes; return the outputs."""
        recorded = RecordedJoint(joint, self.opaque, self.target)
        with differentiated(self.compile_data, enabled=True):
            operands = [*(self._value(i, proxies[i], function) for i in function.read), *constants]
            others = (*state, *self._kept_weights(proxies))
            results = list(joint_symbol(recorded, function)(*operands, *others))
        num_outputs = len(results) - len(joint.writes)
        with differentiated(self.compile_data, enabled=False):
            for (index, _), value in zip(joint.writes, results[num_outputs:], strict=True):
                operands[index].copy_(value)
        return results[:num_outputs]

    def _value(self, index: int, proxy: TensorProxy, function: GraphFunction) -> TensorProxy:
        """Return an input; of a weight that only linears in fp8 read, the numbers that are kept."""
        users = function.placeholders[index].users
        as_kept = self.fp8 is not None and all(map(self.fp8.computes, users))
        return self.inputs.value(index, proxy, as_kept=as_kept)

    def _kept_weights(self, proxies: Sequence[TensorProxy]) -> list[TensorProxy]:
        """Return the numbers of the weights that linears read in fp8."""
        index_of = {id(each.tensor): i for i, each in enumerate(self.capture.inputs)}
        weights = () if self.fp8 is None else self.fp8.kept_weights()
        found = (index_of[id(weight)] for weight in weights)
        return [self.inputs.value(i, proxies[i], as_kept=True) for i in found]

    def _reached(self, joint: JointGraph, function: GraphFunction, output: int) -> frozenset[int]:
        """Return the inputs of the graph that an output gives a gradient to."""
        found = (i for i in joint.reached[output] if joint.gradients[i] is not None)
        return frozenset(function.read[i] for i in found)


def _operand(example: Tensor, grad_enabled: bool) -> Operand:
    return Operand(
        shape=tuple(example.shape),
        stride=tuple(example.stride()),
        dtype=example.dtype,
        device=example.device,
        requires_grad=example.requires_grad and grad_enabled,
    )
