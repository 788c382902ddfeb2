"""Calls a function inside a trace as it is, where no gradient is needed."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from itertools import count
from typing import Any

import torch
from thunder.core.proxies import TensorProxy
from thunder.core.symbol import Symbol
from thunder.extend import OperatorExecutor, TemporaryExecutor
from torch import Tensor, fx
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
)
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from thunder_memsave.frontend.fx_nodes import module_name, node_callable, own_name
from thunder_memsave.ops.aten_operators import proxy_like


class OpaqueExecutor(TemporaryExecutor):  # type: ignore[misc]
    """Holds the opaque operations of one trace.

    Thunder puts a memory address into the names of such an executor and its operators. Here every process that makes
    the same trace uses the same names: ranks compare them, and plans on disk are found by them.
    """

    def __init__(self) -> None:
        OperatorExecutor.__init__(self, "thunder_memsave_opaque")
        self._numbers = count()

    def __repr__(self) -> str:
        return f"OpaqueExecutor({self.name!r})"

    def unique(self, name: str) -> str:
        """Return a name that is unique in the trace: with a number, in the order of the calls."""
        return f"{name}_{next(self._numbers)}"

    def register_operator(self, name: str, **options: Any) -> Symbol:
        """Register an operator under a name that is unique in the trace."""
        return OperatorExecutor.register_operator(self, self.unique(name), **options)

    def call(
        self,
        function: Callable[..., Any],
        expected: Tensor,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        *,
        device: torch.device | None = None,
    ) -> Any:
        """Record `function(*args, **kwargs)`; the result has the metadata of `expected`, on `device` if given."""

        def meta(*_: Any, **__: Any) -> TensorProxy:
            return proxy_like(expected, device)

        operator = self.register_operator(operator_name(function), meta=meta, fn=function)
        return operator(*args, **kwargs)


def operator_name(function: Callable[..., Any]) -> str:
    """Return a name that begins with the function's: passes match its parts, and a module may share one's name."""
    return f"{_identifier(own_name(function))}_of_{_identifier(module_name(function))}"


def _identifier(name: str) -> str:
    """Return a valid Python identifier, even for a lambda or an overload with a dot."""
    return "".join(c if c.isalnum() else "_" for c in name).strip("_")


def is_random(node: fx.Node) -> bool:
    """Return whether the node may draw random numbers, found by running it on its fake inputs.

    A function that looks at numbers on its way, such as `torch.istft` at its window, may draw any later.
    """
    function = node_callable(node)
    is_torchs = node.op == "call_method" or module_name(function) in _KNOWN_MODULES
    key = _key(node) if is_torchs else None
    if key is None:
        return _is_found_random(node)
    if key not in _random:
        _random[key] = _is_found_random(node)
    return _random[key]


_KNOWN_MODULES = frozenset({"torch", "torch._C._nn", "_operator", "builtins"})
"""Modules of functions that do the same for arguments that are alike."""
_random: dict[Hashable, bool] = {}


def _key(node: fx.Node) -> Hashable | None:
    """Return what the node calls, and all of its arguments but the numbers of tensors; None: it cannot be told."""
    values: dict[fx.Node, Any] = {n: n.meta.get("example_value") for n in node.all_input_nodes}
    if not all(isinstance(value, Tensor) for value in values.values()):
        return None

    def described(argument: fx.Node) -> Any:
        value = values[argument]
        return (value.dtype, value.device, tuple(value.shape), value.stride())

    return (node.op, node.target, repr(fx.node.map_arg((node.args, node.kwargs), described)))


def _is_found_random(node: fx.Node) -> bool:
    seen = _RandomOps()

    def fake(argument: fx.Node) -> Any:
        return argument.meta.get("example_value")

    args, kwargs = fx.node.map_arg(node.args, fake), fx.node.map_arg(node.kwargs, fake)
    mode = _fake_mode((args, kwargs, fake(node)))
    if mode is None:
        return False
    try:
        with mode, seen:
            node_callable(node)(*args, **kwargs)
    except (DataDependentOutputException, DynamicOutputShapeException):
        return True
    return seen.found


class _RandomOps(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found = False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        self.found |= torch.Tag.nondeterministic_seeded in func.tags
        return func(*args, **(kwargs or {}))


def _fake_mode(tree: Any) -> Any:
    found: list[Any] = []

    def visit(value: Any) -> Any:
        if (mode := getattr(value, "fake_mode", None)) is not None:
            found.append(mode)
        return value

    tree_map(visit, tree)
    return found[0] if found else None
