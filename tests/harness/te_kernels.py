"""Emulates TransformerEngine's Hopper kernels for one linear layer in float32 on any device.

MXFP8 and NVFP4 are in `te_mx_kernels.py` and `te_nvfp4_kernels.py`.

The arithmetic follows the sources of TransformerEngine 2.20 (`transformer_engine/common`):
`cast/fp8/quantize_fp8.cuh`, `recipe/{delayed_scaling,current_scaling}.cu`, `recipe/recipe_common.cuh`
and `transpose/quantize_transpose_{square,vector}_blockwise.cu`. An amax is taken with `fmaxf`, which
drops NaN; casts saturate and keep NaN. Not emulated: the order in which a GEMM sums, and
the lower precision of fast accumulation.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from harness import te_mx_kernels, te_nvfp4_kernels

BLOCK = 128
_FLOAT32_MAX = torch.finfo(torch.float32).max


@dataclass(frozen=True, kw_only=True)
class Gemm:
    """One emulated call of `tex.generic_gemm`: result [m, n], summed over k."""

    layout: str
    m: int
    n: int
    k: int
    split_accumulator: bool


@dataclass(frozen=True, kw_only=True)
class Calls:
    """The emulated calls since the last `clear`, in order."""

    gemms: list[Gemm]
    quantized: list[tuple[int, ...]]
    """Shapes of the quantised tensors."""

    transposed: list[tuple[int, ...]]
    """Shapes of the fp8 tensors that were transposed after their quantisation."""

    def clear(self) -> None:
        self.gemms.clear()
        self.quantized.clear()
        self.transposed.clear()


calls = Calls(gemms=[], quantized=[], transposed=[])


def install(extension: ModuleType) -> None:
    """Replace the placeholders in TransformerEngine's torch extension, whose python is imported."""
    for kernel in (
        quantize,
        bgrad_quantize,
        generic_gemm,
        fp8_transpose,
        fused_amax_and_scale_update_after_reduction,
    ):
        setattr(extension, kernel.__name__, kernel)


def quantize(
    tensor: Tensor, quantizer: Any, output: Any = None, noop_flag: Tensor | None = None
) -> Any:
    """Emulate `tex.quantize`, for the quantisers of delayed, current and block scaling."""
    assert noop_flag is None, "CUDA graphs are not emulated"
    _refuse_fake(tensor)
    x = tensor.detach()
    calls.quantized.append(tuple(x.shape))
    name = type(quantizer).__name__
    if name == "Float8BlockQuantizer":
        return _quantize_blocks(x, quantizer, output)
    if name == "MXFP8Quantizer":
        return _quantize_mx(x, quantizer, output)
    if name == "NVFP4Quantizer":
        return _quantize_nvfp4(x, quantizer, output)
    if name == "Float8Quantizer":
        scale = quantizer.scale.detach().clone().reshape(1)
        quantizer.amax.copy_(torch.maximum(quantizer.amax, amax_of(x)))
    elif name == "Float8CurrentScalingQuantizer":
        assert not quantizer.with_amax_reduction, "tensor parallelism is not emulated"
        scale = scale_of_amax(
            amax_of(x).reshape(1),
            quantizer.dtype,
            epsilon=quantizer.amax_epsilon,
            power_of_2=quantizer.force_pow_2_scales,
        )
    else:
        raise NotImplementedError(f"{name} is not emulated")
    data = cast(x.float() * scale, quantizer.dtype)
    parts = {
        "data": data if quantizer.rowwise_usage else None,
        "data_transpose": _columns_first(data) if quantizer.columnwise_usage else None,
        "fp8_scale_inv": 1.0 / scale,
    }
    if output is not None:
        held = {"data": "_data", "data_transpose": "_transpose", "fp8_scale_inv": "_scale_inv"}
        return _fill(output, {held[part]: value for part, value in parts.items()})
    return _tensor_class(quantizer, "Float8Tensor")(
        **parts, **_shell(x, quantizer), fp8_dtype=quantizer.dtype, quantizer=quantizer
    )


def bgrad_quantize(grad: Tensor, quantizer: Any) -> tuple[Tensor, Any]:
    """Emulate `tex.bgrad_quantize`: the gradient of a bias too, but not the order in which it is summed."""
    return grad.reshape(-1, grad.shape[-1]).sum(0), quantize(grad, quantizer)


