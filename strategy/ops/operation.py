"""The row that says all there is to know of one operation; `table.py` has them all."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Protocol

import torch
from thunder.core import dtypes
from thunder.core.proxies import TensorProxy
from thunder.core.symbol import BoundSymbol, Symbol
from thunder.extend import OperatorExecutor


@dataclass(frozen=True, slots=True)
class Call:
    """One call of a torch function that is lowered."""

    args: Sequence[Any]
    """Arguments with proxies for tensors, as are `kwargs`."""
    kwargs: Mapping[str, Any]
    eager_args: Sequence[Any]
    """Arguments with eager PyTorch's tensors, without their numbers, as are `eager_kwargs`."""
    eager_kwargs: Mapping[str, Any]

    def needs_grad(self, position: int, name: str) -> bool:
        """Say whether eager gives a gradient to an argument, which the caller may have left out."""
        given = (*self.eager_args[position : position + 1], self.eager_kwargs.get(name))
        return any(isinstance(v, torch.Tensor) and v.requires_grad for v in given)


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

NO_SCRATCH: Mapping[str, Scratch] = MappingProxyType({})


def like_first(value: TensorProxy, *_: Any) -> TensorProxy:
    """Return a result as the first argument is."""
    return TensorProxy(like=value)


def is_float(value: Any) -> bool:
    """Say whether it stands for a tensor of floating-point numbers."""
    return isinstance(value, TensorProxy) and dtypes.is_float_dtype(value.dtype)


def _as_given(*args: Any) -> Sequence[Any]:
    return args


def _always(*args: Any, **kwargs: Any) -> bool:
    return True


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


@dataclass(frozen=True, kw_only=True, slots=True)
class Kernel:
    """An operator of ours: what computes an operation, and what computes its gradients."""

    name: str
    """In the trace that runs."""
    executor: OperatorExecutor | None = None
    """Claims the operation; None: graphs call the kernel by `kernel_calls.call_kernel`."""
    symbol: Symbol | None = None
    """Thunder's for the operation; None as `executor`."""
    takes: tuple[str, ...]
    """Names of the arguments."""
    run: Callable[..., Any]
    derivatives: tuple[Derivative, ...]
    results: tuple[str, ...] = ("result",)
    """Names; the first is the operation's result, the others are there for the derivatives alone."""
    meta: Callable[..., Any] = like_first
    """`run` on proxies."""
    arguments: Callable[..., Sequence[Any]] = _as_given
    """`(arguments of the symbol) -> arguments`."""
    cast: Callable[..., Any] | None = None
    """`(arguments of the symbol) -> dtype` of the first argument while it computes; None, or if so: as it is."""
    applies: Callable[..., bool] = _always
    """`(arguments of the symbol)`: where not, another executor gets it."""
    scratch: Mapping[str, Scratch] = field(default_factory=lambda: NO_SCRATCH)
    """Formulas of scratch bytes by device type; 0 bytes on other devices."""
    is_one_kernel: IsOneKernel = _not_known
    """Where not, what it makes and moves is what `run` makes and moves on FakeTensors."""
    numbers: Numbers | None = None
    """For the kernel and its derivatives, which are measured on zeros; None if zeros are as good as any."""

    @property
    def saves(self) -> frozenset[str]:
        """Names of what forward keeps for backward, where all that can get a gradient gets one."""
        return frozenset(name for d in self.derivatives for name in d.reads)

    @property
    def operators(self) -> Mapping[str, Kernel | Derivative]:
        """Map each operator's name in a trace, its own first, to what is known of it."""
        return {self.name: self, **{d.name: d for d in self.derivatives}}


def _never(bsym: BoundSymbol) -> bool:
    return False


def _none(operator: str, operands: Sequence[Operand]) -> int:
    return 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Foreign:
    """Facts of other executors' operators, and of torch's own functions that run as they are."""

    matches: Callable[[str], bool]
    """`(name in the trace that runs) -> bool`; never called with the name of one of our kernels."""
    scratch: Callable[[str, Sequence[Operand]], int] = _none
    """`(name, tensors that it reads) -> bytes` that it takes at most inside of itself."""
    draws: Callable[[BoundSymbol], bool] = _never
    """Whether it draws random numbers where no tag of Thunder's says so."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Operation:
    """All that this package knows of one operation. What a row leaves out is as Thunder has it."""

    name: str
    functions: tuple[Callable[..., Any], ...] = ()
    """Those of torch that it stands for."""
    run: Callable[..., Any] | None = None
    """The function of tensors that graphs call instead, with kernels of ours in it."""
    lower: Callable[[Call], Any] | None = None
    """Record it on proxies; NotImplemented: this call is as Thunder has it."""
    rewrite: Callable[[Call], Call] | None = None
    """The call that Thunder's own symbol gets instead."""
    runs_torchs_own: bool = False
    """Whether torch's function runs as it is where no gradient is needed, though Thunder knows it."""
    has_whole_derivative: bool = False
    """Whether torch's operators run where a gradient is needed: Thunder takes the function apart, which is slower."""
    wrong_gradient: Callable[[Call], str | None] | None = None
    """`(call) -> what is wrong with Thunder's derivative, in words`; None if it is right."""
    kernels: tuple[Kernel, ...] = ()
    foreign: Foreign | None = None
