"""Says which operators may be fused: those whose results are the same bits in whichever kernel they are computed.

IEEE 754 defines the results of sums, products, quotients and comparisons, and moving numbers does not change them.
Others (`exp`, `tanh`, `sqrt`, `gelu`, ...) differ in their last bit between PyTorch's kernels and inductor's, and
reductions in the order of their terms; they stay as they are, so that no bit depends on what is fused. On CUDA some,
and quotients, are written in formulas that have PyTorch's bits (`functions.py`), and a few on a CPU, where PyTorch
vectorizes all of them; they fuse where the device that is there was asked (`same_bits.py`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from enum import Enum

import torch
from thunder.core import devices, dtypes
from thunder.core.symbol import BoundSymbol
from torch._ops import OpOverload

from thunder_memsave.fusion import functions, inductor, same_bits
from thunder_memsave.measure.layouts import Layout, Value, is_contiguous
from thunder_memsave.measure.op_profile import OpProfile
from thunder_memsave.ops import aten_operators
from thunder_memsave.ops.kernel_calls import own_executor
from thunder_memsave.passes.symbols import is_cast

_aten = torch.ops.aten

EXACT: frozenset[OpOverload] = frozenset(
    {
        *(_aten.add.Tensor, _aten.sub.Tensor, _aten.mul.Tensor, _aten.div.Tensor),
        *(_aten.neg.default, _aten.abs.default),
        *(_aten.where.self, _aten.masked_fill.Scalar, _aten.native_dropout_backward.default),
        *(_aten.relu.default, _aten.threshold_backward.default),
        *(_aten.eq.Scalar, _aten.ne.Scalar, _aten.gt.Scalar, _aten.ge.Scalar),
        *(_aten.lt.Scalar, _aten.le.Scalar, _aten.eq.Tensor, _aten.ne.Tensor),
        *(_aten.gt.Tensor, _aten.ge.Tensor, _aten.lt.Tensor, _aten.le.Tensor),
        *(_aten.logical_and.default, _aten.logical_or.default, _aten.logical_not.default),
        *(_aten.bitwise_and.Tensor, _aten.bitwise_or.Tensor, _aten.bitwise_not.default),
        *(_aten.cat.default, _aten.clone.default, _aten._to_copy.default),
        *(_aten.slice_backward.default, _aten.select_backward.default),
    }
)
_VIEWS: frozenset[OpOverload] = frozenset(
    {
        *(_aten.view.default, _aten._unsafe_view.default, _aten.t.default, _aten.permute.default),
        *(_aten.transpose.int, _aten.slice.Tensor, _aten.select.int, _aten.expand.default),
        *(_aten.unsqueeze.default, _aten.squeeze.dim, _aten.squeeze.dims, _aten.alias.default),
        *(_aten.detach.default, _aten.split.Tensor, _aten.split_with_sizes.default),
        *(_aten.unbind.int, _aten.chunk.default),
    }
)
_RESHAPES = (_aten.view.default, _aten._unsafe_view.default)
EXACT_ON_CUDA = EXACT - {_aten.div.Tensor}
EXACT_ON_CPU = EXACT | {_aten.rsqrt.default}
"""There it is, of float32, a square root and a quotient, each rounded as IEEE 754 says."""
ROUNDING_NUMBERS: frozenset[OpOverload] = frozenset(
    {
        *(_aten.add.Tensor, _aten.sub.Tensor, _aten.threshold_backward.default),
        *(_aten.eq.Scalar, _aten.ne.Scalar, _aten.gt.Scalar, _aten.ge.Scalar),
        *(_aten.lt.Scalar, _aten.le.Scalar),
    }
)
"""PyTorch's own kernels round a number to the dtype of their tensor, those of sums on a CPU alone; inductor's do not,
those of comparisons before PyTorch 2.13."""
_FACTORS: frozenset[OpOverload] = frozenset({_aten.mul.Tensor, _aten.div.Tensor})
"""PyTorch's own kernels take such a number as it is; inductor's, of some versions, round it."""
_GRAIN = 32_768
"""Numbers of a thread at least (`at::internal::GRAIN_SIZE`)."""
_VECTORS = 64
"""Numbers of two vectors of AVX-512, of 16 bits each: PyTorch's loops take two at a time."""
_NARROW = frozenset({torch.bfloat16, torch.float16})
_DTYPES = frozenset({torch.float32, torch.bfloat16, torch.float16, torch.bool})


class Kind(Enum):
    """The part that a symbol has in a run."""

    VIEW = "view"
    """Moves no data: it ends no run."""
    FUSES = "fuses"
    OTHER = "other"
    """Ends a run."""


