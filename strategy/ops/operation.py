"""The row that says all there is to know of one operation; `table.py` has them all."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Protocol

import torch
from thunder.core.proxies import TensorProxy


class Operand(Protocol):
    """A tensor without its numbers, as scratch is computed from it."""

    @property
    def shape(self) -> tuple[int, ...]: ...  # noqa: D102
    @property
    def dtype(self) -> torch.dtype: ...  # noqa: D102
    @property
    def device(self) -> str: ...  # noqa: D102


Scratch = Callable[[Sequence[Operand]], int]
"""`(tensors that a kernel reads) -> bytes` that it takes at most inside of itself, beside its results."""

IsOneKernel = Callable[[Sequence[Operand]], bool]
"""`(tensors that it reads) -> bool`: whether their device has one kernel for it all, which makes its results alone."""

Numbers = Callable[[Sequence[torch.Tensor]], None]
"""`(tensors that a kernel reads)`, all zero; writes those numbers on which its work depends, for the most work."""

ROWS_PER_TILE = "rows_per_tile"
"""Name of the argument of a kernel in tiles whose number of tokens is a plan's choice."""

NO_SCRATCH: Mapping[str, Scratch] = MappingProxyType({})


def like_first(value: TensorProxy, *_: Any) -> TensorProxy:
    """Return a result as the first argument is."""
    return TensorProxy(like=value)


def _not_known(operands: Sequence[Operand]) -> bool:
    return False


@dataclass(frozen=True, kw_only=True, slots=True)
class Derivative:
    """A kernel that computes gradients: `(gradient of the result, *what it reads) -> gradients`."""

    name: str
    """In the trace that runs."""
    run: Callable[..., Any]
    of: tuple[str, ...]
    """Names of the arguments that get the gradients; those that are None get none."""
    reads: tuple[str, ...]
    """Names of arguments and results of the kernel, in the order of `run`: the tensors among them are saved."""
    meta: Callable[..., Any] = like_first
    """`run` on proxies; several gradients are a tuple."""
    fake: Callable[..., Any] | None = None
    """`run` on tensors without numbers, where that cannot run there."""
    scratch: Mapping[str, Scratch] = field(default_factory=lambda: NO_SCRATCH)
    """Formulas of scratch bytes by device type; 0 bytes on other devices."""
    is_one_kernel: IsOneKernel = _not_known
    """Where not, what it makes and moves is what `run` makes and moves on FakeTensors."""
    written_out: Callable[..., Any] | None = None
    """As that of a kernel."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Kernel:
    """An operator of ours, called by `kernel_calls.call_kernel`: computes an operation, and its gradients."""

    name: str
    """In the trace that runs."""
    takes: tuple[str, ...]
    """Names of the arguments."""
    run: Callable[..., Any]
    derivatives: tuple[Derivative, ...]
    results: tuple[str, ...] = ("result",)
    """Names; the first is the operation's result, the others are there for the derivatives alone."""
    meta: Callable[..., Any] = like_first
    """`run` on proxies."""
    scratch: Mapping[str, Scratch] = field(default_factory=lambda: NO_SCRATCH)
    """Formulas of scratch bytes by device type; 0 bytes on other devices."""
    is_one_kernel: IsOneKernel = _not_known
    """Where not, what it makes and moves is what `run` makes and moves on FakeTensors."""
    fake: Callable[..., Any] | None = None
    """`run` on tensors without numbers, where only what its results are is asked."""
    alone: Kernel | None = None
    """Takes the same and makes the first result alone, for less: forward runs it where backward computes the others."""
    on_host: tuple[str, ...] = ()
    """Names of the arguments that are tensors on the CPU whatever the device, and are not read by a captured graph."""
    written_out: Callable[..., Any] | None = None
    """`run` in pure operators of PyTorch, with the same bits for float32 tensors on a CPU: they fuse with others."""
    numbers: Numbers | None = None
    """For the kernel and its derivatives, which are measured on zeros; None if zeros are as good as any."""

    @property
    def operators(self) -> Mapping[str, Kernel | Derivative]:
        """Map each operator's name in a trace, its own first, to what is known of it."""
        return {self.name: self, **{d.name: d for d in self.derivatives}}


@dataclass(frozen=True, slots=True)
class Foreign:
    """Facts of PyTorch's own operators."""

    matches: Callable[[str], bool]
    """`(name in the trace that runs) -> bool`; never called with the name of one of our kernels."""
    scratch: Callable[[str, Sequence[Operand]], int]
    """`(name, tensors that it reads) -> bytes` that it takes at most inside of itself."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Operation:
    """Functions of torch that graphs call otherwise, with kernels of ours."""

    name: str
    functions: tuple[Callable[..., Any], ...]
    run: Callable[..., Any]
    """`(arguments of the functions) -> tensor`."""
    kernels: tuple[Kernel, ...]
