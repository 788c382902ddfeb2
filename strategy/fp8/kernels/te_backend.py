"""The fp8 operations of a linear on plain tensors, by TransformerEngine: quantise, transpose, multiply.

The functions are those of `torch_backend.py`. TransformerEngine's quantisers and GEMM are called without its modules
and its autograd, so backward needs only plain tensors; its schedule of scales is not used: the caller passes the state.
It is imported when the first function runs. Its kernels need data, so FakeTensors, which have none, run PyTorch
operators that make, read and write the same.
"""

from __future__ import annotations

from typing import Any

import torch
from packaging.version import Version
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from thunder_memsave.aten.record import once_through_memory
from thunder_memsave.config import ConfigError
from thunder_memsave.fp8.kernels.cublas_gemm import whole_rows
from thunder_memsave.fp8.kernels.mx_blocks import is_mx
from thunder_memsave.fp8.kernels.te_library import MIN_VERSION, installed_version, loaded
from thunder_memsave.fp8.kernels.te_mx import (
    mx_product,
    quantize_mx,
    quantize_mx_both,
    quantize_mx_columns,
)
from thunder_memsave.fp8.kernels.te_nvfp4 import (
    gemm_nvfp4,
    quantize_nvfp4,
    quantize_nvfp4_both,
    quantize_nvfp4_columns,
)
from thunder_memsave.fp8.kernels.torch_backend import (
    amax,
    current_scale,
    quantize_with_amax,
    weight_amax,
)
from thunder_memsave.fp8.kernels.torch_support import (
    HOPPER,
    Chip,
    chip_of,
    dotted,
    why_not_on_blackwell,
)
from thunder_memsave.fp8.recipe import NEEDS_BLACKWELL, RecipeName

__all__ = [  # with the functions here, what a backend has
    "amax",
    "current_scale",  # a tensor in parts has one scale; these two have the kernels' bits
    "gemm_nvfp4",
    "quantize_mx",
    "quantize_mx_both",
    "quantize_mx_columns",
    "quantize_nvfp4",
    "quantize_nvfp4_both",
    "quantize_nvfp4_columns",
    "quantize_with_amax",  # PyTorch's cast has the same bits; no kernel takes a scale that is found elsewhere
    "weight_amax",
]

BLOCK = 128
"""Side of a block, the only one that TransformerEngine supports."""

_OF_ANOTHER_FORMAT = "whose tensors with scales of blocks are of another format"

_MIN_VERSIONS: dict[RecipeName, tuple[Version, str]] = {
    "block": (Version("2.12"), _OF_ANOTHER_FORMAT),
    "mxfp8": (Version("2.12"), _OF_ANOTHER_FORMAT),
    "nvfp4": (Version("2.17"), "which casts no weights to nvfp4 by columns alone"),
}
"""By recipe, the first version that has what it calls, and what those before lack. From 2.12 on, tensors with scales of
blocks have only one format, and those of mxfp8 the present one; until 2.17, `quantize_transpose_vector_blockwise_fp4`
made blocks of 16x16 by columns only beside those by rows."""

DEVICE_TYPES = frozenset({"cuda"})
"""The devices that its kernels run on."""

_SCALES_MULTIPLE = 4
"""Multiple to which cuBLAS wants rows of block scales padded."""


def quantize_delayed(
    x: Tensor, scale: Tensor, amax_history: Tensor, index: int, dtype: torch.dtype, records: bool
) -> tuple[Tensor, Tensor]:
    """Cast with a scale from earlier steps, and record the amax for later ones: `torch_backend.quantize_delayed`."""
    # The kernel raises this tensor to the amax, so without recording it gets a temporary one.
    amax = amax_history[0, index : index + 1] if records else torch.zeros_like(scale[:1])
    if isinstance(x, FakeTensor):
        amax.copy_(amax)
        return _made(x, dtype, (1,))
    library = loaded()
    quantizer = library.tensor.Float8Quantizer(
        scale[index], amax, library.dtypes[dtype], rowwise=True, columnwise=False
    )
    return _per_tensor(x, quantizer, dtype)