def is_pure(bsym: BoundSymbol, profile: OpProfile) -> bool:
    """Return whether it is an operator of PyTorch, a cast or a kernel of ours, that does nothing but make results."""
    operator = aten_operators.operator_of(bsym)
    is_aten = operator is not None and operator.namespace == "aten"
    if not (is_aten or is_cast(bsym) or bsym.sym.executor is own_executor):
        return False
    return not (
        profile.written or profile.changes_device or profile.is_random or profile.is_collective
    )


def reshapes(bsym: BoundSymbol) -> bool:
    """Return whether a view has all numbers of what it views, in their order."""
    return aten_operators.operator_of(bsym) in _RESHAPES


def kind_of(bsym: BoundSymbol, profile: OpProfile, operands: Sequence[Value | None]) -> Kind:
    """Return what a symbol is to a run.

    Args:
        bsym: A symbol of a trace that runs, no bookkeeping.
        profile: Its profile on the layouts of the trace.
        operands: A value for each of its `flat_proxy_args`.
    """
    operator = aten_operators.operator_of(bsym)
    layouts = [v.layout for v in (*operands, *profile.results) if v is not None]
    is_function = not is_cast(bsym) and _is_function(bsym, operator, layouts)
    if not (is_cast(bsym) or is_function or operator in EXACT_ON_CPU or operator in _VIEWS):
        return Kind.OTHER
    results = [r for r in profile.results if r is not None]
    if not is_pure(bsym, profile) or not results:
        return Kind.OTHER
    if any(r.layout.dtype not in _dtypes(bsym) for r in results):
        return Kind.OTHER
    made = [r.storage >= profile.num_argument_storages for r in results]
    if not any(made):
        return Kind.VIEW if profile.num_argument_storages == 1 else Kind.OTHER
    is_exact = is_cast(bsym) or is_function or _is_exact(bsym, operator)
    return Kind.FUSES if all(made) and is_exact else Kind.OTHER


def _dtypes(bsym: BoundSymbol) -> frozenset[torch.dtype]:
    """Return the dtypes of results whose numbers inductor rounds as the operator does."""
    keeps = inductor.keeps_rounding(bsym.flat_proxy_outs[0].device.type)
    return _DTYPES if keeps else _DTYPES - _NARROW


def _is_exact(bsym: BoundSymbol, operator: OpOverload | None) -> bool:
    """Return whether nothing of the call makes it inexact: sums with a factor round once or twice."""
    if bsym.kwargs.get("alpha", 1) != 1:
        return False
    kinds = {(p.device.type, dtypes.to_torch_dtype(p.dtype)) for p in bsym.flat_proxy_outs}
    if operator not in EXACT_ON_CUDA and any(type_ != "cpu" for type_, _ in kinds):
        return False
    if operator not in EXACT and kinds != {("cpu", torch.float32)}:
        return False
    rounding = ROUNDING_NUMBERS | (_FACTORS if inductor.rounds_factors() else frozenset())
    return operator not in rounding or _rounds_no_number(bsym)


def _is_function(bsym: BoundSymbol, operator: OpOverload | None, layouts: Sequence[Layout]) -> bool:
    """Return whether it is a function of tensors of one dtype, that was compared on their device."""
    tensors = [*bsym.flat_proxy_args, *bsym.flat_proxy_outs]
    if operator is None or len(kinds := {(p.dtype, p.device) for p in tensors}) != 1:
        return False
    ((dtype, device),) = kinds
    if not functions.has_formula(operator, bsym.kwargs, device.type):
        return False
    if device.type == "cpu" and not _is_vectorized(layouts):
        return False
    place, of = devices.to_torch_device(device), dtypes.to_torch_dtype(dtype)
    return of in _DTYPES and same_bits.has_same_bits(operator, of, place)


def _is_vectorized(layouts: Sequence[Layout]) -> bool:
    """Return whether PyTorch's CPU kernel takes whole vectors of all numbers, as inductor's code does.

    What is left over in a thread's part it computes number by number, by the C library (ATen/native/cpu/Loops.h).
    """
    if len({layout.shape for layout in layouts}) != 1 or not all(map(is_contiguous, layouts)):
        return False
    num = math.prod(layouts[0].shape)
    num_threads = min(torch.get_num_threads(), max(1, math.ceil(num / _GRAIN)))
    return num % _VECTORS == 0 and math.ceil(num / num_threads) % _VECTORS == 0


def _rounds_no_number(bsym: BoundSymbol) -> bool:
    """Return whether the numbers among the operands are numbers of 16 bits, where the tensors are of 16-bit numbers."""
    narrow = {dtypes.to_torch_dtype(p.dtype) for p in bsym.flat_proxy_args} & _NARROW
    numbers = [n for n in bsym.args if isinstance(n, float | int)]
    return all(torch.tensor(n, dtype=dtype).item() == n for dtype in narrow for n in numbers)
