"""A runtime of graphs for the CPU: it checks the rules of CUDA's capture and replay while it runs the operations."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from thunder_memsave.compiler.cuda_graphs.host_waits import waits
from thunder_memsave.compiler.cuda_graphs.runtime import NotCapturableError


class FakeRuntime:
    """Captures by running a function and undoing what it wrote; replays by running it into the same results."""

    device_type = "cpu"

    def __init__(self) -> None:
        self.graphs: list[FakeGraph] = []
        self.is_running = False
        """Whether a function runs in a capture or a replay: no other Python of a step may."""

    def new_pool(self) -> object:
        """Return a mark."""
        return object()

    def capture(
        self, function: Callable[[list[Any]], Any], arguments: list[Any], *, pool: object
    ) -> tuple[FakeGraph, Any]:
        """Run the function once for the shapes of its results; what it wrote to others, and drew, is undone.

        Raises:
            NotCapturableError: it read a value, or returned what was not allocated while it ran.
        """
        random_state, capturing = torch.get_rng_state(), _Capturing()
        try:
            with self.running(), capturing:
                results = function(list(arguments))
        finally:
            capturing.undo()
            torch.set_rng_state(random_state)
        graph = FakeGraph(self, function, arguments, results, made=capturing.made)
        self.graphs.append(graph)
        return graph, results

    @contextmanager
    def running(self) -> Iterator[None]:
        """Mark that a function runs."""
        self.is_running = True
        try:
            yield
        finally:
            self.is_running = False


class FakeGraph:
    """A function with its arguments and results, which stay the same tensors."""

    def __init__(
        self,
        runtime: FakeRuntime,
        function: Callable[[list[Any]], Any],
        arguments: list[Any],
        results: Any,
        *,
        made: set[int],
    ) -> None:
        self._runtime, self._function = runtime, function
        # CUDA keeps their memory in the pool; here it is kept with the tensors themselves.
        self._arguments = list(arguments)
        arguments.clear()
        self._results = [t for t in tree_leaves(results) if isinstance(t, Tensor)]
        of_arguments = {_address(t) for t in tree_leaves(self._arguments) if isinstance(t, Tensor)}
        self._is_own = [_address(t) in made for t in self._results]
        for tensor, is_own in zip(self._results, self._is_own, strict=True):
            if not is_own and _address(tensor) not in of_arguments and tensor.numel():
                raise NotCapturableError("it allocated outside of the pool")
        self._addresses = self._addresses_now()
        self.num_replays = 0

    @torch.no_grad()
    def replay(self) -> None:
        """Run the function on what its arguments hold now, into the results of the capture."""
        assert self._addresses_now() == self._addresses, "an argument was moved"
        self.num_replays += 1
        for result, is_own in zip(self._results, self._is_own, strict=True):
            if is_own:
                _bytes(result).fill_(255)  # NaN: whoever still reads it sees that
        with self._runtime.running():
            new = self._function(list(self._arguments))
        tensors = [t for t in tree_leaves(new) if isinstance(t, Tensor)]
        for result, computed, is_own in zip(self._results, tensors, self._is_own, strict=True):
            if is_own:  # whole storages: results may be expanded, or views of each other
                _bytes(result).copy_(_bytes(computed))
            else:
                assert computed.data_ptr() == result.data_ptr()

    def _addresses_now(self) -> list[int]:
        return [t.data_ptr() for t in tree_leaves(self._arguments) if isinstance(t, Tensor)]


class _Capturing(TorchDispatchMode):
    """Refuses what waits, notes what is allocated, and keeps what is written over."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.made: set[int] = set()
        self._alive: list[Tensor] = []
        self._before: list[tuple[Tensor, Tensor]] = []
        self._kept: set[int] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if waits(func, args):
            name = func.overloadpacket.__name__
            raise NotCapturableError(f"operation not permitted when stream is capturing ({name})")
        self._keep(func, args, kwargs or {})
        given = {_address(t) for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)}
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor) and _address(tensor) not in given:
                self.made.add(_address(tensor))
                self._alive.append(tensor)  # so that no other gets its address
        return result

    def _keep(self, func: Any, args: Any, kwargs: Mapping[str, Any]) -> None:
        """Copy the tensors of others that an operator is about to write."""
        schema = func._schema.arguments
        values = {a.name: v for a, v in zip(schema, args, strict=False)} | dict(kwargs)
        for argument in schema:
            if argument.alias_info is None or not argument.alias_info.is_write:
                continue
            for tensor in tree_leaves(values.get(argument.name)):
                own = isinstance(tensor, Tensor) and _address(tensor) in self.made
                if isinstance(tensor, Tensor) and not own and id(tensor) not in self._kept:
                    self._kept.add(id(tensor))
                    self._before.append((tensor, tensor.clone()))

    @torch.no_grad()
    def undo(self) -> None:
        for tensor, before in reversed(self._before):
            tensor.copy_(before)


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _bytes(tensor: Tensor) -> Tensor:
    return torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())
