"""A tensor whose numbers are computed when they are first read.

A model that is given `labels=` returns its logits beside the loss. Training rarely reads them, and they take 1 GB for
2,048 tokens and 128,256 classes in float32. So a compiled call returns a `LateTensor`, which is made of the hidden
states and the head's weight, if anything reads it before the weights change.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils._pytree import tree_map_only

from thunder_memsave.errors import LateTensorError
from thunder_memsave.sharding.sharded_parameter import is_sharded, unquantized_dtype

_SETTING = "set strategy.return_logits to true, and the compiled call returns them, at the cost of their memory"
_WITHOUT_NUMBERS = frozenset(
    {
        *(getattr(Tensor, name).__get__ for name in ("shape", "dtype", "device", "layout", "ndim")),
        *(getattr(Tensor, name).__get__ for name in ("requires_grad", "is_leaf", "grad_fn")),
        *(Tensor.size, Tensor.dim, Tensor.ndimension, Tensor.numel, Tensor.nelement, Tensor.stride),
        *(Tensor.is_floating_point, torch.is_floating_point, torch.is_tensor, Tensor.__len__),
        Tensor.is_complex,
    }
)
_CASTS = frozenset({Tensor.to, Tensor.float, Tensor.half, Tensor.bfloat16, Tensor.detach})


@dataclass(frozen=True, slots=True)
class Kind:
    """The shape, strides, dtype and device of a tensor."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, tensor: Tensor) -> Kind:
        """Describe a tensor."""
        return cls(tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.device)


@dataclass(frozen=True, slots=True)
class LateOutput:
    """An output that is made later of tensors that the call is given, or computes."""

    make: fx.GraphModule
    """`(hidden states, weight[, bias]) -> tensor`."""
    operands: tuple[tuple[str, int], ...]
    """`input` or `computed` for each operand, and its index among these."""
    kind: Kind
    needs_grad: bool
    """Whether eager PyTorch differentiates it."""

    def of(self, inputs: Sequence[Tensor], computed: Sequence[Any]) -> LateTensor:
        """Return the output of a call from its inputs and computed values."""
        lists = {"input": inputs, "computed": computed}
        operands = [lists[kind][index] for kind, index in self.operands]
        late = _Later(self.make, operands, _autocast(operands[0].device.type), self.needs_grad)
        return LateTensor(late.value, replace(self.kind, device=operands[0].device))


@dataclass(slots=True)
class _Later:
    """Makes a tensor once."""

    make: Callable[..., Tensor]
    operands: list[Tensor]
    autocast: tuple[str, torch.dtype, bool]
    needs_grad: bool
    versions: list[int] = field(init=False)
    made: Tensor | None = None

    def __post_init__(self) -> None:
        # Tensors of inference mode have no version, and no optimizer changes weights there.
        self.versions = [0 if t.is_inference() else t._version for t in self.operands]

    def value(self) -> Tensor:
        """Return the tensor.

        Raises:
            LateTensorError: it can no longer be made.
        """
        if self.made is None:
            self._check()
            device, dtype, is_enabled = self.autocast
            with torch.no_grad(), torch.autocast(device, dtype=dtype, enabled=is_enabled):
                self.made = self.make(*self.operands)
            self.operands.clear()
        if self.needs_grad and torch.is_grad_enabled():
            return _WithoutDerivative.apply(self.made.detach().requires_grad_())  # type: ignore[no-any-return, no-untyped-call]
        return self.made

    def _check(self) -> None:
        if any(is_sharded(t) or unquantized_dtype(t) is not None for t in self.operands):
            raise LateTensorError(
                "Logits were read that the compiled call left out, and whose weight is sharded or kept in fp8, so that "
                f"they cannot be made now; {_SETTING}."
            )
        now = [0 if t.is_inference() else t._version for t in self.operands]
        if now != self.versions:
            raise LateTensorError(
                "Logits were read that the compiled call left out, and the weights, of which they would be made now, "
                f"have changed since the call. Read them before optimizer.step(), or {_SETTING}."
            )


class LateTensor(Tensor):
    """A tensor whose numbers are computed when they are first read; casts of it are late too."""

    _value: Callable[[], Tensor]
    _kind: Kind

    @staticmethod
    def __new__(cls, value: Callable[[], Tensor], kind: Kind) -> LateTensor:
        """Make a tensor of a kind, of which `value` returns the numbers."""
        made = Tensor._make_wrapper_subclass(
            cls, kind.shape, strides=kind.stride, dtype=kind.dtype, device=kind.device
        )
        made._value, made._kind = value, kind
        return made

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Compute what needs no numbers without them, make a cast late, and give all else the numbers."""
        kwargs = kwargs or {}
        with torch._C.DisableTorchFunctionSubclass():
            if func in _WITHOUT_NUMBERS:
                return func(*args, **kwargs)
            if func in _CASTS and isinstance(args[0], LateTensor):
                return _cast(args[0], func, args[1:], kwargs)
            return func(*_numbers(args), **_numbers(kwargs))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Give an operator the numbers."""
        return func(*_numbers(args), **_numbers(kwargs or {}))


def _cast(late: LateTensor, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    kind = late._kind
    like = torch.empty_strided(kind.shape, kind.stride, dtype=kind.dtype, device="meta")
    if any(isinstance(a, str | torch.device | Tensor) for a in (*args, *kwargs.values())):
        return func(late._value(), *args, **kwargs)  # on another device it is read soon
    dtype = func(like, *args, **kwargs).dtype
    if func is not Tensor.detach and dtype is kind.dtype:
        return late
    return LateTensor(lambda: func(late._value(), *args, **kwargs), replace(kind, dtype=dtype))


def _numbers(arguments: Any) -> Any:
    return tree_map_only(LateTensor, lambda late: late._value(), arguments)


def _autocast(device_type: str) -> tuple[str, torch.dtype, bool]:
    is_enabled = torch.is_autocast_enabled(device_type)
    return device_type, torch.get_autocast_dtype(device_type), is_enabled


class _WithoutDerivative(torch.autograd.Function):
    """Returns its operand, and has no derivative."""

    @staticmethod
    def forward(ctx: Any, value: Tensor) -> Tensor:
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        raise LateTensorError(
            "Backward reached logits that the compiled call left out: a loss was made of them beside the model's own. "
            f"To differentiate it, {_SETTING}."
        )
