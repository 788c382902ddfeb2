"""Decides which linears of a module run in fp8, with a reason for each that does not."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

import torch
from torch import nn

from thunder_memsave.fp8.recipe import NEEDS_BLACKWELL, RecipeName
from thunder_memsave.settings.problems import ConfigError, suggestion
from thunder_memsave.sharding.sharded_parameter import unquantized_dtype

FEATURE_MULTIPLE = 16
"""Required divisor of a linear's in and out features: fp8 kernels read 16 bytes at a time (cuBLASLt, and
TransformerEngine's `assert_dim_for_fp8_exec`). It holds on the CPU too, so that plans and runs agree across devices."""

_MULTIPLE_ON_BLACKWELL = 32
"""The same for the recipes `mxfp8` and `nvfp4`: a block of `mxfp8`, which TransformerEngine does not cut
(`MXFP8Quantizer::create_tensor` in transformer_engine/pytorch/csrc/quantizer.cpp), along either dim of a weight; and 16
bytes of `nvfp4` (`qgemm` in transformer_engine/pytorch/custom_recipes/reference_nvfp4.py)."""

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_DEFAULT_SKIPPED = "lm_head"
_NUM_SHOWN = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class Choice:
    """The decision on one linear."""

    name: str
    """Dotted name in the module."""
    reason: str | None
    """The reason why it does not run in fp8; None: it does."""


def feature_multiple(recipe: RecipeName) -> int:
    """Return the required divisor of in and out features of linears in fp8."""
    return _MULTIPLE_ON_BLACKWELL if recipe in NEEDS_BLACKWELL else FEATURE_MULTIPLE


def choose(
    module: nn.Module, *, skip_modules: Sequence[str], multiple: int = FEATURE_MULTIPLE
) -> tuple[Choice, ...]:
    """Decide for each linear of `module`, in the module's order.

    Args:
        module: The model.
        skip_modules: Names of modules, or patterns such as `*.gate`, whose linears do not run in fp8: the whole dotted
            name, or its end, such as `lm_head`.
        multiple: The recipe's `feature_multiple`.

    Raises:
        ConfigError: A pattern names no module of this model.
    """
    _refuse_idle_patterns(module, skip_modules)
    return tuple(
        Choice(name=name, reason=_why_not(name, linear, skip_modules, multiple))
        for name, linear in module.named_modules()
        if isinstance(linear, nn.Linear)
    )


def report(choices: Sequence[Choice]) -> str:
    """Describe the choices in one paragraph: how many linears run in fp8, and why the others do not."""
    chosen, others = by_reason(choices)
    lines = [f"{len(chosen)} of {len(choices)} linears run in fp8"]
    lines += [f"not {shown(names, _NUM_SHOWN)}: {reason}" for reason, names in others.items()]
    return "; ".join(lines) + "."


def by_reason(choices: Sequence[Choice]) -> tuple[list[str], dict[str, list[str]]]:
    """Return the names of the linears in fp8, and those of the others by reason."""
    chosen = [c.name for c in choices if c.reason is None]
    others: dict[str, list[str]] = {}
    for choice in choices:
        if choice.reason is not None:
            others.setdefault(choice.reason, []).append(choice.name)
    return chosen, others


def shown(names: Sequence[str], num_shown: int) -> str:
    """Join the first names, with the number of further ones."""
    more = len(names) - num_shown
    first = ", ".join(names[:num_shown])
    return f"{first} and {more} more" if more > 0 else first


def _why_not(name: str, linear: nn.Linear, patterns: Sequence[str], multiple: int) -> str | None:
    if (pattern := next((p for p in patterns if _names(p, name)), None)) is not None:
        return f"skip_modules has {pattern!r}"
    if type(linear) is not nn.Linear:
        return f"it is a {type(linear).__name__}, which may compute otherwise than nn.Linear"
    if "weight" not in linear._parameters:
        return "its weight is computed (spectral_norm or the like), not a parameter of its own"
    kept_as = unquantized_dtype(linear.weight) or linear.weight.dtype
    if kept_as not in _DTYPES:
        dtype = str(kept_as).removeprefix("torch.")
        return f"its weight is {dtype}, and fp8 is for float32, bfloat16 and float16"
    features = (linear.in_features, linear.out_features)
    if any(n % multiple for n in features):
        return f"{features[0]} -> {features[1]} features are no multiples of {multiple}"
    return None


def _names(pattern: str, module: str) -> bool:
    """Return whether a pattern names the module or an enclosing one, by the whole name or its end."""
    return any(
        fnmatchcase(name, pattern) or fnmatchcase(name, f"*.{pattern}")
        for name in _with_ancestors(module)
    )


def _with_ancestors(module: str) -> Iterator[str]:
    while module:
        yield module
        module = module.rpartition(".")[0]


def _refuse_idle_patterns(module: nn.Module, patterns: Sequence[str]) -> None:
    names = [name for name, _ in module.named_modules() if name]
    for pattern in patterns:
        if pattern != _DEFAULT_SKIPPED and not any(_names(pattern, name) for name in names):
            raise ConfigError(
                f"fp8.skip_modules has {pattern!r}, which names no module of this model; '*' stands for any part of "
                f"a name{suggestion(pattern, _ends(names, pattern))}",
                key="fp8.skip_modules",
            )


def _ends(names: Sequence[str], pattern: str) -> list[str]:
    """Return the ends of names with as many parts as the pattern."""
    num_parts = pattern.count(".") + 1
    return list(dict.fromkeys(".".join(name.split(".")[-num_parts:]) for name in names))
