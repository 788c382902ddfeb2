"""One forward and its backward as graphs: their static buffers, and what they hand to each other."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from thunder_memsave.compiler.cuda_graphs.runtime import Graph, Runtime

Forward = Callable[..., Any]
"""`(*inputs) -> (outputs, (saved tensors, saved numbers))`."""
Backward = Callable[..., Any]
"""`([saved tensors, saved numbers], cotangents) -> one gradient or None per input`; empties the lists."""


@dataclass(slots=True, eq=False)
class CapturedCall:
    """The graphs of one call; the backward is captured when it first runs."""

    runtime: Runtime
    pool: Any
    is_fixed: Sequence[bool]
    """For each input, whether the graphs read it where it is: a weight, a buffer, a constant, or state of fp8."""
    addresses: tuple[int, ...]
    """The addresses of the fixed inputs."""
    static_inputs: list[Any]
    """For each other input the buffer that it is copied to; for a fixed one None."""
    forward: Graph
    outputs: Sequence[Any]
    """In the pool."""
    read_by_backward: Sequence[int]
    """The fixed inputs that backward reads, which autograd must see, to notice when they are changed before."""
    saved: list[Any] | None
    """The tensors that forward saved, until the backward is captured; the pool holds them from then on."""
    numbers: Any
    """The saved values that are no tensors: the same at each call."""
    backward: Graph | None = None
    gradients: Sequence[Any] = ()
    """In the pool."""
    cotangents: list[Tensor | None] = field(default_factory=list)
    """Static buffers of the gradients of the outputs."""

    @classmethod
    def of(
        cls,
        runtime: Runtime,
        compute: Forward,
        inputs: Sequence[Any],
        *,
        is_fixed: Sequence[bool],
    ) -> CapturedCall:
        """Capture a forward; it has not run yet.

        Raises:
            NotCapturableError: it did what a graph cannot.
        """
        pool = runtime.new_pool()
        static = [
            None if fixed or not isinstance(value, Tensor) else value.clone()
            for value, fixed in zip(inputs, is_fixed, strict=True)
        ]
        read = [value if own is None else own for value, own in zip(inputs, static, strict=True)]
        graph, results = runtime.capture(lambda arguments: compute(*arguments), read, pool=pool)
        outputs, (saved, numbers) = results
        storages = {
            value.untyped_storage().data_ptr(): number
            for number, (value, fixed) in enumerate(zip(inputs, is_fixed, strict=True))
            if fixed and isinstance(value, Tensor) and value.numel()
        }
        found = (storages.get(t.untyped_storage().data_ptr()) for t in saved if t.numel())
        return cls(
            runtime=runtime,
            pool=pool,
            is_fixed=is_fixed,
            addresses=_addresses(inputs, is_fixed),
            static_inputs=static,
            forward=graph,
            outputs=outputs,
            read_by_backward=sorted({number for number in found if number is not None}),
            saved=list(saved),
            numbers=numbers,
        )

    def is_at(self, inputs: Sequence[Any]) -> bool:
        """Tell whether the fixed inputs are where they were when the call was captured."""
        return _addresses(inputs, self.is_fixed) == self.addresses

    def run_forward(self, inputs: Sequence[Any]) -> tuple[list[Any], list[Tensor]]:
        """Replay the forward; return copies of its outputs, and the fixed inputs that backward will read."""
        for value, static in zip(inputs, self.static_inputs, strict=True):
            if static is not None:
                static.copy_(value, non_blocking=True)
        self.forward.replay()
        return _copies(self.outputs), [inputs[number] for number in self.read_by_backward]

    def run_backward(
        self, differentiate: Backward, cotangents: Sequence[Any], wanted: Collection[int]
    ) -> list[Any]:
        """Replay the backward, after capturing it if need be; return copies of the wanted gradients.

        Raises:
            NotCapturableError: it did what a graph cannot.
        """
        if self.backward is None:
            self.cotangents = [
                torch.empty_like(c) if isinstance(c, Tensor) else None for c in cotangents
            ]
        for cotangent, static in zip(cotangents, self.cotangents, strict=True):
            if static is not None:
                static.copy_(cotangent, non_blocking=True)
        if self.backward is None:
            self._capture_backward(differentiate)
        assert self.backward is not None
        self.backward.replay()
        return _copies([g if i in wanted else None for i, g in enumerate(self.gradients)])

    def _capture_backward(self, differentiate: Backward) -> None:
        """Capture the backward, which frees what forward saved after its last use, as it does without a graph."""
        arguments, self.saved = self.saved, None
        assert arguments is not None, "a forward's backward is captured once"
        numbers, cotangents = self.numbers, self.cotangents

        def function(saved: list[Any]) -> Any:
            return differentiate([saved, numbers], list(cotangents))

        self.backward, self.gradients = self.runtime.capture(function, arguments, pool=self.pool)


def _addresses(inputs: Sequence[Any], is_fixed: Sequence[bool]) -> tuple[int, ...]:
    return tuple(
        value.data_ptr()
        for value, fixed in zip(inputs, is_fixed, strict=True)
        if fixed and isinstance(value, Tensor)
    )


def _copies(values: Sequence[Any]) -> list[Any]:
    """Copy tensors in few launches; other values stay."""
    tensors = [value for value in values if isinstance(value, Tensor)]
    made = [torch.empty_like(tensor) for tensor in tensors]
    for dtype in {tensor.dtype for tensor in tensors}:
        pairs = [(m, t) for m, t in zip(made, tensors, strict=True) if t.dtype == dtype]
        torch._foreach_copy_([m for m, _ in pairs], [t for _, t in pairs])
    copies = iter(made)
    return [next(copies) if isinstance(value, Tensor) else value for value in values]
