"""Runs a PyTorch function inside a trace as it is, where Thunder does not know it and no gradient is needed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from thunder_memsave import compat

compat.apply()

from thunder.core import devices, dtypes  # noqa: E402
from thunder.core.proxies import TensorProxy  # noqa: E402
from thunder.extend import TemporaryExecutor  # noqa: E402

from thunder_memsave.fx_nodes import node_callable  # noqa: E402


class OpaqueExecutor(TemporaryExecutor):  # type: ignore[misc]
    """Holds the opaque operations of one trace."""

    def call(
        self,
        function: Callable[..., Any],
        expected: Tensor,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        *,
        device: torch.device | None = None,
    ) -> Any:
        """Record `function(*args, **kwargs)`, whose result looks like `expected`, but for another device if given."""

        def meta(*_: Any, **__: Any) -> TensorProxy:
            return proxy_like(expected, device)

        name = getattr(function, "__name__", "opaque").strip("_")
        operator = self.register_operator(name, meta=meta, fn=function)
        return operator(*args, **kwargs)


def proxy_like(expected: Tensor, device: torch.device | None = None) -> TensorProxy:
    """A proxy with the metadata of a (fake) tensor, on `device` if given."""
    return TensorProxy(
        shape=tuple(expected.shape),
        device=devices.to_device(device or expected.device),
        dtype=dtypes.to_dtype(expected.dtype),
        requires_grad=expected.requires_grad,
    )


def is_random(node: fx.Node) -> bool:
    """Whether running the node draws random numbers, found by running it on its fake inputs."""
    seen = _RandomOps()

    def fake(argument: fx.Node) -> Any:
        return argument.meta.get("example_value")

    args, kwargs = fx.node.map_arg(node.args, fake), fx.node.map_arg(node.kwargs, fake)
    mode = _fake_mode((args, kwargs, fake(node)))
    if mode is None:
        return False
    with mode, seen:
        node_callable(node)(*args, **kwargs)
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