def _refuse_fake(tensor: Tensor) -> None:
    """Refuse a FakeTensor as compiled kernels do: they take the address of the data, which it does not have."""
    if isinstance(tensor, FakeTensor):
        raise RuntimeError("Cannot access data pointer of Tensor (e.g. FakeTensor)")


def amax_of(x: Tensor) -> Tensor:
    """Return the largest magnitude that is not NaN, in float32; 0 for an empty tensor."""
    if x.numel() == 0:
        return x.new_zeros((), dtype=torch.float32)
    return torch.where(x.isnan(), 0, x.abs()).amax().float()


def scale_of_amax(
    amax: Tensor,
    dtype: Any,
    *,
    epsilon: float,
    power_of_2: bool,
    value_for_inf: float = _FLOAT32_MAX,
) -> Tensor:
    """Emulate `compute_scale_from_amax` of recipe_common.cuh."""
    floored = torch.where(amax < epsilon, torch.full_like(amax, epsilon), amax)
    # `__fdiv_rn`; torch computes `number / tensor` as the number times the reciprocal.
    scale = torch.full_like(floored, torch.finfo(torch_dtype(dtype)).max) / floored
    scale = torch.where(scale.isinf(), torch.full_like(scale, value_for_inf), scale)
    if power_of_2:
        scale = (scale.view(torch.int32) & -0x800000).view(torch.float32)  # drops the mantissa
    usable = floored.isfinite() & (floored != 0)
    return torch.where(usable, scale, torch.ones_like(scale))


def cast(scaled: Tensor, dtype: Any) -> Tensor:
    """Cast to fp8 as bytes: saturates and keeps NaN, whatever this torch version's own cast does."""
    target = torch_dtype(dtype)
    largest = torch.finfo(target).max
    saturated = torch.where(scaled.isnan(), scaled, scaled.clamp(-largest, largest))
    return saturated.to(target).view(torch.uint8)


def torch_dtype(dtype: Any) -> torch.dtype:
    """Return the torch dtype of one of TransformerEngine's dtypes."""
    return {
        4: torch.float32,
        5: torch.float16,
        6: torch.bfloat16,
        7: torch.float8_e4m3fn,
        8: torch.float8_e5m2,
    }[int(dtype)]


def fp8_transpose(data: Tensor, dtype: Any, *, out: Tensor | None) -> Tensor:
    """Emulate `tex.fp8_transpose`: the last dimension comes first."""
    _refuse_fake(data)
    calls.transposed.append(tuple(data.shape))
    transposed = _columns_first(data)
    return transposed if out is None else out.copy_(transposed)


def generic_gemm(
    A: Any,
    transa: bool,
    B: Any,
    transb: bool,
    out: Tensor | None,
    quantizer: Any,
    output_dtype: Any,
    bias: Tensor | None,
    bias_type: Any,
    gelu: bool,
    gelu_in: Tensor | None,
    grad: bool,
    workspace: Tensor,
    workspace_size: int,
    accumulate: bool,
    use_split_accumulator: bool,
    **options: Any,
) -> tuple[Tensor, None, None, None]:
    """Emulate `tex.generic_gemm`: on Hopper both operands must be stored with the summed dimension last."""
    assert not gelu, "GELU is not emulated"
    assert quantizer is None, "an output in fp8 is not emulated"
    assert options.get("alpha", 1.0) == 1.0, "scaling a result is not emulated"
    assert options.get("comm_overlap") is None, "communication is not emulated"
    layout = f"{'T' if transa else 'N'}{'T' if transb else 'N'}"
    result, k = _product(A, B, transa=transa, transb=transb)
    m, n = result.shape
    calls.gemms.append(Gemm(layout=layout, m=m, n=n, k=k, split_accumulator=use_split_accumulator))
    if bias is not None:
        assert not grad, "a bias gradient is not emulated"
        result = result + bias.float()
    if out is None:
        lead = () if transb else _leading(B)
        result = result.to(torch_dtype(output_dtype))
        return result.reshape(*(lead or result.shape[:-1]), result.shape[-1]), None, None, None
    total = out.float() + result.reshape(out.shape) if accumulate else result.reshape(out.shape)
    return out.copy_(total), None, None, None


