"""Lowers a captured FX graph to a Thunder trace, checking every value against what eager PyTorch gives.

Each FX node runs once on Thunder's proxies. Dynamo has already computed the node's shape, dtype and requires_grad with
PyTorch's own kernels (`node.meta["example_value"]`); these decide three things here:

- where Thunder disagrees, compilation stops and names the user's line (no silent difference);
- what needs no gradient in eager (`no_grad`, `detach`, masks, rotary tables) is a constant of the differentiation;
- under autocast, which casts eager makes (`_autocast_arguments`).
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from thunder.common import CompileData
from thunder.core import devices, dtypes, prims
from thunder.core.codeutils import SigInfo
from thunder.core.langctxs import (
    Languages,
    reset_langctx,
    resolve_language,
    set_langctx,
)
from thunder.core.proxies import DistParallelType, TensorProxy
from thunder.core.symbol import BoundSymbol, Symbol
from thunder.core.trace import TraceCtx, tracectx
from thunder.torch import _torch_to_thunder_function_map
from torch import Tensor, fx
from torch.utils._pytree import tree_map

from thunder_memsave.distributed.data_parallel import DataParallel
from thunder_memsave.errors import CompileError, user_frame_of_text
from thunder_memsave.fp8.compute.linears import Fp8Linears
from thunder_memsave.frontend.aliasing import (
    changed_operand,
    inplace_position,
    refuse_lost_changes,
)
from thunder_memsave.frontend.autocast import Autocast
from thunder_memsave.frontend.capture import Capture, GraphInput
from thunder_memsave.frontend.dependencies import output_dependencies
from thunder_memsave.frontend.fp8_linears import LinearNodes
from thunder_memsave.frontend.fx_nodes import (
    example_values,
    function_name,
    node_callable,
    node_needs_grad,
    value_needs_grad,
)
from thunder_memsave.frontend.graph_outputs import OutputOrder, distinct_values, graph_outputs
from thunder_memsave.frontend.higher_order import HIGHER_ORDER, REGION, inline_checkpoints
from thunder_memsave.frontend.opaque import OpaqueExecutor, is_random
from thunder_memsave.ops.attention import scaled_dot_product_attention
from thunder_memsave.ops.cross_entropy import cross_entropy
from thunder_memsave.ops.location import Location, locate, module_name
from thunder_memsave.ops.unshard import unshard
from thunder_memsave.passes.checkpoint_regions import Region, mark
from thunder_memsave.sharding.sharded_parameter import is_sharded, unquantized_dtype

_IGNORED = {torch._C._log_api_usage_once}
# The last is how Dynamo writes `x.data`.
_DETACHES = (torch.Tensor.detach, torch.detach, torch._C._autograd._get_data_attr)  # type: ignore[attr-defined]


@dataclass(frozen=True, slots=True)
class Lowered:
    """The trace of one graph: `(*inputs, *constants, *state) -> computed values`."""

    trace: TraceCtx
    constants: tuple[Tensor, ...]
    """Tensors that the graph holds itself (literals in the user's code)."""
    input_names: tuple[str, ...]
    """What errors call the inputs."""
    depends_on: tuple[frozenset[int], ...] | None
    """For each computed value, the inputs that eager gives a gradient; None when eager's rules are not known."""
    training: bool
    """Whether there is anything to differentiate."""
    outputs: Callable[[Sequence[Tensor], Sequence[Any]], Sequence[Any]]
    """`(inputs, computed values)` -> what the graph returns."""
    state: Callable[[], tuple[Tensor, ...]] = tuple
    """What fp8 linears read beside inputs and constants, as it is now; the trace's last arguments."""


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
        opaque: Gets the operations that Thunder does not know.
        target: Where every tensor is taken to be, for a plan; None: where it is.
        fp8: The linears that compute in fp8.

    Raises:
        CompileError: Thunder does not know an operation that needs a gradient, or gives another shape or dtype than
            PyTorch; the message names the user's line.
    """
    inline_checkpoints(capture.graph)
    refuse_lost_changes(capture.graph)
    _refuse_gradients_under_no_grad(capture)
    lowering = _Lowering(capture, compile_data, data_parallel, opaque, target, fp8)
    return lowering.run()


def _whole_inputs(capture: Capture) -> frozenset[fx.Node]:
    """What a graph may return as it is: of any other input, the caller would get this rank's rows."""
    placeholders = (n for n in capture.graph.graph.nodes if n.op == "placeholder")
    pairs = zip(placeholders, capture.inputs, strict=True)
    return frozenset(node for node, graph_input in pairs if graph_input.is_whole)


def _refuse_gradients_under_no_grad(capture: Capture) -> None:
    outputs, _ = graph_outputs(capture.graph, as_they_are=())
    # A view of a weight says so too under no_grad, but has no graph.
    recorded = (v for v in example_values(outputs) if getattr(v, "grad_fn", None) is not None)
    if not capture.grad_enabled and any(map(value_needs_grad, recorded)):
        raise CompileError(
            "The method was called under no_grad and returns a tensor that requires a gradient, because it turns "
            "gradients on itself. Call it with gradients enabled."
        )


@dataclass(slots=True)
class _Lazy:
    """A parameter whose full value is asked for at its first use, not at the start of the forward."""

    proxy: TensorProxy
    graph_input: GraphInput
    value: TensorProxy | None = field(default=None)
    weight_itself: TensorProxy | None = field(default=None)
    """What fp8 numbers stand for, where something else than a linear in fp8 reads it."""


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
        self.data_parallel = data_parallel
        self.trace = TraceCtx(_computation)
        self.opaque = opaque
        self.autocast = Autocast()
        self.fp8 = None if fp8 is None else LinearNodes(fp8, capture, target)
        self.constants: dict[int, tuple[Tensor, TensorProxy]] = {}

    def run(self) -> Lowered:
        with tracectx(self.trace), in_language(), _no_ambient_autocast():
            inputs = [self._input_proxy(i) for i in self.capture.inputs]
            constants = self._constant_proxies()
            state = () if self.fp8 is None else self.fp8.proxies()
            self.trace.args = (*(lazy.proxy for lazy in inputs), *(p for _, p in constants), *state)
            self.trace.kwargs = {}
            self.trace._siginfo = SigInfo.from_name_and_args("computation", self.trace.args)
            for proxy in self.trace.args:
                prims.unpack_trivial(proxy, name=proxy.name)
            as_they_are = _whole_inputs(self.capture)
            outputs, computed = graph_outputs(self.capture.graph, as_they_are=as_they_are)
            values = self._values(self.capture.graph, inputs)
            with self._grad(enabled=True):
                prims.python_return(
                    tuple(map(distinct_values(), (self._force(values[node]) for node in computed)))
                )
        return Lowered(
            trace=self.trace,
            constants=tuple(t for t, _ in constants),
            input_names=tuple(i.name for i in self.capture.inputs),
            depends_on=self._dependencies(computed),
            training=self.capture.training,
            outputs=OutputOrder.of(self.capture.graph, outputs, computed),
            state=tuple if self.fp8 is None else self.fp8.tensors,
        )

    def _dependencies(self, computed: Sequence[fx.Node]) -> tuple[frozenset[int], ...]:
        if (
            not self.capture.grad_enabled
        ):  # where a returned weight still says that it requires a gradient
            return tuple(frozenset() for _ in computed)
        return output_dependencies(self.capture.graph, computed)

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
                values[node] = self._attribute(graph, node.target)
            elif node.op != "output":
                values[node] = self._run_located(node, values)
        return values

    def _run_located(self, node: fx.Node, values: Mapping[fx.Node, Any]) -> Any:
        """Run a node, and say of its symbols which line and module they come from."""
        num_symbols = len(self.trace.scopes[-1])
        result = self._run_node(node, values)
        source = self._where(node).partition(" in ")[0]
        place = Location(source=source, module=module_name(node.meta.get("nn_module_stack")))
        locate(self.trace.scopes[-1][num_symbols:], place)
        if (number := node.meta.get(REGION)) is not None:
            mark(self.trace.scopes[-1][num_symbols:], Region(number))
        for bsym in self.trace.scopes[-1][num_symbols:]:
            if self._is_torchs_own(bsym) and is_random(node):
                bsym.tags.add(prims.OpTags.RANDOM_OP)
        return result

    def _is_torchs_own(self, bsym: BoundSymbol) -> bool:
        """Whether it is a function of PyTorch of which Thunder knows nothing but the shape of the result."""
        return bsym.sym.executor is self.opaque or _is_auto_registered(bsym.sym)

    def _run_node(self, node: fx.Node, values: Mapping[fx.Node, Any]) -> Any:
        self.trace.set_current_source_location(self._where(node), None)
        target = node.target
        if target in _IGNORED or target is torch._C._set_grad_enabled:
            return None  # which values need a gradient is read off `example_value`
        in_fp8 = self.fp8 is not None and self.fp8.computes(node)
        args = self._read(node.args, values, as_kept=in_fp8)
        kwargs = self._read(node.kwargs, values, as_kept=in_fp8)
        if self.autocast.handles(target):
            return self.autocast.switch(target, args)
        expected = node.meta.get("example_value")
        with self._grad(enabled=node_needs_grad(node)):
            if self.fp8 is not None and self.fp8.computes(node):
                result = self.fp8.run(node, args, kwargs)
                self._check(node, result, expected)
                return result
            if (higher_order := HIGHER_ORDER.get(target)) is not None:
                return higher_order(self, node, args, kwargs)
            function = node_callable(node)
            args, kwargs = self.autocast.arguments(function, expected, args, kwargs)
            result = self._call_out_of_place(node, function, args, kwargs)
            if expected is not None and self.autocast.enabled and _dtype_differs(result, expected):
                args, kwargs = self.autocast.cast_to(expected.dtype, args, kwargs)
                result = self._call(node, function, args, kwargs)
        self._check(node, result, expected)
        return result

    def _call_out_of_place(
        self,
        node: fx.Node,
        function: Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
    ) -> Any:
        """Compute what `inplace=True` asks for elsewhere, and copy it: executors overwrite what gradients read."""
        position = inplace_position(node)
        if position is None:
            return self._call(node, function, args, kwargs)
        if position == "inplace":
            kwargs = {**kwargs, "inplace": False}
        else:
            args = [False if i == position else a for i, a in enumerate(args)]
        return args[0].copy_(self._call(node, function, args, kwargs))

    def _call(
        self,
        node: fx.Node,
        function: Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
    ) -> Any:
        expected = node.meta.get("example_value")
        if function in _DETACHES:
            return prims.shallow_copy(args[0])
        if function is getattr and args[1] in ("T", "mT") and args[0].ndim == 2:
            return args[0].transpose(0, 1)
        if function is torch.cat:
            args = (_without_legacy_empties(args[0]), *args[1:])
        if function is torch.nn.functional.scaled_dot_product_attention:
            mask = [*node.args[3:4], node.kwargs.get("attn_mask")]
            trained = value_needs_grad(example_values(mask))
            return scaled_dot_product_attention(*args, **kwargs, mask_needs_grad=trained)
        if function is torch.nn.functional.cross_entropy:
            return cross_entropy(*args, **kwargs)
        needs_grad = node_needs_grad(node)
        is_wait = function is torch.ops._c10d_functional.wait_tensor
        if is_wait and not needs_grad and isinstance(expected, Tensor):
            # Thunder's returns its argument at once, which may be read before the collective has ended.
            return self._call_opaque(node_callable(node), expected, args, kwargs)
        symbol = _torch_to_thunder_function_map.get(function)
        if _is_auto_registered(symbol) and needs_grad and is_random(node):
            raise CompileError(
                f"{function_name(function)} (at {self._where(node)}) draws random numbers and Thunder would draw them "
                "again in backward, which gives wrong gradients; use torch.nn.functional.dropout, or move it out of "
                "the model."
            )
        if needs_grad:
            self._refuse_lost_gradient(node, symbol)
        num_scopes = len(self.trace.scopes)
        try:
            return self._call_thunder(node, symbol, function, args, kwargs)
        except CompileError:
            raise
        except Exception as error:
            del self.trace.scopes[num_scopes:]  # those of the symbols that were left by the error
            if needs_grad or not isinstance(expected, Tensor):
                raise CompileError(
                    f"Thunder cannot compile {function_name(function)} (at {self._where(node)}): {error}. "
                    "Write it with other operations, or keep it out of the compiled model."
                ) from error
            if changed_operand(node) is None:
                return self._call_opaque(node_callable(node), expected, args, kwargs)
            changed = self._call_opaque(_on_a_copy(node_callable(node)), expected, args, kwargs)
            return args[0].copy_(changed)

    def _call_opaque(
        self,
        function: Callable[..., Any],
        expected: Tensor,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
    ) -> Any:
        return self.opaque.call(function, expected, args, kwargs, device=self.target)

    def _refuse_lost_gradient(self, node: fx.Node, symbol: Any) -> None:
        """Thunder's rules for some operations leave out the gradient of an operand, or give its conjugate."""
        values = [node.meta.get("example_value"), *example_values(node.all_input_nodes)]
        tensors = [a for a in node.args if isinstance(a, fx.Node)]
        nested = [n for n in node.all_input_nodes if n not in tensors]
        if any(isinstance(v, Tensor) and v.is_complex() for v in values):
            what = "complex numbers"
        elif _is_auto_registered(symbol) and any(map(value_needs_grad, example_values(nested))):
            what = "tensors in a list or as keywords"
        elif function_name(node_callable(node)).endswith("index_put") and value_needs_grad(
            [*example_values(node.args[2:3]), *example_values([node.kwargs.get("values")])]
        ):
            what = "the values that are put"
        else:
            return
        raise CompileError(
            f"Thunder computes wrong gradients of {function_name(node_callable(node))} (at {self._where(node)}) with "
            f"respect to {what}. Write it with other operations, or keep it out of the compiled model."
        )

    def _call_thunder(
        self,
        node: fx.Node,
        symbol: Callable[..., Any] | None,
        function: Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
    ) -> Any:
        if symbol is not None:
            return symbol(*args, **kwargs)
        if node.op == "call_method":
            return getattr(args[0], str(node.target))(*args[1:], **kwargs)
        makes_tensor = isinstance(node.meta.get("example_value"), Tensor)  # such as `torch.eye(3)`
        of_numbers = isinstance(args[0], (int, float)) and not makes_tensor
        if getattr(function, "__module__", None) == "_operator" or of_numbers:
            return function(*args, **kwargs)
        raise NotImplementedError(f"{function_name(function)} is not known to Thunder")

    def _check(self, node: fx.Node, result: Any, expected: Any) -> None:
        if not isinstance(expected, Tensor) or not isinstance(result, TensorProxy):
            return
        ours = (tuple(result.shape), dtypes.to_torch_dtype(result.dtype))
        eager = (tuple(expected.shape), expected.dtype)
        if ours != eager:
            raise CompileError(
                f"Thunder computes {function_name(node_callable(node))} (at {self._where(node)}) as {ours[0]} "
                f"{ours[1]}, PyTorch as {eager[0]} {eager[1]}; the result would differ from eager, so it is not "
                "compiled."
            )

    def _where(self, node: fx.Node) -> str:
        return user_frame_of_text(node.meta.get("stack_trace"))

    def _read(self, argument: Any, values: Mapping[fx.Node, Any], *, as_kept: bool = False) -> Any:
        """`as_kept`: weights of which fp8 numbers are kept are these."""

        def read(node: fx.Node) -> Any:
            return self._force(values[node], as_kept=as_kept)

        plain = _plain(fx.node.map_arg(argument, read))
        return plain if self.target is None else tree_map(self._on_target, plain)

    def _on_target(self, argument: Any) -> Any:
        """The graph names the devices on which its tensors were captured."""
        return self.target if isinstance(argument, torch.device) else argument

    def _force(self, value: Any, *, as_kept: bool = False) -> Any:
        if not isinstance(value, _Lazy):
            return value
        if value.value is None:
            value.value = self._full_value(value)
        if as_kept or unquantized_dtype(value.graph_input.tensor) is None:
            return value.value
        if value.weight_itself is None:
            assert self.fp8 is not None, "only linears in fp8 keep weights so"
            tensor = value.graph_input.tensor
            value.weight_itself = self.fp8.weight_itself(tensor, value.value)
        return value.weight_itself

    def _full_value(self, lazy: _Lazy) -> TensorProxy:
        if self.data_parallel is None or lazy.graph_input.kind != "parameter":
            return lazy.proxy
        parameter = lazy.graph_input.tensor
        sharded = is_sharded(parameter)
        if not sharded and not parameter.requires_grad:
            return lazy.proxy
        kind = DistParallelType.FULLY_SHARDED if sharded else DistParallelType.REPLICATED
        with self._grad(enabled=parameter.requires_grad):
            full = unshard(lazy.proxy, self.data_parallel, kind, training=self.capture.training)
            num_rows = parameter.unsharded_shape[0] if sharded else None  # type: ignore[attr-defined]
            if sharded and full.shape[0] != num_rows:
                full = full[:num_rows]
        return full

    def _input_proxy(self, graph_input: GraphInput) -> _Lazy:
        tensor = graph_input.tensor
        name = "t_" + "".join(c if c.isalnum() else "_" for c in graph_input.name)
        kind = None
        if graph_input.kind == "parameter" and self.data_parallel is not None:
            kind = (
                DistParallelType.FULLY_SHARDED
                if is_sharded(tensor)
                else DistParallelType.REPLICATED
            )
        return _Lazy(_proxy(tensor, name, kind, self.target), graph_input)

    def _constant_proxies(self) -> list[tuple[Tensor, TensorProxy]]:
        found: list[tuple[Tensor, TensorProxy]] = []
        for graph in _graphs(self.capture.graph):
            for node in graph.graph.nodes:
                value = getattr_path(graph, node.target) if node.op == "get_attr" else None
                if isinstance(value, Tensor) and id(value) not in self.constants:
                    pair = (value, _proxy(value, f"c{len(found)}", None, self.target))
                    self.constants[id(value)] = pair
                    found.append(pair)
        return found

    def _attribute(self, graph: fx.GraphModule, target: Any) -> Any:
        value = getattr_path(graph, target)
        return self.constants[id(value)][1] if isinstance(value, Tensor) else value

    @contextmanager
    def _grad(self, *, enabled: bool) -> Iterator[None]:
        """Symbols called with `enabled=False` are constants for Thunder's differentiation."""
        before, self.compile_data.is_grad_enabled = self.compile_data.is_grad_enabled, enabled
        try:
            yield
        finally:
            self.compile_data.is_grad_enabled = before


def _computation() -> None:
    """Names the trace."""


def _proxy(
    tensor: Tensor, name: str, kind: DistParallelType | None, target: torch.device | None
) -> TensorProxy:
    return TensorProxy(
        name,
        shape=tuple(tensor.shape),
        device=devices.to_device(target or tensor.device),
        dtype=dtypes.to_dtype(tensor.dtype),
        requires_grad=tensor.requires_grad,
        distparallel_type=kind,
    )


@contextmanager
def in_language() -> Iterator[None]:
    """Operators and methods of proxies mean what they mean in torch."""
    token = set_langctx(resolve_language(Languages.TORCH))
    try:
        yield
    finally:
        reset_langctx(token)


@contextmanager
def _no_ambient_autocast() -> Iterator[None]:
    """Thunder would apply its own, incomplete autocast rules on top of ours."""
    with torch.autocast("cpu", enabled=False), torch.autocast("cuda", enabled=False):
        yield


def _graphs(graph: fx.GraphModule) -> Iterator[fx.GraphModule]:
    yield from (m for m in graph.modules() if isinstance(m, fx.GraphModule))


def getattr_path(owner: Any, path: str) -> Any:
    """`getattr` along a dotted path."""
    return operator.attrgetter(path)(owner)


def _plain(argument: Any) -> Any:
    """FX keeps arguments in immutable containers of its own; Thunder knows lists and dictionaries."""
    if isinstance(argument, slice):
        return argument
    if isinstance(argument, dict):
        return {key: _plain(value) for key, value in argument.items()}
    if type(argument) is tuple:
        return tuple(map(_plain, argument))
    return [_plain(a) for a in argument] if isinstance(argument, list) else argument


def _dtype_differs(result: Any, expected: Any) -> bool:
    return (
        isinstance(result, TensorProxy)
        and isinstance(expected, Tensor)
        and dtypes.to_torch_dtype(result.dtype) != expected.dtype
    )


def _is_auto_registered(symbol: Any) -> bool:
    return isinstance(symbol, Symbol) and prims.OpTags.AUTO_REGISTERED in (symbol.tags or ())


def _without_legacy_empties(tensors: Sequence[TensorProxy]) -> Sequence[TensorProxy]:
    """`torch.cat` skips tensors of shape (0,) whatever the others are; transformers' caches start as such."""
    kept = [t for t in tensors if tuple(t.shape) != (0,)]
    return kept if kept else tensors


def _on_a_copy(function: Callable[..., Any]) -> Callable[..., Any]:
    """An in-place function as one that returns the changed tensor."""

    @functools.wraps(function)
    def run(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        result = tensor.clone()
        function(result, *args, **kwargs)
        return result

    return run
