"""A parameter that holds only a weight's stored numbers, and refuses operations that would take them for it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from thunder_memsave.distributed.data_parallel import DataParallel
from thunder_memsave.errors import ThunderMemsaveError
from thunder_memsave.settings.frozen_format import BytesFormat, setting_of
from thunder_memsave.sharding.operands import first_of, tensors_in
from thunder_memsave.sharding.row_operations import name_of
from thunder_memsave.sharding.rows import mark, whole_shape
from thunder_memsave.sharding.sharded_parameter import (
    StoredWeight,
    is_sharded,
    mark_quantized,
    stored_weight,
)

# These read a weight as a whole even if the shapes of a shard happen to fit.
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


class Fp8ParameterError(ThunderMemsaveError, ValueError):
    """The stored numbers of a weight were used as if they were the weight."""

    code = None  # the traceback shows the user


class Fp8Parameter(nn.Parameter):
    """The fp8 numbers of a frozen weight, whose scale is a buffer of its linear; or its bytes in another format.

    Made in place by assigning `__class__`, like `ShardedParameter`; a shard of such a weight is a `ShardedParameter`.
    """

    _parameter_name: str

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run `func` on plain tensors, or refuse it."""
        kwargs = kwargs or {}
        with torch._C.DisableTorchFunctionSubclass():
            name = _computing_operation(func, args, kwargs)
            found = None if name is None else first_of(Fp8Parameter, [*args, kwargs])
            if found is not None:
                raise Fp8ParameterError(_message(str(name), found))
            return func(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Fp8Parameter:
        """Copy the numbers and the weight's attributes."""
        if id(self) not in memo:
            memo[id(self)] = _rebuild(self.data.clone(), *self._state())
        copied_once: Fp8Parameter = memo[id(self)]
        return copied_once

    def __reduce_ex__(self, protocol: object) -> tuple[Any, ...]:
        """Pickle as stored numbers: torch's own way gives a parameter that looks like a weight."""
        return _rebuild, (self.data, *self._state())

    def _state(self) -> tuple[str, StoredWeight]:
        stored = stored_weight(self)
        assert stored is not None
        return self._parameter_name, stored


def hold_fp8(p: nn.Parameter, values: Tensor, *, name: str) -> None:
    """Replace the weight, or shard, that `p` holds by its fp8 numbers, and free it.

    Args:
        p: A frozen parameter. The object stays, with its attributes.
        values: fp8, in the shape of `p`.
        name: Dotted name, for messages.
    """
    mark_quantized(p, StoredWeight(format="fp8", dtype=p.dtype, shape=whole_shape(p)))
    p.data = values
    if not is_sharded(p):
        mark_whole(p, name=name)


def hold_bytes(
    p: nn.Parameter,
    stored: Tensor,
    *,
    kept_in: BytesFormat,
    whole: torch.Size,
    name: str,
    data_parallel: DataParallel | None,
) -> None:
    """Replace the weight, or shard, that `p` holds by its bytes in a format, and free it.

    Args:
        p: A frozen parameter. The object stays, with its attributes.
        stored: uint8: all bytes, or of a shard this rank's rows of them, padded.
        kept_in: The format.
        whole: The shape of the bytes of the whole weight.
        name: Dotted name, for messages.
        data_parallel: The ranks that share the bytes, if `p` is a shard.
    """
    mark_quantized(p, StoredWeight(format=kept_in, dtype=p.dtype, shape=whole_shape(p)))
    p.data = stored
    if is_sharded(p):
        assert data_parallel is not None
        mark(p, name, whole, data_parallel)
    else:
        mark_whole(p, name=name)


def mark_whole(p: nn.Parameter, *, name: str) -> None:
    """Turn `p`, which holds the numbers of a whole weight, into an `Fp8Parameter` in place."""
    p.__class__ = Fp8Parameter
    assert isinstance(p, Fp8Parameter)
    p._parameter_name = name


def _rebuild(values: Tensor, name: str, stored: StoredWeight) -> Fp8Parameter:
    p = nn.Parameter(values, requires_grad=False)
    mark_quantized(p, stored)
    mark_whole(p, name=name)
    assert isinstance(p, Fp8Parameter)
    return p


def _computing_operation(
    func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> str | None:
    """Return the name of an operation that computes with weights like a model's forward; None for any other.

    Args:
        func: The function that `__torch_function__` got.
        args: Its positional arguments.
        kwargs: Its keyword arguments.
    """
    name = name_of(func)
    if name in _REFUSED_ATTRIBUTES:
        return name
    if name not in _REFUSED and (_is_in_place(name) or not _mixes_shapes([*args, kwargs])):
        return None
    return name


def _is_in_place(name: str) -> bool:
    if name.startswith("__"):
        return name.startswith("__i") or name in ("__set__", "__setitem__")
    return name.endswith("_") or name.startswith("_foreach")


def _mixes_shapes(values: Sequence[Any]) -> bool:
    """Return whether tensors of several shapes meet, such as an activation and a weight; scalars do not count."""
    shapes = {t.shape for t in tensors_in(values) if t.dim() > 0}
    return len(shapes) > 1


def _message(operation: str, p: Fp8Parameter) -> str:
    stored = stored_weight(p)
    if stored is not None and stored.format != "fp8":
        setting = setting_of(stored.format)
        return (
            f"{operation}() was asked to use {p._parameter_name!r} outside the compiled forward, but only the bytes of "
            f"that weight are kept (frozen_weights: {setting}). Call the module that fabric.setup() returned, or "
            "leave frozen_weights out, which keeps the weight itself."
        )
    return (
        f"{operation}() was asked to use {p._parameter_name!r} outside the compiled forward, but only fp8 numbers of "
        "that weight are kept (fp8.frozen_weights: fp8), which mean nothing without their scale. Call the module that "
        "fabric.setup() returned, or set fp8.frozen_weights to 'compute', which keeps the weight too."
    )
