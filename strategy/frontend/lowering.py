"""Lowers a captured FX graph to a Thunder trace, and checks every value against eager PyTorch.

Each FX node runs once on Thunder's proxies. Dynamo has already computed the node's shape, dtype and requires_grad with
PyTorch's own kernels (`node.meta["example_value"]`), which decide three things here:

- if Thunder disagrees, torch's own operators run instead (no silent difference);
- values that need no gradient in eager (`no_grad`, `detach`, masks, rotary tables) are constants of differentiation;
- under autocast, they tell which casts eager makes (`Autocast.arguments`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from thunder.common import CompileData
from thunder.core import dtypes, prims
from thunder.core.codeutils import SigInfo
from thunder.core.proxies import TensorProxy
from thunder.core.trace import TraceCtx, tracectx
from torch import Tensor, fx
from torch.utils._pytree import tree_map

from thunder_memsave.aten.autocast import no_autocast
from thunder_memsave.distributed.data_parallel import DataParallel
from thunder_memsave.errors import CompileError
from thunder_memsave.fp8.compute.linears import Fp8Linears
from thunder_memsave.frontend.aliasing import (
    changed_operand,
    refuse_changed_weights,
    refuse_lost_changes,
)
from thunder_memsave.frontend.autocast import Autocast
from thunder_memsave.frontend.calls import Calls
from thunder_memsave.frontend.capture import Capture, GraphInput
from thunder_memsave.frontend.fp8_linears import LinearNodes
from thunder_memsave.frontend.fx_nodes import (
    example_values,
    function_name,
    node_callable,
    node_needs_grad,
    tag_origin,
    value_needs_grad,
    where,
)
from thunder_memsave.frontend.graph_inputs import GraphInputs
from thunder_memsave.frontend.graph_outputs import (
    OutputOrder,
    ViewOfInput,
    distinct_values,
    graph_outputs,
    output_dependencies,
    views_of_inputs,
)
from thunder_memsave.frontend.higher_order import HIGHER_ORDER, inline_checkpoints
from thunder_memsave.frontend.modes import differentiated, in_language
from thunder_memsave.frontend.opaque import OpaqueExecutor, is_random
from thunder_memsave.frontend.rewrites.attention_masks import simplify_attention
from thunder_memsave.frontend.rewrites.batch_norms import split_batch_norms
from thunder_memsave.frontend.rewrites.custom_functions import join_custom_changes
from thunder_memsave.frontend.rewrites.nodes import changed_storages
from thunder_memsave.frontend.rewrites.out_arguments import split_out_arguments
from thunder_memsave.frontend.rewrites.rms_norms import join_rms_norms
from thunder_memsave.frontend.rewrites.scaled_linears import scale_smaller_operands
from thunder_memsave.frontend.rewrites.view_writes import join_view_writes
from thunder_memsave.frontend.rewrites.vmapped import join_vmaps


@dataclass(frozen=True, slots=True)
class Lowered:
    """The trace of one graph: `(*inputs, *constants, *state) -> computed values`."""

    trace: TraceCtx
    constants: tuple[Tensor, ...]
    """Tensors that the graph holds itself (literals in the user's code)."""
    input_names: tuple[str, ...]
    """Names of the inputs in error messages."""
    depends_on: tuple[frozenset[int], ...] | None
    """Indices of the inputs that each computed value has a gradient for in eager; None if unknown."""
    training: bool
    """Whether any input needs a gradient."""
    outputs: Callable[[Sequence[Tensor], Sequence[Any]], Sequence[Any]]
    """`(inputs, computed values) -> the graph's outputs`."""
    state: Callable[[], tuple[Tensor, ...]] = tuple
    """Returns the current state of the fp8 linears: the trace's last arguments."""
    reduces_last: bool = False
    """Whether its backward has all reductions after all else, see `passes/early_reductions.py`."""


def lower(
    capture: Capture,
    *,
    compile_data: CompileData,
    data_parallel: DataParallel | None,
    opaque: OpaqueExecutor,
    target: torch.device | None = None,
    fp8: Fp8Linears | None = None,
) -> Lowered:
    """Run `capture.graph` on proxies.

    Args:
        capture: The graph.
        compile_data: Thunder's settings, with the executors.
        data_parallel: The ranks that share the parameters; None on one device.
        opaque: The executor for operations that Thunder does not know.
        target: The device of every tensor, for a plan; None: each tensor's own.
        fp8: The linears that compute in fp8.

    Raises:
        CompileError: An operation that Thunder does not know cannot be traced without numbers, or an operation in place
            would have another shape or dtype than PyTorch's; the message names the user's line.
    """
    inline_checkpoints(capture.graph)
    join_custom_changes(capture.graph)
    join_vmaps(capture.graph)
    split_out_arguments(capture.graph)
    split_batch_norms(capture.graph)
    join_view_writes(capture.graph)
    refuse_lost_changes(capture.graph)
    refuse_changed_weights(capture.graph, trained_on_this_rank(capture))
    refuse_gradients_under_no_grad(capture)
    changed = changed_storages(capture.graph)
    simplify_attention(capture.graph, changed=changed, target=target)
    join_rms_norms(capture.graph, changed=changed)
    lowering = _Lowering(capture, compile_data, data_parallel, opaque, target, fp8)
    scale_smaller_operands(capture.graph, changed=changed, stays=lowering.in_fp8)
    return lowering.run()


def whole_inputs(capture: Capture) -> frozenset[fx.Node]:
    """Return the inputs that may be returned unchanged; for any other, the caller would get this rank's rows."""
    return frozenset(node for node, graph_input in _inputs(capture) if graph_input.is_whole)


def _inputs(capture: Capture) -> Iterator[tuple[fx.Node, GraphInput]]:
    """Yield the placeholders, each with its input."""
    placeholders = capture.graph.graph.find_nodes(op="placeholder")
    return zip(placeholders, capture.inputs, strict=True)


def views_of_batch(capture: Capture) -> dict[fx.Node, ViewOfInput]:
    """Return the outputs that are views of what the caller passed."""
    of = {node for node, graph_input in _inputs(capture) if graph_input.kind == "user"}
    return views_of_inputs(capture.graph, of=of, changed=changed_storages(capture.graph))


def trained_on_this_rank(capture: Capture) -> dict[fx.Node, str]:
    """Return the names of trained parameters that are not sharded; `passes/lost_writes.py` looks at the others."""
    return {
        node: i.name
        for node, i in _inputs(capture)
        if i.kind == "parameter" and i.is_whole and i.tensor.requires_grad
    }


def refuse_gradients_under_no_grad(capture: Capture) -> None:
    """Refuse a graph of a call under no_grad that returns a tensor which requires a gradient."""
    outputs, _ = graph_outputs(capture.graph, as_they_are=())
    # A view of a weight says so too under no_grad, but has no graph.
    recorded = (v for v in example_values(outputs) if getattr(v, "grad_fn", None) is not None)
    if not capture.grad_enabled and any(map(value_needs_grad, recorded)):
        raise CompileError(
            "The method was called under no_grad and returns a tensor that requires a gradient, because it turns "
            "gradients on itself. Call it with gradients enabled."
        )


def begin(trace: TraceCtx, arguments: Sequence[TensorProxy]) -> None:
    """Record in `trace`, the current one, that it is given `arguments`."""
    trace.args, trace.kwargs = tuple(arguments), {}
    trace._siginfo = SigInfo.from_name_and_args("computation", trace.args)
    for proxy in arguments:
        prims.unpack_trivial(proxy, name=proxy.name)


class _Lowering:
    def __init__(
        self,
        capture: Capture,
        compile_data: CompileData,
        data_parallel: DataParallel | None,
        opaque: OpaqueExecutor,
        target: torch.device | None,
        fp8: Fp8Linears | None,
    ) -> None:
        self.capture = capture
        self.target = target
        self.compile_data = compile_data
        self.trace = TraceCtx(computation)
        self.opaque = opaque
        self.autocast = Autocast()
        self.calls = Calls(self.trace, opaque, target, self.autocast.as_eager)
        self.fp8 = None if fp8 is None else LinearNodes(fp8, capture, target)
        self.inputs = GraphInputs(capture, compile_data, data_parallel, target, self.fp8)

    def run(self) -> Lowered:
        with tracectx(self.trace), in_language(), no_autocast():
            inputs = self.inputs.proxies()
            constants = self.inputs.constants()
            state = () if self.fp8 is None else self.fp8.proxies()
            begin(self.trace, (*(i.proxy for i in inputs), *(p for _, p in constants), *state))
            views = views_of_batch(self.capture)
            as_they_are = {*whole_inputs(self.capture), *views}
            outputs, computed = graph_outputs(self.capture.graph, as_they_are=as_they_are)
            values = self._values(self.capture.graph, inputs)
            with differentiated(self.compile_data, enabled=True):
                returned = (self.inputs.force(values[node]) for node in computed)
                prims.python_return(tuple(map(distinct_values(), returned)))
        return Lowered(
            trace=self.trace,
            constants=tuple(t for t, _ in constants),
            input_names=tuple(i.name for i in self.capture.inputs),
            depends_on=self._dependencies(computed),
            training=self.capture.training,
            outputs=OutputOrder.of(self.capture.graph, outputs, computed, views),
            state=tuple if self.fp8 is None else self.fp8.tensors,
        )

    def _dependencies(self, computed: Sequence[fx.Node]) -> tuple[frozenset[int], ...]:
        if (
            not self.capture.grad_enabled
        ):  # where a returned weight still says that it requires a gradient
            return tuple(frozenset() for _ in computed)
        return output_dependencies(self.capture.graph, computed)

    def in_fp8(self, node: fx.Node) -> bool:
        """Return whether the node is a linear that computes in fp8."""
        return self.fp8 is not None and self.fp8.computes(node)

    def evaluate(self, graph: fx.GraphModule, arguments: Sequence[Any]) -> Any:
        """Run the body of a higher-order operator on values."""
        values = self._values(graph, arguments)
        return self._read(graph.graph.output_node().args[0], values)

    def _values(self, graph: fx.GraphModule, arguments: Sequence[Any]) -> dict[fx.Node, Any]:
        values: dict[fx.Node, Any] = {}
        remaining = iter(arguments)
        for node in graph.graph.nodes:
            if node.op == "placeholder":
                values[node] = next(remaining)
            elif node.op == "get_attr":
                values[node] = self.inputs.attribute(graph, node.target)
            elif node.op != "output":
                values[node] = self._run_located(node, values)
        return values

    def _run_located(self, node: fx.Node, values: Mapping[fx.Node, Any]) -> Any:
        """Run a node, and tag its symbols with their source line and module."""
        num_symbols = len(self.trace.scopes[-1])
        result = self._run_node(node, values)
        symbols = self.trace.scopes[-1][num_symbols:]
        tag_origin(symbols, node)
        for bsym in symbols:
            if self.calls.is_torchs_own(bsym) and is_random(node):
                bsym.tags.add(prims.OpTags.RANDOM_OP)
        return result

    def _run_node(self, node: fx.Node, values: Mapping[fx.Node, Any]) -> Any:
        self.trace.set_current_source_location(where(node), None)
        target = node.target
        in_fp8 = self.in_fp8(node)
        args = self._read(node.args, values, as_kept=in_fp8)
        kwargs = self._read(node.kwargs, values, as_kept=in_fp8)
        if self.autocast.handles(target):
            return self.autocast.switch(target, args)
        expected = node.meta.get("example_value")
        with differentiated(self.compile_data, enabled=node_needs_grad(node)):
            if self.fp8 is not None and in_fp8:
                result = self.fp8.run(node, args, kwargs)
                self._check(node, result, expected)
                return result
            if (higher_order := HIGHER_ORDER.get(target)) is not None:
                return higher_order(self, node, args, kwargs)
            args, kwargs = self.autocast.arguments(node_callable(node), expected, args, kwargs)
            result = self.calls.out_of_place(node, args, kwargs)
            if expected is not None and self.autocast.enabled and _dtype_differs(result, expected):
                cast_args, cast_kwargs = self.autocast.cast_to(expected.dtype, args, kwargs)
                result = self.calls.call(node, cast_args, cast_kwargs)
            difference = _difference(result, expected)
            if difference is not None and changed_operand(node) is None:
                result = self.calls.as_torchs_own(node, args, kwargs, reason=difference)
        self._check(node, result, expected)
        return result

    def _check(self, node: fx.Node, result: Any, expected: Any) -> None:
        if (difference := _difference(result, expected)) is not None:
            raise CompileError(
                f"{function_name(node_callable(node))} (at {where(node)}) would differ from eager, so it is not "
                f"compiled: {difference}."
            )

    def _read(self, argument: Any, values: Mapping[fx.Node, Any], *, as_kept: bool = False) -> Any:
        """Replace nodes by their values; `as_kept`: pass fp8-stored weights as their fp8 numbers."""

        def read(node: fx.Node) -> Any:
            return self.inputs.force(values[node], as_kept=as_kept)

        plain = _plain(fx.node.map_arg(argument, read))
        return plain if self.target is None else tree_map(self._on_target, plain)

    def _on_target(self, argument: Any) -> Any:
        """Replace devices, which the graph captured from its tensors, by the plan's target."""
        return self.target if isinstance(argument, torch.device) else argument


def computation() -> None:
    """Names the trace."""


def _plain(argument: Any) -> Any:
    """Convert FX's immutable containers to the lists and dictionaries that Thunder knows."""
    if isinstance(argument, slice):
        return argument
    if isinstance(argument, dict):
        return {key: _plain(value) for key, value in argument.items()}
    if type(argument) is tuple:
        return tuple(map(_plain, argument))
    return [_plain(a) for a in argument] if isinstance(argument, list) else argument


def _difference(result: Any, expected: Any) -> str | None:
    """Say how a tensor differs from eager's; None if it does not."""
    if not isinstance(expected, Tensor) or not isinstance(result, TensorProxy):
        return None
    ours = (tuple(result.shape), dtypes.to_torch_dtype(result.dtype))
    eager = (tuple(expected.shape), expected.dtype)
    if ours == eager:
        return None
    return f"Thunder computes it as {ours[0]} {ours[1]}, PyTorch as {eager[0]} {eager[1]}"


def _dtype_differs(result: Any, expected: Any) -> bool:
    return (
        isinstance(result, TensorProxy)
        and isinstance(expected, Tensor)
        and dtypes.to_torch_dtype(result.dtype) != expected.dtype
    )