def fused_amax_and_scale_update_after_reduction(
    amax_reduction_buffer: Tensor,
    amax_histories: Sequence[Tensor],
    scales: Sequence[Tensor],
    amax_compute_algo: str,
    fp8_dtype: Any,
    margin: float,
) -> None:
    """Emulate `kernel_bulk` of delayed_scaling.cu: unlike the Python schedule, an amax of 0 rolls nothing."""
    scaled_max = torch.finfo(torch_dtype(fp8_dtype)).max / 2.0**margin
    start = 0
    for history, scale in zip(amax_histories, scales, strict=True):
        reduced = amax_reduction_buffer[start : start + scale.numel()]
        start += scale.numel()
        newest = torch.where(reduced != 0, reduced, history[0])
        rolled = torch.cat([torch.zeros_like(newest)[None], history[2:], newest[None]])[
            : len(history)
        ]
        window = torch.cat([history[1:], newest[None]]).nan_to_num(nan=0.0, posinf=torch.inf)
        largest = newest if amax_compute_algo == "most_recent" else window.amax(0)
        largest = torch.where(newest != 0, largest, torch.zeros_like(largest))
        usable = largest.isfinite() & (largest > 0)
        updated = torch.where(usable, torch.full_like(largest, scaled_max) / largest, scale)
        scale.copy_(updated.clamp(max=_FLOAT32_MAX))
        history.copy_(torch.where(newest != 0, rolled, history))


def _quantize_blocks(x: Tensor, quantizer: Any, output: Any) -> Any:
    rows = x.reshape(-1, x.shape[-1])
    height = BLOCK if quantizer.block_scaling_dim == 2 else 1
    parts: dict[str, Any] = {}
    for side, wanted, source in (
        ("rowwise", quantizer.rowwise_usage, rows),
        ("columnwise", quantizer.columnwise_usage, rows.t()),
    ):
        data, scale_inv = _blocks(source, height, quantizer) if wanted else (None, None)
        shape = x.shape if side == "rowwise" else (x.shape[-1], *x.shape[:-1])
        parts[f"{side}_data"] = None if data is None else data.reshape(shape)
        parts[f"{side}_scale_inv"] = scale_inv
    if output is not None:
        return _fill(output, {f"_{k}": v for k, v in parts.items()})
    return _tensor_class(quantizer, "Float8BlockwiseQTensor")(
        **parts,
        **_shell(x, quantizer),
        fp8_dtype=quantizer.dtype,
        quantizer=quantizer,
        is_2D_scaled=height == BLOCK,
    )


def _quantize_mx(x: Tensor, quantizer: Any, output: Any) -> Any:
    parts = te_mx_kernels.parts(x, quantizer)
    is_swizzled = quantizer.optimize_for_gemm
    if output is not None:
        parts_of = {f"_{name}": value for name, value in parts.items()}
        return _fill(output, {**parts_of, "_with_gemm_swizzled_scales": is_swizzled})
    return _tensor_class(quantizer, "MXFP8Tensor")(
        **parts,
        **_shell(x, quantizer),
        fp8_dtype=quantizer.dtype,
        quantizer=quantizer,
        with_gemm_swizzled_scales=is_swizzled,
    )


def _quantize_nvfp4(x: Tensor, quantizer: Any, output: Any) -> Any:
    parts = te_nvfp4_kernels.parts(x, quantizer)
    if output is not None:
        return _fill(output, {f"_{name}": value for name, value in parts.items()})
    return _tensor_class(quantizer, "NVFP4Tensor")(
        **parts,
        **_shell(x, quantizer),
        fp4_dtype=quantizer.dtype,
        quantizer=quantizer,
        with_gemm_swizzled_scales=False,
    )


