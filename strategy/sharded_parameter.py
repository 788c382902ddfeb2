"""A parameter that holds this rank's rows and refuses to be computed with as if it were whole."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from types import GetSetDescriptorType
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from thunder_memsave.compat import foreach_subclasses

TensorT = TypeVar("TensorT", bound=Tensor)

# These read a weight as a whole even where the shapes of a shard happen to fit.
_REFUSED = frozenset(
    {"linear", "bilinear", "embedding", "embedding_bag", "one_hot", "multi_head_attention_forward"}
    | {"matmul", "__matmul__", "__rmatmul__", "mm", "bmm", "mv", "dot", "addmm", "addmv", "addbmm"}
    | {"baddbmm", "einsum", "tensordot", "outer", "kron", "chain_matmul", "multi_dot"}
    | {"conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d"}
    | {"layer_norm", "rms_norm", "batch_norm", "group_norm", "instance_norm", "prelu"}
    | {"scaled_dot_product_attention", "t", "transpose", "permute", "swapaxes", "movedim"}
    # Random initialisation computes fans from the shape, and would fill the padding rows.
    | {"uniform_", "normal_", "xavier_uniform_", "xavier_normal_"}
    | {"kaiming_uniform_", "kaiming_normal_", "trunc_normal_", "orthogonal_"}
)
_REFUSED_ATTRIBUTES = frozenset({"T", "mT", "H", "mH"})
_STATE = ("unsharded_shape", "_first_row", "_num_real_rows", "_parameter_name")
_UNQUANTIZED = "unquantized_dtype"


class ShardedParameterError(ValueError):
    """A weight of which this rank holds only some rows was used as if it were whole."""


class ShardedParameter(nn.Parameter):
    """This rank's rows of a parameter: real rows first, then padding rows of zeros.

    Made in place by assigning `__class__`, so that the object keeps its identity. Optimizer
    operations, inspection and copies see a plain tensor; operations that would compute a model's
    forward with it raise `ShardedParameterError`. `p.data` is the way around that.
    """

    unsharded_shape: torch.Size
    _first_row: int
    _num_real_rows: int
    _parameter_name: str

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Runs `func` on plain tensors, or refuses it."""
        kwargs = kwargs or {}
        with torch._C.DisableTorchFunctionSubclass():
            _refuse_compute(func, args, kwargs)
            return func(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> ShardedParameter:
        """Copies the rows and what is known about the whole."""
        if id(self) not in memo:
            copied = nn.Parameter(self.data.clone(), self.requires_grad)
            memo[id(self)] = _rebuild(copied, self._state())
        copied_once: ShardedParameter = memo[id(self)]
        return copied_once

    def __reduce_ex__(self, protocol: object) -> tuple[Any, ...]:
        """Pickles as what it is: torch's own way gives a parameter that looks whole."""
        plain = nn.Parameter(self.data, self.requires_grad)
        return _rebuild, (plain, self._state())

    def _state(self) -> dict[str, Any]:
        state = {k.lstrip("_"): vars(self)[k] for k in _STATE}
        return {**state, _UNQUANTIZED: unquantized_dtype(self)}


def mark_sharded(
    p: nn.Parameter,
    *,
    unsharded_shape: torch.Size,
    first_row: int,
    num_real_rows: int,
    parameter_name: str,
) -> ShardedParameter:
    """Turns `p`, which already holds this rank's rows, into a sharded parameter in place."""
    p.__class__ = ShardedParameter
    assert isinstance(p, ShardedParameter)
    p.unsharded_shape = unsharded_shape
    p._first_row = first_row
    p._num_real_rows = num_real_rows
    p._parameter_name = parameter_name
    foreach_subclasses.allow(ShardedParameter)
    return p


def _rebuild(plain: nn.Parameter, state: dict[str, Any]) -> ShardedParameter:
    dtype = state.pop(_UNQUANTIZED)
    sharded = mark_sharded(plain, **state)
    if dtype is not None:
        mark_quantized(sharded, unquantized_dtype=dtype)
    return sharded


def mark_quantized(p: nn.Parameter, *, unquantized_dtype: torch.dtype) -> None:
    """Notes that `p`, sharded or not, holds fp8 numbers of a weight of this dtype."""
    setattr(p, _UNQUANTIZED, unquantized_dtype)


def unquantized_dtype(p: Tensor) -> torch.dtype | None:
    """The dtype of a weight of which `p` holds fp8 numbers; None: `p` holds the weight itself."""
    return vars(p).get(_UNQUANTIZED)


def is_sharded(p: Tensor) -> bool:
    """Whether `p` holds only this rank's rows of a parameter."""
    return isinstance(p, ShardedParameter)


def computing_operation(
    func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> str | None:
    """The name of an operation that computes with weights as a model's forward does; None: another one.

    Args:
        func: As `__torch_function__` gets it, and so are the others.
        args: What it is called with.
        kwargs: Likewise.
    """
    name = getattr(func, "__name__", "")
    if name == "__get__":
        name = _attribute_name(func)
        return name if name in _REFUSED_ATTRIBUTES else None
    if name not in _REFUSED and (_is_in_place(name) or not _mixes_shapes([*args, kwargs])):
        return None
    return name


def first_of(kind: type[TensorT], args: Sequence[Any]) -> TensorT | None:
    """The first tensor of this type among arguments, also within lists and mappings."""
    return next((a for a in _tensors(args) if isinstance(a, kind)), None)


def _refuse_compute(
    func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> None:
    name = computing_operation(func, args, kwargs)
    if name is None:
        return
    shard = first_of(ShardedParameter, [*args, kwargs])
    if shard is not None:
        raise ShardedParameterError(_message(name, shard))


def _attribute_name(func: Callable[..., Any]) -> str:
    descriptor = getattr(func, "__self__", None)
    return descriptor.__name__ if isinstance(descriptor, GetSetDescriptorType) else ""


def _is_in_place(name: str) -> bool:
    if name.startswith("__"):
        return name.startswith("__i") or name in ("__set__", "__setitem__")
    return name.endswith("_") or name.startswith("_foreach")


def _mixes_shapes(values: Sequence[Any]) -> bool:
    """Whether an activation, an index or a full tensor meets the shard: scalars do not count."""
    shapes = {t.shape for t in _tensors(values) if t.dim() > 0}
    return len(shapes) > 1


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _tensors(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors(item)


def _message(operation: str, p: ShardedParameter) -> str:
    return (
        f"{operation}() was asked to use {p._parameter_name!r} of shape "
        f"{tuple(p.unsharded_shape)} outside the compiled forward; this rank holds only "
        f"{p._num_real_rows} of its {p.unsharded_shape[0]} rows. Run it inside "
        "`with strategy.summon_full(module):`, on every rank, which gathers the whole weights."
    )
