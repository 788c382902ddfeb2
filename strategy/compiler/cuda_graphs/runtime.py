"""Names what graphs need of a device; torch.cuda implements it, and tests do on a CPU, where the rules are checked."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from thunder_memsave.errors import ThunderMemsaveError


class Graph(Protocol):
    """Operations that were captured."""

    def replay(self) -> None:
        """Launch the operations, which read what they read when they were captured, at the same addresses."""


class Runtime(Protocol):
    """Captures functions as graphs."""

    @property
    def device_type(self) -> str:
        """Type of the device on which all tensors are."""

    def new_pool(self) -> Any:
        """Return memory for graphs that run one after the other, of which each reads what the one before left."""

    def capture(
        self, function: Callable[[list[Any]], Any], arguments: list[Any], *, pool: Any
    ) -> tuple[Graph, Any]:
        """Capture what a function launches, without running it.

        Args:
            function: Takes the list of arguments, from which it may remove each after its last use. It must not
                wait for the device, nor depend on what is in a tensor.
            arguments: Tensors at addresses that stay; the graph itself keeps none of them alive.
            pool: Gets all that the function allocates.

        Returns:
            The graph, and what the function returned: tensors in the pool, which each replay overwrites. The pool
            keeps their memory; once they are not referenced any more, what is captured later may take it.

        Raises:
            NotCapturableError: the function did what a graph cannot.
        """


class NotCapturableError(ThunderMemsaveError, RuntimeError):
    """A function did what a graph cannot: it waited for the device, or allocated elsewhere."""

    code = None
