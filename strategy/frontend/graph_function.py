"""A captured graph as a function of tensors, which PyTorch's autograd can trace."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, fx

from thunder_memsave.aten.equal_layers import EqualLayers
from thunder_memsave.aten.origin import LAYER, KeepsOrigin
from thunder_memsave.frontend.fp8_linears import LinearNodes
from thunder_memsave.frontend.unseen_calls import UnseenCalls
from thunder_memsave.ops.table import operation_of


class GraphFunction:
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
        self._instead_of: Mapping[fx.Node, fx.Node] = {}

    def with_layers(self, layers: EqualLayers) -> GraphFunction:
        """Return the function with the values of one layer in place of those of the layers that are cut."""
        found = copy.copy(self)
        found._instead_of = layers.instead_of
        for node in self.graph.graph.nodes:
            node.meta[LAYER] = layers.place_of.get(node)
        return found

    def __call__(self, *tensors: Tensor) -> tuple[Any, ...]:
        """Run the graph."""
        num_inputs = len(self.read)
        inputs = dict(zip(self.read, tensors[:num_inputs], strict=True))
        constants = zip(map(id, self.constants), tensors[num_inputs:], strict=True)
        run = _Run(self.graph, dict(constants), self.fp8, self._unseen, self._instead_of)
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
        instead_of: Mapping[fx.Node, fx.Node],
    ) -> None:
        super().__init__(graph, garbage_collect_values=False)
        self._instead, self._fp8, self._unseen = instead, fp8, unseen
        self._instead_of = instead_of

    def run_node(self, n: fx.Node) -> Any:
        """Run a node, or return the value of another that is as its."""
        other = self._instead_of.get(n)
        return super().run_node(n) if other is None else self.env[other]

    def compute(self, n: fx.Node) -> Any:
        """Compute a node's value."""
        if self._fp8 is not None and self._fp8.computes(n):
            return self._fp8.call(n, *self.fetch_args_kwargs_from_env(n))
        return self._unseen.value(n, super().compute, self.fetch_args_kwargs_from_env)

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        """Call a function, or what the table of operations has in its place."""
        row = operation_of(target)
        return super().call_function(target if row is None else row.run, args, kwargs)

    def get_attr(self, target: Any, args: Any, kwargs: Any) -> Any:
        """Return what the graph holds under a name."""
        value = super().get_attr(target, args, kwargs)
        return self._instead.get(id(value), value)
