"""Calls one function of a graph on proxies: by its row in the table, else as Thunder knows it, else as it is."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from thunder.core import prims
from thunder.core.symbol import BoundSymbol, Symbol
from thunder.core.trace import TraceCtx
from thunder.torch import _torch_to_thunder_function_map
from torch import Tensor, fx

from thunder_memsave.errors import CompileError, user_frame_of_text
from thunder_memsave.frontend.aliasing import changed_operand, inplace_position
from thunder_memsave.frontend.fx_nodes import (
    example_values,
    function_name,
    node_callable,
    node_needs_grad,
    value_needs_grad,
)
from thunder_memsave.frontend.opaque import OpaqueExecutor, is_random
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
            CompileError: Thunder does not know it and it needs a gradient, or gives it a wrong one.
        """
        if (fact := self._fact(node)) is not NotImplemented:
            return fact
        row = operation_of(node_callable(node)) or _NOT_IN_THE_TABLE
        call = Call(args, kwargs, *_eager_arguments(node))
        if row.lower is not None and (result := row.lower(call)) is not NotImplemented:
            return result
        needs_grad = node_needs_grad(node)
        expected = node.meta.get("example_value")
        if row.runs_torchs_own and not needs_grad and isinstance(expected, Tensor):
            return self._call_opaque(node_callable(node), expected, args, kwargs)
        if needs_grad:
            _refuse_wrong_gradient(node, row, call)
        if row.rewrite is not None:
            call = row.rewrite(call)
        return self._call_thunders(node, call.args, call.kwargs)

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

    def _call_thunders(self, node: fx.Node, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Record Thunder's symbol or method; where there is none and no gradient is needed, torch's own function."""
        num_scopes = len(self.trace.scopes)
        try:
            return _run_thunders(node, args, kwargs)
        except CompileError:
            raise
        except Exception as error:
            del self.trace.scopes[num_scopes:]  # those of the symbols that were left by the error
            function, expected = node_callable(node), node.meta.get("example_value")
            if node_needs_grad(node) or not isinstance(expected, Tensor):
                raise CompileError(
                    f"Thunder cannot compile {function_name(function)} (at {where(node)}): {error}. "
                    "Write it with other operations, or keep it out of the compiled model."
                ) from error
            if changed_operand(node) is None:
                return self._call_opaque(function, expected, args, kwargs)
            changed = self._call_opaque(_on_a_copy(function), expected, args, kwargs)
            return args[0].copy_(changed)

    def _call_opaque(
        self,
        function: Callable[..., Any],
        expected: Tensor,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
    ) -> Any:
        return self.opaque.call(function, expected, args, kwargs, device=self.target)


_NOT_IN_THE_TABLE = Operation(name="unknown")


def where(node: fx.Node) -> str:
    """The user's line that a node is from, for messages."""
    return user_frame_of_text(node.meta.get("stack_trace"))


def _eager_arguments(node: fx.Node) -> tuple[Any, Any]:
    def eager(argument: fx.Node) -> Any:
        return argument.meta.get("example_value")

    return fx.node.map_arg(node.args, eager), fx.node.map_arg(node.kwargs, eager)


def _refuse_wrong_gradient(node: fx.Node, row: Operation, call: Call) -> None:
    function = node_callable(node)
    is_automatic = _is_auto_registered(_torch_to_thunder_function_map.get(function))
    if is_automatic and is_random(node):
        raise CompileError(
            f"{function_name(function)} (at {where(node)}) draws random numbers and Thunder would draw them again in "
            "backward, which gives wrong gradients; use torch.nn.functional.dropout, or move it out of the model."
        )
    what = _lost_by_any_rule(node, is_automatic=is_automatic)
    if what is None and row.wrong_gradient is not None:
        what = row.wrong_gradient(call)
    if what is not None:
        raise CompileError(
            f"Thunder computes wrong gradients of {function_name(function)} (at {where(node)}) with respect to {what}. "
            "Write it with other operations, or keep it out of the compiled model."
        )


def _lost_by_any_rule(node: fx.Node, *, is_automatic: bool) -> str | None:
    """Name the operands whose gradient Thunder leaves out, or gives the conjugate of, whatever the function."""
    values = [node.meta.get("example_value"), *example_values(node.all_input_nodes)]
    tensors = [a for a in node.args if isinstance(a, fx.Node)]
    nested = [n for n in node.all_input_nodes if n not in tensors]
    if any(isinstance(v, Tensor) and v.is_complex() for v in values):
        return "complex numbers"
    if is_automatic and any(map(value_needs_grad, example_values(nested))):
        return "tensors in a list or as keywords"
    return None


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
