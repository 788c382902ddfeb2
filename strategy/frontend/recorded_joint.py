"""Records a joint graph in a trace: each ATen operator is one operation, of forward or of backward."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from thunder.core import dtypes, prims
from thunder.core.proxies import TensorProxy, variableify
from thunder.core.symbol import BoundSymbol, Symbol
from thunder.core.trace import TraceCtx, TraceProvenance, from_trace, get_tracectx
from torch import Tensor, fx
from torch._ops import OpOverload

from thunder_memsave.aten.joint_graph import JointGraph
from thunder_memsave.aten.round_trips import only_casts
from thunder_memsave.aten.whole_calls import WHOLE_CALL, WHOLE_CALL_BACKWARD
from thunder_memsave.frontend.fx_nodes import tag_origin
from thunder_memsave.frontend.opaque import OpaqueExecutor, operator_name
from thunder_memsave.ops.added_gradients import laid_out
from thunder_memsave.ops.aten_operators import filled, proxy_like, record
from thunder_memsave.passes.symbols import keep_unread

_SAME = (torch.ops.aten.detach.default, torch.ops.aten.alias.default)
"""Torch 2.14 records the one as the other."""
_CONJUGATES = (torch.ops.aten._conj.default, torch.ops.aten.conj_physical.default)


_OTHERS = "others"
"""Key of the further operands, which rules read, among the values of nodes."""
_SAVED = "saved"
"""First part of the keys of what whole calls keep for their backward."""


@dataclass(frozen=True, slots=True)
class RecordedJoint:
    """A joint graph, recorded on proxies."""

    joint: JointGraph
    opaque: OpaqueExecutor
    device: torch.device | None
    """Where every tensor is taken to be, for a plan; None: where it is."""

    def described(self, *tensors: TensorProxy) -> tuple[TensorProxy, ...]:
        """Return proxies like those that `forward` gives, and record nothing."""
        own = dict(zip(self.joint.operands, tensors, strict=False))
        return tuple(
            TensorProxy(like=own[node])
            if node in own
            else proxy_like(node.meta["val"], self.device)
            for node in self.joint.results
            if isinstance(node, fx.Node)
        )

    def forward(self, *tensors: TensorProxy) -> tuple[Any, ...]:
        """Record what the results need, and return them; rules of whole calls read tensors beyond the operands."""
        return self._outputs(self._run_forward(tensors), tensors)

    def forward_and_backward(self, *tensors: TensorProxy) -> tuple[Any, ...]:
        """Record the gradients of the operands too, as a rule of Thunder for derivatives does.

        Forward is one operation and backward another, which `taken_apart` takes apart: Thunder's transform of a trace
        makes anew, more than once, every operation that it sees.
        """
        trace = get_tracectx()
        with _recording() as forward:
            values = self._run_forward(tensors)
            outputs = self._outputs(values, tensors)
        trace.peek_scope().append(_whole("joint_forward", forward, reads=tensors, gives=outputs))
        of_forward = set(values)
        tensors_only = [i for i, o in enumerate(self.joint.outputs) if isinstance(o, fx.Node)]
        of_leaf = dict(zip(tensors_only, outputs, strict=False))  # writes follow
        cotangents, backward = [], list[BoundSymbol]()
        for index, node in zip(self.joint.differentiable, self.joint.cotangents, strict=True):
            cotangents.append(prims.get_grad(of_leaf[index]))
            with _recording() as of_layout:
                values[node] = self._laid_out(node, cotangents[-1])
            backward += of_layout
        with _recording() as recorded:
            self._run(self.joint.gradients, values)
            for gradient in dict.fromkeys(self.joint.gradients):
                if gradient is not None and gradient in of_forward:
                    values[gradient] = self._alias(gradient, values[gradient])
        backward += recorded
        read = (*tensors, *cotangents)
        gradients = [values[g] for g in self.joint.gradients if g is not None]
        trace.peek_scope().append(_whole("joint_backward", backward, reads=read, gives=gradients))
        for tensor, gradient in zip(tensors, self.joint.gradients, strict=False):
            if gradient is not None:
                prims.put_grad(tensor, values[gradient])
        return outputs

    def _run_forward(self, tensors: Sequence[TensorProxy]) -> dict[Any, Any]:
        own = zip(self.joint.operands, tensors, strict=False)
        values: dict[Any, Any] = dict(own)
        values[_OTHERS] = tensors[len(self.joint.operands) :]
        self._run((*self.joint.results, *self.joint.unread_draws), values)
        return values

    def _laid_out(self, node: fx.Node, tensor: TensorProxy) -> TensorProxy:
        """Record a copy with the strides that the graph was traced with, where its results depend on them."""
        if not self.joint.reads_memory:
            return tensor
        traced: Tensor = node.meta["val"]
        stride = tuple(traced.stride())
        return laid_out(tensor, stride)

    def _alias(self, node: fx.Node, value: TensorProxy) -> TensorProxy:
        """Record an alias of what forward made: what backward alone returns is not saved for it."""
        alias = torch.ops.aten.alias.default
        expected: Tensor = node.meta["val"]
        made: TensorProxy = record(alias, (value,), {}, expected=expected, device=self.device)
        return made

    def _run(self, results: Sequence[Any], values: dict[Any, Any]) -> None:
        """Record what results need beside the values."""
        scope = get_tracectx().peek_scope()
        for node in list(self.joint.nodes_for(results, known=set(values))):
            num_symbols = len(scope)
            values[node] = self._run_node(node, values)
            if node in self.joint.unread_draws:
                keep_unread(scope[-1])
            if "stack_trace" in node.meta:
                tag_origin(scope[num_symbols:], node)

    def _run_node(self, node: fx.Node, values: dict[Any, Any]) -> Any:
        if node.op == "get_attr":
            return self._constant(node)
        args = filled(node.args, values, device=self.device)
        kwargs = filled(node.kwargs, values, device=self.device)
        if node.target is operator.getitem:
            return args[0][args[1]]
        if node.target is WHOLE_CALL:
            number, operands = args
            return self._whole_call(number, operands, values)
        if node.target is WHOLE_CALL_BACKWARD:
            return self.joint.rules[args[0]].record_backward(args[1], values[_SAVED, args[0]])
        if node.target in _SAME:
            return args[0]
        if node.target in _CONJUGATES and isinstance(args[0], complex):
            return args[0].conjugate()  # PyTorch would make a tensor of this factor
        if only_casts(node):
            return prims.convert_element_type(args[0], dtypes.to_dtype(kwargs["dtype"]))
        assert isinstance(node.target, OpOverload), "the graph has no others"
        return record(node.target, args, kwargs, expected=node.meta["val"], device=self.device)

    def _whole_call(
        self, number: int, operands: Sequence[TensorProxy], values: dict[Any, Any]
    ) -> TensorProxy:
        result, saved = self.joint.rules[number].record(operands, values[_OTHERS])
        values[_SAVED, number] = saved
        return result

    def _constant(self, node: fx.Node) -> TensorProxy:
        """Record a tensor that the function makes of numbers: each reader gets memory of its own, as in eager."""
        tensor: Tensor = operator.attrgetter(str(node.target))(self.joint.module)

        def constant() -> Tensor:
            return tensor.to(self.device) if self.device else tensor.clone()

        return self.opaque.call(constant, tensor, (), {}, device=self.device)

    def _outputs(
        self, values: Mapping[fx.Node, Any], tensors: Sequence[TensorProxy]
    ) -> tuple[Any, ...]:
        """Return the outputs; each is a value of its own, because each has a gradient of its own."""
        seen = {t.name for t in tensors}
        outputs = []
        for node in self.joint.results:
            if not isinstance(node, fx.Node):
                continue
            value = values[node]
            outputs.append(prims.shallow_copy(value) if value.name in seen else value)
            seen.add(value.name)
        return tuple(outputs)


@contextmanager
def _recording() -> Iterator[list[BoundSymbol]]:
    """Yield the list in which the operations that are recorded inside are, and not in the trace."""
    symbols: list[BoundSymbol] = []
    trace = get_tracectx()
    trace.push_scope(symbols)
    try:
        yield symbols
    finally:
        trace.pop_scope()


_PARTS = "parts"
"""Key of the operations that a whole one stands for."""


def _whole(
    name: str,
    parts: Sequence[BoundSymbol],
    *,
    reads: Sequence[TensorProxy],
    gives: Sequence[TensorProxy],
) -> BoundSymbol:
    """Return an operation that stands for others, of which the rest of the trace sees these values alone."""
    made = {o.name for part in parts for o in part.flat_proxy_outs}
    symbol = Symbol(name=name, meta=None, id=f"thunder_memsave.{name}", is_prim=True)
    given = {g.name: g for g in gives if g.name in made}
    whole = symbol.bind(*(r for r in reads if r.name not in made), output=tuple(given.values()))
    whole._call_ctx = {_PARTS: (whole, parts)}
    return whole


def taken_apart(trace: TraceCtx) -> TraceCtx:
    """Return a trace with the operations that whole ones of `RecordedJoint` stand for."""
    new = from_trace(trace)
    new.bound_symbols = [part for bsym in trace.bound_symbols for part in _parts(bsym)]
    new.set_provenance(TraceProvenance("Differentiate"))
    return new


def _parts(bsym: BoundSymbol) -> Iterator[BoundSymbol]:
    """Yield the operations of a whole one, on the values that it reads and makes now."""
    if _PARTS not in (bsym._call_ctx or {}):
        yield bsym
        return
    before, parts = bsym._call_ctx[_PARTS]
    values = zip(
        (*before.flat_proxy_args, *before.flat_proxy_outs),
        (*bsym.flat_proxy_args, *bsym.flat_proxy_outs),
        strict=True,
    )
    swaps = {variableify(old): new for old, new in values if old.name != new.name}
    names = {variable.proxy.name for variable in swaps}
    for part in parts:
        part.tags |= bsym.tags
        touched = (*part.flat_proxy_args, *part.flat_proxy_outs)
        is_touched = any(p.name in names for p in touched)
        yield part.from_bsym_swap_proxies(swaps) if is_touched else part


def joint_symbol(recorded: RecordedJoint, function: Callable[..., Any]) -> Symbol:
    """Return a symbol that stands for the recorded function: `(*operands) -> (*tensors among the outputs, *writes)`."""
    opaque = recorded.opaque
    name = opaque.unique(operator_name(function))
    symbol = Symbol(name=name, meta=recorded.described, id=f"thunder_memsave.{name}", is_prim=False)
    opaque.register_implementation(
        symbol,
        execution_transform=recorded.forward,
        grad_transform=recorded.forward_and_backward,
        checker=lambda *_: True,
    )
    return symbol
