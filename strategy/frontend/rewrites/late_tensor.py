"""A tensor whose numbers are computed when they are first read.

A model that is given `labels=` returns its logits beside the loss. Training rarely reads them, and they take 1 GB for
2,048 tokens and 128,256 classes in float32. So a compiled call returns a `LateTensor`, which is made of the hidden
states and the head's weight, if anything reads it before the weights change. A function of the user's own that
`torch.compile` compiles reads it before its first operator: for PyTorch it is a subclass that wraps another tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map_only

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
    """`(hidden states, weight[, bias][, scale]) -> tensor`."""
    operands: tuple[tuple[str, int], ...]
    """`input` or `computed` for each operand, and its index among these."""
    kind: Kind
    needs_grad: bool
    """Whether eager PyTorch differentiates it."""
    scale: Callable[[], Tensor] | None = None
    """Returns the scales of a linear layer in fp8 at the time of the call."""

    def of(self, inputs: Sequence[Tensor], computed: Sequence[Any]) -> LateTensor:
        """Return the output of a call from its inputs and computed values."""
        lists = {"input": inputs, "computed": computed}
        operands = [lists[kind][index] for kind, index in self.operands]
        if self.scale is not None:
            operands.append(self.scale())
        late = _Later(self.make, operands, _autocast(operands[0].device.type), self.needs_grad)
        kind = replace(self.kind, device=operands[0].device)
        return LateTensor(late.value, kind, needs_grad=self.needs_grad)


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
                f"or their scales have changed since the call. Read them before optimizer.step(), or {_SETTING}."
            )


class LateTensor(Tensor):
    """A tensor whose numbers are computed when they are first read; casts of it are late too."""

    _value: Callable[[], Tensor]
    _kind: Kind
    _needs_grad: bool
    _numbers: Tensor | None
    """Without a derivative, once they were read for a graph of PyTorch's compiler."""

    @staticmethod
    def __new__(
        cls, value: Callable[[], Tensor], kind: Kind, *, needs_grad: bool = False
    ) -> LateTensor:
        """Make a tensor of a kind, of which `value` returns the numbers.

        Where it `needs_grad`, eager PyTorch differentiates it; here a backward that reaches it is an error.
        """
        made = Tensor._make_wrapper_subclass(
            *(cls, kind.shape),
            strides=kind.stride,
            dtype=kind.dtype,
            device=kind.device,
            requires_grad=needs_grad,
        )
        made._value, made._kind, made._needs_grad, made._numbers = value, kind, needs_grad, None
        if needs_grad:
            made.register_hook(_refuse_gradient)  # type: ignore[no-untyped-call]
        return made

    def __tensor_flatten__(self) -> tuple[list[str], bool]:
        """Compute the numbers, which PyTorch's compiler traces in place of this."""
        if self._numbers is None:
            with _disable_current_modes(), torch.no_grad():
                self._numbers = self._value()
        return ["_numbers"], self._needs_grad

    @staticmethod
    def __tensor_unflatten__(
        inner: dict[str, Tensor], needs_grad: bool, size: Sequence[int], stride: Sequence[int]
    ) -> LateTensor:
        """Return a tensor that stands for these numbers."""
        numbers = inner["_numbers"]
        kind = Kind(tuple(size), tuple(stride), numbers.dtype, numbers.device)
        made = LateTensor(lambda: numbers, kind)  # the first one has the hook
        made._numbers, made._needs_grad = numbers, needs_grad
        return made

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Compute what needs no numbers without them, make a cast late, and give all else the numbers."""
        kwargs = kwargs or {}
        with torch._C.DisableTorchFunctionSubclass():
            if func in _WITHOUT_NUMBERS or _is_wrapper(func, args, kwargs):
                return func(*args, **kwargs)
            if func in _CASTS and isinstance(args[0], LateTensor):
                return _cast(args[0], func, args[1:], kwargs)
            return func(*_read(args), **_read(kwargs))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Give an operator the numbers; autograd has recorded it."""
        for late in _late_among(args, kwargs):
            late.__tensor_flatten__()
        args, kwargs = tree_map_only(LateTensor, lambda late: late._numbers, (args, kwargs or {}))
        return func(*args, **kwargs)


def _cast(late: LateTensor, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    kind = late._kind
    like = torch.empty_strided(kind.shape, kind.stride, dtype=kind.dtype, device="meta")
    if any(isinstance(a, str | torch.device | Tensor) for a in (*args, *kwargs.values())):
        return func(late._value(), *args, **kwargs)  # on another device it is read soon
    dtype = func(like, *args, **kwargs).dtype
    if func is not Tensor.detach and dtype is kind.dtype:
        return late
    return LateTensor(
        lambda: func(late._value(), *args, **kwargs),
        replace(kind, dtype=dtype),
        needs_grad=late._needs_grad and func is not Tensor.detach and torch.is_grad_enabled(),
    )


def _is_wrapper(func: Any, args: Any, kwargs: Any) -> bool:
    """Return whether a function is given a late tensor as a tensor that wraps another.

    One that was read for a graph is that from then on, and autograd knows it, but it is shown by its numbers, which may
    be those of a graph that is traced. Hooks are for the gradient that it has not.
    """
    late = _late_among(args, kwargs)
    if func is Tensor.register_hook:
        return late[0]._needs_grad
    return func is not Tensor.__repr__ and any(a._numbers is not None for a in late)


def _late_among(args: Any, kwargs: Any) -> list[LateTensor]:
    return [a for a in tree_leaves((args, kwargs)) if isinstance(a, LateTensor)]


def _read(arguments: Any) -> Any:
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
        _refuse_gradient(*gradients)


def _refuse_gradient(*gradients: Any) -> None:
    raise LateTensorError(
        "Backward reached logits that the compiled call left out: a loss was made of them beside the model's own. "
        f"To differentiate it, {_SETTING}."
    )
