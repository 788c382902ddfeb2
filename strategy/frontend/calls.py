"""Calls one function of a graph on proxies: by its row in the table, else as Thunder knows it, else as torch does."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from thunder.core import prims
from thunder.core.symbol import BoundSymbol, Symbol
from thunder.core.trace import TraceCtx
from thunder.torch import _torch_to_thunder_function_map
from torch import Tensor, fx
from torch.utils._pytree import tree_iter

from thunder_memsave.aten.joint_graph import UntraceableError
from thunder_memsave.errors import CompileError
from thunder_memsave.frontend.aliasing import changed_operand, inplace_position
from thunder_memsave.frontend.fx_nodes import (
    example_values,
    function_name,
    node_callable,
    node_needs_grad,
    refuse_numbers,
    where,
)
from thunder_memsave.frontend.joint.one_call import call_with_derivative
from thunder_memsave.frontend.opaque import OpaqueExecutor
from thunder_memsave.ops.derivatives import without_derivative
from thunder_memsave.ops.operation import Call, Operation
from thunder_memsave.ops.table import operation_of

_OF_DEVICES = frozenset(f"is_{kind}" for kind in ("cpu", "cuda", "mps", "xpu"))


@dataclass(frozen=True, slots=True)
class Calls:
    """Those of one trace."""

    trace: TraceCtx
    opaque: OpaqueExecutor
    """Gets the operations that Thunder does not know."""
    target: torch.device | None
    """Where every tensor is taken to be, for a plan; None: where it is."""
    as_eager: Callable[[], AbstractContextManager[Any]]
    """Enters the autocast that eager runs the current node in."""

    def out_of_place(self, node: fx.Node, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Compute what `inplace=True` asks for elsewhere, and copy it: executors overwrite what gradients read."""
        position = inplace_position(node)
        if position is None:
            return self.call(node, args, kwargs)
        if position == "inplace":
            kwargs = {**kwargs, "inplace": False}
        else:
            args = [False if i == position else a for i, a in enumerate(args)]
        return args[0].copy_(self.call(node, args, kwargs))

    def call(self, node: fx.Node, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Record a node's function.

        Raises:
            CompileError: Neither Thunder nor PyTorch can make operations of it without numbers.
        """
        refuse_numbers(node)
        if _picks_result(node, args):
            return args[0][args[1]]
        if (fact := self._fact(node)) is not NotImplemented:
            return fact
        row = operation_of(node_callable(node)) or _NOT_IN_THE_TABLE
        call = Call(args, kwargs, *_eager_arguments(node))
        if row.run is not None:
            return self._call_with_derivative(node, row.run, args, kwargs, "it is ours")
        if row.lower is not None and (result := row.lower(call)) is not NotImplemented:
            return result
        needs_grad = node_needs_grad(node)
        expected = node.meta.get("example_value")
        if row.runs_torchs_own and not needs_grad and isinstance(expected, Tensor):
            return self.as_torchs_own(node, args, kwargs, reason="Thunder's own differs")
        if needs_grad and (reason := _why_not_thunders(node, row, call)) is not None:
            return self.as_torchs_own(node, args, kwargs, reason=reason)
        rewritten = call if row.rewrite is None else row.rewrite(call)
        return self._call_thunders(node, rewritten, call)

    def _fact(self, node: fx.Node) -> Any:
        """Return an attribute that is no tensor, such as `is_cuda`, which deterministic code reads."""
        if (
            node.target is not getattr
            or len(node.args) != 2
            or not isinstance(node.args[0], fx.Node)
        ):
            return NotImplemented
        tensor, name = node.args[0].meta.get("example_value"), str(node.args[1])
        if self.target is not None and name in _OF_DEVICES:
            return name == f"is_{self.target.type}"
        fact = getattr(tensor, name)
        return NotImplemented if isinstance(fact, Tensor) else fact

    def is_torchs_own(self, bsym: BoundSymbol) -> bool:
        """Whether it is a function of PyTorch of which Thunder knows nothing but the shape of the result."""
        return bsym.sym.executor is self.opaque or _is_auto_registered(bsym.sym)

    def _call_thunders(self, node: fx.Node, call: Call, own: Call) -> Any:
        """Record Thunder's symbol or method; torch's `own` call, where there is none or it has no derivative."""
        num_scopes, num_symbols = len(self.trace.scopes), len(self.trace.scopes[-1])
        try:
            result = _run_thunders(node, call.args, call.kwargs)
        except CompileError:
            raise
        except Exception as error:
            del self.trace.scopes[num_scopes:]  # those of the symbols that were left by the error
            reason = f"Thunder cannot compile it: {str(error) or type(error).__name__}"
        else:
            recorded = self.trace.scopes[-1][num_symbols:]
            if not node_needs_grad(node) or (lacking := without_derivative(recorded)) is None:
                return result
            reason = f"Thunder has no derivative of {lacking.sym.name}"
        del self.trace.scopes[-1][num_symbols:]
        return self.as_torchs_own(node, own.args, own.kwargs, reason=reason)

    def as_torchs_own(
        self, node: fx.Node, args: Sequence[Any], kwargs: Mapping[str, Any], *, reason: str
    ) -> Any:
        """Record what torch runs for a node, with torch's own derivative.

        Raises:
            CompileError: PyTorch cannot trace it without numbers; the message has `reason`, why it is not Thunder's.
        """
        function, expected = node_callable(node), node.meta.get("example_value")
        _refuse_untraceable(node, reason)
        # `out_of_place` asks for a new result, where `inplace=True` did.
        is_changing = changed_operand(node) is not None and inplace_position(node) is None
        run = _on_a_copy(function) if is_changing else function
        if isinstance(expected, Tensor) and not node_needs_grad(node):
            result = self._call_opaque(run, expected, args, kwargs)
        else:
            result = self._call_with_derivative(node, run, args, kwargs, reason)
        return args[0].copy_(result) if is_changing else result

    def _call_with_derivative(
        self,
        node: fx.Node,
        function: Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        reason: str,
    ) -> Any:
        try:
            return call_with_derivative(
                node,
                function,
                args,
                kwargs,
                opaque=self.opaque,
                device=self.target,
                as_eager=self.as_eager,
            )
        except UntraceableError as error:
            raise CompileError(
                f"{function_name(node_callable(node))} (at {where(node)}) cannot be compiled. {reason}. PyTorch cannot "
                f"trace it without numbers: {error}. Write it with other operations, or keep it out of the compiled "
                "model."
            ) from error

    def _call_opaque(
        self,
        function: Callable[..., Any],
        expected: Tensor,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
    ) -> Any:
        return self.opaque.call(function, expected, args, kwargs, device=self.target)


_NOT_IN_THE_TABLE = Operation(name="unknown")


def _eager_arguments(node: fx.Node) -> tuple[Any, Any]:
    def eager(argument: fx.Node) -> Any:
        return argument.meta.get("example_value")

    return fx.node.map_arg(node.args, eager), fx.node.map_arg(node.kwargs, eager)


def _refuse_untraceable(node: fx.Node, reason: str) -> None:
    """Refuse what returns no tensor, such as what changes a setting of torch."""
    found = tree_iter(node.meta.get("example_value"))
    tensors = [v for v in found if isinstance(v, Tensor)]
    if not tensors and changed_operand(node) is None:
        why = "it returns no tensor"
    else:
        return
    raise CompileError(
        f"{function_name(node_callable(node))} (at {where(node)}) cannot be compiled: {why}. {reason}. Write it with "
        "other operations, or keep it out of the compiled model."
    )


def _picks_result(node: fx.Node, args: Sequence[Any]) -> bool:
    """Whether it picks one of several results, which are no tensor."""
    return node.target is operator.getitem and isinstance(args[0], (tuple, list))


def _why_not_thunders(node: fx.Node, row: Operation, call: Call) -> str | None:
    """Say why Thunder's derivative is not used; None if it is."""
    if row.has_whole_derivative:
        return "Thunder would take it apart"
    if _is_auto_registered(_torch_to_thunder_function_map.get(node_callable(node))):
        return "Thunder has no derivative of its own"
    values = [node.meta.get("example_value"), *example_values(node.all_input_nodes)]
    what = row.wrong_gradient(call) if row.wrong_gradient is not None else None
    if any(isinstance(v, Tensor) and v.is_complex() for v in tree_iter(values)):
        what = "complex numbers"
    return None if what is None else f"Thunder computes wrong gradients with respect to {what}"


def _run_thunders(node: fx.Node, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    function = node_callable(node)
    if (symbol := _torch_to_thunder_function_map.get(function)) is not None:
        return symbol(*args, **kwargs)
    if node.op == "call_method":
        return getattr(args[0], str(node.target))(*args[1:], **kwargs)
    makes_tensor = isinstance(node.meta.get("example_value"), Tensor)  # such as `torch.eye(3)`
    of_numbers = isinstance(args[0], (int, float)) and not makes_tensor
    if getattr(function, "__module__", None) == "_operator" or of_numbers:
        return function(*args, **kwargs)
    raise NotImplementedError(f"{function_name(function)} is not known to Thunder")


def _is_auto_registered(symbol: Any) -> bool:
    return isinstance(symbol, Symbol) and prims.OpTags.AUTO_REGISTERED in (symbol.tags or ())


def _on_a_copy(function: Callable[..., Any]) -> Callable[..., Any]:
    """An in-place function as one that returns the changed tensor."""

    @functools.wraps(function)
    def run(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        result = tensor.clone()
        function(result, *args, **kwargs)
        return result

    return run
