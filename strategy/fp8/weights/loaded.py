"""Makes fp8 linears refuse entries of a `state_dict` that do not fit: fp8 numbers for a weight, or the reverse."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from typing import Any

from torch import Tensor, nn

from thunder_memsave.aten.record import FP8_DTYPES
from thunder_memsave.sharding.sharded_parameter import unquantized_dtype

SCALE_NAME = "fp8_weight"
"""Name of the submodule of each linear that holds its weight's scale, so that a `state_dict` has it."""


def weight_of_scale(name: str) -> str | None:
    """Return the name of the weight whose scale this entry of a `state_dict` is; None: it is no such scale."""
    prefix, dot, last = name.rpartition(f"{SCALE_NAME}.")
    is_scale = last == "scale_inv" and bool(dot) and (not prefix or prefix.endswith("."))
    return f"{prefix}weight" if is_scale else None


def which_half(*, has_scale: bool) -> str:
    """Describe a `state_dict` that has only one of the two, for messages."""
    return "a scale without its fp8 numbers" if has_scale else "fp8 numbers without their scale"


def refuse_other_numbers(linear: nn.Linear) -> None:
    """Make `load_state_dict` of the linear and of enclosing modules refuse values that do not fit.

    PyTorch copies anything of the right shape, even fp8 numbers without their scale, or weights cast to fp8. So loading
    raises a ValueError, even with `strict=False`. A copy of such a linear has the hook already.
    """
    hooks = linear._load_state_dict_pre_hooks.values()
    if all(getattr(hook, "hook", None) is not _refuse for hook in hooks):
        linear.register_load_state_dict_pre_hook(_refuse)


def _refuse(
    module: nn.Module,
    state_dict: MutableMapping[str, Any],
    prefix: str,
    metadata: Mapping[str, Any],
    *_: object,
) -> None:
    weight = module._parameters["weight"]
    assert weight is not None
    value = state_dict.get(f"{prefix}weight")
    has_scale = f"{prefix}{SCALE_NAME}.scale_inv" in state_dict
    if unquantized_dtype(weight) is None:
        reason = _why_no_weight(value)
    else:
        reason = _why_no_numbers(value, weight, has_scale=has_scale)
    if reason is not None:
        raise ValueError(f"{prefix}weight: {reason}")


def _why_no_weight(value: object) -> str | None:
    if not isinstance(value, Tensor) or value.dtype not in FP8_DTYPES:
        return None
    return (
        f"dtype {value.dtype} was given, but the model keeps the weight itself (fp8.frozen_weights: compute, or the "
        "weight is trained), and fp8 numbers mean nothing without their scale; set the model up like the one that "
        "saved them, with fp8.frozen_weights 'fp8', or give it weights"
    )


def _why_no_numbers(value: object, weight: Tensor, *, has_scale: bool) -> str | None:
    if isinstance(value, Tensor) and value.dtype != weight.dtype:
        return (
            f"dtype {value.dtype} was given, and the model keeps only fp8 numbers of it (fp8.frozen_weights: fp8), "
            f"whose scale is in {SCALE_NAME}.scale_inv; load what such a model saved, or give "
            f"{unquantized_dtype(weight)} weights to load_on_setup() before fabric.setup(), which casts them"
        )
    if has_scale != (value is not None):
        return (
            f"the state_dict has {which_half(has_scale=has_scale)} ({SCALE_NAME}.scale_inv), and the model keeps "
            "the two and nothing else of it (fp8.frozen_weights: fp8); load both, or neither"
        )
    return None