def quantize_current(
    x: Tensor, dtype: torch.dtype, amax_epsilon: float = 0.0, force_pow_2_scales: bool = False
) -> tuple[Tensor, Tensor]:
    """Cast with the scale of x's own amax: `torch_backend.quantize_current`."""
    if isinstance(x, FakeTensor):
        return _made(x, dtype, (1,))
    library = loaded()
    quantizer = library.tensor.Float8CurrentScalingQuantizer(
        library.dtypes[dtype],
        device=x.device,
        rowwise=True,
        columnwise=False,
        force_pow_2_scales=force_pow_2_scales,
        amax_epsilon=amax_epsilon,
    )
    return _per_tensor(x, quantizer, dtype)


def quantize_block(
    x: Tensor,
    dtype: torch.dtype,
    block_rows: int,
    block_cols: int = BLOCK,
    amax_epsilon: float = 0.0,
    force_pow_2_scales: bool = True,
) -> tuple[Tensor, Tensor]:
    """Cast each block with the scale of its own amax: `torch_backend.quantize_block`."""
    assert (block_rows, block_cols) in ((1, BLOCK), (BLOCK, BLOCK)), "there are no other kernels"
    down, across = -(-x.shape[0] // block_rows), -(-x.shape[1] // block_cols)
    if isinstance(x, FakeTensor):
        return _made(x, dtype, (down, across))
    library = loaded()
    quantizer = library.tensor.Float8BlockQuantizer(
        library.dtypes[dtype],
        rowwise=True,
        columnwise=False,
        amax_epsilon=amax_epsilon,
        force_pow_2_scales=force_pow_2_scales,
        block_scaling_dim=1 if block_rows == 1 else 2,
    )
    quantizer.internal = True
    quantized = library.extension.quantize(x, quantizer)
    scales = quantized._rowwise_scale_inv
    if block_rows == 1:
        scales = scales.t()  # the kernel writes them along the columns
    real = scales[:down, :across]
    return quantized._rowwise_data.view(
        dtype
    ), real if real.numel() == scales.numel() else real.contiguous()


def transpose(q: Tensor) -> Tensor:
    """Copy `[rows, columns]` to `[columns, rows]`: `torch_backend.transpose`."""
    if isinstance(q, FakeTensor):
        return q.t().contiguous()
    library = loaded()
    copied = library.extension.fp8_transpose(q.view(torch.uint8), library.dtypes[q.dtype], out=None)
    return copied.view(q.dtype)  # type: ignore[no-any-return]


def gemm(
    a: Tensor,
    a_scale_inv: Tensor,
    b: Tensor,
    b_scale_inv: Tensor,
    bias: Tensor | None,
    out_dtype: torch.dtype,
    use_fast_accum: bool = False,
) -> Tensor:
    """Multiply `a @ b.t() + bias`: `torch_backend.gemm`."""
    # For a float32 result the kernel would read the bias as bfloat16.
    added_later = bias if out_dtype == torch.float32 else None
    fused = None if bias is None or added_later is not None else bias.to(out_dtype)
    if is_mx(a_scale_inv):
        product = mx_product(a, a_scale_inv, b, b_scale_inv, fused, out_dtype, use_fast_accum)
    elif isinstance(a, FakeTensor):
        one = a_scale_inv.flatten().narrow(0, 0, 1)
        product = torch._scaled_mm(
            whole_rows(a), whole_rows(b).t(), scale_a=one, scale_b=one, out_dtype=out_dtype
        )
    else:
        product, *_ = loaded().general_gemm(
            _operand(b, b_scale_inv),
            _operand(a, a_scale_inv),
            out_dtype=out_dtype,
            layout="TN",
            bias=fused,
            use_split_accumulator=not use_fast_accum,
        )
    return product if added_later is None else product.add_(added_later)


def why_not(recipe: RecipeName, device: torch.device) -> str | None:
    """Return why TransformerEngine cannot compute `recipe` on `device`; None: it can."""
    try:
        library = loaded()
    except ConfigError as error:
        return str(error)
    if device.type not in DEVICE_TYPES:
        return f"TransformerEngine computes on CUDA devices, and the model is on {device.type}"
    version, (least, lacking) = installed_version(), _MIN_VERSIONS.get(recipe, (MIN_VERSION, ""))
    if version < least:
        return (
            f"TransformerEngine {version} is installed, {lacking}: `pip install "
            f"'transformer-engine[pytorch]>={least}'`, or set `fp8.recipe: current`"
        )
    is_there, reason = getattr(library.pytorch, _SUPPORT[recipe])(return_reason=True)
    if not is_there:
        return f"{chip_of(device)} cannot compute it: TransformerEngine says {reason!r}"
    is_of_blackwell = device.type == "cuda" and recipe in NEEDS_BLACKWELL
    return why_not_on_blackwell(chip_of(device), recipe) if is_of_blackwell else None


def why_not_on(chip: Chip | None, recipe: RecipeName) -> str | None:
    """Return the same for a chip that need not be present, as far as known without TransformerEngine; None: a CPU."""
    if chip is None:
        return "TransformerEngine computes on CUDA devices: set `fp8.backend: torch`"
    if recipe in NEEDS_BLACKWELL:
        return why_not_on_blackwell(chip, recipe)
    if recipe == "block" and chip.capability < HOPPER:
        return (
            f"TransformerEngine computes it from compute capability {dotted(HOPPER)} (Hopper) on, and there is {chip}: "
            "set `fp8.recipe: current`"
        )
    return None


_SUPPORT: dict[RecipeName, str] = {
    "delayed": "is_fp8_available",
    "current": "is_fp8_available",
    "block": "is_fp8_block_scaling_available",
    "mxfp8": "is_mxfp8_available",
    "nvfp4": "is_nvfp4_available",
}


def _per_tensor(x: Tensor, quantizer: Any, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    quantizer.internal = True  # return no tensor subclass, which autograd would track
    quantized = loaded().extension.quantize(x, quantizer)
    return quantized._data.view(dtype), quantized._scale_inv.reshape(1)


def _made(x: Tensor, dtype: torch.dtype, scales: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """Return results without data in the kernels' layouts, with the memory traffic of one kernel."""
    q = torch.empty_like(x, dtype=dtype, memory_format=torch.contiguous_format)
    with once_through_memory(x, q):
        q.copy_(x)
    if len(scales) == 2 and scales[0] == x.shape[0]:  # of blocks of one row: along the columns
        return q, x.new_empty(scales[::-1], dtype=torch.float32).t()
    return q, x.new_empty(scales, dtype=torch.float32)


def _operand(q: Tensor, scale_inv: Tensor) -> Any:
    """Wrap plain tensors as the quantised matrix that the GEMM takes, without a copy."""
    library = loaded()
    # A weight's gradient sums over any number of rows; cublaslt_gemm.cu says "Caller must pad."
    data, dtype = whole_rows(q).view(torch.uint8), library.dtypes[q.dtype]
    if scale_inv.dim() < 2:
        return library.tensor.Float8TensorStorage(
            data=data, fp8_scale_inv=scale_inv, fp8_dtype=dtype, data_transpose=None, quantizer=None
        )
    of_rows = scale_inv.shape[0] == q.shape[0]
    return library.tensor.Float8BlockwiseQTensorStorage(
        rowwise_data=data,
        rowwise_scale_inv=_in_whole_rows(scale_inv.t() if of_rows else scale_inv),
        columnwise_data=None,
        columnwise_scale_inv=None,
        fp8_dtype=dtype,
        quantizer=None,
        is_2D_scaled=not of_rows,
    )


def _in_whole_rows(scales: Tensor) -> Tensor:
    missing = -scales.shape[1] % _SCALES_MULTIPLE
    return torch.nn.functional.pad(scales, (0, missing)).contiguous()
