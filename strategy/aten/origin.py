"""Where a node of a graph is from: the user's line, module and checkpointed region, kept through tracing."""

from __future__ import annotations

from itertools import takewhile
from typing import Any

from torch import fx
from torch.fx.experimental.proxy_tensor import get_proxy_mode

REGION = "checkpoint_region"
"""Key in a node's meta of the number of its outermost checkpointed region."""
ORIGIN = ("stack_trace", "nn_module_stack", REGION)
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
        mode = get_proxy_mode()
        nodes = None if mode is None else mode.tracer.graph.nodes
        last = None if nodes is None else next(iter(reversed(nodes)), None)
        try:
            return self.compute(n)
        except Exception:
            self.failed = self.failed or n
            raise
        finally:
            if nodes is not None:
                for new in takewhile(lambda node: node is not last, reversed(nodes)):
                    new.meta.update(origin(n))

    def compute(self, n: fx.Node) -> Any:
        """Compute the value of one node."""
        return super().run_node(n)
