"""What a captured graph returns: values that its trace computes, whole inputs as they are, plain Python values."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, Self

from thunder.core import prims
from thunder.core.proxies import TensorProxy
from torch import Tensor, fx


def graph_outputs(
    graph: fx.GraphModule, *, as_they_are: Collection[fx.Node]
) -> tuple[tuple[Any, ...], tuple[fx.Node, ...]]:
    """The outputs in order, and the nodes among them that are computed, each once.

    Args:
        graph: What was captured.
        as_they_are: The inputs that are returned without a computation; the others are gathered first.
    """
    outputs = tuple(graph.graph.output_node().args[0])  # type: ignore[arg-type]
    computed = (o for o in outputs if isinstance(o, fx.Node) and o not in as_they_are)
    return outputs, tuple(dict.fromkeys(computed))


@dataclass(frozen=True, slots=True)
class OutputOrder:
    """Puts the computed values and the inputs that are returned as they are into the graph's order."""

    order: tuple[tuple[str, Any], ...]

    @classmethod
    def of(cls, graph: fx.GraphModule, outputs: Sequence[Any], computed: Sequence[fx.Node]) -> Self:
        """The order of `outputs`; `computed` are the nodes that the trace returns."""
        inputs = [n for n in graph.graph.nodes if n.op == "placeholder"]
        position = {n: ("input", i) for i, n in enumerate(inputs)}
        position.update({n: ("computed", i) for i, n in enumerate(computed)})
        return cls(tuple(position[o] if isinstance(o, fx.Node) else ("value", o) for o in outputs))

    def __call__(self, inputs: Sequence[Tensor], computed: Sequence[Any]) -> Sequence[Any]:
        """`(inputs, computed values)` -> what the graph returns."""
        sources = {"input": inputs, "computed": computed}
        return [value if kind == "value" else sources[kind][value] for kind, value in self.order]


def distinct_values() -> Callable[[Any], Any]:
    """Copies a value that was returned before: `y` and `y.float()` are one proxy, and each output has a gradient."""
    seen: set[str] = set()

    def distinct(value: Any) -> Any:
        if isinstance(value, TensorProxy) and value.name in seen:
            return prims.shallow_copy(value)
        seen.add(getattr(value, "name", ""))
        return value

    return distinct