def _blocks(x: Tensor, height: int, quantizer: Any) -> tuple[Tensor, Tensor]:
    """Return the bytes of `x` [m, k], and 1 / scale of its blocks in the GEMM's layout."""
    m, k = x.shape
    padded = torch.nn.functional.pad(x.float(), (0, -k % BLOCK, 0, -m % height))
    tiles = padded.unflatten(0, (-1, height)).unflatten(2, (-1, BLOCK))
    amax = torch.where(tiles.isnan(), 0, tiles.abs()).amax((1, 3))
    scale = scale_of_amax(
        amax,
        quantizer.dtype,
        epsilon=quantizer.amax_epsilon,
        power_of_2=quantizer.force_pow_2_scales,
        value_for_inf=torch.finfo(x.dtype).max,
    )
    scaled = (tiles * scale[:, None, :, None]).flatten(2).flatten(0, 1)[:m, :k]
    scale_inv = (1.0 / scale) if height == BLOCK else (1.0 / scale).t()
    return cast(scaled, quantizer.dtype), torch.nn.functional.pad(
        scale_inv, (0, -scale_inv.shape[1] % 4)
    ).contiguous()


def _product(right: Any, left: Any, *, transa: bool, transb: bool) -> tuple[Tensor, int]:
    """Return the product in float32, and the size of the dim that it sums over."""
    if hasattr(right, "_fp4_dtype"):
        numbers = right._rowwise_data if transa else right._columnwise_data
        found = te_nvfp4_kernels.product(right, left, transa=transa, transb=transb)
        return found, 2 * numbers.shape[-1]
    a = _high_precision(left, rowwise=not transb)
    b = _high_precision(right, rowwise=transa)
    _refuse_fake(a)
    return a @ b.t(), a.shape[1]


def _high_precision(operand: Any, *, rowwise: bool) -> Tensor:
    """Return an operand as float32 [rows, k] from its data with the summed dimension last, which must exist."""
    if hasattr(operand, "_with_gemm_swizzled_scales"):
        return te_mx_kernels.values(operand, rowwise=rowwise)
    if hasattr(operand, "_rowwise_data"):
        side = "rowwise" if rowwise else "columnwise"
        data = getattr(operand, f"_{side}_data")
        assert data is not None, f"the {side} data of a block-scaled GEMM operand is missing"
        scale_inv = getattr(operand, f"_{side}_scale_inv")
        return _unblock(_values(operand, data, rowwise), scale_inv, operand._is_2D_scaled)
    if hasattr(operand, "_transpose"):
        data = operand._data if rowwise else operand._transpose
        assert data is not None, (
            f"the {'row' if rowwise else 'column'}-wise data of a GEMM operand is missing"
        )
        return _values(operand, data, rowwise) * operand._scale_inv
    plain = operand.detach().reshape(-1, operand.shape[-1]).float()
    return plain if rowwise else plain.t().contiguous()


def _values(operand: Any, data: Tensor, rowwise: bool) -> Tensor:
    values = data.view(torch_dtype(operand._fp8_dtype)).float()
    return values.reshape(-1, values.shape[-1]) if rowwise else values.reshape(values.shape[0], -1)


def _unblock(values: Tensor, scale_inv: Tensor, two_dimensional: bool) -> Tensor:
    m, k = values.shape
    rows = scale_inv.repeat_interleave(BLOCK, 0) if two_dimensional else scale_inv.t()
    return values * rows[:m].repeat_interleave(BLOCK, 1)[:, :k]


def _columns_first(data: Tensor) -> Tensor:
    moved = data.reshape(-1, data.shape[-1]).t().contiguous()
    return moved.reshape(data.shape[-1], *data.shape[:-1])


def _leading(operand: Any) -> tuple[int, ...]:
    return tuple(operand.size()[:-1])


def _shell(x: Tensor, quantizer: Any) -> dict[str, Any]:
    if quantizer.internal:
        return {"fake_dtype": x.dtype}
    return {"shape": x.shape, "dtype": x.dtype, "device": x.device}


def _tensor_class(quantizer: Any, name: str) -> Any:
    """Return the class that the extension would make: only the storage for an internal tensor."""
    tensors = importlib.import_module("transformer_engine.pytorch.tensor")
    return getattr(tensors, f"{name}Storage" if quantizer.internal else name)


def _fill(output: Any, parts: dict[str, Any]) -> Any:
    for name, value in parts.items():
        held = getattr(output, name, None)
        if isinstance(held, Tensor) and value is not None and held.shape == value.shape:
            held.copy_(value)
        else:
            setattr(output, name, value)
    if hasattr(output, "_transpose_invalid"):
        output._transpose_invalid = output._transpose is None
    return output
