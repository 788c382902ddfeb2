"""Where a node of a graph is from: the user's line, module and checkpointed region, kept through tracing.

What autograd runs in backward is from where the operation is that it differentiates: PyTorch numbers the nodes of
autograd's graph in the order in which forward makes them.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import takewhile
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.utils._python_dispatch import TorchDispatchMode

REGION = "checkpoint_region"
"""Key in a node's meta of the number of its outermost checkpointed region."""
LAYER = "equal_layer"
"""Key of the index of its layer in a row of equal ones, and of its place in that; None: it is in no layer."""
IS_BACKWARD = "is_backward"
"""Key that nodes of backward have."""
_PLACE = ("stack_trace", "nn_module_stack", LAYER)
ORIGIN = (*_PLACE, REGION, IS_BACKWARD)
"""Keys in a node's meta that say where it is from."""


def origin(node: fx.Node) -> dict[str, Any]:
    """Return the part of a node's meta that says where it is from."""
    return {key: node.meta[key] for key in ORIGIN if key in node.meta}


class KeepsOrigin(fx.Interpreter):
    """Runs a graph, and gives what `make_fx` records of each node the origin of that node."""

    failed: fx.Node | None = None
    """The node that raised an error."""

    def run(self, *args: Any, **_: Any) -> Any:
        """Run all nodes; without torch's progress bar, which leaves a semaphore behind in a process that is killed."""
        self.args_iter = iter(args)
        for node in self.graph.nodes:
            self.env[node] = self.run_node(node)
        return self.env[self.graph.output_node()]

    def run_node(self, n: fx.Node) -> Any:
        """Run one node."""
        number = torch.autograd._get_sequence_nr()
        try:
            with _given(origin(n)):
                return self.compute(n)
        except Exception:
            self.failed = self.failed or n
            raise
        finally:
            if _seen and torch.autograd._get_sequence_nr() > number:
                _seen[-1].append((number, n))

    def compute(self, n: fx.Node) -> Any:
        """Compute the value of one node."""
        return super().run_node(n)


Differentiable = list[tuple[int, fx.Node]]
"""Nodes that ran, each with the number of the first node that it added to autograd's graph."""

_seen: list[Differentiable] = []


@contextmanager
def differentiable_nodes() -> Iterator[Differentiable]:
    """Yield the list to which `KeepsOrigin` adds the nodes that it runs inside."""
    _seen.append([])
    try:
        yield _seen[-1]
    finally:
        _seen.pop()


class BackwardKeepsPlace(TorchDispatchMode):
    """Gives what `make_fx` records of backward the place of what it differentiates."""

    supports_higher_order_operators = True

    def __init__(self, forward: Differentiable) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._numbers: Sequence[int] = [number for number, _ in forward]
        self._places = [{k: n.meta[k] for k in _PLACE if k in n.meta} for _, n in forward]

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run an operator."""
        with _given(self._place()):
            return func(*args, **(kwargs or {}))

    def _place(self) -> Mapping[str, Any]:
        current = torch._C._current_autograd_node()
        index = -1
        if current is not None:
            index = bisect_right(self._numbers, current._sequence_nr()) - 1
        return {IS_BACKWARD: True, **(self._places[index] if index >= 0 else {})}


@contextmanager
def _given(meta: Mapping[str, Any]) -> Iterator[None]:
    """Add `meta` to what `make_fx` records inside."""
    mode = get_proxy_mode()
    nodes = None if mode is None else mode.tracer.graph.nodes
    last = None if nodes is None else next(iter(reversed(nodes)), None)
    try:
        yield
    finally:
        if nodes is not None:
            for new in takewhile(lambda node: node is not last, reversed(nodes)):
                new.meta.update(meta)
