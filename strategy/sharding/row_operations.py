"""Lists the operations that are correct if each rank applies them to its rows of a parameter.

They are functions of each row's elements alone. It is an allowlist: any other operation is refused, because a sum over
this rank's rows, for example, is a wrong number and no error.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from enum import Enum, auto
from typing import Any

import torch
from torch import Tensor, nn
from torch._ops import OpOverload


class Kind(Enum):
    """The effect of an operation on rows, and the type of its result."""

    INSPECTS = auto()
    """Reads no element, or makes a tensor like this one: the result is a plain value."""
    COPIES = auto()
    """Copies the rows: the result is marked as rows, even if autograd records the copy."""
    COMPUTES = auto()
    """Computes rows if the operands fit; a gradient of the result would be that of these rows alone."""
    ADDS = auto()
    """Like COMPUTES, but the result has the type of the first operand: a gradient plus rows stays a gradient."""
    COMPARES = auto()
    """Like COMPUTES, without a gradient."""
    CHANGES = auto()
    """Like COMPUTES, in place: the result is the changed operand."""
    DIFFERENTIATES = auto()
    """Is `torch.autograd.grad`: allowed unless rows are among its outputs."""


_ATTRIBUTES = (
    "_backward_hooks _base _cdata _grad _grad_fn _has_symbolic_sizes_strides _post_accumulate_grad_hooks "
    "_python_dispatch _version data device dtype grad grad_dtype grad_fn is_cpu is_cuda is_ipu is_leaf is_maia is_meta "
    "is_mkldnn is_mps is_mtia is_nested is_quantized is_sparse is_sparse_csr is_vulkan is_xla is_xpu itemsize layout "
    "name names nbytes ndim output_nr requires_grad retains_grad shape volatile"
)
_INSPECTS = (
    "__repr__ __str__ __format__ __hash__ __len__ __dir__ __setstate__ _is_view _typed_storage can_cast "
    "constant_ _clear_non_serializable_cached_data _has_compatible_shallow_copy_type dense_dim dim element_size "
    "empty_like "
    "full_like get_device has_names is_coalesced is_complex is_conj is_contiguous is_distributed is_floating_point "
    "is_inference is_neg is_pinned is_same_size is_set_to is_shared is_signed is_tensor ndimension nelement new_empty "
    "new_empty_strided new_full new_ones new_zeros numel ones_like register_hook register_post_accumulate_grad_hook "
    "requires_grad_ result_type retain_grad share_memory_ size storage storage_offset storage_type stride "
    "untyped_storage zeros_like"
)
_COPIES = (
    "__copy__ __deepcopy__ __pos__ alias alias_copy bfloat16 bool byte char clone conj conj_physical contiguous cpu "
    "cuda detach detach_ detach_copy double float half imag int long pin_memory positive real resolve_conj resolve_neg "
    "short to type type_as view_as_complex view_as_real xpu"
)
_UNARY = (
    "abs absolute acos acosh angle arccos arcsin arctan asin asinh atan atanh ceil clamp clamp_max clamp_min clip cos "
    "cosh deg2rad digamma erf erfc erfinv exp exp2 expm1 fix floor frac i0 lgamma log log10 log1p log2 logit "
    "nan_to_num neg negative rad2deg reciprocal round rsqrt sgn sigmoid sign sin sinc sinh sqrt square tan tanh trunc"
)
_BINARY = (
    "addcdiv addcmul arctan2 atan2 bitwise_and bitwise_not bitwise_or bitwise_xor copysign div divide float_power "
    "floor_divide fmax fmin fmod heaviside hypot ldexp logaddexp lerp masked_fill maximum minimum mul multiply "
    "nextafter pow remainder rsub true_divide where xlogy"
)
_OPERATORS = (
    "abs and floordiv div idiv invert mod mul neg or pow rand rdiv rfloordiv rmod rmul ror rpow rsub rtruediv rxor "
    "truediv xor"
)
_IN_PLACE_OPERATORS = "add and div floordiv idiv mod mul or pow sub truediv xor"
_ADDS = "__add__ __radd__ __sub__ add sub subtract _foreach_add _foreach_sub"
_COMPARES = (
    "__eq__ __ge__ __gt__ __le__ __lt__ __ne__ eq ge greater greater_equal gt isclose isfinite isinf isnan isneginf "
    "isposinf isreal le less less_equal logical_and logical_not logical_or logical_xor lt ne not_equal signbit"
)
_CHANGES = "copy_ eq_ fill_ ge_ gt_ le_ logical_and_ logical_not_ logical_or_ logical_xor_ lt_ ne_ relu_ zero_"
_OWNERS = (Tensor, torch, nn.init)


def kind_of(operation: Callable[..., Any]) -> Kind | None:
    """Return the kind of a function that `__torch_function__` got; None: it is not known to be correct on rows."""
    if isinstance(operation, OpOverload):
        # From a dispatch mode, which is asked about what autograd adds to a gradient too.
        name = operation.overloadpacket.__name__
        return _KINDS.get(getattr(Tensor, name, None) or getattr(torch, name, None))
    return _KINDS.get(operation)


def name_of(operation: Callable[..., Any]) -> str:
    """Return the operation's name for error messages."""
    name = str(getattr(operation, "__name__", operation))
    if name == "__get__":
        return str(getattr(getattr(operation, "__self__", None), "__name__", name))
    return name


def _kinds() -> dict[Any, Kind]:
    computes = f"{_UNARY} {_BINARY}".split()
    changes = [*_CHANGES.split(), *(f"{n}_" for n in (*computes, "add", "sub", "subtract"))]
    foreach = [f"_foreach_{n}" for n in computes]
    named = {
        Kind.INSPECTS: _INSPECTS.split(),
        Kind.COPIES: [*_COPIES.split(), "_foreach_clone"],
        Kind.COMPUTES: [*computes, *foreach, *(f"__{n}__" for n in _OPERATORS.split())],
        Kind.ADDS: _ADDS.split(),
        Kind.COMPARES: _COMPARES.split(),
        Kind.CHANGES: [
            *changes,
            *(f"_foreach_{n}" for n in changes),
            *(f"__i{n}__" for n in _IN_PLACE_OPERATORS.split()),
            *(f"_fused_{n}_" for n in ("adagrad", "adam", "adamw", "sgd")),
            "_amp_foreach_non_finite_check_and_unscale_",
        ],
    }
    kinds: dict[Any, Kind] = {torch.autograd.grad: Kind.DIFFERENTIATES}
    kinds.update((found, kind) for kind, names in named.items() for found in functions_of(names))
    kinds.update((accessor, Kind.INSPECTS) for accessor in _accessors(_ATTRIBUTES.split()))
    kinds.update((accessor, Kind.COPIES) for accessor in _accessors(["real", "imag"]))
    return kinds


def functions_of(names: list[str]) -> Iterator[Any]:
    """Yield the functions of these names that this version of torch has."""
    for name in names:
        for owner in _OWNERS:
            found = getattr(owner, name, None)
            # Not methods of `object`, which are no tensor operations, nor dtypes such as `torch.long`.
            if callable(found) and found is not getattr(object, name, None):
                yield found


def _accessors(names: list[str]) -> Iterator[Any]:
    for name in names:
        attribute = getattr(Tensor, name, None)
        for accessor in ("__get__", "__set__", "__delete__"):
            if attribute is not None and hasattr(attribute, accessor):
                yield getattr(attribute, accessor)


_KINDS = _kinds()
