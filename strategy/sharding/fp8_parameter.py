"""A whole weight of which only fp8 numbers are kept, and which refuses to be computed with without their scale."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from thunder_memsave.errors import ThunderMemsaveError
from thunder_memsave.sharding.row_operations import name_of
from thunder_memsave.sharding.sharded_parameter import (
    first_of,
    is_sharded,
    mark_quantized,
    tensors_in,
    unquantized_dtype,
)

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


class Fp8ParameterError(ThunderMemsaveError, ValueError):
    """A weight of which only fp8 numbers are kept was used as if it were the weight itself."""

    code = None  # the traceback shows who did


class Fp8Parameter(nn.Parameter):
    """The fp8 numbers of a weight that is not trained; their scale is a buffer of its linear.

    Made in place by assigning `__class__`, as a `ShardedParameter` is; a rank's rows of such a weight are one of those.
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
        """Runs `func` on plain tensors, or refuses it."""
        kwargs = kwargs or {}
        with torch._C.DisableTorchFunctionSubclass():
            name = _computing_operation(func, args, kwargs)
            found = None if name is None else first_of(Fp8Parameter, [*args, kwargs])
            if found is not None:
                raise Fp8ParameterError(_message(str(name), found))
            return func(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Fp8Parameter:
        """Copies the numbers and what is known of the weight."""
        if id(self) not in memo:
            memo[id(self)] = _rebuild(self.data.clone(), *self._state())
        copied_once: Fp8Parameter = memo[id(self)]
        return copied_once

    def __reduce_ex__(self, protocol: object) -> tuple[Any, ...]:
        """Pickles as what it is: torch's own way gives a parameter that looks like a weight."""
        return _rebuild, (self.data, *self._state())

    def _state(self) -> tuple[str, torch.dtype]:
        dtype = unquantized_dtype(self)
        assert dtype is not None
        return self._parameter_name, dtype


def hold_fp8(p: nn.Parameter, values: Tensor, *, name: str) -> None:
    """Let `p` hold fp8 numbers, of its rows where it is sharded, instead of the weight, which is freed.

    Args:
        p: Not trained. The object stays, with its attributes.
        values: fp8, in the shape of `p`.
        name: Dotted, for messages.
    """
    dtype = p.dtype
    p.data = values
    mark_quantized(p, unquantized_dtype=dtype)
    if not is_sharded(p):
        mark_whole(p, name=name)


def mark_whole(p: nn.Parameter, *, name: str) -> None:
    """Turn `p`, which holds the fp8 numbers of a whole weight, into an `Fp8Parameter` in place."""
    p.__class__ = Fp8Parameter
    assert isinstance(p, Fp8Parameter)
    p._parameter_name = name


def _rebuild(values: Tensor, name: str, dtype: torch.dtype) -> Fp8Parameter:
    p = nn.Parameter(values, requires_grad=False)
    mark_quantized(p, unquantized_dtype=dtype)
    mark_whole(p, name=name)
    assert isinstance(p, Fp8Parameter)
    return p


def _computing_operation(
    func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> str | None:
    """The name of an operation that computes with weights as a model's forward does; None: another one.

    Args:
        func: As `__torch_function__` gets it, and so are the others.
        args: What it is called with.
        kwargs: Likewise.
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
    """Whether an activation, an index or a full tensor meets the shard: scalars do not count."""
    shapes = {t.shape for t in tensors_in(values) if t.dim() > 0}
    return len(shapes) > 1


def _message(operation: str, p: Fp8Parameter) -> str:
    return (
        f"{operation}() was asked to use {p._parameter_name!r} outside the compiled forward, and of that weight only "
        "fp8 numbers are kept (fp8.frozen_weights: fp8), which mean nothing without their scale. Call the module that "
        "fabric.setup() returned, or set fp8.frozen_weights to 'compute', which keeps the weight too."
    )
