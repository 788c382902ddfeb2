"""Casts tensors on the CPU as `torch.autocast` casts those on CUDA, for plans made where there is no such device.

The two lists differ: on CUDA layer norms, softmax, sums and powers are computed in float32, on the CPU in the dtype of
their inputs; on the CPU pooling in three dimensions and FFTs are in float32. Lists: ATen/autocast_mode.h, torch 2.13.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor
from torch._C import DispatchKey, DispatchKeySet
from torch.library import Library, fallthrough_kernel
from torch.utils._pytree import tree_map

LOWER_PRECISION = (
    *("_convolution", "convolution", "addmv", "addr", "mv", "einsum", "chain_matmul"),
    *("linalg_multi_dot", "_thnn_fused_lstm_cell", "_thnn_fused_gru_cell", "lstm_cell", "gru_cell"),
    *("rnn_tanh_cell", "rnn_relu_cell", "_scaled_dot_product_flash_attention"),
)
"""Operators whose arguments CUDA casts to autocast's dtype, and the CPU does not."""

IN_FLOAT32 = (
    *("acos", "asin", "cosh", "erfinv", "exp", "expm1", "log", "log10", "log2", "log1p"),
    *("reciprocal", "rsqrt", "sinh", "tan", "pow.Tensor_Scalar", "pow.Tensor_Tensor", "pow.Scalar"),
    *("softplus", "layer_norm", "native_layer_norm", "rms_norm", "group_norm"),
    *("frobenius_norm.dim", "nuclear_norm", "nuclear_norm.dim", "cosine_similarity"),
    *("dist", "pdist", "renorm", "logsumexp"),
    *(f"upsample_nearest{n}d" for n in (1, 2, 3)),
    *(f"_upsample_nearest_exact{n}d" for n in (1, 2, 3)),
    *("upsample_linear1d", "upsample_bilinear2d", "_upsample_bilinear2d_aa"),
    *("upsample_trilinear3d", "upsample_bicubic2d", "_upsample_bicubic2d_aa"),
)
"""Operators whose arguments CUDA casts to float32, and the CPU does not."""

TO_FLOAT32 = (
    *("softmax.int", "log_softmax.int", "cumprod", "cumsum", "sum", "sum.dim_IntList"),
    *("linalg_vector_norm", "linalg_matrix_norm", "linalg_matrix_norm.str_ord"),
)
"""Operators that CUDA asks for a result in float32 unless they are asked for another, and the CPU does not."""

NORMS = {"norm.Scalar": "ScalarOpt_dtype", "norm.ScalarOpt_dim": "ScalarOpt_dim_dtype"}
"""Operators for which CUDA calls an overload with a dtype, float32."""

ALIKE_ON_THE_CPU = (
    *("conv1d.padding", "conv2d.padding", "conv3d.padding", "cat", "stack", "index_copy"),
    *("_addmm_activation", "mkldnn_rnn_layer", "_native_multi_head_attention"),
)
"""Operators that only the CPU lists; on CUDA what they call is cast, or they promote dtypes themselves."""

_CASTABLE = (torch.float32, torch.float16, torch.bfloat16)
_AUTOCAST = DispatchKeySet(DispatchKey.AutocastCPU)


@contextmanager
def autocast_of_cuda(dtype: torch.dtype) -> Iterator[None]:
    """Autocast tensors on the CPU to `dtype` as CUDA's autocast does.

    Operators' kernels are replaced for the whole process as long as the context is open.
    """
    with ExitStack() as stack:
        library = Library("aten", "IMPL")
        stack.callback(library._destroy)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Warning only once for all operators")
            for name, kernel in _kernels(dtype).items():
                library.impl(name, kernel, "AutocastCPU")
        stack.enter_context(torch.autocast("cpu", dtype=dtype))
        yield


def cpu_only() -> frozenset[str]:
    """Return the operators that autocast treats on the CPU only."""
    cpu, cuda = (
        torch._C._dispatch_get_registrations_for_dispatch_key(key)
        for key in ("AutocastCPU", "AutocastCUDA")
    )
    return frozenset(name.removeprefix("aten::") for name in {*cpu} - {*cuda})


def _kernels(dtype: torch.dtype) -> Mapping[str, Callable[..., Any]]:
    existing = torch._C._dispatch_get_registrations_for_dispatch_key("AutocastCUDA")
    kernels = {
        **{name: _casting(_overload(name), dtype) for name in LOWER_PRECISION},
        **{name: _casting(_overload(name), torch.float32) for name in IN_FLOAT32},
        **{name: _asking(_overload(name)) for name in TO_FLOAT32},
        **{name: _appending(name, with_dtype) for name, with_dtype in NORMS.items()},
    }
    known = {name: kernel for name, kernel in kernels.items() if f"aten::{name}" in existing}
    return {**known, **dict.fromkeys(cpu_only() - {*ALIKE_ON_THE_CPU}, fallthrough_kernel)}


def _overload(name: str) -> Callable[..., Any]:
    packet, _, overload = name.partition(".")
    found: Callable[..., Any] = getattr(getattr(torch.ops.aten, packet), overload or "default")
    return found


def _casting(run: Callable[..., Any], dtype: torch.dtype) -> Callable[..., Any]:
    def cast(value: Any) -> Any:
        is_cast = isinstance(value, Tensor) and value.dtype in _CASTABLE
        return value.to(dtype) if is_cast else value

    def kernel(*args: Any, **kwargs: Any) -> Any:
        with torch._C._ExcludeDispatchKeyGuard(_AUTOCAST):
            return run(*tree_map(cast, args), **tree_map(cast, kwargs))

    return kernel


def _asking(run: Any) -> Callable[..., Any]:
    names = [a.name for a in run._schema.arguments]

    def kernel(*args: Any, **kwargs: Any) -> Any:
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        if given.get("dtype") is None and args[0].dtype in _CASTABLE:
            args, kwargs = args[: names.index("dtype")], {**kwargs, "dtype": torch.float32}
        with torch._C._ExcludeDispatchKeyGuard(_AUTOCAST):
            return run(*args, **kwargs)

    return kernel


def _appending(name: str, with_dtype: str) -> Callable[..., Any]:
    run: Any = _overload(name)
    defaults = [a.default_value for a in run._schema.arguments]
    in_float32 = getattr(torch.ops.aten.norm, with_dtype)

    def kernel(value: Tensor, *rest: Any) -> Tensor:
        with torch._C._ExcludeDispatchKeyGuard(_AUTOCAST):
            if value.dtype not in _CASTABLE:
                found: Tensor = run(value, *rest)
            else:
                given: Sequence[Any] = (*rest, *defaults[1 + len(rest) :])
                found = in_float32(value, *given, dtype=torch.float32)
            return found

    return kernel
